"""Errors about unknown keyword arguments: they name the class and the nearest argument; one rank reports them."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def near(unknown: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name: "; did you mean 'update'?", or "" if no name is near. Local."""
    found = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def known_only(method: CallableT) -> CallableT:
    """Decorator: the method raises TypeError for unknown keyword arguments, before it does anything."""
    taken = [name for name in inspect.signature(method).parameters if name != "self"]
    known = frozenset(taken)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not options.keys() <= known:
            unknown = next(name for name in options if name not in known)
            place = type(self).__name__ + ("" if method.__name__ == "__init__" else f".{method.__name__}")
            hint = near(unknown, taken) or f"; it takes: {', '.join(taken)}"
            raise TypeError(f"{place}() got an unexpected keyword argument {unknown!r}{hint}")
        return method(self, *args, **options)

    return call  # type: ignore[return-value]

"""A keyword argument that a call does not take: named with its class and the nearest one, once for all ranks."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from allreduce.health import abort

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def near(unknown: str, known: Iterable[str]) -> str:
    """What to say of a name that is not known: "; did you mean 'update'?", or "" where none is near. Local."""
    found = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def known_only(method: CallableT) -> CallableT:
    """A method, or constructor, that raises a TypeError for keywords it does not take, before it does anything.

    The error is reported by one rank alone when nobody catches it, as all errors are once a topology was made.
    """
    taken = [name for name in inspect.signature(method).parameters if name != "self"]
    known = frozenset(taken)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not options.keys() <= known:
            unknown = next(name for name in options if name not in known)
            place = type(self).__name__ + ("" if method.__name__ == "__init__" else f".{method.__name__}")
            hint = near(unknown, taken) or f"; it takes: {', '.join(taken)}"
            abort.install()
            raise TypeError(f"{place}() got an unexpected keyword argument {unknown!r}{hint}")
        return method(self, *args, **options)

    return call  # type: ignore[return-value]

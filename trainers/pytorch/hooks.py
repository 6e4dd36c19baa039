"""Hooks that a module keeps of ours."""

import logging
import weakref
from typing import Any, Generic, TypeVar

UserT = TypeVar("UserT")


class Hook(Generic[UserT]):
    """A module's hook for `user`, which it does not keep alive.

    It stays behind when the module is copied or pickled: there the hook is a function that does nothing.
    """

    def __init__(self, user: UserT) -> None:
        self._user = weakref.ref(user)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (logging.NullHandler, "handle")

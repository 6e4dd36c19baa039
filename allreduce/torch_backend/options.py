"""Which of our backends a process group reduces with."""

import os
from dataclasses import dataclass, field
from typing import Any

import allreduce
from allreduce.errors import UnknownBackendError

VARIABLE = "ALLREDUCE_BACKEND"


def _default() -> str:
    return os.environ.get(VARIABLE) or "auto"


@dataclass(frozen=True)
class Options:
    """For `init_process_group("allreduce", pg_options=Options("ring"))` and `new_group(pg_options=...)`.

    backend: one of `allreduce.NAMES`; by default what the environment variable ALLREDUCE_BACKEND names,
        else "auto". new_group does not inherit the world's options; it goes by the environment variable too.
    settings: further arguments of `allreduce.create` (check="always", cross="ring", ...). check, compress and trace
        apply to every reduction of floats, also to reduce_scatter, for which "auto" has a backend of its own.
    overlap: False runs every operation in the calling thread, before the call returns; then only messages and
        monitored_barrier have timeouts.

    Raises UnknownBackendError.
    """

    backend: str = field(default_factory=_default)
    settings: dict[str, Any] = field(default_factory=dict)
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.backend not in allreduce.NAMES:
            raise UnknownBackendError(
                f"pg_options or {VARIABLE} names a backend {self.backend!r}; the backends are: "
                + ", ".join(allreduce.NAMES)
            )

    @classmethod
    def parse(cls, given: object) -> "Options":
        """What a user passed as pg_options: Options, a backend's name, or None."""
        if given is None:
            return cls()
        if isinstance(given, str):
            return cls(given)
        if isinstance(given, cls):
            return given
        raise TypeError(
            'pg_options of backend "allreduce" are allreduce.torch_backend.Options or the name of a backend '
            f'("ring"), not {type(given).__name__}'
        )

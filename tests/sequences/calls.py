"""The calls of a random sequence: each call is timed, recorded, and compared with its expected outcome."""

import faulthandler
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

HANG_SECONDS = float(os.environ.get("SEQUENCE_HANG_SECONDS", "120"))  # of one call


class FailureError(AssertionError):
    """A call did not have its expected outcome."""


class Calls:
    """Makes calls on all ranks, and checks that they have the same outcome."""

    def __init__(self, comm: MPI.Intracomm, seed: int, folder: str, verbose: bool) -> None:
        self.comm, self.seed, self.folder, self.verbose = comm, seed, folder, verbose
        self.size, self.rank = comm.size, comm.rank
        self.draw = random.Random(seed)
        self.log: list[str] = []
        self.calls: Counter[str] = Counter()
        self.watched = False  # whether a call that takes too long ends the job
        self._flags = np.zeros(3, np.int64)

    def note(self, text: str) -> None:
        self.log.append(text)
        if self.verbose and self.rank == 0:
            print("  ", text, flush=True)

    def call(self, name: str, action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result or the error of a call, which must be of the same kind on all ranks."""
        self.calls[name] += 1
        if self.watched:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as met:
            error = met
        failed = self.any(error is not None)
        if self.watched:
            faulthandler.cancel_dump_traceback_later()
        if failed:
            ends = self.comm.allgather(("", "") if error is None else (type(error).__name__, str(error)))
            if len({kind for kind, _ in ends}) > 1:
                raise FailureError(f"{name} ended differently on the ranks: {ends}") from error
            self.note(f"  -> {ends[0][0]}: {ends[0][1][:200]}")
        return result, error

    def any(self, holds: bool, number: int = 0) -> bool:
        """Return whether a condition holds on any rank, or the ranks have different numbers. Collective."""
        self._flags[:] = holds, number, -number
        self.comm.Allreduce(MPI.IN_PLACE, self._flags, MPI.MAX)  # thousands of times, so without pickle
        return bool(self._flags[0] or self._flags[1] != -self._flags[2])

    def well(self, name: str, action: Callable[[], Any]) -> Any:
        result, error = self.call(name, action)
        if error is not None:
            raise FailureError(f"{name}: {type(error).__name__}: {error}") from error
        return result

    def check(self, holds: bool, text: str | Callable[[], str], number: int = 0) -> None:
        """Check a condition on all ranks, and that they have the same number. Collective."""
        if self.any(not holds, number):
            shown = text if isinstance(text, str) else text()
            found = self.comm.allgather("" if holds else f"rank {self.rank}: {shown}")
            if not any(found):
                raise FailureError(f"the ranks have different bits: {shown}")
            raise FailureError(next(filter(None, found)))

    def pick(self, *choices: Any) -> Any:
        return self.draw.choice(choices)

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def __str__(self) -> str:
        return f"sequence {self.seed} on {self.size} ranks"

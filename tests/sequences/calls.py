"""The calls of a random sequence: each call is timed, recorded, and compared with its expected outcome."""

import faulthandler
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

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

    def note(self, text: str) -> None:
        self.log.append(text)
        if self.verbose and self.rank == 0:
            print("  ", text, flush=True)

    def call(self, name: str, action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result or the error of a call, which must be of the same kind on all ranks."""
        self.calls[name] += 1
        watch = threading.Timer(HANG_SECONDS, self._hangs, [name])
        watch.daemon = True
        watch.start()
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as met:
            error = met
        ends = self.comm.allgather(("", "") if error is None else (type(error).__name__, str(error)))
        watch.cancel()
        if len({kind for kind, _ in ends}) > 1:
            raise FailureError(f"{name} ended differently on the ranks: {ends}") from error
        if error is not None:
            self.note(f"  -> {ends[0][0]}: {ends[0][1][:200]}")
        return result, error

    def _hangs(self, name: str) -> None:
        print(f"HANGS: {self} in {name}", *self.log, sep="\n   ", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(sys.__stderr__)
        os._exit(3)

    def well(self, name: str, action: Callable[[], Any]) -> Any:
        result, error = self.call(name, action)
        if error is not None:
            raise FailureError(f"{name}: {type(error).__name__}: {error}") from error
        return result

    def refused(self, name: str, action: Callable[[], Any], *errors: str) -> None:
        _, error = self.call(name, action)
        self.check(type(error).__name__ in errors, f"{name} met {error!r}, not {' or '.join(errors)}")

    def check(self, holds: bool, text: str) -> None:
        """Check a condition on all ranks."""
        found = self.comm.allgather("" if holds else f"rank {self.rank}: {text}")
        if any(found):
            raise FailureError(next(filter(None, found)))

    def pick(self, *choices: Any) -> Any:
        return self.draw.choice(choices)

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def __str__(self) -> str:
        return f"sequence {self.seed} on {self.size} ranks"

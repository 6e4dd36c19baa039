"""SIGTERM in a search: a rank that gets it passes it on to the ranks of all parts, which train without each other."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import TracebackType

from trainers.recovery.terminating import Terminating

LOOK_SECONDS = 0.5  # between two looks for the file


class Relay:
    """Context manager: SIGTERM that comes to one rank comes to the first ranks of all parts. Local.

    A thread writes the file `path` when this rank has received the signal. If `looks`, and another rank has written it,
    this rank sends the signal to itself, so that a training here ends after its step and writes its checkpoint.
    """

    def __init__(self, sigterm: Terminating, path: str) -> None:
        self._sigterm, self._path = sigterm, Path(path)
        self.looks = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="passes SIGTERM on", daemon=True)

    @property
    def here(self) -> bool:
        """Whether any rank has received the signal, as far as this rank knows. Local."""
        return self._sigterm.here or self._written

    @property
    def _written(self) -> bool:
        return self._sigterm.active and self.looks and self._path.exists()

    def __enter__(self) -> "Relay":
        if self._sigterm.active:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            if self._sigterm.here:
                with contextlib.suppress(OSError):  # of a folder that this rank does not see
                    self._path.touch()
                return
            if self._written:
                os.kill(os.getpid(), signal.SIGTERM)
                return

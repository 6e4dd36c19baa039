"""A thread that writes while the training goes on. No MPI there."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("trainers")


class Writer:
    """Does one piece of work at a time in a thread; its error is raised where it is waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin with `work`, after what was begun before. Raises what that raised."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # the thread has nobody to raise it to
                self._error = error

        self._thread = threading.Thread(target=run, name="writes checkpoints", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the work has raised, if it has; wait for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the work. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """Wait for the work; what it raised is logged."""
        try:
            self.wait()
        except Exception as error:
            log.error("trainers: %s", error)

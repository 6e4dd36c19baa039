"""The thread that looks after what waits inside of MPI. One a process; it starts with the first watch."""

import threading
import time
import weakref
from typing import Protocol

from mpi4py import MPI

from allreduce import ending
from allreduce.messages import losses, stacks
from allreduce.notices import log

LOOK_SECONDS = 0.25  # how often the waits are looked at


class Looks(Protocol):
    """A watch, as the watchdog sees it. active: it has ranks to wait for."""

    active: bool

    def look(self) -> None: ...

    def listen(self) -> None: ...

    def leave(self, why: str) -> None: ...

    def end(self, code: int) -> None: ...

    def standing(self) -> str: ...


class _Watchdog:
    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Looks] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, watch: Looks) -> None:
        with self._lock:
            self._watches.add(watch)
        if self._thread is None and watch.active:
            self._thread = threading.Thread(target=self._run, name="allreduce watchdog", daemon=True)
            self._thread.start()
            ending.on_leaving(self._end)
            ending.on_ending(self._end_others)

    def _run(self) -> None:
        listens = losses.in_force()
        if listens:
            losses.end_alone()
        looked = time.monotonic()
        while not self._stop.wait(losses.HEAR_SECONDS if listens else LOOK_SECONDS):
            due = not listens or time.monotonic() - looked > LOOK_SECONDS
            looked = time.monotonic() if due else looked
            for watch in self.watches():
                if MPI.Is_finalized():  # the program goes on without it
                    return
                try:
                    with losses.alone_for_now():
                        if listens:
                            watch.listen()
                        if due:
                            watch.look()
                except Exception:  # a watchdog that dies would leave hangs without a word
                    log.exception("the watchdog met an error, and goes on")

    def watches(self) -> list[Looks]:
        with self._lock:
            return list(self._watches)

    def _end(self, why: str) -> None:
        """MPI ends after this."""
        self._stop.set()
        stacks.stop()
        if self._thread is not None:
            self._thread.join(timeout=5)
        for watch in self.watches():
            watch.leave(why)

    def _end_others(self, code: int) -> None:
        """With ULFM, Open MPI's MPI_Abort ends no other rank as long as none was lost; so they are told."""
        if losses.in_force():
            for watch in self.watches():
                watch.end(code)


_watchdog = _Watchdog()


def add(watch: Looks) -> None:
    """Have the thread look at a watch, as long as that lives. Local."""
    _watchdog.add(watch)


def standing() -> str:
    """Where this rank stands, for people, by all watches. Local, from any thread."""
    texts = [text for watch in _watchdog.watches() if (text := watch.standing())]
    return "\n  ".join(texts) or "it has made no call that took long"

"""Waiting for messages in a loop of ours, so that every wait ends: in what it waits for, or in a named error."""

from collections.abc import Callable, Sequence

from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.wait import LOOK_SECONDS, Said, all_done, asleep
from trainers.watching.stopwatch import Stopwatch


class Waits:
    """The waits of one thread of this rank. All ranks make theirs in the same order.

    They sleep between looks, so that ranks that compute have the cores, and raise what the topology's watch finds:
    RankLostError, RankLeftError, CollectiveTimeoutError. clock: runs meanwhile.
    """

    def __init__(self, topology: Topology, clock: Stopwatch) -> None:
        self._watch, self._place = topology.watch, topology.place()
        self._place.raises = True
        self._clock = clock

    def until(self, done: Callable[[], bool], text: str) -> None:
        """Return when `done`, which is called again and again. text: what this rank waits for."""
        self._clock.start()
        try:
            with self._watch.hearing():
                if not done():
                    self._wait(done, text)
        finally:
            self._clock.stop()

    def _wait(self, done: Callable[[], bool], text: str) -> None:
        def heard() -> bool:
            self._watch.check()
            return done()

        self._place.begin(Said(text))
        try:
            while not asleep(heard, LOOK_SECONDS):
                self._watch.look(self._place)
        finally:
            self._place.end()

    def all_of(self, requests: Sequence[MPI.Request], text: str) -> None:
        """Return when all requests are complete."""
        self.until(lambda: all_done(requests), text)

    def forget(self) -> None:
        """There are no more waits. Local."""
        self._watch.forget(self._place)

"""Who computes what in an asynchronous epoch, and how far behind a gradient may be: rules, without any MPI.

Parts of batches are dealt one by one, so a fast worker does more of them. A dealt part is outstanding until its
gradients have come. Its staleness is the number of updates between the reading of its parameters and its own update.

A bound on it is kept by waiting (Q. Ho et al.: More effective distributed ML via a stale synchronous parallel
parameter server, 2013; there it counts steps of a worker, here updates, as the measured staleness does). Outstanding
parts can always be applied oldest first, the next at once, so the bound s holds as long as the i-th oldest of them
(0, 1, ...) has read at least version now + i - s. Whatever would break that waits: a new part, or the gradients of a
fast worker. The oldest never has to, so something always goes on.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from allreduce.errors import CommunicationError

END = -1  # in the place of a part: there are no more


@dataclass(frozen=True)
class Read:
    """A part that is outstanding: whose it is, and which version of the parameters it was read with."""

    worker: int
    version: int


class Dealer:
    """Deals the parts of one epoch.

    parts: their numbers, in the order in which they are dealt. workers: who takes part; others rest until all are
        dealt (a warm-up).
    bound: the largest staleness, or None for any. ahead: whether a worker may have its next part while it computes.
    """

    def __init__(
        self, parts: Sequence[int], workers: Collection[int], bound: int | None = None, ahead: bool = True
    ) -> None:
        self._left = deque(parts)
        self.cut_short = False  # whether it was stopped before everything was dealt
        self._workers, self._bound = workers, bound
        self._ahead = ahead and len(workers) > 1  # parameters that miss the only worker's own gradients have no use
        self._outstanding: list[Read] = []  # the oldest first

    def deal(self, worker: int, version: int) -> int | None:
        """The next part, for a worker that gets the parameters of `version`; END, or None: it has to wait."""
        if not self._left:
            return END
        if self.rests(worker):
            return None
        if self._bound is not None and len(self._outstanding) > self._bound:
            return None
        if self._is_ahead(worker):
            return None
        self._outstanding.append(Read(worker, version))
        return self._left.popleft()

    def rests(self, worker: int) -> bool:
        """Whether a worker takes no part."""
        return worker not in self._workers

    def _is_ahead(self, worker: int) -> bool:
        """Whether a worker still computes, and must not have another part yet.

        Near the end nobody may, because a slow one would keep what others could do.
        """
        computes = any(read.worker == worker for read in self._outstanding)
        return computes and (not self._ahead or len(self._left) <= len(self._workers))

    def stop(self) -> None:
        """Deal nothing more."""
        self.cut_short |= bool(self._left)
        self._left.clear()

    def may_apply(self, worker: int, version: int) -> bool:
        """Whether the gradients of this worker's oldest part may become update number `version` + 1 now."""
        if self._bound is None:
            return True
        others = list(self._outstanding)
        others.remove(self._oldest(worker))
        return all(version + 1 + place <= read.version + self._bound for place, read in enumerate(others))

    def done(self, worker: int) -> None:
        """The gradients of this worker's oldest part were applied, or there are none."""
        self._outstanding.remove(self._oldest(worker))

    def _oldest(self, worker: int) -> Read:
        for read in self._outstanding:
            if read.worker == worker:
                return read
        raise CommunicationError(f"worker {worker} has sent gradients of a part that it was not dealt")

"""An asynchronous epoch on a server: it deals parts of batches, and applies gradients as they arrive."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.transport.control import all_values, combine
from trainers.strategies.servers.mailbox import (
    AGAIN,
    END,
    ENDED,
    GRADIENTS,
    WORK,
    Arrival,
    Header,
    Message,
)
from trainers.strategies.servers.server import Policy, Shard


class StalenessRule(NamedTuple):
    """How a server treats stale gradients.

    stale: "keep" applies them unchanged; "drop" discards those more than `most` updates behind; "scale" divides the
        learning rate by staleness + 1 (W. Zhang et al.: Staleness-aware async-SGD for distributed deep learning, 2015).
    """

    stale: str = "keep"
    most: int | None = None

    @property
    def bound(self) -> int | None:
        """The largest staleness, enforced by letting workers wait; None for no bound."""
        return None if self.stale == "drop" else self.most

    def factor(self, staleness: int) -> float:
        """Return the factor on the learning rate for a gradient of this staleness; 0.0 drops the gradient."""
        if self.stale == "drop":
            assert self.most is not None
            return float(staleness <= self.most)
        return 1.0 / (staleness + 1) if self.stale == "scale" else 1.0


HOW_FAR = "learn the positions of the servers"
LEFT, EMPTY, DROPPED = -1, -2, -3  # outcomes of a part that was not applied: not processed yet, no gradients, dropped


class EpochLedger:
    """Records the outcome of each part of the current epoch: the dealt parts of batches, or the steps.

    outcomes: (parts,) int32: the staleness of the applied gradient, or LEFT, EMPTY, DROPPED; empty on workers.
    dealt: (parts,) bool: the parts that all servers had processed when the epoch began or was continued; they are not
        dealt again. cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self) -> None:
        self.epoch, self.cut_short = -1, False
        self._reset(0)

    def begin(self, epoch: int, parts: int) -> None:
        """Begin epoch `epoch` of `parts` parts, or continue it after a failure. parts: 0 if the number is not known: a
        part is then added when its outcome is recorded. Local."""
        if self.epoch != epoch or (parts and self.parts != parts):
            self.epoch, self.cut_short = epoch, False
            self._reset(parts)

    def _reset(self, parts: int) -> None:
        self.outcomes = np.full(parts, LEFT, np.int32)
        self.dealt = np.zeros(parts, bool)

    @property
    def parts(self) -> int:
        return self.outcomes.size

    def has(self, number: int) -> bool:
        """Whether this server has processed part `number`."""
        return number < self.parts and bool(self.outcomes[number] != LEFT)

    def undealt(self, numbers: Iterable[int]) -> Iterator[int]:
        """Return those of these numbers whose parts are to be dealt."""
        return (number for number in numbers if number >= self.dealt.size or not self.dealt[number])

    def note(self, number: int, outcome: int) -> None:
        """Record the outcome of part `number`, unless it has one."""
        if number >= self.parts:
            self._grow(max(number + 1, 2 * self.parts))  # twice the memory: a long epoch costs no copy a part
        if not self.has(number):
            self.outcomes[number] = outcome

    def _grow(self, parts: int) -> None:
        added = max(0, parts - self.parts)
        self.outcomes = np.append(self.outcomes, np.full(added, LEFT, np.int32))
        self.dealt = np.append(self.dealt, np.zeros(added, bool))

    @property
    def staleness(self) -> list[int]:
        """The number of gradients that were applied 0, 1, 2, ... updates after their parameters."""
        return np.bincount(self.outcomes[self.outcomes >= 0]).tolist()

    @property
    def dropped(self) -> int:
        return int((self.outcomes == DROPPED).sum())

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """After a failure, agree on `dealt`, so that parts which a server lacks are dealt again. Collective.

        serves: whether this rank is a server.
        """
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        if self.epoch != epoch:
            self.begin(epoch, parts if serves else 0)
        elif serves:
            self._grow(parts)  # servers may have recorded different numbers of parts of a stream
        done = self.outcomes != LEFT if serves else np.ones(parts, bool)
        self.dealt = combine(comm, done, HOW_FAR, MPI.LAND)


NO_PART = -1  # instead of a part: none is left


class OutstandingPart(NamedTuple):
    """A part that a worker computes: the worker, and the version of the parameters it has."""

    worker: int
    version: int


class Parts:
    """The parts of an epoch that remain to be dealt.

    numbers: of the parts, in the order of dealing: one iterator for all workers, or one for each. count: how many they
        are; infinity of a stream, whose end a worker reports.
    """

    def __init__(self, numbers: Sequence[Iterator[int]], count: float = math.inf) -> None:
        self._numbers, self._left = numbers, count
        self._ended = set[int]()  # the iterators whose streams have ended

    def has(self, worker: int | None = None) -> bool:
        """Whether parts are left for a worker, or for any."""
        ended = len(self._ended) == len(self._numbers) if worker is None else self._place(worker) in self._ended
        return self._left > 0 and not ended

    def are_few(self, workers: int) -> bool:
        """Whether a worker with two parts would keep one from the other workers."""
        return self._left <= workers

    def next(self, worker: int) -> int:
        self._left -= 1
        return next(self._numbers[self._place(worker)])

    def clear(self) -> None:
        """Remove all parts."""
        self._left = 0

    def end(self, worker: int) -> None:
        """Remove the parts after the end of a stream, which a worker has reported."""
        if self._left == math.inf:  # arrays have as many parts as were counted
            self._ended.add(self._place(worker))

    def _place(self, worker: int) -> int:
        return worker % len(self._numbers)


class Dealer:
    """Deals the parts of one epoch.

    workers: the workers that get parts; others wait until all are dealt (warm-up). bound: the largest staleness, or
        None for any.
    """

    def __init__(self, parts: Parts, workers: Collection[int], bound: int | None = None) -> None:
        self._parts = parts
        self.cut_short = False  # whether it was stopped before everything was dealt
        self._workers, self._bound = workers, bound
        self._ahead = len(workers) > 1  # a single worker would get parameters that lack its own gradients
        self._outstanding: list[OutstandingPart] = []  # the oldest first

    def deal(self, worker: int, version: int) -> int | None:
        """Deal the next part to `worker`, which gets the parameters of `version`; the part is outstanding then.

        Returns the part; NO_PART if none is left, None if the worker has to wait.
        """
        if not self._parts.has(worker):
            return NO_PART
        if self.is_idle(worker):
            return None
        if self._bound is not None and len(self._outstanding) > self._bound:
            return None
        if self._is_ahead(worker):
            return None
        self._outstanding.append(OutstandingPart(worker, version))
        return self._parts.next(worker)

    def is_idle(self, worker: int) -> bool:
        """Whether `worker` gets no parts in this epoch (warm-up)."""
        return worker not in self._workers

    def _is_ahead(self, worker: int) -> bool:
        """Whether a worker still computes, and must not have another part yet.

        Near the end of the epoch no worker gets a second part: a slow worker would keep it from the other workers.
        """
        computes = any(part.worker == worker for part in self._outstanding)
        return computes and (not self._ahead or self._parts.are_few(len(self._workers)))

    def stop(self) -> None:
        """Deal nothing more."""
        self.cut_short |= self._parts.has()
        self._parts.clear()

    def end(self, worker: int) -> None:
        """Take the report of a worker that its stream has ended."""
        self._parts.end(worker)

    def may_apply(self, worker: int, version: int) -> bool:
        """Whether the gradients of this worker's oldest part may become update number `version` + 1 now."""
        if self._bound is None:
            return True
        others = list(self._outstanding)
        others.remove(self._oldest(worker))
        return all(version + 1 + position <= part.version + self._bound for position, part in enumerate(others))

    def done(self, worker: int) -> None:
        """Remove this worker's oldest part from the outstanding ones."""
        self._outstanding.remove(self._oldest(worker))

    def _oldest(self, worker: int) -> OutstandingPart:
        for part in self._outstanding:
            if part.worker == worker:
                return part
        raise CommunicationError(f"worker {worker} has sent gradients of a part that it was not dealt")


class Asynchronous(Policy):
    """Applies each gradient as it arrives, and deals the next part to whichever worker asks.

    dealer: deals the parts on the first server; None on the others. Only the first server guarantees the bound on
        staleness; on the others it may be exceeded by the number of gradients in flight.
    apply: apply(message, factor) updates the shard, with the learning rate times `factor`; it raises nothing.
    halts: whether this rank wants the epoch to end.
    ledger: the outcomes of the parts; a part that has one is not applied again.
    more: of a stream: by how much the number of a part may exceed those in the ledger.
    """

    def __init__(
        self, shard: Shard, rule: StalenessRule, dealer: Dealer | None, apply: Callable[[Message, float], object],
        halts: Callable[[], bool], ledger: EpochLedger, more: int = 0,
    ) -> None:  # fmt: skip
        self._shard, self._rule, self._dealer = shard, rule, dealer
        self._apply, self._halts = apply, halts
        self._ledger, self._more = ledger, more
        self._held: list[Arrival] = []  # gradients that would break the bound
        self._taken = 0  # pushes
        self._moved = False  # whether the last message has led to an update

    @property
    def parts(self) -> int:
        return self._ledger.parts + self._more

    def hear(self, halt: int) -> None:
        self._moved = False
        if self._dealer is not None and (halt or self._halts()):
            self._dealer.stop()

    def take(self, push: Arrival) -> Sequence[Arrival]:
        """Process held pushes, oldest version first, as far as the bound allows."""
        self._held.append(push)
        processed: list[Arrival] = []
        while ready := next((each for each in sorted(self._held, key=_version) if self._may_apply(each)), None):
            self._held.remove(ready)
            self._process(ready)
            processed.append(ready)
        self._moved = bool(processed)
        return processed

    def _may_apply(self, push: Arrival) -> bool:
        nothing = push.message.header.kind != GRADIENTS
        return nothing or self._dealer is None or self._dealer.may_apply(push.worker, self._shard.version)

    def _process(self, push: Arrival) -> None:
        header = push.message.header
        if self._dealer is not None:
            self._dealer.done(push.worker)
            if header.kind == ENDED:
                self._dealer.end(push.worker)
        outcome = EMPTY
        if header.kind == GRADIENTS and not self._ledger.has(header.step):
            outcome = self._shard.version - header.version
            factor = self._rule.factor(outcome)
            if factor:
                self._apply(push.message, factor)
            else:
                outcome = DROPPED
        self._ledger.note(header.step, outcome)
        self._taken += 1

    def answer(self, request: Arrival) -> Header | None:
        """Deal a part. Servers without a dealer reply only after as many pushes as the first server had processed,
        because a request may overtake gradients of other workers.

        A worker that gets no parts (warm-up) is told after each update to ask again, so that a single wait of its does
        not last the whole epoch.
        """
        part: int | None = 0
        if self._dealer is not None:
            part = self._dealer.deal(request.worker, self._shard.version)
        elif self._taken < request.message.header.taken:
            return None
        if part == NO_PART:
            return Header(END)
        if part is not None:
            return Header(WORK, part, self._shard.version, int(self._halts()), self._taken)
        assert self._dealer is not None
        return Header(AGAIN) if self._moved and self._dealer.is_idle(request.worker) else None


def _version(push: Arrival) -> int:
    return push.message.header.version

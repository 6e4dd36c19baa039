"""An asynchronous epoch on a server: the parts of batches are dealt, and gradients are applied as they come."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.transport.control import all_values, combine
from trainers.strategies.servers.mailbox import (
    AGAIN,
    ASK,
    BYE,
    END,
    GRADIENTS,
    PUSH,
    WORK,
    Arrival,
    Head,
    Mailbox,
    Parcel,
    check,
)
from trainers.strategies.servers.service import Counts, Shard


class Rule(NamedTuple):
    """What a server does with a gradient that is so many updates behind.

    stale: "keep" applies it as it is; "drop" discards it when it is more than `most` behind; "scale" divides the
        learning rate by staleness + 1 (W. Zhang et al.: Staleness-aware async-SGD for distributed deep learning, 2015).
    rate: of the learning rate that every update uses.
    """

    stale: str = "keep"
    most: int | None = None
    rate: float = 1.0

    @property
    def bound(self) -> int | None:
        """The staleness that is kept by waiting."""
        return None if self.stale == "drop" else self.most

    def factor(self, staleness: int) -> float:
        """Of the learning rate; zero for a gradient that is dropped."""
        if self.stale == "drop":
            assert self.most is not None
            return self.rate if staleness <= self.most else 0.0
        return self.rate / (staleness + 1) if self.stale == "scale" else self.rate


HOW_FAR = "hear how far the servers are"
LEFT, EMPTY, DROPPED = -1, -2, -3  # what has become of a part, besides the staleness of gradients that were applied


class EpochLedger:
    """What has become of each part of the epoch under way: parts of batches that are dealt, or steps.

    outcomes: (parts,): what has become of every part in this server's slice; empty on workers.
    dealt: (parts,) bool, those that all servers have had when the epoch began or was gone on with, which nobody needs
        to compute. cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self) -> None:
        self.epoch, self.cut_short = -1, False
        self._begin_anew(0)

    def begin(self, epoch: int, parts: int) -> None:
        """An epoch of so many parts begins here, or is gone on with. Local."""
        if self.epoch != epoch or self.parts != parts:
            self.epoch, self.cut_short = epoch, False
            self._begin_anew(parts)

    def _begin_anew(self, parts: int) -> None:
        self.outcomes = np.full(parts, LEFT, np.int32)
        self.dealt = np.zeros(parts, bool)

    @property
    def parts(self) -> int:
        return self.outcomes.size

    def has(self, number: int) -> bool:
        """Whether this server had a part."""
        return bool(self.outcomes[number] != LEFT)

    def note(self, number: int, outcome: int) -> None:
        """This server had a part; what became of it the first time counts."""
        if not self.has(number):
            self.outcomes[number] = outcome

    def counts(self) -> Counts:
        """What is told of the epoch."""
        counts = Counts()
        counts.behind = np.bincount(self.outcomes[self.outcomes >= 0]).tolist()
        counts.dropped = int((self.outcomes == DROPPED).sum())
        counts.cut_short = self.cut_short
        return counts

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """Parts that any server lacks are to be dealt again. Collective. serves: whether this rank is a server."""
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, parts if serves else 0)
        done = self.outcomes != LEFT if serves else np.ones(parts, bool)
        self.dealt = combine(comm, done, HOW_FAR, MPI.LAND)


NO_PART = -1  # in the place of a part: there are no more


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
        """The next part, for a worker that gets the parameters of `version`.

        NO_PART when there are no more, None when the worker has to wait.
        """
        if not self._left:
            return NO_PART
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


Apply = Callable[[Parcel, float], object]


class EpochServer:
    """One epoch of one server.

    dealer: on the first server, which says who computes what; None on the others, which only hold their slice. The
        bound on staleness is kept on the first; the others get the gradients in the same moments, so they differ from
        it by as many updates as are under way.
    apply: updates the shard by what a worker has sent, with this factor of the learning rate; raises nothing.
    halts: whether this rank wants the epoch to end.
    ledger: what of it was done before, which is not applied again; the rest is noted there.
    """

    def __init__(
        self, mailbox: Mailbox, shard: Shard, rule: Rule, dealer: Dealer | None, apply: Apply,
        halts: Callable[[], bool], ledger: EpochLedger,
    ) -> None:  # fmt: skip
        self._mailbox, self._shard, self._rule, self._dealer = mailbox, shard, rule, dealer
        self._apply, self._halts = apply, halts
        self._ledger = ledger
        self._held: list[Arrival] = []  # gradients that would break the bound
        self._asked: deque[Arrival] = deque()  # workers that can't be dealt a part yet, the first first
        self._taken = 0  # pushes

    def serve(self, workers: Sequence[int]) -> None:
        """Until every worker has taken leave."""
        present = set(workers)
        self._mailbox.open((ASK, PUSH))
        while present:
            arrival = self._mailbox.next("be asked by workers")
            head = arrival.parcel.head
            check(head, arrival.tag, self._ledger.parts, self._shard.version)
            if self._dealer is not None and (head.halt or self._halts()):
                self._dealer.stop()
            if arrival.tag == ASK:
                self._asked.append(arrival)
            elif head.kind == BYE:
                present.discard(arrival.worker)
                continue
            else:
                self._held.append(arrival)
            if self._apply_what_may():
                self._keep_waiting()
            self._answer_who_may()
        self._ledger.cut_short = self._dealer is not None and self._dealer.cut_short
        self._mailbox.drain()

    def _apply_what_may(self) -> bool:
        """Apply what has come, the oldest first, as far as the bound allows; whether anything was."""
        held, applied = len(self._held), True
        while applied:
            self._held.sort(key=lambda arrival: arrival.parcel.head.version)
            applied = False
            for arrival in list(self._held):
                if self._may_apply(arrival):
                    self._held.remove(arrival)
                    self._take(arrival)
                    applied = True
        return len(self._held) < held

    def _keep_waiting(self) -> None:
        """Let workers that rest hear that the others go on, or their wait would be as long as the whole epoch."""
        for arrival in [each for each in self._asked if self._dealer is not None and self._dealer.rests(each.worker)]:
            self._asked.remove(arrival)
            self._mailbox.clear(arrival)
            self._mailbox.answer(Head(AGAIN), arrival.worker)

    def _may_apply(self, arrival: Arrival) -> bool:
        nothing = arrival.parcel.head.kind != GRADIENTS
        return nothing or self._dealer is None or self._dealer.may_apply(arrival.worker, self._shard.version)

    def _take(self, arrival: Arrival) -> None:
        head = arrival.parcel.head
        if self._dealer is not None:
            self._dealer.done(arrival.worker)
        outcome = EMPTY
        if head.kind == GRADIENTS and not self._ledger.has(head.step):
            outcome = self._shard.version - head.version
            factor = self._rule.factor(outcome)
            if factor:
                self._apply(arrival.parcel, factor)
            else:
                outcome = DROPPED
        self._ledger.note(head.step, outcome)
        self._taken += 1
        self._mailbox.clear(arrival)

    def _part_for(self, arrival: Arrival) -> int | None:
        """What a worker is dealt; None when it has to wait. The other servers deal nothing and only say when.

        A question may overtake gradients on their way; then parameters would miss what the first server has applied.
        """
        if self._dealer is not None:
            return self._dealer.deal(arrival.worker, self._shard.version)
        return 0 if self._taken >= arrival.parcel.head.taken else None

    def _answer_who_may(self) -> None:
        for arrival in list(self._asked):
            part = self._part_for(arrival)
            if part is None:
                continue
            self._asked.remove(arrival)
            if part == NO_PART:
                self._mailbox.answer(Head(END), arrival.worker)
                continue
            reply = self._mailbox.parcel()
            reply.head = Head(WORK, part, self._shard.version, self._halts(), self._taken)
            reply.body[:] = self._shard.parameters
            self._mailbox.clear(arrival)
            self._mailbox.reply(reply, arrival.worker, whole=True)

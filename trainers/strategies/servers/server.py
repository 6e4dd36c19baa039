"""A server: its mailbox, its shard of the parameters, and an asynchronous epoch.

The mailbox has a slot for each worker and kind of message, whose receive is posted ahead, so a server takes the
messages that have come, in any order, and all of them before it looks again: no worker can starve another.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.errors import CommunicationError
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import all_done
from trainers.replica import Replica
from trainers.strategies.servers.messages import (
    AGAIN,
    ASK,
    BYE,
    GRADIENTS,
    PUSH,
    REPLY,
    WORK,
    Head,
    Parcel,
    Waits,
    check,
)
from trainers.strategies.servers.messages import END as NO_WORK
from trainers.strategies.servers.progress import DROPPED, NOTHING, EpochLedger, Rule


class Arrival(NamedTuple):
    """A message that lies in the mailbox until its slot is cleared."""

    worker: int
    tag: int
    parcel: Parcel


class Mailbox:
    """Local to make.

    comm: of servers and workers. workers: their ranks there; a worker's number is its index there.
    measures, length, dtype, unit: of parcels, see there.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, workers: Sequence[int], measures: int, length: int,
        dtype: np.dtype, unit: MPI.Datatype,
    ) -> None:  # fmt: skip
        self._comm, self._waits, self._workers = comm, waits, list(workers)
        self._shape = measures, length, dtype, unit
        self._slots: list[Arrival] = []
        self._requests: list[MPI.Prequest] = []
        for number, rank in enumerate(workers):
            for tag in (ASK, PUSH):
                parcel = Parcel(measures, length if tag == PUSH else 0, dtype, unit)
                self._slots.append(Arrival(number, tag, parcel))
                self._requests.append(comm.Recv_init(parcel.message(), rank, tag))
        self._posted = [False] * len(self._slots)
        self._arrived: deque[int] = deque()
        self._leaving: list[tuple[Parcel, list[MPI.Request]]] = []  # parcels, used again when they have left

    def open(self, tags: Sequence[int]) -> None:
        """Post the receives of an epoch."""
        for index, slot in enumerate(self._slots):
            if slot.tag in tags and not self._posted[index]:
                self._post(index)

    def clear(self, arrival: Arrival) -> None:
        """The message was dealt with: the worker's next one may come."""
        self._post(self._slots.index(arrival))

    def _post(self, index: int) -> None:
        self._requests[index].Start()
        self._posted[index] = True

    def next(self, text: str) -> Arrival:
        """A message that has come; waits for one when there is none. text: what for."""
        if not self._arrived:
            self._waits.until(self._look, text)
        return self._slots[self._arrived.popleft()]

    def _look(self) -> bool:
        come = [index for index, posted in enumerate(self._posted) if posted and self._requests[index].Test()]
        for index in come:
            self._posted[index] = False
        self._arrived.extend(come)
        return bool(come)

    def parcel(self) -> Parcel:
        """One that nobody has to receive any more, to be filled and sent."""
        for parcel, sends in self._leaving:
            if all_done(sends):
                sends.clear()
                return parcel
        parcel = Parcel(*self._shape)
        self._leaving.append((parcel, []))
        return parcel

    def reply(self, parcel: Parcel, worker: int, whole: bool) -> None:
        """Send a parcel, which must be left as it is until `parcel` gives it again; one may go to several workers."""
        sends = next(sends for each, sends in self._leaving if each is parcel)
        sends.append(self._comm.Isend(parcel.message(whole), self._workers[worker], REPLY))

    def answer(self, head: Head, worker: int) -> None:
        """A reply that is nothing but its head."""
        parcel = self.parcel()
        parcel.head = head
        self.reply(parcel, worker, whole=False)

    def drain(self) -> None:
        """Wait until everything has left."""
        for _, sends in self._leaving:
            self._waits.all_of(sends, "hand out the last replies")
            sends.clear()

    def close(self) -> None:
        """Give the receives back. Local."""
        for request, posted in zip(self._requests, self._posted, strict=True):
            if posted:
                request.Cancel()
                request.Wait()
            request.Free()
        self._requests, self._slots, self._leaving = [], [], []

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        free_later(self)


class Round:
    """What has come for one step.

    used: the first gradients, as many as were wanted, in the order of the workers' numbers.
    others: who came without gradients: it had no rows, or has failed.
    failed: whether somebody has met an error, so that there is no update. stop: whether training shall end after it.
    """

    def __init__(self) -> None:
        self.used: list[Arrival] = []
        self.others: list[Arrival] = []
        self.failed = self.stop = False

    @property
    def everybody(self) -> list[Arrival]:
        return self.used + self.others


def collect(mailbox: Mailbox, step: int, wanted: int, late: Callable[[Arrival], None]) -> Round:
    """Wait until the gradients of `wanted` workers for `step` are there, or one worker has failed.

    late: is given whoever comes meanwhile with what was computed for a step before.
    """
    found = Round()
    while len(found.used) < wanted and not found.failed:
        arrival = mailbox.next(f"get the gradients of step {step + 1}")
        head = arrival.parcel.head
        found.failed |= head.kind != GRADIENTS and bool(head.halt)
        found.stop |= bool(head.halt)
        if head.step != step:
            late(arrival)
        elif head.kind == GRADIENTS:
            found.used.append(arrival)
        else:
            found.others.append(arrival)
    found.used.sort(key=lambda each: each.worker)  # so that sums do not depend on who was first
    return found


class Shard:
    """The slice `part` of a replica's flat parameters, which this rank alone updates.

    parameters, gradients: the whole flat buffers that the replica is bound to.
    version: how many updates it has had.
    """

    def __init__(self, replica: Replica, parameters: np.ndarray, gradients: np.ndarray, part: slice) -> None:
        self._replica, self.part = replica, part
        self.parameters, self.gradients = parameters[part], gradients[part]
        self._accumulator = dtypes.TYPES[self.gradients.dtype].accumulator
        self.version = 0

    def apply(self, gradients: np.ndarray, factor: float) -> None:
        """One update, with the learning rate times `factor`."""
        self.gradients[:] = gradients
        self.update(factor)

    def update(self, factor: float = 1.0) -> None:
        """The same with the gradients that lie in the bound buffer.

        The rate is changed, not the gradients, because Adam and its like take no notice of how large those are.
        """
        replica = self._replica
        rates = replica.learning_rates
        if factor != 1.0:
            replica.learning_rates = [rate * factor for rate in rates]
        try:
            replica.update(self.part)
        finally:
            if factor != 1.0:
                replica.learning_rates = rates
        replica.refresh()
        self.version += 1

    def add_up(self, summands: Sequence[np.ndarray], share: float = 1.0) -> None:
        """Leave the sum of slices, divided by `share`, in the bound buffer; 16-bit floats are summed in float32."""
        total = self.gradients
        if total.dtype != self._accumulator:
            total = np.zeros(total.size, self._accumulator)
        np.copyto(total, summands[0])
        for summand in summands[1:]:
            total += summand
        if share != 1.0:
            total /= total.dtype.type(share)
        if total is not self.gradients:
            self.gradients[:] = total.astype(self.gradients.dtype)

    def is_finite(self) -> bool:
        """Whether all parameters are numbers."""
        return bool(np.isfinite(self.parameters).all())


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
        outcome = NOTHING
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
            if part == END:
                self._mailbox.answer(Head(NO_WORK), arrival.worker)
                continue
            reply = self._mailbox.parcel()
            reply.head = Head(WORK, part, self._shard.version, self._halts(), self._taken)
            reply.body[:] = self._shard.parameters
            self._mailbox.clear(arrival)
            self._mailbox.reply(reply, arrival.worker, whole=True)

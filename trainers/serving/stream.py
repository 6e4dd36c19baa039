"""The server's side of an asynchronous epoch: every gradient is applied as it comes."""

from collections import deque
from collections.abc import Callable, Sequence

from trainers.serving.dealer import END, Dealer
from trainers.serving.desk import Arrival, Desk
from trainers.serving.parcels import AGAIN, ASK, BYE, GRADIENTS, PUSH, WORK, Head, Parcel, check
from trainers.serving.parcels import END as NO_WORK
from trainers.serving.parts import DROPPED, NOTHING, Parts
from trainers.serving.shard import Shard
from trainers.serving.staleness import Rule

Apply = Callable[[Parcel, float], object]


class Stream:
    """One epoch of one server.

    dealer: on the first server, which says who computes what; None on the others, which only hold their slice. The
        bound on staleness is kept on the first; the others get the gradients in the same moments, so they differ from
        it by as many updates as are under way.
    apply: updates the shard by what a worker has sent, with this factor of the learning rate; raises nothing.
    halts: whether this rank wants the epoch to end.
    epoch: what of it was done before, which is not applied again; the rest is noted there.
    """

    def __init__(
        self, desk: Desk, shard: Shard, rule: Rule, dealer: Dealer | None, apply: Apply, halts: Callable[[], bool],
        epoch: Parts,
    ) -> None:  # fmt: skip
        self._desk, self._shard, self._rule, self._dealer = desk, shard, rule, dealer
        self._apply, self._halts = apply, halts
        self._epoch = epoch
        self._held: list[Arrival] = []  # gradients that would break the bound
        self._asked: deque[Arrival] = deque()  # workers that can't be dealt a part yet, the first first
        self._taken = 0  # pushes

    def serve(self, workers: Sequence[int]) -> None:
        """Until every worker has taken leave."""
        present = set(workers)
        self._desk.open((ASK, PUSH))
        while present:
            arrival = self._desk.next("be asked by workers")
            head = arrival.parcel.head
            check(head, arrival.tag, self._epoch.parts, self._shard.version)
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
        self._epoch.cut_short = self._dealer is not None and self._dealer.cut_short
        self._desk.drain()

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
            self._desk.clear(arrival)
            self._desk.answer(Head(AGAIN), arrival.worker)

    def _may_apply(self, arrival: Arrival) -> bool:
        nothing = arrival.parcel.head.kind != GRADIENTS
        return nothing or self._dealer is None or self._dealer.may_apply(arrival.worker, self._shard.version)

    def _take(self, arrival: Arrival) -> None:
        head = arrival.parcel.head
        if self._dealer is not None:
            self._dealer.done(arrival.worker)
        outcome = NOTHING
        if head.kind == GRADIENTS and not self._epoch.has(head.step):
            outcome = self._shard.version - head.version
            factor = self._rule.factor(outcome)
            if factor:
                self._apply(arrival.parcel, factor)
            else:
                outcome = DROPPED
        self._epoch.note(head.step, outcome)
        self._taken += 1
        self._desk.clear(arrival)

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
                self._desk.answer(Head(NO_WORK), arrival.worker)
                continue
            reply = self._desk.parcel()
            reply.head = Head(WORK, part, self._shard.version, self._halts(), self._taken)
            reply.body[:] = self._shard.parameters
            self._desk.clear(arrival)
            self._desk.reply(reply, arrival.worker, whole=True)

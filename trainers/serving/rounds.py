"""The server's side of synchronous steps: a step takes the first gradients that come for it."""

from collections.abc import Callable

from trainers.serving.desk import Arrival, Desk
from trainers.serving.parcels import GRADIENTS


class Round:
    """What has come for one step.

    used: the first gradients, as many as were wanted, in the order of the workers' numbers. own: whether those of the
        server itself are among the first, besides.
    others: who came and is not used: it had no rows, or came when there were enough.
    failed: whether somebody has met an error, so that there is no update. stop: whether training shall end after it.
    """

    def __init__(self) -> None:
        self.used: list[Arrival] = []
        self.others: list[Arrival] = []
        self.own = self.failed = self.stop = False

    @property
    def everybody(self) -> list[Arrival]:
        return self.used + self.others

    @property
    def dropped(self) -> int:
        """Gradients that came when there were enough."""
        return sum(arrival.parcel.head.kind == GRADIENTS for arrival in self.others)


def collect(desk: Desk, step: int, wanted: int, late: Callable[[Arrival], None], own: bool = False) -> Round:
    """Wait until the gradients of `wanted` workers for `step` are there, or one worker has failed.

    late: is given whoever comes meanwhile with what was computed for a step before.
    own: the server has computed too, and just now, so that it comes after what is on the desk already.
    """
    found = Round()
    while (arrival := desk.come()) is not None:
        _sort(arrival, step, wanted, found, late)
    if own and len(found.used) < wanted:
        found.own, wanted = True, wanted - 1
    while len(found.used) < wanted and not found.failed:
        _sort(desk.next(f"get the gradients of step {step + 1}"), step, wanted, found, late)
    found.used.sort(key=lambda each: each.worker)  # so that sums do not depend on who was first
    return found


def _sort(arrival: Arrival, step: int, wanted: int, found: Round, late: Callable[[Arrival], None]) -> None:
    head = arrival.parcel.head
    found.failed |= head.kind != GRADIENTS and bool(head.halt)
    found.stop |= bool(head.halt)
    if head.step != step:
        late(arrival)
    elif head.kind == GRADIENTS and len(found.used) < wanted:
        found.used.append(arrival)
    else:
        found.others.append(arrival)

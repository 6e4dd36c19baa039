"""The server's side of synchronous steps: a step takes the first gradients that come for it."""

from collections.abc import Callable

from trainers.serving.desk import Arrival, Desk
from trainers.serving.parcels import GRADIENTS


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


def collect(desk: Desk, step: int, wanted: int, late: Callable[[Arrival], None]) -> Round:
    """Wait until the gradients of `wanted` workers for `step` are there, or one worker has failed.

    late: is given whoever comes meanwhile with what was computed for a step before.
    """
    found = Round()
    while len(found.used) < wanted and not found.failed:
        arrival = desk.next(f"get the gradients of step {step + 1}")
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

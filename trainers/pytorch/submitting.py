"""Calls of a lane, also where autograd is at work, inside of which nothing can be made again."""

from collections.abc import Callable

from allreduce.messages import losses
from allreduce.messages.lanes import Lane, Pending


def submit(lane: Lane, work: Callable[[], object], what: str) -> Pending:
    """As `lane.submit`, but a lost rank is told when what this returns is waited for. Local."""
    try:
        return lane.submit(work, what)
    except Exception as error:
        if losses.lost(error) is None:
            raise
        pending = Pending(work)
        pending.finish(error)
        return pending

"""Calls of a lane, also where autograd is at work, inside of which nothing can be made again."""

from collections.abc import Callable
from typing import TypeVar

from allreduce.messages import losses
from allreduce.messages.lanes import Lane, Pending
from trainers.replicas.pytorch.devices import Crossing

ResultT = TypeVar("ResultT")


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


def result_of(lane: Lane, work: Callable[[], ResultT], what: str, crossing: Crossing) -> ResultT:
    """What `work` returns, when all ranks have come to it, and the work of GPUs is in that order. Collective."""
    results: list[ResultT] = []

    def inside() -> None:
        with crossing.inside():
            results.append(work())

    crossing.leave()
    try:
        lane.submit(inside, what).wait()
    finally:
        crossing.back()
    return results[0]

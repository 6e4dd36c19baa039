"""Ranks that have run out of batches take part in the others' steps, until all ranks have."""

from collections.abc import Callable
from functools import partial

from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce.messages.agreement import all_values
from trainers.pytorch.averaging import Averager
from trainers.pytorch.broadcast import broadcast_state, broadcast_tensors
from trainers.pytorch.sharded import ShardedOptimizer


def leave(
    averager: Averager,
    optimizer: Optimizer,
    trained: dict[str, Parameter],
    sharded: ShardedOptimizer | None,
    stepped: Callable[[], None],
) -> None:
    """Take part in the steps of ranks that have batches left, until none has. Collective.

    optimizer, trained: the plain optimizer and its parameters; overwritten with those of a rank that was among the
        last, where each rank has its own.
    sharded: how each rank updates its slice, of which the others need the result; None where each updates everything.
    stepped: what a step ends with.
    """
    mine = averager.steps
    while averager.count_rows(0, active=False).ranks():
        averager.forget(release=True)
        averager.average()
        if sharded is not None and not averager.leaves_out():
            sharded.update()
        stepped()
    averager.rows = None
    follow = partial(_follow, averager, mine, optimizer, trained)
    averager.together("leaves join()", follow if sharded is None else lambda: None)


def _follow(averager: Averager, mine: int, optimizer: Optimizer, trained: dict[str, Parameter]) -> None:
    """Take over from the first of the ranks that have done the most steps, of which this one did `mine` itself.

    Runs in the lane.
    """
    comm = averager.comm
    steps = all_values(comm, mine, "learn who has done the most steps")
    if min(steps) < max(steps):
        root = steps.index(max(steps))
        broadcast_tensors(comm, trained.values(), root)
        broadcast_state(comm, optimizer, root)

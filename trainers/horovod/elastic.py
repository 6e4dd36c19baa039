"""hvd.elastic: a training goes on with the ranks that are left, where MPI lets ranks be outlived.

That is Open MPI's ULFM, `mpirun --with-ft ulfm`. Elsewhere a rank that fails ends the job. No ranks join, and the
process sets of the previous ranks are gone after a failure: make them again in a reset callback.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from allreduce.elastic.retry import recover, retry
from allreduce.topology import Topology
from trainers.horovod import calls, session
from trainers.horovod.state import ElasticSampler, TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


def run(
    train: "Callable[Concatenate[TorchState, Arguments], ResultT]",
) -> "Callable[Concatenate[TorchState, Arguments], ResultT]":
    """`train(state, ...)`; after a failure the ranks that are left begin it again from the last `state.commit()`.

    All ranks begin with rank 0's state. Collective.
    """

    @functools.wraps(train)
    def elastic(state: TorchState, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        begun = session.world()

        def attempt(topology: Topology) -> ResultT:
            if topology is not begun:
                state.restore()
                state.on_reset()
            state.sync()
            return train(state, *args, **kwargs)

        return retry(begun, attempt, partial(recover, repair=_begin_session))

    return elastic


def _begin_session(topology: Topology) -> None:
    """Begin a session of the ranks that are left. Collective."""
    calls.forget()
    session.begin(topology)

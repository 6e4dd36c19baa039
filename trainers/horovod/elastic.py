"""hvd.elastic: a training goes on with the ranks that are left, where MPI lets ranks be outlived.

That is Open MPI's ULFM, `mpirun --with-ft ulfm`. Elsewhere a rank that dies ends the job, as always. Ranks are not
added, and process sets of the old ranks are gone after a loss: make them again in a reset callback.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from allreduce.transport import ulfm
from trainers.horovod import calls, session
from trainers.horovod.state import ElasticSampler, TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


def run(
    train: "Callable[Concatenate[TorchState, Arguments], ResultT]",
) -> "Callable[Concatenate[TorchState, Arguments], ResultT]":
    """`train(state, ...)`, begun again from the last `state.commit()` with the ranks that are left, on a loss.

    All ranks begin with rank 0's state. Collective.
    """

    @functools.wraps(train)
    def elastic(state: TorchState, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        restored = True
        while True:
            ok, result, topology = False, None, session.world()
            try:
                if not restored:
                    state.restore()
                    state.on_reset()
                    restored = True
                state.sync()
                result = train(state, *args, **kwargs)
                ok = True
            except Exception as error:
                if ulfm.lost(error) is None:
                    raise
                topology.revoke()  # so that all ranks that wait come out
            if not ulfm.in_force() or topology.finished(ok):
                return result  # type: ignore[return-value]
            _go_on()
            restored = False

    return elastic


def _go_on() -> None:
    """A session of the ranks that are left. Collective over them; when another is lost meanwhile, it begins again."""
    topology = session.world()
    while True:
        topology = topology.survivors()
        made = _attempt(topology)
        if topology.finished(made):
            return


def _attempt(topology: Any) -> bool:
    calls.forget()
    try:
        session.begin(topology)
        return True
    except Exception as error:
        if ulfm.lost(error) is None:
            raise
        topology.revoke()
        return False

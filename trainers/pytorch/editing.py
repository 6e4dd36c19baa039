"""Parameters are edited in any way, and all ranks get what rank 0 has made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mpi4py import MPI
from torch.nn import Module

from trainers.pytorch.averaging import Averager
from trainers.pytorch.broadcast import broadcast_tensors
from trainers.pytorch.sharded import ShardedOptimizer


@contextmanager
def editing(averager: Averager, model: Module, sharded: ShardedOptimizer | None) -> Iterator[None]:
    """Inside, every rank has parameters of its own; afterwards all have rank 0's. Collective.

    sharded: what keeps the parameters in the memory of the node, and takes them in again; None where none does.
    """
    if sharded is not None:
        sharded.placement.move_out()
    yield
    averager.together("edits parameters", partial(_take_in, averager.comm, model, sharded))


def _take_in(comm: MPI.Intracomm, model: Module, sharded: ShardedOptimizer | None) -> None:
    if comm.size > 1:
        broadcast_tensors(comm, model.parameters())
    if sharded is not None:
        sharded.placement.move_in()
        sharded.keep()

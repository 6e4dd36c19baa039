"""A saved optimizer state goes to all ranks: rank 0 loads it, the others get what it has then."""

from typing import Any

from mpi4py import MPI
from torch.optim import Optimizer

from allreduce.errors import OptionError
from allreduce.messages.agreement import raise_together
from trainers.pytorch.broadcast import broadcast_state


def load_of_root(comm: MPI.Intracomm, optimizer: Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load rank 0's state_dict into the plain optimizer of every rank. Collective.

    state_dict: not looked at on other ranks. What rank 0 can't load is raised on all ranks.
    """
    error: Exception | None = None
    if comm.rank == 0:
        try:
            if state_dict is None:
                raise OptionError("load_state_dict(None) on rank 0: its state_dict is what all ranks get")
            optimizer.load_state_dict(state_dict)
        except Exception as refused:
            error = refused
    raise_together(comm, error)
    broadcast_state(comm, optimizer)

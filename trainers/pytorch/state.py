"""Compares the models and optimizers of all ranks, and broadcasts those of one rank."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce.elastic.retry import Commit
from allreduce.errors import DisagreementError, OptionError
from allreduce.transport.chunked import broadcast
from allreduce.transport.control import all_values, raise_together, root_value, together
from trainers.checks import Compared
from trainers.files.values import from_json, to_json
from trainers.replicas.pytorch.division import hyperparameters
from trainers.replicas.pytorch.tensors import as_bytes
from trainers.replicas.pytorch.values import empty, layouts


def compare(comm: MPI.Intracomm, lines: list[str]) -> None:
    """Raise the same DisagreementError on all ranks unless all of them have the same lines. Collective.

    lines: one for each parameter, with all properties that must be alike.
    """
    waits_to = "compare models and optimizers"
    if len(set(all_values(comm, zlib.crc32("\n".join(lines).encode()), waits_to))) == 1:
        return
    everyone = all_values(comm, lines, waits_to)
    first = next(at for at in range(max(map(len, everyone)) + 1) if len({_line(each, at) for each in everyone}) > 1)
    table = "\n".join(
        f"  rank {rank}: {len(each)} parameters, number {first} is {_line(each, first)}"
        for rank, each in enumerate(everyone)
    )
    raise_together(comm, DisagreementError(f"the ranks have different models or optimizers:\n{table}"))


def _line(lines: list[str], at: int) -> str:
    return lines[at] if at < len(lines) else "missing"


def comparable(
    optimizer: Optimizer, parameters: Mapping[str, Parameter], stateful: Mapping[str, Parameter]
) -> Compared:
    """Return parameters, hyperparameters, and the optimizer's state of `stateful`, for checks.compare. Local."""
    held: dict[str, np.ndarray | str] = {f"group {at}": _text(group) for at, group in enumerate(optimizer.param_groups)}
    held |= {name: _comparable(each) for name, each in parameters.items()}
    for name, each in stateful.items():
        state = optimizer.state.get(each, {})
        held |= {f"the state of {name}, {key}": _comparable(value) for key, value in state.items()}
    return held


def _comparable(value: Any) -> np.ndarray | str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__
    known = value.dtype in (torch.float16, torch.float32, torch.float64)  # the norm of others is not told
    return as_bytes(value).view(str(value.dtype).removeprefix("torch.") if known else np.uint8)


def _text(group: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(hyperparameters(group).items()))


def broadcast_tensors(comm: MPI.Intracomm, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Broadcast tensors of any dtype from rank `root`, in place, through host memory. Collective."""
    for tensor in tensors:
        whole = tensor.data  # a write through it is no edit of the program's, which another optimizer would refuse
        packed = whole.cpu().contiguous()
        broadcast(comm, [as_bytes(packed)], root, f"receive tensors of rank {root}")
        if packed is not whole:
            whole.copy_(packed)


def broadcast_state(comm: MPI.Intracomm, optimizer: Optimizer, root: int = 0) -> None:
    """Copy the state and the hyperparameters of the root's optimizer to all ranks. Collective."""
    together(comm, receive(comm, [], optimizer, root))


def receive(comm: MPI.Intracomm, tensors: Sequence[Tensor], optimizer: Optimizer, root: int) -> Commit:
    """Receive tensors, and the state and hyperparameters of the optimizer, of the root. Returns a function that loads
    them, locally; nothing is changed before. Collective."""
    received = [each.detach().clone() for each in tensors]
    broadcast_tensors(comm, received, root)
    state, receives = _state_dict(comm, optimizer, root), comm.rank != root

    @torch.no_grad()
    def commit() -> None:
        for here, there in zip(tensors, received, strict=True):
            here.copy_(there)
        if receives:
            optimizer.load_state_dict(state)

    return commit


def _state_dict(comm: MPI.Intracomm, optimizer: Optimizer, root: int) -> dict[str, Any]:
    """Return the state_dict of the root's optimizer, whose tensors are not copied on the root. Collective."""
    tensors: list[Tensor] = []

    def plain() -> Any:
        try:
            return to_json(optimizer.state_dict(), tensors)
        except TypeError as error:
            raise OptionError(f"the optimizer's state: {error}") from None

    # Before any message: only the root finds out whether its state can be sent.
    state = together(comm, lambda: plain() if comm.rank == root else None)
    state, shapes = root_value(comm, [state, layouts(tensors)], "receive the state of an optimizer", root)
    if comm.rank != root:
        tensors = empty(shapes)
    broadcast_tensors(comm, tensors, root)
    return from_json(state, tensors)


def load_root_state(comm: MPI.Intracomm, optimizer: Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load rank 0's state_dict into the plain optimizer of every rank. Collective.

    state_dict: ignored on other ranks. An error of rank 0 is raised on all ranks.
    """

    def load() -> None:
        if state_dict is None:
            raise OptionError("load_state_dict(None) on rank 0: rank 0 needs the state_dict, which all ranks get")
        optimizer.load_state_dict(state_dict)

    together(comm, lambda: load() if comm.rank == 0 else None)
    broadcast_state(comm, optimizer)

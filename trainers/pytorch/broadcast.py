"""The same start on every rank: models are compared, and rank 0's values go to all others."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from mpi4py import MPI

from allreduce.errors import DisagreementError
from allreduce.messages.agreement import all_values, raise_together, root_value, together
from allreduce.messages.parcels import broadcast
from trainers.pytorch import plain
from trainers.pytorch.plain import Place
from trainers.replicas.pytorch.tensors import as_bytes


def compare(comm: MPI.Intracomm, lines: list[str]) -> None:
    """Raise the same DisagreementError on all ranks unless all of them have the same lines. Collective.

    lines: one for each parameter, telling all that must be alike.
    """
    what = "compare models and optimizers"
    if len(set(all_values(comm, zlib.crc32("\n".join(lines).encode()), what))) == 1:
        return
    everyone = all_values(comm, lines, what)
    first = next(at for at in range(max(map(len, everyone)) + 1) if len({_line(each, at) for each in everyone}) > 1)
    table = "\n".join(
        f"  rank {rank}: {len(each)} parameters, number {first} is {_line(each, first)}"
        for rank, each in enumerate(everyone)
    )
    raise_together(comm, DisagreementError(f"the ranks have different models or optimizers:\n{table}"))


def _line(lines: list[str], at: int) -> str:
    return lines[at] if at < len(lines) else "missing"


def broadcast_tensors(comm: MPI.Intracomm, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrite tensors of any dtype with those of the root, in place; by way of the host. Collective."""
    for tensor in tensors:
        whole = tensor.detach()
        packed = whole.cpu().contiguous()
        broadcast(comm, [as_bytes(packed)], root, f"take on tensors of rank {root}")
        if packed is not whole:
            whole.copy_(packed)


def broadcast_state(comm: MPI.Intracomm, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Give every rank the state and the hyperparameters of the root's optimizer. Collective."""
    state = state_of(comm, optimizer, root)
    together(comm, lambda: None if comm.rank == root else optimizer.load_state_dict(state))


def state_of(comm: MPI.Intracomm, optimizer: torch.optim.Optimizer, root: int = 0) -> dict[str, Any]:
    """The state_dict of the root's optimizer, on all ranks; of its tensors the root has no copies. Collective."""
    # Before anybody waits for it: the root alone finds out that a state can't be taken apart or sent.
    tensors, packed = together(comm, lambda: _packed(optimizer) if comm.rank == root else ([], None))
    skeleton, shapes = plain.from_json(root_value(comm, packed, "take on the state of an optimizer", root))
    if comm.rank != root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    broadcast_tensors(comm, tensors, root)
    return _put_back(skeleton, tensors)


def _packed(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], Any]:
    """An optimizer's tensors, and all else: its state around them, their shapes and dtypes."""
    tensors: list[torch.Tensor] = []
    skeleton = _taken_out(optimizer.state_dict(), tensors)
    return tensors, plain.to_json([skeleton, [[list(each.shape), each.dtype] for each in tensors]])


def _taken_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with every tensor in it moved to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _taken_out(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_taken_out(each, tensors) for each in value)
    return value


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _put_back(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(each, tensors) for each in value)
    return value

"""The same start on every rank: models are compared, and rank 0's values go to all others."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.optim import Optimizer

from allreduce.errors import DisagreementError, OptionError
from allreduce.transport.chunked import broadcast
from allreduce.transport.control import all_values, raise_together, root_value, together
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
    skeleton, shapes = from_json(root_value(comm, packed, "take on the state of an optimizer", root))
    if comm.rank != root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    broadcast_tensors(comm, tensors, root)
    return _put_back(skeleton, tensors)


def _packed(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], Any]:
    """An optimizer's tensors, and all else: its state around them, their shapes and dtypes."""
    tensors: list[torch.Tensor] = []
    skeleton = _taken_out(optimizer.state_dict(), tensors)
    return tensors, to_json([skeleton, [[list(each.shape), each.dtype] for each in tensors]])


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


class Place(int):
    """Stands for a tensor that travels by itself: its number in a list."""


def to_json(value: Any) -> Any:
    """What json.dumps takes: of numbers, texts, None, dtypes, lists, tuples, dicts of them and tensors without axes.

    Raises OptionError for anything else.
    """
    if isinstance(value, Place):
        return {"place": int(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return {"tensor": [to_json(value.dtype), value.item()]}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(held)] for key, held in value.items()]}
    if isinstance(value, list):
        return [to_json(held) for held in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(held) for held in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(f"the optimizer's state has a {type(value).__qualname__}, which can't be sent to other ranks")


def from_json(value: Any) -> Any:
    """What `to_json` was given; tuples and dicts are plain ones."""
    if isinstance(value, list):
        return [from_json(held) for held in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    return _MAKE[kind](held)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


_MAKE: dict[str, Any] = {
    "place": Place,
    "dtype": _dtype,
    "device": torch.device,
    "tensor": lambda held: torch.tensor(held[1], dtype=from_json(held[0])),
    "dict": lambda held: {from_json(key): from_json(entry) for key, entry in held},
    "tuple": lambda held: tuple(map(from_json, held)),
}

"""Compare models and optimizers of all ranks, and make them equal: one rank's become those of all."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce.errors import DisagreementError, OptionError
from allreduce.transport.chunked import broadcast
from allreduce.transport.control import all_values, raise_together, root_value, together
from trainers.checks import Compared
from trainers.replicas.pytorch.optimizer import hyperparameters
from trainers.replicas.pytorch.tensors import as_bytes


def compare(comm: MPI.Intracomm, lines: list[str]) -> None:
    """Raise the same DisagreementError on all ranks unless all of them have the same lines. Collective.

    lines: one for each parameter, with all properties that must be alike.
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


def comparable(
    optimizer: Optimizer, parameters: Mapping[str, Parameter], stateful: Mapping[str, Parameter]
) -> Compared:
    """These parameters, the optimizer's hyperparameters, and its state of `stateful`, for `checks.compare`. Local."""
    held: dict[str, np.ndarray | str] = {f"group {at}": _text(group) for at, group in enumerate(optimizer.param_groups)}
    held |= {name: _array(each) for name, each in parameters.items()}
    states = ((name, optimizer.state.get(each, {})) for name, each in stateful.items())
    return held | {f"the state of {name}": _state_text(state) for name, state in states}


def _array(parameter: Parameter) -> np.ndarray:
    whole = parameter.detach().cpu().contiguous()
    return as_bytes(whole) if whole.dtype == torch.bfloat16 else whole.numpy()


def _text(group: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(hyperparameters(group).items()))


def _state_text(state: Mapping[str, Any]) -> str:
    """An optimizer's state of one parameter, its tensors by their CRC."""
    return ", ".join(f"{key}={_digest(value)}" for key, value in sorted(state.items(), key=lambda pair: str(pair[0])))


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"crc {zlib.crc32(as_bytes(value.detach().contiguous()).data):08x}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__


def broadcast_tensors(comm: MPI.Intracomm, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Overwrite tensors of any dtype with those of the root, in place; by way of the host. Collective."""
    for tensor in tensors:
        whole = tensor.detach()
        packed = whole.cpu().contiguous()
        broadcast(comm, [as_bytes(packed)], root, f"take on tensors of rank {root}")
        if packed is not whole:
            whole.copy_(packed)


def broadcast_state(comm: MPI.Intracomm, optimizer: Optimizer, root: int = 0) -> None:
    """Give every rank the state and the hyperparameters of the root's optimizer. Collective."""
    state = state_of(comm, optimizer, root)
    together(comm, lambda: None if comm.rank == root else optimizer.load_state_dict(state))


def state_of(comm: MPI.Intracomm, optimizer: Optimizer, root: int = 0) -> dict[str, Any]:
    """The state_dict of the root's optimizer, on all ranks. On the root its tensors are no copies. Collective."""
    tensors: list[Tensor] = []

    def packed() -> Any:
        state = to_json(optimizer.state_dict(), tensors)
        return [state, [[list(each.shape), to_json(each.dtype)] for each in tensors]]

    # First, as only the root finds out that its state can't be sent.
    sent = together(comm, lambda: packed() if comm.rank == root else None)
    state, shapes = root_value(comm, sent, "take on the state of an optimizer", root)
    if comm.rank != root:
        tensors = [torch.empty(shape, dtype=from_json(dtype)) for shape, dtype in shapes]
    broadcast_tensors(comm, tensors, root)
    return from_json(state, tensors)


def load_of_root(comm: MPI.Intracomm, optimizer: Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load rank 0's state_dict into the plain optimizer of every rank. Collective.

    state_dict: ignored on other ranks. An error of rank 0 is raised on all ranks.
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


def to_json(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """A value that json.dumps takes, of numbers, texts, None, dtypes, tensors, and lists, tuples and dicts of them.

    tensors: gets the tensors, whose numbers the result has; without it tensors must have no axes. Reading the result
    runs no code, as a pickle would. Raises OptionError for other types.
    """
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and tensors is not None:
        tensors.append(value)
        return {"number": len(tensors) - 1}
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        return {"tensor": [to_json(value.dtype), value.item()]}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(held, tensors)] for key, held in value.items()]}
    if isinstance(value, list):
        return [to_json(held, tensors) for held in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # other ranks may lack the named one
        return {"tuple": [to_json(held, tensors) for held in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(f"the optimizer's state has a {type(value).__qualname__}, which can't be sent to other ranks")


def from_json(value: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """The argument of `to_json`, with plain tuples and dicts. tensors: those that it has numbers of."""
    if isinstance(value, list):
        return [from_json(held, tensors) for held in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "number":
        return tensors[held]
    if kind == "dict":
        return {from_json(key): from_json(entry, tensors) for key, entry in held}
    if kind == "tuple":
        return tuple(from_json(held, tensors))
    if kind == "tensor":
        return torch.tensor(held[1], dtype=from_json(held[0]))
    if kind == "device":
        return torch.device(held)
    found = getattr(torch, held)
    assert isinstance(found, torch.dtype)
    return found

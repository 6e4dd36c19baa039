"""Whether the replicas still are replicas: a hash of all that must be equal on the ranks."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce import notices
from allreduce.errors import DivergenceError
from allreduce.transport.control import known, together
from trainers.checks import compare
from trainers.pytorch.sharded import ShardedOptimizer
from trainers.pytorch.state import broadcast_state, broadcast_tensors
from trainers.replicas.pytorch.optimizer import hyperparameters
from trainers.replicas.pytorch.tensors import as_bytes


def compare_replicas(
    comm: MPI.Intracomm,
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    sharded: ShardedOptimizer | None,
    on_divergence: str,
    source: str | int,
) -> None:
    """See that parameters, hyperparameters and the optimizer's state are equal on all ranks. Collective.

    sharded: whose slices no other rank has. What the ranks of one node have in common has no copies that could differ.
    on_divergence, source: as of MirroredOptimizer. Costs one reading of all that, and a message of 16 bytes.
    """
    held = together(comm, lambda: _held(optimizer, parameters, sharded))
    found = compare(comm, held)
    if found is None:
        return
    if on_divergence == "raise":
        raise known(DivergenceError(str(found)), comm)
    root = found.root(source)
    broadcast_tensors(comm, parameters.values(), root)
    broadcast_state(comm, optimizer, root)
    if sharded is not None:
        sharded.placement.move_in()
        sharded.keep()
    if comm.rank == 0:
        ranks = ", ".join(map(str, found.differing(root)))
        notices.log.warning("allreduce: %s\n  copied again to rank %s: the replica of rank %d", found, ranks, root)


def _held(
    optimizer: Optimizer, parameters: Mapping[str, Parameter], sharded: ShardedOptimizer | None
) -> dict[str, np.ndarray | str]:
    """What must be equal on all ranks, by name."""
    held: dict[str, np.ndarray | str] = {f"group {at}": _text(group) for at, group in enumerate(optimizer.param_groups)}
    apart = parameters if sharded is None else sharded.apart
    copies = apart if sharded is not None and sharded.placement.one_memory else parameters
    held |= {name: _array(each) for name, each in copies.items()}
    held |= {f"the state of {name}": _state(optimizer.state.get(each, {})) for name, each in apart.items()}
    return held


def _array(parameter: Parameter) -> np.ndarray:
    whole = parameter.detach().cpu().contiguous()
    return as_bytes(whole) if whole.dtype == torch.bfloat16 else whole.numpy()


def _text(group: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(hyperparameters(group).items()))


def _state(state: Mapping[str, Any]) -> str:
    """An optimizer's state of one parameter, its tensors by their CRC."""
    return ", ".join(f"{key}={_digest(value)}" for key, value in sorted(state.items(), key=lambda pair: str(pair[0])))


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"crc {zlib.crc32(as_bytes(value.detach().contiguous()).data):08x}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__

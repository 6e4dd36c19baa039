"""Whether the replicas still are replicas: a hash of all that must be equal on the ranks."""

import zlib
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI
from torch.nn import Parameter
from torch.optim import Optimizer

from allreduce.errors import DisagreementError
from allreduce.messages.agreement import all_values, known, waiting
from trainers.replicas.pytorch.alike import hyperparameters
from trainers.replicas.pytorch.tensors import as_bytes


def compare_replicas(comm: MPI.Intracomm, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> None:
    """Raise the same DisagreementError on all ranks unless parameters and hyperparameters are equal. Collective.

    Costs one reading of the parameters and a message of 16 bytes a parameter.
    """
    groups = {f"group {at}": _text(group) for at, group in enumerate(optimizer.param_groups)}
    hashes = np.array(
        [zlib.crc32(text.encode()) for text in groups.values()]
        + [zlib.crc32(as_bytes(each.detach().contiguous()).data) for each in parameters.values()],
        dtype=np.int64,
    )
    low = np.concatenate([hashes, -hashes])  # the minimum of -x is minus the maximum: one message gives both
    if comm.size > 1:
        with waiting(comm, "compare the replicas"):
            comm.Allreduce(MPI.IN_PLACE, low, MPI.MIN)
    differ = np.flatnonzero(low[: hashes.size] != -low[hashes.size :])
    if not differ.size:
        return
    first = int(differ[0])
    name = [*groups, *parameters][first]
    side = groups.get(name) or f"crc {hashes[first]:08x}, norm {float(parameters[name].detach().double().norm())!r}"
    sides = all_values(comm, side, "compare the replicas")
    table = "\n".join(f"  rank {rank}: {name}: {text}" for rank, text in enumerate(sides))
    raise known(
        DisagreementError(
            f"the replicas are no longer equal: {_odd(comm, int(hashes[first]))} in {name}, the first of {differ.size} "
            f"differences. Gradients, parameters or hyperparameters were changed on some ranks only:\n{table}"
        ),
        comm,
    )


def _odd(comm: MPI.Intracomm, value: int) -> str:
    """Which ranks differ from the most common value. Collective."""
    values = all_values(comm, value, "compare the replicas")
    usual = max(values, key=lambda each: (values.count(each), each == values[0]))
    odd = [str(rank) for rank, each in enumerate(values) if each != usual]
    return f"rank{'s' * (len(odd) > 1)} {', '.join(odd)} differ{'s' * (len(odd) == 1)} from the others"


def _text(group: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(hyperparameters(group).items()))

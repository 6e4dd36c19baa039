"""Makes the process group when torch.distributed asks for one, from the ranks of MPI that belong to it."""

import functools
import math
from typing import Any

from torch.distributed import distributed_c10d

from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.process_group import AllReduceProcessGroup


def create_group(request: Any, pg_options: Any) -> AllReduceProcessGroup:
    """The creator that torch.distributed calls. Collective over the members of the group.

    request: PyTorch's store, rank, size, timeout, name and global ranks of the group (none for the world).
    """
    options = Options.parse(pg_options)
    members = list(request.global_ranks_in_group)
    # The group has time-outs of its own, by which its program may go on.
    topology = Topology.of_ranks(members, request.group_id, math.inf) if members else Topology(timeout=math.inf)
    if (request.group_rank, request.group_size) != (topology.rank, topology.size):
        raise OptionError(
            f"PyTorch takes this process for rank {request.group_rank} of {request.group_size} and MPI for rank "
            f"{topology.rank} of {topology.size}. Start the program by mpirun -n {max(request.group_size, 2)} python "
            "... (MPI does not know what torchrun or accelerate launch starts), leave rank and world_size of "
            "init_process_group out, and have RANK and WORLD_SIZE unset"
        )
    return AllReduceProcessGroup(
        request.store, request.group_rank, request.group_size, topology, options, request.timeout, request.group_id
    )


def attach_no_flight_recorder() -> None:
    """Have PyTorch, from 2.15 on, attach its flight recorder to other groups alone.

    The recorder asks a backend in C++ for the group's name. A group in Python has no such backend, so the attachment
    raises RuntimeError("Could not find the default backend type 0").
    """
    module: Any = distributed_c10d
    original = getattr(module, "_maybe_attach_flight_recorder", None)
    if original is None or getattr(original, "passes_over", False):
        return

    @functools.wraps(original)
    def attach(group: Any, *args: Any, **options: Any) -> Any:
        return None if isinstance(group, AllReduceProcessGroup) else original(group, *args, **options)

    attach.passes_over = True  # type: ignore[attr-defined]
    module._maybe_attach_flight_recorder = attach

"""Makes the process group when torch.distributed asks for one, from the ranks of MPI that belong to it."""

import math
from typing import Any

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

"""What MirroredOptimizer decides by ranks and cores: overlap, and whether threads are too many."""

import torch

from allreduce import notices
from allreduce.errors import UnavailableError
from allreduce.messages import losses
from allreduce.messages.worker import Lane
from allreduce.topology import Topology
from allreduce.wrappers.background import crowded
from trainers.pytorch.family import Family
from trainers.replicas.pytorch.devices import Host
from trainers.twins import NOT_KEPT


def lane_of(family: Family, topology: Topology, overlap: bool | str, device: Host) -> tuple[Lane, bool]:
    """What runs an optimizer's calls, and whether it does so in a thread while backward goes on. Collective.

    No thread where it does not pay or can't be had. While a GPU computes the host's threads have nothing to do.
    """
    pays = overlap if overlap != "auto" else device.kind == "cuda" or _overlap_pays(topology)
    if topology.size > 1 and pays:
        try:
            return family.lane(threaded=True), True
        except UnavailableError as error:
            notices.once(topology.rank, f"gradients are reduced after backward, not during it: {error}")
    return family.lane(threaded=False), False


def _overlap_pays(topology: Topology) -> bool:
    """Whether reducing during backward is likely to be faster.

    Across nodes most of it is waiting for the network, which costs backward nothing. Within a node it is
    memory traffic and polling, for which there should be a core that nobody computes on.
    """
    return topology.nodes > 1 or not crowded(topology)


def copies_kept(topology: Topology, copies: int) -> int:
    """How many ranks have each slice of a sharded update. Local. copies: as many were asked for."""
    if copies == 2 and not losses.in_force():
        notices.once(topology.rank, NOT_KEPT)
        return 1
    return copies


def tell_threads(topology: Topology) -> None:
    """A notice when the ranks of a node compute with more threads than it has cores."""
    cores, threads = topology.cores, torch.get_num_threads()
    if topology.node_size > 1 and topology.node_size * threads > max(cores, topology.node_size):
        notices.once(
            topology.rank,
            f"{topology.node_size} ranks compute with {threads} threads each on {cores} cores, so they slow each "
            f"other; set OMP_NUM_THREADS={max(1, cores // topology.node_size)} or torch.set_num_threads",
        )

"""The bytes that real hosts, and those of scripts/cluster_sim.sh, send to each other."""

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.control import combine


def sent_bytes(topology: Topology) -> int | None:
    """Return the bytes that all hosts have sent to other hosts so far, with the headers of packets. Collective.

    Counted by the system, so other programs' bytes count too. None where all ranks are on one host.
    """
    if topology.nodes == 1 or topology.simulated:
        return None
    mine = interface_bytes() if topology.node_rank == 0 else 0
    return int(combine(topology.world, np.array([mine], np.int64), "count the bytes that hosts have sent")[0])


def interface_bytes(path: str = "/proc/self/net/dev") -> int:
    """Return the bytes that this host has sent over its network interfaces, except the loopback. Local."""
    total = 0
    with open(path) as file:
        for line in list(file)[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != "lo":
                total += int(numbers.split()[8])
    return total

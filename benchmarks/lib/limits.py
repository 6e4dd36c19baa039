"""The limit of memory or network on the bus bandwidth of large arrays: measured, and computed for a run."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.topology import Topology
from benchmarks.lib.results import Run

LARGE, MESSAGE = 64 << 20, 4 << 20  # bytes: larger than most caches; a message that fills a link
ROUNDS = 5
MEMORY, ADDING, NETWORK = "memory_gbs", "adding_gbs", "network_gbs"  # facts of a machine, in GB/s
FASTEST = 1e9  # GB/s that a file may name


class Limit(NamedTuple):
    """busbw: in GB/s. what: limits it, in words."""

    busbw: float
    what: str


def measure(topology: Topology) -> dict[str, float]:
    """Return the speed of the largest node's memory, and of the slowest link between real nodes, in GB/s. Collective.

    Memory: bytes read and written per second while all ranks copy, and while all add float32 in place, as STREAM does.
    Network: bytes per second in one direction while each node's first rank sends to the next node's and receives from
    the one before.
    """
    most = max(topology.node_sizes)
    source, target = np.ones(LARGE // 4 // most, np.float32), np.ones(LARGE // 4 // most, np.float32)
    copying = _fastest(topology.world, lambda: np.copyto(target, source))
    adding = _fastest(topology.world, lambda: np.add(target, source, out=target))
    facts = {
        key: round(streams * most * source.nbytes / seconds / 1e9, 2)
        for key, streams, seconds in ((MEMORY, 2, copying), (ADDING, 3, adding))
    }
    if topology.nodes > 1 and not topology.simulated:
        sent, received = np.ones(MESSAGE, np.uint8), np.empty(MESSAGE, np.uint8)
        cross = topology.cross  # of the first rank of a node: a rank for each node

        def pass_on() -> None:
            if topology.node_rank == 0:
                after, before = (cross.rank + 1) % cross.size, (cross.rank - 1) % cross.size
                cross.Sendrecv(sent, after, recvbuf=received, source=before)

        facts[NETWORK] = round(MESSAGE / _fastest(topology.world, pass_on) / 1e9, 3)
    return facts


def _fastest(comm: MPI.Intracomm, action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it, in the fastest of some rounds. Collective."""
    rounds = np.empty(ROUNDS)
    for index in range(ROUNDS):
        comm.Barrier()
        start = time.perf_counter()
        action()
        comm.Barrier()  # where ranks outnumber cores, a rank may begin when others have ended
        rounds[index] = time.perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, rounds, MPI.MAX)
    return float(rounds.min())


def limit_of(run: Run) -> Limit | None:
    """Return the lowest limit of a run; None if none was measured, or if the run has one rank.

    An all-reduce reads and writes the array of each rank at least once: 2 k S bytes on a node of k ranks. On m nodes,
    each node sends at least 2 S (m-1)/m bytes (Patarasuk and Yuan 2009).
    """
    found = []
    for fact, least, what in (
        (MEMORY, 2 * max(run.node_sizes), "memory"),
        (NETWORK, 2 * (run.nodes - 1) / run.nodes, "network"),
    ):
        speed = run.machine.get(fact)
        if type(speed) is float and 0 < speed < FASTEST and least and run.ranks > 1:
            found.append(Limit(speed / least * 2 * (run.ranks - 1) / run.ranks, what))
    return min(found, default=None)


def in_words(run: Run) -> list[str]:
    """Return the measured speeds of a run and the limit that follows from them, as lines."""
    verbs = {MEMORY: "copy", ADDING: "add in place", NETWORK: "send to another node"}
    speeds = ", ".join(f"{verb} {run.machine[key]:.3g} GB/s" for key, verb in verbs.items() if key in run.machine)
    limit = limit_of(run)
    of = (
        f"; so the limit of the bus bandwidth is {limit.busbw:.3g} GB/s ({limit.what}; caches exceed it)"
        if limit
        else ""
    )
    return [f"all ranks at once {speeds}{of}"] if speeds else []

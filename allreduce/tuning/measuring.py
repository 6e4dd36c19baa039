"""Measures the constants of the cost formulas on the ranks of a topology."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport import cost
from allreduce.transport.control import combine
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.shared_segment import PAGE_BYTES, STAGING_BYTES, shared_rows
from allreduce.transport.wait import wait, waiting

WHAT = "measure the constants of the machine"
FIELDS = tuple(Machine.__dataclass_fields__)
TRIES = 5  # of each time; the median counts
BYTES = 512 * 1024  # of the long messages and arrays
MIDDLE = 2 * cost.EAGER  # bytes of messages with a handshake
SHORT = 8  # bytes of the short ones
OPERATIONS = 16  # the Python code of an algorithm takes about as long as these operations on a short array


def layout_of(topology: Topology, node_sizes: tuple[int, ...]) -> Layout:
    """Return the layout of some ranks of a topology, the same on all of them. Local.

    node_sizes: the number of these ranks on each node."""
    by_c, cores = len(node_sizes) == 1 and topology.by_c, topology.fewest_cores
    return Layout(node_sizes, cma=topology.all_cma, by_c=by_c, cores=cores, sharing=topology.most_sharing)


class Measured:
    """A service of a topology: its constants, measured when they are first needed. The constructor is collective."""

    def __init__(self, topology: Topology) -> None:
        self.machine = measure(topology)

    def close(self) -> None:
        """Do nothing: constants hold no resources."""

    abandon = close


def measure(topology: Topology, tries: int = TRIES) -> Machine:
    """Measure the constants in some milliseconds. All ranks get the same: the times of the slowest rank. Collective.

    Ranks that share a core wait for it in these messages and barriers too, so `switch` is 0. Constants that the
    topology has no use for (messages inside nodes of one rank) keep their defaults.
    """
    at = layout_of(topology, topology.node_sizes)
    with _communicators(topology) as (world, node):
        mine = _in_node(topology, node, at, tries) if node.size > 1 else {}
        mine |= _between_nodes(topology, world, tries) if topology.nodes > 1 else {}
        native = [_seconds(world, _all_reduce(world, nbytes), tries) for nbytes in (SHORT, BYTES)]
        values = np.array([mine.get(name, -1.0) for name in FIELDS] + native)
        *agreed, short, long = combine(world, values, "agree on the constants", MPI.MAX).tolist()
    found = {name: value for name, value in zip(FIELDS, agreed, strict=True) if value >= 0}
    machine = replace(Machine(), **{"switch": 0.0, **found})
    times = asdict(_with_native(machine, at, short, long))
    return Machine(**{name: float(f"{seconds:.3g}") for name, seconds in times.items()})


def _with_native(machine: Machine, at: Layout, short: float, long: float) -> Machine:
    """Add the constants of the MPI library's all-reduce, whose times are given. Return all constants."""
    steps = cost.rounds(at.largest)
    across = cost.rounds(at.nodes) * machine.net_alpha
    if steps:
        machine = replace(machine, native_alpha=max(short - across, short / 4) / steps)
    least, one = (cost.library(BYTES, at, replace(machine, native=times)) for times in (0.0, 1.0))
    return replace(machine, native=max((long - least) / (one - least), 0.01))


def _in_node(topology: Topology, node: MPI.Intracomm, at: Layout, tries: int) -> dict[str, float]:
    """Measure barriers, memory and messages of the ranks of a node. Collective over the node."""
    rank, ranks, per_core = node.rank, node.size, at.per_core
    memory = _rows(node)
    rows = list(memory.view(np.float32))
    mine = chunk(rows[0].size, ranks, rank)

    def barrier() -> None:
        node.Barrier()

    def add(part: slice) -> None:
        first, second, *others = (row[part] for row in rows)
        np.add(first, second, out=first)
        for other in others:
            np.add(first, other, out=first)
        for other in (second, *others):
            np.copyto(other, first)
        barrier()

    def bare() -> None:
        first = rows[rank][:2]
        np.add(first, first, out=first)

    operation = _seconds(node, bare, tries)
    fence = _seconds(node, barrier, tries)
    little, all_of_it = (
        _seconds(node, partial(add, part), tries) for part in (slice(mine.start, mine.start + 2), mine)
    )
    share = (ranks - 1) / ranks * rows[0].nbytes * per_core
    other = (rank + 1) % ranks
    buffer, source = np.empty_like(memory[0]), np.zeros_like(memory[0])
    memory[rank, :8].view(np.int64)[:] = topology.cma.address(source) if at.cma else 0
    with waiting(node, WHAT):
        node.Barrier()
    addresses = memory[:, :8].copy().view(np.int64)[:, 0].tolist()
    reads = all(addresses)

    def fetch(nbytes: int) -> None:
        if reads:
            topology.cma.read(other, addresses[other], buffer[:nbytes])
        else:
            np.copyto(buffer[:nbytes], memory[other][:nbytes])

    few, copy = (_seconds(node, partial(fetch, nbytes), tries) for nbytes in (SHORT, buffer.nbytes))
    with waiting(node, WHAT):
        node.Barrier()  # the others have read `source`
    byte = max(copy - few, 1e-9) / buffer.nbytes
    found = {
        "call": operation * OPERATIONS,
        "fence": fence / cost.rounds(ranks),
        "gamma": max(all_of_it - little, 1e-9) / share,
        "copy": byte / per_core,
    }
    partner = rank ^ 1
    if partner < ranks:
        short, middle, long = (_swap(node, partner, nbytes, tries) for nbytes in (SHORT, MIDDLE, BYTES))
        beta = max((long - max(short, middle)) / BYTES, byte)  # a byte of a message is copied once at least
        found |= {"alpha": short, "beta": beta / per_core, "handshake": max(middle - short - beta * MIDDLE, 0.0)}
    return found


def _rows(node: MPI.Intracomm) -> np.ndarray:
    """Return some memory for each rank, shared if it can be: else the times are of this rank's own memory."""
    nbytes = min(BYTES, STAGING_BYTES // node.size // PAGE_BYTES * PAGE_BYTES)
    try:
        return shared_rows(node, nbytes)
    except UnavailableError:  # on all ranks of the node
        return np.zeros((node.size, nbytes), np.uint8)


def _between_nodes(topology: Topology, world: MPI.Intracomm, tries: int) -> dict[str, float]:
    """Measure messages between the leaders of two nodes. Collective over these."""
    partner = topology.node_index ^ 1
    if topology.node_rank or partner >= topology.nodes:
        return {}
    leader = topology.layout.members[partner][0]
    short, long = (_swap(world, leader, nbytes, tries) for nbytes in (SHORT, BYTES))
    return {"net_alpha": short, "net_beta": max(long - short, 1e-9) / BYTES}


def _swap(comm: MPI.Intracomm, partner: int, nbytes: int, tries: int) -> float:
    """Return the time in which two ranks send each other a message, as the algorithms do."""
    sent, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return _seconds(comm, lambda: wait(comm.Irecv(received, partner), comm.Isend(sent, partner)), tries)


def _all_reduce(comm: MPI.Intracomm, nbytes: int) -> Callable[[], object]:
    """Return a function that sums `nbytes` of float32 by the MPI library."""
    array = np.zeros(nbytes // 4, np.float32)
    return lambda: comm.Allreduce(MPI.IN_PLACE, array)


def _seconds(comm: MPI.Intracomm, work: Callable[[], object], tries: int) -> float:
    """Return the median time of some calls, after one that is not counted."""
    times = []
    with waiting(comm, WHAT):
        work()
        for _ in range(tries):
            begin = perf_counter()
            work()
            times.append(perf_counter() - begin)
    return median(times)


@contextmanager
def _communicators(topology: Topology) -> Iterator[tuple[MPI.Intracomm, MPI.Intracomm]]:
    """Context manager: communicators of all ranks and of this node's ranks, for these messages alone."""
    world = topology.private()
    with waiting(world, WHAT):
        node = topology.own(world.Split(topology.node_index, world.rank), watch=True)
    yield world, node
    topology.release(node)
    topology.release(world)

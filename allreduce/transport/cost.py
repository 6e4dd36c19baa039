"""The cost of the algorithms: seconds by formula, from the bytes, the layout of the ranks and constants of the machine.

The alpha-beta-gamma model: a message of S bytes takes alpha + S beta, adding S bytes takes S gamma. R. Hockney: The
communication challenge for MPP, 1994. Each algorithm has its own formula, `cost`; here are the types and the parts that
several formulas share. "auto" selects the cheapest, and benchmarks.scaling predicts with the same formulas.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2

from allreduce.transport.point_to_point import SEGMENT_BYTES
from allreduce.transport.shared_segment import STAGING_BYTES

EAGER = 4096  # bytes; messages of this length and longer ones in a node need a handshake first (Open MPI)


@dataclass(frozen=True)
class Machine:
    """The constants, in seconds and seconds per byte, on a core that a rank has alone.

    The defaults were measured on a 2-core AMD EPYC with Open MPI 5; those between nodes are of a 1 Gb/s network.
    """

    call: float = 1.2e-5  # the Python code of an algorithm, once in a call
    alpha: float = 5e-6  # a message between ranks of a node: Python and MPI, both sides
    handshake: float = 4e-6  # more for a message of EAGER bytes or more
    beta: float = 2e-10  # a byte of it
    gamma: float = 1e-10  # a byte added, and the sum written to another rank's memory
    copy: float = 1.5e-10  # a byte copied from or to another rank's memory, by the system or through a staging buffer
    fence: float = 1e-6  # one round of a node's barrier; it has log2 n
    switch: float = 2e-5  # the delay until a rank gets its core, for each other rank that polls on this core
    native_alpha: float = 1.5e-6  # a message inside the MPI library's own all-reduce
    native: float = 1.0  # the factor by which its bytes take longer than by the formula
    net_alpha: float = 2.5e-5  # a message between nodes
    net_beta: float = 8e-9  # a byte between nodes, on the link of a node; both directions at once


@dataclass(frozen=True)
class Layout:
    """The ranks of a call, and the memory and dtype of its array.

    sizes: the number of ranks of each node. allocated: the array is from `allocate`. cma: the ranks of a node can read
    each other's memory. half: its dtype has 16 bits. by_c: when the ranks meet, "shared" sums a short array in one call
    of C. cores: of a node; 0: one for each rank. sharing: the number of ranks that share these cores; 0: all ranks
    of the largest node.
    """

    sizes: tuple[int, ...]
    allocated: bool = True
    cma: bool = True
    half: bool = False
    by_c: bool = False
    cores: int = 0
    sharing: int = 0

    @cached_property
    def ranks(self) -> int:
        return sum(self.sizes)

    @cached_property
    def nodes(self) -> int:
        return len(self.sizes)

    @cached_property
    def largest(self) -> int:
        """The number of ranks of the largest node."""
        return max(self.sizes)

    @cached_property
    def per_core(self) -> int:
        """The number of ranks on the fullest core."""
        return ceil((self.sharing or self.largest) / self.cores) if self.cores else 1

    def crossing(self, distance: int) -> int:
        """Return how many ranks of a node use its link at once if the partner of each rank has the number rank XOR
        `distance`, a power of two; 0 if all partners are on one node."""
        if self.nodes == 1 or not any(size % (2 * distance) for size in self.sizes):
            return 0
        return min(distance, self.largest)

    @property
    def name(self) -> str:
        return ("+".join(map(str, self.sizes)) if self.nodes > 1 else str(self.ranks)) + " ranks"


def rounds(ranks: int) -> int:
    """Return log2 of the ranks, rounded up: the steps of a tree or a barrier."""
    return ceil(log2(ranks))


def waiting(at: Layout, k: Machine) -> float:
    """Return the time until the scheduler runs the rank that others wait for."""
    return k.switch * (at.per_core - 1)


def message(nbytes: float, at: Layout, k: Machine) -> float:
    """Return the time of a message within a node, cut into segments, with its latency."""
    segments = max(1, ceil(nbytes / SEGMENT_BYTES))
    return segments * (k.alpha + handshake(nbytes, k)) + waiting(at, k) + nbytes * k.beta * at.per_core


def handshake(nbytes: float, k: Machine) -> float:
    """Return the latency that a long message has besides alpha."""
    return k.handshake if nbytes >= EAGER else 0.0


def link(nbytes: float, k: Machine, sharing: int = 1) -> float:
    """Return the time of a message to another node, with its latency, if `sharing` ranks of a node send at once."""
    return k.net_alpha + nbytes * sharing * k.net_beta


def fences(count: int, at: Layout, k: Machine) -> float:
    """Return the time of barriers of the ranks of a node."""
    return count * rounds(at.largest) * (k.fence + waiting(at, k))


def adding(nbytes: float, at: Layout, k: Machine) -> float:
    """Return the time in which each rank adds `nbytes`."""
    return nbytes * k.gamma * at.per_core


def fetching(nbytes: float, at: Layout, k: Machine) -> float:
    """Return the time to reach the node's arrays of `nbytes` that are not from `allocate`.

    By CMA each rank fetches its chunk from the n - 1 others, and brings the sum back. Through the staging buffer each
    rank copies its array there and back, with two fences for each piece.
    """
    if at.allocated:
        return 0.0
    if at.cma:
        return 2 * (at.largest - 1) / at.largest * nbytes * k.copy * at.per_core
    pieces = ceil(nbytes * at.largest / STAGING_BYTES)
    return 2 * nbytes * k.copy * at.per_core + fences(2 * pieces, at, k)


def ring(nbytes: float, ranks: int, at: Layout, k: Machine, crosses: bool, sharing: int = 1) -> float:
    """Return the time of a ring all-reduce: 2 (n-1) alpha + 2 (n-1)/n S beta + (n-1)/n S gamma.

    Between nodes the segments are pipelined. The time is that of the link, of the core, or of the latencies of single
    segments, whichever is the largest. sharing: the number of rings of a node that run at once.
    """
    part, steps = nbytes / ranks, 2 * (ranks - 1)
    core = steps * message(part, at, k) + adding((ranks - 1) * part, at, k)
    if not crosses:
        return core
    alone = steps * link(min(part, SEGMENT_BYTES), k, sharing)
    return max(core, alone, steps * part * sharing * k.net_beta)


def library(nbytes: float, at: Layout, k: Machine) -> float:
    """Return the time of the MPI library's own all-reduce: the faster one of two algorithms, in nodes and across them.

    Recursive doubling: log2 n (alpha + S beta + S gamma). Rabenseifner's halving and doubling: 2 log2 n alpha +
    2 (n-1)/n S beta + (n-1)/n S gamma. MPI libraries select among more algorithms; the constant `native` corrects the
    formula for this machine.
    """
    total = 0.0
    inside = k.native_alpha + handshake(nbytes, k)
    for ranks, alpha, beta in ((at.largest, inside, k.beta * at.per_core), (at.nodes, k.net_alpha, k.net_beta)):
        steps, latency = rounds(ranks), alpha + waiting(at, k)
        add, part = k.gamma * at.per_core, (ranks - 1) / ranks
        doubling = steps * latency + k.native * steps * nbytes * (beta + add)
        halving = 2 * steps * latency + k.native * part * nbytes * (2 * beta + add)
        total += min(doubling, halving)
    return total


def on_link(k: Machine, bandwidth: float, latency: float) -> Machine:
    """Return the constants with another network: `bandwidth` bytes per second in each direction, `latency` seconds."""
    return replace(k, net_beta=1 / bandwidth, net_alpha=latency)

"""The cost model: the time of each backend, computed from latency, bandwidth and reduction.

The alpha-beta-gamma model: a message of S bytes takes alpha + S beta, adding S bytes takes S gamma.
R. Hockney: The communication challenge for MPP, 1994. R. Thakur, R. Rabenseifner, W. Gropp: Optimization of
collective communication operations in MPICH, 2005. P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009. The model adds what these leave out: handshakes before long messages,
ranks that share a core, page faults of new memory, and links used in both directions.

n ranks, m nodes, S bytes; seconds, bytes, seconds per byte throughout. First come the constants, the nodes, and steps
of several algorithms; then a function for each backend. The formulas follow the code in allreduce/: segments, staging,
and results that their owner writes to all ranks.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, log2

SEGMENT = 1024 * 1024  # bytes in one message (allreduce/transport/point_to_point.py)
EAGER, NET_EAGER = 4096, 65536  # bytes; longer messages need a handshake first (Open MPI: in a node, by TCP)
MAPPED = 32 << 20  # bytes; a longer temporary is fresh memory in every call (the most that glibc's malloc keeps)
HALF = 0.5  # average wait for a rank that itself waits, as a fraction of a scheduling round of the ranks on a core
LEVELS = 128 * 1024  # bytes; from this on `shared` takes two levels (allreduce/backends/shared.py)
QUEUE = 256 * 1024  # bytes in flight on a link above which acknowledgements of the other direction are delayed


@dataclass(frozen=True)
class Machine:
    """The constants, in seconds and seconds per byte. The last five are given, the others can be fitted."""

    call: float = 5e-6  # fixed cost of a call in this library
    alpha: float = 5e-6  # a message between ranks of a node: Python and MPI, both sides
    handshake: float = 4e-6  # more for a message longer than EAGER
    beta: float = 1.5e-10  # a byte copied from or to another rank's memory, by a message or by the system
    gamma: float = 1e-10  # a byte added, and the sum written where it belongs
    fence: float = 2e-6  # one round of a node's barrier; it has log2 n
    switch: float = 2e-5  # a rank that others wait for gets its core later by this, for each rank that polls there
    lib_alpha: float = 1e-6  # a message inside the MPI library's own all-reduce
    lib_switch: float = 1e-5  # `switch` in that all-reduce: C yields more often than Python
    fault: float = 3e-10  # a byte of fresh memory: the kernel clears and maps its page
    net_alpha: float = 2e-5  # a message between nodes, besides `alpha`
    net_switch: float = 1e-4  # `switch` between nodes: packets and their interrupts need the core as well
    net_beta: float = 8e-9  # a byte between nodes, on the link of a node; both directions at once
    duplex: float = 0.1  # relative slowdown when two nodes send to each other: acknowledgements are delayed behind data
    bus: float = 5e-12  # a byte through the memory of a node, however many cores ask for it
    burst: float = 0  # bytes that a shaped link lets through at once after it was idle (cluster_sim.sh)
    cores: int = 16  # of a node
    numa: int = 1  # NUMA nodes of a node, with equal numbers of ranks
    numa_beta: float = 2e-11  # a byte between NUMA nodes; all ranks of a node share their links


FITTED = tuple(
    name for name in Machine.__dataclass_fields__ if name not in ("bus", "burst", "cores", "numa", "numa_beta")
)


def on_link(k: Machine, bandwidth: float, latency: float) -> Machine:
    """Return the constants with a switched network: `bandwidth` bytes per second in each direction, `latency` s."""
    return replace(k, net_beta=1 / bandwidth, net_alpha=latency, duplex=0.0, burst=0.0)


@dataclass(frozen=True)
class Cluster:
    """The nodes that the ranks are on.

    sizes: the number of ranks of each node. one_machine: all nodes share one machine's cores and memory (simulated
        nodes, cluster_sim.sh). linked: messages between nodes use a network (not on simulated nodes). crowd: the number
        of ranks that share cores and memory, if more than in `sizes`; else 0. active: the number of ranks that work at
        the same time; 0 for all.
    """

    sizes: tuple[int, ...]
    one_machine: bool = False
    linked: bool = True
    crowd: int = 0
    active: int = 0

    @cached_property
    def n(self) -> int:
        return sum(self.sizes)

    @cached_property
    def m(self) -> int:
        return len(self.sizes)

    @property
    def name(self) -> str:
        return f"{self.n} ranks" if self.m == 1 else "+".join(map(str, self.sizes)) + " ranks"

    @cached_property
    def sharing_ranks(self) -> int:
        """The number of ranks that share cores and memory."""
        return self.crowd or (self.n if self.one_machine else max(self.sizes))

    @cached_property
    def working(self) -> int:
        """The number of `sharing_ranks` that work at the same time."""
        return min(self.active, self.sharing_ranks) or self.sharing_ranks

    def with_working(self, ranks: int) -> "Cluster":
        """Return the same ranks in a phase in which only `ranks` of them work."""
        return _changed(self, ranks, self.sizes, self.crowd)

    def part(self, sizes: tuple[int, ...]) -> "Cluster":
        """Return some of the ranks, which share the machine with all the others."""
        return _changed(self, self.active, sizes, self.sharing_ranks)


@cache
def _changed(at: Cluster, active: int, sizes: tuple[int, ...], crowd: int) -> Cluster:
    return replace(at, active=active, sizes=sizes, crowd=crowd)


def message(k: Machine, s: float) -> float:
    """Return the latency cost of the messages that carry s bytes within a node."""
    return max(1, ceil(s / SEGMENT)) * (k.alpha + (k.handshake if s > EAGER else 0.0))


@cache
def crossing(at: Cluster, ranks: int, distance: int) -> int:
    """Return the most messages on one node's link, in one direction, if each of the first `ranks` ranks has a partner
    `distance` away."""
    if at.m == 1 or not at.linked:
        return 0
    node = [index for index, size in enumerate(at.sizes) for _ in range(size)]
    pairs = [(node[rank], node[rank ^ distance if distance < ranks else rank + distance]) for rank in range(ranks)]
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    return max((most for side in zip(*apart, strict=True) for most in Counter(side).values()), default=0)


def latency(k: Machine, at: Cluster, s: float, own: float, turn: float) -> float:
    """Return the time until a message from another node begins to arrive. Long messages need a handshake first.

    own: software time of the sender. turn: the fraction of a scheduling round before the receiver gets the core.
    """
    return own + (3 if s > NET_EAGER else 1) * (k.net_alpha + turn * k.net_switch * excess(k, at))


@dataclass(frozen=True)
class Wire:
    """The cost of messages on links: latencies, and bytes that the busiest link carries in each direction."""

    latency: float = 0.0
    out: float = 0.0
    back: float = 0.0

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(self.latency + other.latency, self.out + other.out, self.back + other.back)

    def __rmul__(self, times: float) -> "Wire":
        return Wire(times * self.latency, times * self.out, times * self.back)

    def seconds(self, k: Machine) -> float:
        """Return the time of messages one after another. The burst after a pause overlaps with latencies."""
        after = max(0.0, self.out - k.burst) + max(0.0, self.back - k.burst)
        return max(self.latency + after * k.net_beta, max(self.out, self.back) * k.net_beta)


def hop(k: Machine, at: Cluster, s: float, sharing: int = 1, own: float | None = None) -> Wire:
    """Return the cost of s bytes to another node; `sharing` ranks use the link at once. own: default `alpha`."""
    return Wire(latency(k, at, s, k.alpha if own is None else own, HALF), s * sharing)


def swap(k: Machine, at: Cluster, s: float, sharing: int = 1, own: float | None = None) -> Wire:
    """As `hop`, with the same number of bytes in the other direction at the same time."""
    behind = max(0.0, s * sharing - QUEUE) * k.duplex / sharing
    return Wire(latency(k, at, s, k.alpha if own is None else own, 1.0), s * sharing + behind)


def ring_time(k: Machine, at: Cluster, n: int, s: float, sharing: int = 1) -> float:
    """Return the time of a ring all-reduce of s bytes on n ranks. Across nodes, `sharing` rings per node run at once.

    Within a node the core does all the work, one step after another. Across nodes segments are pipelined: the time is
    that of the link, of the core, or of the latencies of a single segment, whichever is the largest.
    """
    part, steps = s / n, 2 * (n - 1)
    core = steps * work(k, at, message(k, part) + part * (k.beta + k.gamma / 2), 2.5 * part)
    if at.m == 1 or not at.linked:
        return core + steps * HALF * waiting(k, at)
    kind, segment = swap if n == 2 else hop, min(part, SEGMENT)
    link, alone = kind(k, at, part, sharing), kind(k, at, segment, sharing)
    adding = (n - 1) * segment * k.gamma * ranks_per_core(k, at)
    return max((steps * alone).seconds(k) + adding, steps * link.out * k.net_beta, core)


def in_two_phases(k: Machine, node: Cluster, s: float, allocated: bool) -> float:
    """Return the time of `shared`'s reduce_scatter and all_gather: a pass over the memory each, between two fences."""
    n = node.n
    copied = (1 if allocated else 2) * (n - 1) / n * s
    return 4 * fence(k, node) + work(k, node, (n - 1) / n * s * k.gamma + copied * k.beta, 3 * s)


def work(k: Machine, at: Cluster, seconds: float, touched: float) -> float:
    """Return the time of `seconds` of work on each rank's core: times the ranks on a core, or limited by the memory."""
    return max(seconds * ranks_per_core(k, at), touched * at.sharing_ranks * k.bus)


def ranks_per_core(k: Machine, at: Cluster) -> int:
    """Return the working ranks on the fullest core. Waiting ranks poll, so the scheduler sees no idle core."""
    return ceil(at.working / k.cores)


def excess(k: Machine, at: Cluster) -> int:
    """Return the number of other ranks on the core of the rank that others wait for."""
    return ceil(at.sharing_ranks / k.cores) - 1


def waiting(k: Machine, at: Cluster) -> float:
    """Return the time until the scheduler runs the rank that others wait for."""
    return k.switch * excess(k, at)


def fence(k: Machine, at: Cluster) -> float:
    """Return the time of a barrier of the ranks of a node."""
    return ceil(log2(at.n)) * (k.fence + waiting(k, at)) if at.n > 1 else 0.0


Formula = Callable[[Machine, Cluster, float, bool], float]


def ring(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """2 (n-1) alpha + 2 (n-1)/n S beta + (n-1)/n S gamma; the slowest link sets the pace."""
    return k.call + ring_time(k, at, at.n, s)


def halving_doubling(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma, p the power of two up to n; 2 steps of S if p < n.

    The partner of the first and largest step is the nearest rank, on the same node where it has one; the later and
    smaller steps cross nodes, and then all ranks of a node use its link at once.
    """
    power = 1 << (at.n.bit_length() - 1)
    pairs, main = at.n - power, at.with_working(power)
    total, wire = k.call, Wire()
    for step in range(1, power.bit_length()):
        part, sharing = s / 2**step, crossing(at, power, 1 << (step - 1))
        if sharing:
            wire += 2 * swap(k, at, part, sharing)
            total += part * k.gamma
        else:
            total += work(k, main, 2 * message(k, part) + part * (2 * k.beta + k.gamma), 5 * part)
            total += 2 * waiting(k, at)
    if pairs:
        sharing = crossing(at, pairs, power)
        wire += 2 * hop(k, at, s, sharing) if sharing else Wire()
        total += 0.0 if sharing else 2 * (message(k, s) + s * k.beta + HALF * waiting(k, at))
        total += work(k, at.with_working(pairs), s * k.gamma, 5 * s)
    return total + wire.seconds(k)


def reduce_to_one(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """(n-1) (alpha + S beta + S gamma) at the root, then a tree of log2 n copies, each S, in a pipeline.

    While the root adds, the others wait and leave it the cores. The link of the root's node carries the messages of all
    ranks on other nodes, and log2 m messages of the tree.
    """
    n, linked = at.n, at.linked and at.m > 1
    here, remote = (at.sizes[0], ceil(log2(at.m))) if linked else (n, 0)
    levels = ceil(log2(n)) - remote
    total = k.call + (here - 1) * (message(k, s) + s * (k.beta + k.gamma))
    total += HALF * waiting(k, at) * (here > 1) + levels * (message(k, s) + HALF * waiting(k, at))
    if linked:
        total += s * k.gamma + (hop(k, at, s, n - here) + remote * Wire(hop(k, at, s).latency, 0.0, s)).seconds(k)
    if levels:
        total += work(k, at.with_working(n - 1), s * k.beta, 2 * s) + (levels - 1) * min(s, SEGMENT) * k.beta
    return total


def shared(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """2 fences; each rank adds S/n from n ranks and writes it to n. With foreign arrays both need a copy.

    On g NUMA nodes of m ranks 2 (g-1) m S bytes cross. In two levels 2 (g-1) S bytes cross, for 2 more fences: each
    rank adds S/m from m ranks, and S/n from g of them, and copies S/m to m.
    """
    if not allocated or not 1 < k.numa < at.n or s < LEVELS:
        return shared_in_one_level(k, at, s, allocated)
    m = at.n / k.numa
    added = (m - 1) / m + (k.numa - 1) / at.n
    crossing = 2 * (k.numa - 1) * s * k.numa_beta
    return k.call + 4 * fence(k, at) + max(work(k, at, added * s * k.gamma, 2 * s), crossing)


def shared_in_one_level(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """As `shared` with the option numa=0."""
    n, g = at.n, min(k.numa, at.n)
    copied = 0.0 if allocated else 2 * (n - 1) / n * s
    crossing = 2 * (g - 1) / g * n * s * k.numa_beta
    return k.call + 2 * fence(k, at) + max(work(k, at, (n - 1) / n * s * k.gamma + copied * k.beta, 2 * s), crossing)


def hierarchical_copy(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """`shared`'s two phases in each node, and between them rings across nodes, of S bytes in all for each node.

    Equal nodes: every local rank has a ring of S/size. Unequal nodes: the leader gathers, reduces and distributes S.
    """
    big, even = max(at.sizes), len(set(at.sizes)) == 1
    total = k.call + (in_two_phases(k, at.part((big,)), s, allocated) if big > 1 else 0.0)
    if at.m == 1:
        return total
    if even:
        return total + ring_time(k, at, at.m, s / big, sharing=big)
    collect = (big - 1) * message(k, s / big) + (big - 1) / big * s * k.beta + waiting(k, at)
    return total + 2 * collect + ring_time(k, at, at.m, s)


def native(k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """The faster one of recursive doubling and Rabenseifner's algorithm; a tree across nodes of several ranks.

    Doubling: log2 n (alpha + S beta + S gamma). Rabenseifner: 2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma. Both
    take 2 more steps if n is no power of two. The tree is pipelined: log2 m S beta. MPI libraries select other
    algorithms too. A large temporary buffer is fresh memory in every call.
    """
    linked = at.linked and at.m > 1
    alone = linked and max(at.sizes) == 1
    n = at.m if alone else max(at.sizes) if linked else at.n
    power = 1 << (n.bit_length() - 1)
    steps, extra, pairs = power.bit_length() - 1, int(n > power), n - power
    fresh = s * k.fault * ranks_per_core(k, at) if s > MAPPED and n > 1 else 0.0
    if alone:
        whole = steps * swap(k, at, s, own=k.lib_alpha)
        halves = sum((2 * swap(k, at, s / 2**step, own=k.lib_alpha) for step in range(1, steps + 1)), Wire())
        wires = (wire + 2 * extra * hop(k, at, s, own=k.lib_alpha) for wire in (whole, halves))
        return k.lib_alpha + min(wire.seconds(k) for wire in wires) + s * k.gamma + fresh
    one = k.lib_alpha + (k.handshake if s > EAGER else 0.0)
    main, few = at.with_working(power), at.with_working(pairs)
    doubling = work(k, main, steps * (one + s * (k.beta + k.gamma)), 3 * s)
    halving = work(k, main, 2 * steps * one + (power - 1) / power * s * (2 * k.beta + k.gamma), 5 * s)
    total = k.lib_alpha + min(doubling, halving) + fresh + (steps + 2 * HALF * extra) * k.lib_switch * excess(k, at)
    total += extra * work(k, few, 2 * one + s * (2 * k.beta + k.gamma), 5 * s)
    return total + (linked * ceil(log2(at.m)) * hop(k, at, s, own=k.lib_alpha)).seconds(k)


FORMULAS: dict[str, Formula] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "reduce_to_one": reduce_to_one,
    "hierarchical_copy": hierarchical_copy,
    "shared": shared,
    "native": native,
}


def predict(backend: str, k: Machine, at: Cluster, s: float, allocated: bool = True) -> float:
    """Return the seconds that a backend needs to all-reduce s bytes. Raises ValueError if it can't work on `at`."""
    if backend not in FORMULAS:
        raise ValueError(f"there is no formula for {backend!r}; there are {', '.join(FORMULAS)}")
    if backend == "shared" and at.m > 1:
        raise ValueError("shared works within one node only")
    if at.n == 1 or s <= 0:
        return 0.0
    return FORMULAS[backend](k, at, s, allocated)

"""What each backend costs on paper: latency, bandwidth and reduction, in one small function each.

The alpha-beta-gamma model: a message of S bytes takes alpha + S beta, adding S bytes takes S gamma.
R. Hockney: The communication challenge for MPP, 1994. R. Thakur, R. Rabenseifner, W. Gropp: Optimization of
collective communication operations in MPICH, 2005. P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009. To that come what they leave out and a node makes you pay:
copies that miss the cache, waiting for all ranks of a node, and cores that several ranks share.

n ranks, m nodes, S bytes, seconds throughout. The formulas follow the code in allreduce/: segments, staging,
and a result that its owner writes to all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

SEGMENT = 512 * 1024  # bytes in one message (allreduce/transfer.py)
STAGE, LEAST_PART = 512 * 1024, 16 * 1024  # bytes staged in a round (allreduce/shared.py)
EAGER = 4096  # bytes; a longer message needs a handshake first (Open MPI's default between ranks of a node)


@dataclass(frozen=True)
class Machine:
    """The constants. Seconds, and seconds per byte; the last two lines are given, the others can be fitted."""

    call: float = 5e-6  # what a call of ours costs before anything moves
    alpha: float = 5e-6  # a message of ours between ranks of a node: Python and MPI, both sides
    handshake: float = 4e-6  # more for a message longer than EAGER
    beta: float = 1.5e-10  # a byte sent and received within a node
    gamma: float = 5e-11  # a byte added, in the cache
    copy: float = 4e-11  # a byte copied, in the cache
    miss: float = 1e-10  # more for a byte that is read or written and not in the cache
    cache: float = 32e6  # bytes that the last-level cache of a node holds
    fence: float = 2e-6  # one round of a node's barrier; it has log2 n
    switch: float = 5e-6  # until the scheduler brings on a rank that others wait for, by ranks too many on a core
    lib_alpha: float = 1e-6  # a message inside of the MPI library's own all-reduce
    lib_switch: float = 2e-6  # `switch` there: C polls and yields more often than Python
    lib_beta: float = 2e-10  # a byte there
    net_alpha: float = 3e-5  # a message between nodes
    net_beta: float = 8e-9  # a byte between nodes, on the link of a node; both directions at once
    bus: float = 5e-12  # a byte through the memory of a node, however many cores ask for it
    cores: int = 16  # of a node


FITTED = tuple(name for name in Machine.__dataclass_fields__ if name not in ("bus", "cores"))


@dataclass(frozen=True)
class Place:
    """Where the ranks are.

    sizes: ranks of each node. one_machine: the nodes are pretended and share one machine's cores and memory
    (simulated nodes, cluster_sim.sh). linked: messages between nodes travel over a network (not so on
    simulated nodes).
    """

    sizes: tuple[int, ...]
    one_machine: bool = False
    linked: bool = True

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @property
    def m(self) -> int:
        return len(self.sizes)

    @property
    def together(self) -> int:
        """Ranks that share cores and memory."""
        return self.n if self.one_machine else max(self.sizes)

    def part(self, sizes: tuple[int, ...]) -> "Crowd":
        """Some of the ranks, on the same crowded machine."""
        return Crowd(sizes, self.one_machine, self.linked, self.together)


@dataclass(frozen=True)
class Crowd(Place):
    """A part of a place: it communicates among itself and shares the cores with `others`."""

    others: int = 1

    @property
    def together(self) -> int:
        return self.others


Formula = Callable[[Machine, Place, float, bool], float]


def ring(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 (n-1) alpha + 2 (n-1)/n S beta + (n-1)/n S gamma; the slowest link sets the pace."""
    n, across = at.n, at.m > 1 and at.linked
    adding = (n - 1) * exchange(k, at, s / n, across, add=True)
    copying = (n - 1) * exchange(k, at, s / n, across)
    return k.call + adding + copying + memory(k, at, 5 * (n - 1) / n * s, s)


def halving_doubling(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma, p the power of two up to n; 2 steps of S if p < n.

    The partner of the first and largest step is the farthest, so it lies on another node, and then all ranks
    of a node use its link at once.
    """
    power, linked, near = 1 << (at.n.bit_length() - 1), at.m > 1 and at.linked, min(at.sizes)
    total = k.call
    for step in range(1, power.bit_length()):
        distance = power >> step
        across = linked and distance >= near
        sharing = min(distance, max(at.sizes)) if across else 1
        for add in (True, False):
            total += exchange(k, at, s / 2**step, across, add, sharing)
    if at.n > power:
        total += exchange(k, at, s, linked, add=True) + exchange(k, at, s, linked)
    return total + memory(k, at, (5 * (power - 1) / power + 5 * (at.n > power)) * s, s)


def reduce_to_one(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """(n-1) (alpha + S beta + S gamma) at the root, then a tree of log2 n copies, each S, in a pipeline."""
    n, here = at.n, at.sizes[0] if at.linked else at.n
    root = Crowd(at.sizes, at.one_machine, at.linked, others=1)  # it adds while the others wait and make room
    near, far = exchange(k, root, s, False, add=True), exchange(k, root, s, True, add=True)
    remote = ceil(log2(at.m)) if at.linked else 0
    total = k.call + (here - 1) * near + (n - here) * far + waiting(k, at)
    total += remote * exchange(k, at, s, True) + max(ceil(log2(n)) - remote, 0) * exchange(k, at, s, False)
    return total + 2 * s * k.copy + memory(k, at, (n + 2) * s, s, alone=True)


def shared(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 fences; each rank adds S/n from n ranks and writes it to n. Staged: 2 S copied and 2 fences a round."""
    n = at.n
    add = (n - 1) / n * s * k.gamma
    if allocated:
        return k.call + 2 * fence(k, at) + crowd(k, at) * (add + (n - 1) / n * s * k.copy) + memory(k, at, 2 * s, s)
    rounds = ceil(s / n / max(STAGE / n, LEAST_PART))
    return k.call + (1 + 2 * rounds) * fence(k, at) + crowd(k, at) * (add + 2 * s * k.copy) + memory(k, at, 2 * s, s)


def hierarchical_copy(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """`shared`'s two phases in each node, and between them a ring across nodes, of S in all on each link.

    Equal nodes: every local rank carries S/size. Uneven ones: the leader collects, carries, hands back.
    """
    big, even = max(at.sizes), len(set(at.sizes)) == 1
    node = at.part((big,))
    total = shared(k, node, s, allocated) + 2 * fence(k, node) if big > 1 else k.call
    if at.m == 1:
        return total
    sharing = big if even else 1
    each = s / big if even else s
    for add in (True, False):
        total += (at.m - 1) * exchange(k, at, each / at.m, at.linked, add, sharing)
    if not even:
        slices = (big - 1) / big * s
        total += 2 * (exchange(k, node, slices, False) + memory(k, at, 2 * slices, s))
    return total + memory(k, at, 5 * each, s)


def native(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """The faster of recursive doubling, log2 n (alpha + S beta + S gamma), and Rabenseifner's or the ring's

    2 log2 n alpha + 2 (n-1)/n S beta + (n-1)/n S gamma; between nodes a tree in a pipeline, log2 m S beta.
    Which algorithms an MPI library really takes is its own affair.
    """
    big = max(at.sizes) if at.linked else at.n
    steps, busy = ceil(log2(big)), crowd(k, at)
    one = k.lib_alpha + (k.handshake if s > EAGER else 0)
    doubling = steps * (one + s * (k.lib_beta + k.gamma)) * busy
    scattering = (2 * steps * one + (big - 1) / big * s * (2 * k.lib_beta + k.gamma)) * busy
    total = k.lib_alpha + min(doubling, scattering) + steps * k.lib_switch * excess(k, at) + memory(k, at, 3 * s, s)
    if at.linked and at.m > 1:
        total += ceil(log2(at.m)) * exchange(k, at, s, True, add=True)
    return total


FORMULAS: dict[str, Formula] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "reduce_to_one": reduce_to_one,
    "hierarchical_copy": hierarchical_copy,
    "shared": shared,
    "native": native,
}


# ---- The parts that formulas are made of ----


def exchange(k: Machine, at: Place, s: float, across: bool, add: bool = False, sharing: int = 1) -> float:
    """One step: a rank sends s bytes in segments while as many arrive, which it adds or not.

    Within a node the core does all of it, one after the other. Across nodes the link, which `sharing` ranks
    of a node use at once, carries segments while the core adds those before; only the last one is not hidden.
    """
    if s <= 0:
        return 0.0
    messages = max(1, ceil(s / SEGMENT))
    work = s * k.gamma * crowd(k, at) if add else 0.0
    if across:
        return messages * k.net_alpha + max(s * k.net_beta * sharing, work) + work / messages + waiting(k, at)
    handshake = k.handshake if s > EAGER else 0.0
    return crowd(k, at) * (messages * (k.alpha + handshake) + s * k.beta) + work + waiting(k, at)


def crowd(k: Machine, at: Place) -> float:
    """How much slower cores are that several ranks share."""
    return max(1.0, at.together / k.cores)


def excess(k: Machine, at: Place) -> float:
    """Ranks too many on a core."""
    return max(0.0, at.together / k.cores - 1)


def waiting(k: Machine, at: Place) -> float:
    """What the scheduler takes to bring on a rank that others wait for."""
    return k.switch * excess(k, at)


def fence(k: Machine, at: Place) -> float:
    """A barrier of the ranks of a node."""
    return k.fence * ceil(log2(at.n)) * crowd(k, at) + waiting(k, at) if at.n > 1 else 0.0


def memory(k: Machine, at: Place, touched: float, s: float, alone: bool = False) -> float:
    """What a rank pays for the bytes it touches and the cache does not hold, of S bytes on each rank.

    alone: the other ranks wait meanwhile.
    """
    together = at.together
    missing = max(0.0, 1 - k.cache / (together * s)) if s > 0 else 0.0
    each = max(k.miss, k.bus) if alone else max(k.miss * crowd(k, at), k.bus * together)
    return touched * missing * each


def predict(backend: str, k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """Seconds that a backend takes to all-reduce s bytes; ValueError where it can't work."""
    if backend not in FORMULAS:
        raise ValueError(f"there is no formula for {backend!r}; there are {', '.join(FORMULAS)}")
    if backend == "shared" and at.m > 1:
        raise ValueError("shared works within one node only")
    if at.n == 1 or s <= 0:
        return 0.0
    return FORMULAS[backend](k, at, s, allocated)

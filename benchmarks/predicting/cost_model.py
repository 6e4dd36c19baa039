"""What each backend costs on paper: latency, bandwidth and reduction, in one small function each.

The alpha-beta-gamma model: a message of S bytes takes alpha + S beta, adding S bytes takes S gamma.
R. Hockney: The communication challenge for MPP, 1994. R. Thakur, R. Rabenseifner, W. Gropp: Optimization of
collective communication operations in MPICH, 2005. P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009. To that come what they leave out and a real machine makes you
pay: handshakes before long messages, ranks that share a core, fresh memory, links that both directions load.

n ranks, m nodes, S bytes, seconds throughout. The formulas follow the code in allreduce/: segments, staging,
and a result that its owner writes to all. The constants and the steps are in cost_parts.
"""

from collections.abc import Callable
from math import ceil, log2

from benchmarks.predicting.cost_parts import (
    EAGER,
    HALF,
    MAPPED,
    SEGMENT,
    Machine,
    Place,
    Wire,
    crossing,
    crowd,
    excess,
    fence,
    hop,
    in_two_phases,
    message,
    swap,
    waiting,
    walk,
    work,
)

Formula = Callable[[Machine, Place, float, bool], float]


def ring(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 (n-1) alpha + 2 (n-1)/n S beta + (n-1)/n S gamma; the slowest link sets the pace."""
    return k.call + walk(k, at, at.n, s)


def halving_doubling(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma, p the power of two up to n; 2 steps of S if p < n.

    The partner of the first and largest step is the farthest, so it lies on another node, and then all ranks
    of a node use its link at once.
    """
    power = 1 << (at.n.bit_length() - 1)
    pairs, main = at.n - power, at.with_working(power)
    total, wire = k.call, Wire()
    for step in range(1, power.bit_length()):
        part, sharing = s / 2**step, crossing(at, power, power >> step)
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


def reduce_to_one(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """(n-1) (alpha + S beta + S gamma) at the root, then a tree of log2 n copies, each S, in a pipeline.

    While the root adds, the others wait and make room. Links: all others send over that of the root's node,
    and the tree leaves it log2 m times.
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


def shared(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """2 fences; each rank adds S/n from n ranks and writes it to n. Others' ordinary memory: both by a copy."""
    n = at.n
    copied = 0.0 if allocated else 2 * (n - 1) / n * s
    return k.call + 2 * fence(k, at) + work(k, at, (n - 1) / n * s * k.gamma + copied * k.beta, 2 * s)


def hierarchical_copy(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """`shared`'s two phases in each node, and between them a ring across nodes, of S in all on each link.

    Equal nodes: every local rank carries S/size. Uneven ones: the leader collects, carries, hands back.
    """
    big, even = max(at.sizes), len(set(at.sizes)) == 1
    total = k.call + (in_two_phases(k, at.part((big,)), s, allocated) if big > 1 else 0.0)
    if at.m == 1:
        return total
    if even:
        return total + walk(k, at, at.m, s / big, sharing=big)
    collect = (big - 1) * message(k, s / big) + (big - 1) / big * s * k.beta + waiting(k, at)
    return total + 2 * collect + walk(k, at, at.m, s)


def native(k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """The faster of recursive doubling, log2 n (alpha + S beta + S gamma), and Rabenseifner's,

    2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma, both with 2 steps more where n is no power of two;
    across nodes of several ranks a tree in a pipeline, log2 m S beta. Which algorithms an MPI library really
    takes is its own affair. Its temporary memory is fresh where it is large.
    """
    linked = at.linked and at.m > 1
    alone = linked and max(at.sizes) == 1
    n = at.m if alone else max(at.sizes) if linked else at.n
    power = 1 << (n.bit_length() - 1)
    steps, extra, pairs = power.bit_length() - 1, int(n > power), n - power
    fresh = s * k.fault * crowd(k, at) if s > MAPPED and n > 1 else 0.0
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


def predict(backend: str, k: Machine, at: Place, s: float, allocated: bool = True) -> float:
    """Seconds that a backend takes to all-reduce s bytes; ValueError where it can't work."""
    if backend not in FORMULAS:
        raise ValueError(f"there is no formula for {backend!r}; there are {', '.join(FORMULAS)}")
    if backend == "shared" and at.m > 1:
        raise ValueError("shared works within one node only")
    if at.n == 1 or s <= 0:
        return 0.0
    return FORMULAS[backend](k, at, s, allocated)

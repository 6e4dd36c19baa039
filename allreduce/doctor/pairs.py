"""Pairs of ranks: which are measured, in which order, and which of them are much slower than others of their kind."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_high, median_low
from typing import NamedTuple

from allreduce.doctor.findings import OK, PROBLEM, WARNING, Finding, Needs, Rank, plural, some
from allreduce.doctor.memory import ELEMENT, count

AREA = "pairs of ranks"
MOST_PAIRS = 4000
LEAST_ALIKE = 3  # of fewer pairs of a kind none can be called slow
SLOWER = 3.0  # times the median of its kind, in bandwidth
LATER = 5.0  # times the median of its kind, in latency, and besides
LATER_SECONDS = 50e-6
LONG_SECONDS = 50e-6  # a latency within a node that says that something is wrong
SHARE_OF_LINK = 0.25  # of what an interface promises
KINDS = ("same node", "across nodes")
CAUSES = {
    KINDS[0]: "which cores they are bound to, and at what else runs there",
    KINDS[1]: "the hosts' adapters, cables and switches, and at what else uses them",
}

Pair = tuple[int, int]


class Measured(NamedTuple):
    """Of one pair of ranks."""

    first: int
    second: int
    latency: float  # seconds of a message of 8 bytes
    bandwidth: float  # bytes a second


def plan(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of pairs, such that a node has one pair in each: no pair is in another's way.

    nodes: the node of each rank. Every rank, and every two nodes, come early; all pairs come in the end, where they
    are not more than MOST_PAIRS.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    turns = [*(_inside(ranks) for ranks in members.values()), _between(list(members.values()))]
    free: Counter[int] = Counter()  # the first round in which a node has no pair yet
    rounds: list[list[Pair]] = []
    for pair in itertools.islice(_in_turn(turns), MOST_PAIRS):
        ends = {nodes[rank] for rank in pair}
        number = max(free[node] for node in ends)
        free.update({node: number + 1 - free[node] for node in ends})
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append((min(pair), max(pair)))
    return rounds


def _inside(ranks: Sequence[int]) -> Iterator[Pair]:
    """All pairs of a node: neighbours first."""
    size = len(ranks)
    for distance in range(1, size // 2 + 1):
        for index in range(size if 2 * distance < size else distance):
            yield ranks[index], ranks[(index + distance) % size]


def _between(members: Sequence[Sequence[int]]) -> Iterator[Pair]:
    """All pairs across nodes: those of the same place in their nodes first."""
    most = max(map(len, members))
    for shift in range(most):
        for place in range(most):
            for one, other in itertools.combinations(members, 2):
                if place < len(one) and (place + shift) % most < len(other):
                    yield one[place], other[(place + shift) % most]


def _in_turn(sources: Sequence[Iterator[Pair]]) -> Iterator[Pair]:
    """One of each in turn, until all are empty."""
    for several in itertools.zip_longest(*sources):
        yield from (pair for pair in several if pair is not None)


def kind(pair: Measured, nodes: Sequence[int]) -> str:
    return KINDS[nodes[pair.first] != nodes[pair.second]]


def slow(measured: Sequence[Measured], nodes: Sequence[int]) -> list[Measured]:
    """The pairs that are much slower than the median of their kind."""
    found = []
    for alike in _kinds(measured, nodes).values():
        if len(alike) < LEAST_ALIKE:
            continue
        latency, bandwidth = _medians(alike)
        late = max(LATER * latency, latency + LATER_SECONDS)
        found += [pair for pair in alike if pair.latency > late or pair.bandwidth < bandwidth / SLOWER]
    return found


def better(measured: Sequence[Measured], again: Sequence[Measured]) -> list[Measured]:
    """The best of two measurements of each pair: what is slow by chance is so once."""
    second = {(pair.first, pair.second): pair for pair in again}
    merged = []
    for pair in measured:
        other = second.get((pair.first, pair.second), pair)
        merged.append(
            Measured(pair.first, pair.second, min(pair.latency, other.latency), max(pair.bandwidth, other.bandwidth))
        )
    return merged


def judge(ranks: Sequence[Rank], needs: Needs, measured: Sequence[Measured], link: float | None) -> list[Finding]:
    """link: bytes a second of the fastest interface that the hosts have in common, where it is known."""
    nodes = [rank.node for rank in ranks]
    if not measured:
        return []
    findings = []
    for name, alike in _kinds(measured, nodes).items():
        findings.append(_of_kind(name, alike, ranks, needs, link))
    slow_ones = slow(measured, nodes)
    for name in KINDS:
        findings += _slow_ones(name, [pair for pair in slow_ones if kind(pair, nodes) == name], ranks)
    return findings


def _kinds(measured: Sequence[Measured], nodes: Sequence[int]) -> dict[str, list[Measured]]:
    found = {name: [pair for pair in measured if kind(pair, nodes) == name] for name in KINDS}
    return {name: alike for name, alike in found.items() if alike}


def _medians(alike: Sequence[Measured]) -> tuple[float, float]:
    """Latency and bandwidth; where half of the pairs are slow, those of the other half."""
    return median_low(pair.latency for pair in alike), median_high(pair.bandwidth for pair in alike)


def _of_kind(name: str, alike: Sequence[Measured], ranks: Sequence[Rank], needs: Needs, link: float | None) -> Finding:
    latency, bandwidth = _medians(alike)
    text = f"{_figures(latency, bandwidth)} (median of {plural(len(alike), 'pair')})"
    if name == KINDS[1]:
        hosts = len({rank.node for rank in ranks})
        wire = 2 * ELEMENT * needs.parameters * (hosts - 1) / hosts / bandwidth
        text += f": gradients of {count(needs.parameters)} parameters take {wire:.2g} s a step or more"
        if link is not None and bandwidth < SHARE_OF_LINK * link:
            advice = (
                f"an interface promises {speed(link)}: have MPI use it (Open MPI: --mca btl_tcp_if_include NETWORK), "
                "and look who else uses it"
            )
            return Finding(AREA, name, WARNING, text, advice)
    elif latency > LONG_SECONDS:
        advice = "ranks wait for a core, or MPI does not use shared memory here (look under cores, and at --mca btl)"
        return Finding(AREA, name, WARNING, text, advice)
    return Finding(AREA, name, OK, text)


def _slow_ones(name: str, pairs: Sequence[Measured], ranks: Sequence[Rank]) -> list[Finding]:
    """Of one kind."""
    if not pairs:
        return []
    texts = [
        f"ranks {pair.first} and {pair.second}{_hosts(pair, ranks)}: {_figures(pair.latency, pair.bandwidth)}"
        for pair in sorted(pairs, key=lambda pair: pair.bandwidth)
    ]
    shared = _in_common(pairs, ranks)
    where = f"all of them have {shared} in common: look" if shared else "look"
    advice = f"{where} at {CAUSES[name]}; a ring is as fast as its slowest pair"
    return [Finding(AREA, "slow pairs", WARNING, f"{name}: {some(texts)}", advice)]


def _hosts(pair: Measured, ranks: Sequence[Rank]) -> str:
    hosts = dict.fromkeys((ranks[pair.first].host, ranks[pair.second].host))
    return f" ({' - '.join(hosts)})"


def _in_common(pairs: Sequence[Measured], ranks: Sequence[Rank]) -> str:
    """The rank, or else the one host, that all slow pairs have in common; nothing for a single pair."""
    if len(pairs) < 2:
        return ""
    if common := set.intersection(*({pair.first, pair.second} for pair in pairs)):
        return f"rank {min(common)} ({ranks[min(common)].host})"
    everywhere = len({rank.node for rank in ranks}) == 1
    hosts = set.intersection(*({ranks[pair.first].host, ranks[pair.second].host} for pair in pairs))
    return f"host {min(hosts)}" if len(hosts) == 1 and not everywhere else ""


def unreachable(pairs: Sequence[Pair], ranks: Sequence[Rank]) -> list[Finding]:
    """Of pairs that did not answer."""
    if not pairs:
        return []
    texts = [f"ranks {one} and {other} ({ranks[one].host} - {ranks[other].host})" for one, other in pairs]
    advice = "a firewall or an interface that leads nowhere: mpirun --mca btl_tcp_if_include NETWORK (Open MPI)"
    return [Finding(AREA, "no answer", PROBLEM, some(texts), advice)]


def _figures(latency: float, bandwidth: float) -> str:
    return f"{1e6 * latency:.3g} us, {speed(bandwidth)}"


def speed(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"

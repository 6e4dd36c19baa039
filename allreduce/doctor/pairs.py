"""Measures latency and bandwidth of pairs of ranks, and finds pairs that are much slower than the others."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from statistics import median_high, median_low
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.doctor.findings import Finding, Needs, Rank, count, ok, plural, problem, some, warning
from allreduce.doctor.host import ELEMENT
from allreduce.transport.control import all_values, combine
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import wait_until

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
TURNS = 20  # of the small message
USUAL = 0.25  # the quantile of its times that is reported, because some round trips wait for a core
ANSWER_SECONDS = 15.0  # a rank that takes longer to answer counts as unreachable
LARGE_SECONDS, LARGE_TURNS = 0.03, 4  # for the large message: seconds, and round trips at most
SWEEPS = 2  # measurements of each pair, of which the better values count: a chance delay rarely repeats
FEW = 8  # ranks of a node, and nodes, of which all pairs are measured
LEAST_ALIKE = 3  # with fewer pairs of a kind, none counts as slow
SLOWER = 3.0  # a slow pair's bandwidth is below the median of its kind by this factor
LATER = 5.0  # a slow pair's latency exceeds the median of its kind by this factor, and by
LATER_SECONDS = 50e-6
LONG_SECONDS = 50e-6  # a latency within a node above which something is wrong
SHARE_OF_LINK = 0.25  # of an interface's nominal speed
KINDS = ("same node", "across nodes")
CAUSES = {
    KINDS[0]: "which cores they are bound to, and at what else runs there",
    KINDS[1]: "the hosts' adapters, cables and switches, and at what else uses them",
}

Pair = tuple[int, int]


class PairTimes(NamedTuple):
    """The measurement of one pair of ranks."""

    first: int
    second: int
    latency: float  # seconds of a message of 8 bytes
    bandwidth: float  # bytes a second

    def __str__(self) -> str:
        return f"{1e6 * self.latency:.3g} us, {speed(self.bandwidth)}"


class Results(NamedTuple):
    """The measured pairs, and those without an answer; the same on all ranks."""

    measured: list[PairTimes]
    unreachable: list[Pair]


class SilentError(Exception):
    """A rank does not answer another rank."""


# Measuring


def measure(comm: MPI.Intracomm, rounds: Sequence[Sequence[Pair]], seconds: float) -> Results:
    """Measure pairs of `comm`, round by round, until the time is over. Collective.

    A rank is in at most one pair of a round. Of a pair that comes again the better values are kept.
    """
    deadline = time.monotonic() + seconds
    found: dict[Pair, tuple[float, float]] = {}
    silent: list[Pair] = []
    for pairs in rounds:
        going = np.array([time.monotonic() < deadline and not silent], np.int64)
        if not combine(comm, going, "measure pairs of ranks", MPI.MIN)[0]:
            break
        for first, second in pairs:
            try:
                if comm.rank in (first, second):
                    times = _measure_pair(comm, second if comm.rank == first else first, comm.rank == first)
                    if comm.rank == first:
                        latency, bandwidth = found.get((first, second), (math.inf, 0.0))
                        found[first, second] = min(latency, times[0]), max(bandwidth, times[1])
            except SilentError:
                silent.append((first, second))
    mine = [(*pair, *times) for pair, times in found.items()]
    reports = all_values(comm, [mine, silent], "gather the measurements of pairs")
    measured = sorted(PairTimes(*pair) for times, _ in reports for pair in times)
    return Results(measured, sorted({(one, other) for _, lost in reports for one, other in lost}))


def _measure_pair(comm: MPI.Intracomm, other: int, begins: bool) -> tuple[float, float]:
    """Return latency and bandwidth of two ranks, which both call this. begins: whether this rank sends first."""
    small, large = np.zeros(SMALL_BYTES, np.uint8), np.ones(LARGE_BYTES, np.uint8)

    def round_trip(message: np.ndarray) -> float:
        begin = time.perf_counter()
        for sends in (begins, not begins):
            _complete(comm.Isend(message, other) if sends else comm.Irecv(message, other))
        return time.perf_counter() - begin

    round_trip(small)  # the first message of two ranks connects them
    latency = float(np.quantile([round_trip(small) for _ in range(TURNS)], USUAL)) / 2
    once = round_trip(large)
    more = np.array([min(LARGE_TURNS, max(1, LARGE_SECONDS / once))], np.int64)
    round_trip(more)  # the rank that begins decides
    return latency, 2 * LARGE_BYTES / min(once, *(round_trip(large) for _ in range(more[0])))


def _complete(request: MPI.Request) -> None:
    """Wait for one message without sleeping, which would be measured too. Raises SilentError after ANSWER_SECONDS."""
    if not wait_until(request.Test, ANSWER_SECONDS, pause=lambda now: os.sched_yield()):
        free_later(request)
        raise SilentError


# Which pairs, in which order


def plan(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of pairs, in which each rank is in at most one pair. nodes: the node of each rank.

    Each rank meets the next one of its node. The first ranks of the nodes meet those at distances 1, 2, 4, ...: about
    2 log2 of the nodes, so that a slow link is found in a job of any size. Up to FEW ranks, or nodes, all meet: one
    slow rank must not make most of the pairs slow.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    inside, leaders = list(members.values()), [ranks[0] for ranks in members.values()]
    rounds = []
    for distance in range(1, FEW):
        meeting = [ranks for ranks in inside if distance == 1 or len(ranks) <= FEW]
        rounds += [[pair for ranks in meeting for pair in _half(ranks, distance, parity)] for parity in (0, 1)]
    far = (
        range(1, len(leaders)) if len(leaders) <= FEW else [1 << bit for bit in range((len(leaders) - 1).bit_length())]
    )
    rounds += [_half(leaders, distance, parity) for distance in far for parity in (0, 1)]
    return [pairs for pairs in rounds if pairs]


def _half(ranks: Sequence[int], distance: int, parity: int) -> list[Pair]:
    """Return pairs at a distance: those that begin in the even groups of `distance` ranks, or in the odd ones."""
    pairs = enumerate(zip(ranks, ranks[distance:], strict=False))
    return [pair for place, pair in pairs if place // distance % 2 == parity]


# Judging


def slow(measured: Sequence[PairTimes], nodes: Sequence[int]) -> list[PairTimes]:
    """Return the pairs that are much slower than the median of their kind."""
    found = []
    for alike in _kinds(measured, nodes).values():
        usual = _median(alike)
        late = max(LATER * usual.latency, usual.latency + LATER_SECONDS)
        if len(alike) >= LEAST_ALIKE:
            found += [pair for pair in alike if pair.latency > late or pair.bandwidth < usual.bandwidth / SLOWER]
    return found


def judge(ranks: Sequence[Rank], needs: Needs, results: Results, link: float | None) -> Iterator[Finding]:
    """Yield the findings. link: bytes a second of the fastest network that the hosts share; None if unknown."""
    nodes = [rank.node for rank in ranks]
    for name, alike in _kinds(results.measured, nodes).items():
        yield _of_kind(name, alike, len(set(nodes)), needs, link)
    for name, alike in _kinds(slow(results.measured, nodes), nodes).items():
        yield _slow_ones(name, alike, ranks)
    if results.unreachable:
        texts = [f"ranks {one} and {other} ({ranks[one].host} - {ranks[other].host})" for one, other in results[1]]
        advice = "a firewall or an interface that leads nowhere: mpirun --mca btl_tcp_if_include NETWORK (Open MPI)"
        yield problem("no answer", some(texts), advice)


def _kinds(measured: Sequence[PairTimes], nodes: Sequence[int]) -> dict[str, list[PairTimes]]:
    """Group pairs by kind: within nodes, and across nodes. Kinds without pairs are left out."""
    found: dict[str, list[PairTimes]] = {name: [] for name in KINDS}
    for pair in measured:
        found[KINDS[nodes[pair.first] != nodes[pair.second]]].append(pair)
    return {name: alike for name, alike in found.items() if alike}


def _median(alike: Sequence[PairTimes]) -> PairTimes:
    """Return the median latency and bandwidth; if half of the pairs are slow, the values of the other half."""
    return PairTimes(0, 0, median_low(p.latency for p in alike), median_high(p.bandwidth for p in alike))


def _of_kind(name: str, alike: Sequence[PairTimes], nodes: int, needs: Needs, link: float | None) -> Finding:
    usual = _median(alike)
    text = f"{usual} (median of {plural(len(alike), 'pair')})"
    if name == KINDS[1]:
        wire = 2 * ELEMENT * needs.parameters * (nodes - 1) / nodes / usual.bandwidth
        text += f": gradients of {count(needs.parameters)} parameters take {wire:.2g} s a step or more"
        if link is not None and usual.bandwidth < SHARE_OF_LINK * link:
            advice = (
                f"an interface has {speed(link)}: make MPI use it (Open MPI: --mca btl_tcp_if_include NETWORK), "
                "and check what else uses it"
            )
            return warning(name, text, advice)
    elif usual.latency > LONG_SECONDS:
        advice = "ranks wait for a core, or MPI does not use shared memory here (look under cores, and at --mca btl)"
        return warning(name, text, advice)
    return ok(name, text)


def _slow_ones(name: str, pairs: Sequence[PairTimes], ranks: Sequence[Rank]) -> Finding:
    """Return the finding for the slow pairs of one kind."""
    texts = []
    for pair in sorted(pairs, key=lambda pair: pair.bandwidth):
        hosts = " - ".join(dict.fromkeys((ranks[pair.first].host, ranks[pair.second].host)))
        texts.append(f"ranks {pair.first} and {pair.second} ({hosts}): {pair}")
    advice = f"look at {CAUSES[name]}; a ring is as fast as its slowest pair"
    return warning("slow pairs", f"{name}: {some(texts)}", advice)


def speed(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"

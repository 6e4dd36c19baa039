"""The examination: every rank looks, all is brought together, pairs are measured, and findings are made of it."""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from allreduce.doctor import clock, cores, gpus, measuring, memory, mpi, network, pairs, versions
from allreduce.doctor.findings import PROBLEM, Finding, Needs, Place, Rank, grouped, named
from allreduce.topology import Topology
from allreduce.transport.control import all_values, root_value

LOOKS: tuple[ModuleType, ...] = (mpi, cores, memory, gpus, versions, network)
FAILED = "failed"
SECOND_LOOKS = 2  # at pairs that seem slow,
SECOND_SHARE = 0.2  # each with so much of the time
Tell = Callable[[str], None]


class Examination(NamedTuple):
    """What was found; the same on all ranks."""

    ranks: list[Rank]
    findings: list[Finding]
    measured: list[pairs.Measured]
    unreachable: list[pairs.Pair]
    ahead: list[float]


def examine(topology: Topology, needs: Needs, seconds: float, tell: Tell) -> Examination:
    """Look at everything. Collective.

    seconds: for measuring pairs; 0 leaves that out. tell: what shows the progress.
    """
    comm = topology.private()
    tell("looking at each rank")
    hosts = all_values(comm, socket.gethostname(), "gather host names")
    place = Place(topology, hosts)
    facts = {_name(module): _tried(module, place) for module in LOOKS}
    heard = all_values(comm, [topology.node_index, facts], "gather what each rank has found")
    ranks = _ranks(hosts, heard)
    tell("comparing clocks")
    ahead = root_value(comm, clock.measure(topology), "compare clocks")
    results = _measure(topology, [rank.node for rank in ranks], seconds, tell)
    findings = judge(ranks, needs, ahead, results)
    return Examination(ranks, findings, results.measured, results.unreachable, ahead)


def judge(ranks: Sequence[Rank], needs: Needs, ahead: Sequence[float], results: measuring.Results) -> list[Finding]:
    """The findings of what ranks have found and measured. Pure."""
    findings = []
    for module in LOOKS:
        findings += _judged(module, ranks, needs)
    findings += clock.judge(ranks, ahead)
    well = [rank for rank in ranks if FAILED not in (rank.facts["network"] or {})]
    findings += pairs.judge(ranks, needs, results.measured, network.speed(well))
    return findings + pairs.unreachable(results.unreachable, ranks)


def _judged(module: ModuleType, ranks: Sequence[Rank], needs: Needs) -> list[Finding]:
    """A module's findings of the ranks on which its look has worked, and one for the others."""
    failed = [rank for rank in ranks if FAILED in (rank.facts[_name(module)] or {})]
    well = [rank for rank in ranks if rank not in failed]
    findings = [
        Finding(
            module.AREA, "looking", PROBLEM, f"failed on {named(some)}: {text}", "please report this, with its text"
        )
        for text, some in grouped(failed, lambda rank: rank.facts[_name(module)][FAILED]).items()
    ]
    return [*module.judge(well, needs), *findings] if well else findings


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _tried(module: ModuleType, place: Place) -> Any:
    """What a module sees here; an error is a finding too, because the others wait for this rank."""
    try:
        return module.look(place)
    except Exception as error:
        return {FAILED: f"{type(error).__name__}: {error}"}


def _ranks(hosts: Sequence[str], heard: Sequence[Any]) -> list[Rank]:
    """The ranks, on nodes with names of their own: containers may all have one host name."""
    host_of = {node: host for (node, _), host in zip(heard, hosts, strict=True)}
    times = Counter(host_of.values())
    names = {node: f"{host}#{node}" if times[host] > 1 else host for node, host in host_of.items()}
    return [Rank(rank, node, names[node], facts) for rank, (node, facts) in enumerate(heard)]


def _measure(topology: Topology, nodes: Sequence[int], seconds: float, tell: Tell) -> measuring.Results:
    """Measure the pairs, and those that seem slow again. Collective."""
    if topology.size == 1 or not seconds:
        return measuring.Results([], [])
    comm = topology.private()
    what = f"measuring pairs of ranks, {seconds:g} s at most"

    def told(done: int, rounds: int) -> None:
        tell(f"{what}: round {done} of {rounds}")

    first = seconds * (1 - SECOND_LOOKS * SECOND_SHARE)
    results = measuring.measure(comm, pairs.plan(nodes), first, told)
    for _ in range(SECOND_LOOKS):
        suspects = pairs.slow(results.measured, nodes)
        if not suspects or results.unreachable:
            break
        apart = [[(pair.first, pair.second)] for pair in suspects]
        again = measuring.measure(comm, apart, seconds * SECOND_SHARE, told)
        results = measuring.Results(pairs.better(results.measured, again.measured), again.unreachable)
    return results

"""Ranks on good hosts, as the doctor's examination describes them, for the tests of allreduce.doctor."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from allreduce.doctor import command
from allreduce.doctor.findings import OK, Finding, Needs, Rank
from allreduce.doctor.pairs import PairTimes, Results

GIB = 1 << 30
NEEDS = Needs(25_000_000)
LINK: Any = {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24", "speed": 1000}


def facts_of(node: int, node_rank: int) -> dict[str, Any]:
    """Return the facts of a rank on a good host, in a cluster of such hosts."""
    interfaces = [LINK | {"address": f"10.0.0.{node + 1}"}]
    return {
        "mpi": {
            "library": "Open MPI v5.0.11", "threads": "MPI_THREAD_MULTIPLE", "unguarded": "", "launch": None,
        },
        "cores": {"cores": [node_rank], "of": 64, "quota": None, "threads": 1},
        "memory": {
            "shared_path": "/dev/shm", "shared_bytes": 64 * GIB, "shared_free": 64 * GIB, "available": 128 * GIB,
            "cma": True,
        },
        "gpus": {
            "device": None, "missing": '"nccl" needs CuPy: it is not installed', "present": 0, "visible": None,
            "cuda_aware": False,
        },
        "versions": {
            "versions": {"Python": "3.11.7", "numpy": "2.4.6", "allreduce": "0.1.0 (code 1)"},
            "cpu": "EPYC",
            "kernels": "C",
        },
        "network": None if node_rank else {"interfaces": interfaces, "infiniband": []},
    }  # fmt: skip


def cluster(*sizes: int) -> list[Rank]:
    """Return the facts of ranks on good hosts, with these numbers of ranks each."""
    places = [(node, node_rank) for node, size in enumerate(sizes) for node_rank in range(size)]
    return [Rank(rank, node, f"host{node}", facts_of(node, place)) for rank, (node, place) in enumerate(places)]


def measured(ranks: list[Rank], **slow: tuple[float, float]) -> Results:
    """Return the times of all pairs of ranks. slow: "r0_1" -> latency and bandwidth of ranks 0 and 1."""
    kinds = {True: (1e-6, 8e9), False: (50e-6, 0.12e9)}
    pairs = [
        PairTimes(one.rank, other.rank, *slow.get(f"r{one.rank}_{other.rank}", kinds[one.node == other.node]))
        for one, other in combinations(ranks, 2)
    ]
    return Results(pairs, [])


def judged(key: str, ranks: list[Rank], needs: Needs = NEEDS) -> list[Finding]:
    """Return the findings of one check."""
    return list(command.judge_one(key, ranks, needs))


def worse(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != OK]


def changed(key: str, ranks: list[Rank], facts: dict[int, dict[str, Any]]) -> list[Rank]:
    """Return the ranks, some of which get other facts of one check."""
    for rank, changes in facts.items():
        ranks[rank].facts[key] |= changes
    return ranks


def only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding that is not ok."""
    (found,) = worse(findings)
    assert found.advice
    return found


def finds(key: str, ranks: list[Rank], facts: dict[int, dict[str, Any]], *words: str, needs: Needs = NEEDS) -> None:
    """Assert that a check of ranks that have other facts has one finding that is not ok, with these words."""
    found = only(judged(key, changed(key, ranks, facts), needs))
    shown = f"{found.level}, {found.name}: {found.text} -> {found.advice}"
    assert [each for each in words if each not in shown] == [], shown

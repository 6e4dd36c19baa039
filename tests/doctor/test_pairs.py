"""The times between pairs of ranks: how the doctor measures them, and its findings."""

from itertools import combinations
from typing import Any

import pytest
from mpi4py import MPI

from allreduce.doctor import network, pairs
from allreduce.doctor.findings import OK, PROBLEM, WARNING
from allreduce.doctor.pairs import PairTimes, Results
from tests.doctor.doctor_ranks import NEEDS, cluster, measured, only


def test_64_ranks_with_one_slow_pair_name_it() -> None:
    ranks = cluster(32, 32)
    found = only(pairs.judge(ranks, NEEDS, measured(ranks, r3_40=(51e-6, 0.03e9)), None))
    assert (found.level, found.name) == (WARNING, "slow pairs")
    assert "ranks 3 and 40 (host0 - host1): 51 us, 0.03 GB/s" in found.text
    assert found.text.count("ranks ") == 1
    late = only(pairs.judge(ranks, NEEDS, measured(ranks, r5_6=(2e-3, 8e9)), None))
    assert "ranks 5 and 6 (host0): 2e+03 us" in late.text
    assert "bound" in late.advice


def test_what_slow_pairs_have_in_common_is_said() -> None:
    ranks = cluster(2, 2, 2, 2)
    bad_rank = {f"r{min(5, rank)}_{max(5, rank)}": (50e-6, 0.01e9) for rank in (0, 1, 2, 3, 6, 7)}
    (found,) = [each for each in pairs.judge(ranks, NEEDS, measured(ranks, **bad_rank), None) if each.level != OK]
    assert "all of them have rank 5 (host2) in common" in found.advice
    assert "and 1 more" in found.text
    bad_host = {f"r{one}_{other}": (50e-6, 0.01e9) for one in (0, 1) for other in (2, 3)}
    bad_host |= {f"r{one}_{other}": (50e-6, 0.01e9) for one in (2, 3) for other in (4, 5)}
    assert (
        "all of them have host host1 in common"
        in only(pairs.judge(ranks, NEEDS, measured(ranks, **bad_host), None)).advice
    )


def test_half_of_the_pairs_are_slow_beside_the_other_half() -> None:
    ranks = cluster(1, 1, 1, 1)
    bad_host = {f"r{min(2, rank)}_{max(2, rank)}": (50e-6, 0.0129e9) for rank in (0, 1, 3)}
    findings = list(pairs.judge(ranks, NEEDS, measured(ranks, **bad_host), None))
    assert "0.12 GB/s (median of 6 pairs)" in findings[0].text
    assert "all of them have rank 2 (host2) in common" in only(findings).advice


def test_two_pairs_are_too_few_to_call_one_slow_and_second_looks_forgive_chance() -> None:
    two = [PairTimes(0, 1, 1e-6, 8e9), PairTimes(2, 3, 1e-6, 1e9)]
    assert pairs.slow(two, [0, 0, 1, 1]) == []
    first = [PairTimes(0, 1, 9e-3, 8e9), PairTimes(0, 2, 1e-6, 8e9), PairTimes(1, 2, 1e-6, 8e9)]
    assert [pair[:2] for pair in pairs.slow(first, [0] * 3)] == [(0, 1)]
    assert pairs.slow(pairs.better(first, [PairTimes(0, 1, 2e-6, 1e9)]), [0] * 3) == []


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (3, 1), (2, 2), (4, 3, 1), (1, 1, 1, 1), (32, 32)])
def test_every_pair_comes_once_and_a_node_has_one_at_a_time(sizes: tuple[int, ...]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rounds = pairs.plan(nodes)
    planned = [tuple(sorted(pair)) for pairs_of_round in rounds for pair in pairs_of_round]
    assert sorted(planned) == list(combinations(range(len(nodes)), 2))
    for pairs_of_round in rounds:
        busy = [node for pair in pairs_of_round for node in {nodes[rank] for rank in pair}]
        assert pairs_of_round
        assert len(busy) == len(set(busy))


def test_every_rank_is_measured_early_and_huge_jobs_have_a_limit() -> None:
    early = {
        rank
        for pairs_of_round in pairs.plan([rank // 32 for rank in range(64)])[:70]
        for rank in sum(pairs_of_round, ())
    }
    assert early == set(range(64))
    assert sum(map(len, pairs.plan([rank // 64 for rank in range(96)]))) == pairs.MOST_PAIRS


@pytest.mark.parametrize("count", [1000, 1024])
def test_every_node_of_a_large_job_meets_others_near_and_far(count: int) -> None:
    """Of 8,000 ranks on 1,000 nodes each node meets the nodes at distances 1, 2, 4, ..., in few rounds."""
    nodes = [rank // 8 for rank in range(8 * count)]
    rounds = pairs.plan(nodes)
    met: dict[int, set[int]] = {node: set() for node in range(count)}
    for pairs_of_round in rounds:
        busy = [node for pair in pairs_of_round for node in {nodes[rank] for rank in pair}]
        assert len(busy) == len(set(busy))
        for first, second in pairs_of_round:
            met[nodes[first]].add(nodes[second])
            met[nodes[second]].add(nodes[first])
    distances = {1 << power for power in range(20) if 2 << power <= count}
    for node in range(count):
        assert {(node + distance) % count for distance in distances} <= met[node]
    assert {rank for pairs_of_round in rounds for pair in pairs_of_round for rank in pair} == set(range(len(nodes)))
    assert len(rounds) <= 3 * (len(distances) + 1)


def test_no_answer_and_a_slow_link_and_slow_memory() -> None:
    ranks = cluster(1, 1)
    silent = only(pairs.judge(ranks, NEEDS, Results([], [(0, 1)]), None))
    assert (silent.level, silent.text) == (PROBLEM, "ranks 0 and 1 (host0 - host1)")
    unused = only(pairs.judge(ranks, NEEDS, measured(ranks), 12.5e9))
    assert "an interface has 12.5 GB/s" in unused.advice
    assert network.link_speed([rank._replace(facts=rank.facts["network"]) for rank in ranks]) == 125e6
    crowded = only(pairs.judge(cluster(2), NEEDS, Results([PairTimes(0, 1, 4e-3, 1e9)], []), None))
    assert crowded.name == "same node"


class SilentRequest:
    def Test(self) -> bool:  # noqa: N802, MPI's name
        return False


class SilentRank:
    """A communicator of two ranks; the other rank never answers."""

    rank, size = 0, 1  # of size 1 for agreements

    def Isend(self, *_: Any) -> SilentRequest:  # noqa: N802, MPI's name
        return SilentRequest()

    Irecv = Isend

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI.COMM_SELF, name)


def test_a_rank_that_does_not_answer_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "ANSWER_SECONDS", 0.01)
    comm: Any = SilentRank()
    results = pairs.measure(comm, [[(0, 1)], [(0, 2)]], 10)
    assert results == Results([], [(0, 1)])

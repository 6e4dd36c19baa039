"""The times between pairs of ranks: how the doctor measures them, and its findings."""

from itertools import chain
from typing import Any

import pytest
from mpi4py import MPI

from allreduce.doctor import network, pairs
from allreduce.doctor.findings import PROBLEM, WARNING
from allreduce.doctor.pairs import FEW, PairTimes, Results
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


def test_half_of_the_pairs_are_slow_beside_the_other_half() -> None:
    ranks = cluster(1, 1, 1, 1)
    bad_host = {f"r{min(2, rank)}_{max(2, rank)}": (50e-6, 0.0129e9) for rank in (0, 1, 3)}
    results = measured(ranks, **bad_host)
    assert sorted(pair[:2] for pair in results.measured) == sorted(chain(*pairs.plan([0, 1, 2, 3])))
    findings = list(pairs.judge(ranks, NEEDS, results, None))
    assert "0.12 GB/s (median of 6 pairs)" in findings[0].text
    assert "ranks 0 and 2 (host0 - host2)" in only(findings).text


def test_two_pairs_are_too_few_to_call_one_slow() -> None:
    two = [PairTimes(0, 1, 1e-6, 8e9), PairTimes(2, 3, 1e-6, 1e9)]
    assert pairs.slow(two, [0, 0, 1, 1]) == []
    three = [PairTimes(0, 1, 9e-3, 8e9), PairTimes(0, 2, 1e-6, 8e9), PairTimes(1, 2, 1e-6, 8e9)]
    assert [pair[:2] for pair in pairs.slow(three, [0] * 3)] == [(0, 1)]


def test_of_two_measurements_the_better_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(5e-6, 8e9), (2e-6, 1e9)])
    monkeypatch.setattr(pairs, "_measure_pair", lambda *_: next(times))
    comm: Any = SilentRank()
    assert pairs.measure(comm, [[(0, 1)]] * 2, 10) == Results([PairTimes(0, 1, 2e-6, 8e9)], [])


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (3, 1), (2, 2), (4, 3, 1), (1,) * 7, (32, 32), (8,) * 1000])
def test_each_rank_meets_its_neighbour_and_each_node_others_near_and_far(sizes: tuple[int, ...]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rounds, first, last = pairs.plan(nodes), {}, {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
        last[node] = rank
    for pairs_of_round in rounds:
        busy = [rank for pair in pairs_of_round for rank in pair]
        assert busy
        assert len(busy) == len(set(busy))
    planned = [pair for pairs_of_round in rounds for pair in pairs_of_round]
    wanted = [(rank, rank + 1) for rank, node in enumerate(nodes) if rank < last[node]]
    wanted += [
        (rank, other)
        for rank, node in enumerate(nodes)
        for other in range(rank + 2, last[node] + 1)
        if sizes[node] <= FEW
    ]
    for distance in range(1, FEW) if len(sizes) <= FEW else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        wanted += [(first[node], first[node + distance]) for node in range(len(sizes) - distance)]
    assert sorted(planned) == sorted(wanted)
    assert len(rounds) <= 4 * FEW + 2 * len(sizes).bit_length()


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

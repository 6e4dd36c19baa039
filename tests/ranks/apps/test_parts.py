"""Parts of the ranks of a topology: who is in which, and that one's errors are not another's."""

import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.together import raised_everywhere
from trainers.apps.search.parts import Parts
from trainers.errors import ArgumentError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.mark.parametrize("ranks_per_part", range(1, SIZE + 1))
def test_ranks_that_are_left_over_join_a_part(flat: allreduce.Topology, ranks_per_part: int) -> None:
    parts = Parts(flat, ranks_per_part)
    assert parts.count == SIZE // ranks_per_part
    sizes = [len(ranks) for ranks in parts.ranks]
    assert sum(parts.ranks, ()) == tuple(range(SIZE))  # neighbours stay together
    assert min(sizes) >= ranks_per_part
    assert max(sizes) <= min(sizes) + 1 or parts.count == 1
    assert (parts.topology.rank, parts.topology.size) == (parts.ranks[parts.index].index(RANK), sizes[parts.index])
    assert parts.leader == (parts.ranks[parts.index][0] == RANK)
    parts.close()


def test_there_are_at_most_so_many_parts(flat: allreduce.Topology) -> None:
    parts = Parts(flat, 1, most=2)
    assert parts.count == min(SIZE, 2)
    assert parts.topology.size in ((SIZE // 2, SIZE - SIZE // 2) if SIZE > 1 else (1,))
    parts.close()


def test_more_ranks_than_there_are(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    text = raised_everywhere(world, ArgumentError, lambda: Parts(flat, SIZE + 1))
    assert f"a part of {SIZE + 1} ranks: this job has {SIZE} rank" in text
    for bad in (0, True, 1.5, "2"):
        assert repr(bad) in raised_everywhere(world, ArgumentError, lambda bad=bad: Parts(flat, bad))
    assert "'x'" in raised_everywhere(world, ArgumentError, lambda: Parts(flat, 1, "x" if RANK == 0 else 1))  # type: ignore[arg-type]


def test_parts_work_on_their_own(flat: allreduce.Topology) -> None:
    parts = Parts(flat, 1)
    for _ in range(RANK):  # unequally often
        parts.topology.agree([RANK], "of one part alone")
    assert parts.count == SIZE
    parts.close()
    flat.agree([1], "all are there")

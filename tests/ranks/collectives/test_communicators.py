"""The number of communicators that "auto" creates: only those in use, at their first use. MPICH has some 2,000 in
all."""

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.topology import Topology

SIZE = MPI.COMM_WORLD.size
# After the topology, `create`, `allocate` and a call, and a call of a small array (native). One on which no failure is
# seen is made besides where ranks may be lost.
COUNTS = {
    "flat": (3, 6, 7, 8),  # world and node; of "auto" two, and the world of its parts; shared; native
    "twos": (5, 8, 17, 18),  # hierarchical_copy, its topologies of two each out of two, shared and ring
    "ones": (3, 6, 13, 14),  # a node of one rank and a topology of such nodes have none for `node` and `cross`
}
NODES = {"flat": None, "twos": 2, "ones": 1}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one number: the communicators that all topologies hold."""
    count, own, release = [0], Topology.own, Topology.release

    def counted_own(self: Topology, comm: MPI.Comm, watch: bool = False) -> MPI.Intracomm:
        count[0] += 1
        return own(self, comm, watch)

    def counted_release(self: Topology, *args: object) -> None:
        count[0] -= 1
        release(self, *args)

    monkeypatch.setattr(Topology, "own", counted_own)
    monkeypatch.setattr(Topology, "release", counted_release)
    return count


@pytest.mark.skipif(SIZE < 2, reason="one rank makes no parts")
@pytest.mark.parametrize("shape", COUNTS)
def test_communicators_of_auto(shape: str, made: list[int]) -> None:
    if shape == "twos" and SIZE < 3:
        pytest.skip("two nodes of two need more ranks")
    found = []
    with Topology(ranks_per_node=NODES[shape]) as topology:
        found.append(made[0])
        with allreduce.create("auto", topology, trial=False) as reduce:
            found.append(made[0])
            array = reduce.allocate(1_000_000)
            reduce(array, "sum")
            found.append(made[0])
            few = np.ones(3)
            reduce(few, "sum")
            assert few.tolist() == [SIZE] * 3
            found.append(made[0])
    if not (topology.leaders_only and topology.node_rank):  # which has no topology across
        assert tuple(found) == COUNTS[shape]
    assert made[0] == 0


def test_a_duplicate_makes_communicators_of_nodes_when_asked(made: list[int]) -> None:
    with Topology(ranks_per_node=2) as topology, topology.duplicate() as duplicate:
        before = made[0]
        assert (duplicate.node_rank, duplicate.node_size) == (topology.node_rank, topology.node_size)
        assert made[0] == before
        assert duplicate.node.allgather(duplicate.rank) == topology.node.allgather(topology.rank)
        assert duplicate.cross.allgather(duplicate.rank) == topology.cross.allgather(topology.rank)
        assert made[0] == before + (SIZE > 2) * 2 or SIZE == 1
    assert made[0] == 0

"""Topology: ranks and nodes, communicators that are owned and freed, simulated nodes."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import machine, notices
from allreduce.algorithms.ring import Ring
from allreduce.call.rendezvous import Tables
from allreduce.errors import DisagreementError, OptionError
from allreduce.transport.control import on_all_ranks
from allreduce.transport.layout import NodeLayout
from tests.ranks.grid import shapes
from tests.ranks.hosts import Hosts

JOBS = "openmpi 1 2 3 5, mpich 2 3"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
NODES = {  # ranks -> the node sizes of each of grid.shapes
    1: {"flat": (1,)},
    2: {"flat": (2,), "ones": (1, 1)},
    3: {"flat": (3,), "twos": (2, 1), "uneven": (1, 2)},
    4: {"flat": (4,), "twos": (2, 2), "uneven": (3, 1)},
    5: {"flat": (5,), "twos": (2, 2, 1), "uneven": (1, 3, 1)},
}


@pytest.mark.parametrize("shape", shapes(SIZE))
def test_who_is_where(shape: str, topology_of: Callable[..., allreduce.Topology]) -> None:
    topology = topology_of(shapes(SIZE)[shape])
    if SIZE not in NODES:
        pytest.skip("no table for this number of ranks")
    sizes = NODES[SIZE][shape]
    place = [(node, node_rank) for node, size in enumerate(sizes) for node_rank in range(size)]
    node, node_rank = place[topology.rank]
    assert (topology.rank, topology.size) == (WORLD.rank, SIZE)
    assert topology.layout == NodeLayout.of_sizes(sizes, simulated=shape != "flat")
    assert topology.node_sizes == sizes
    assert (topology.nodes, topology.node_index) == (len(sizes), node)
    assert (topology.node_rank, topology.node_size) == (node_rank, sizes[node])
    assert topology.leaders_only == (len(set(sizes)) > 1)
    pairs = [index for index, size in enumerate(sizes) if size > node_rank]
    assert (topology.cross.size, topology.cross.rank) == (len(pairs), pairs.index(node))
    members = topology.node.allgather(topology.rank)
    assert members == [rank for rank, where in enumerate(place) if where[0] == node]
    assert topology.cross.allgather(topology.node_rank) == [node_rank] * len(pairs)
    with topology.split(0, topology.ranks_per_node) as duplicate, allreduce.create("auto", duplicate) as reduce:
        assert (duplicate.layout.members, duplicate.rank) == (topology.layout.members, topology.rank)
        assert duplicate.world != topology.world
        array = np.ones(3)
        reduce(array, "sum")
        assert array.tolist() == [SIZE] * 3


@pytest.mark.skipif(SIZE < 4, reason="nodes of two ranks each")
def test_cross_is_in_the_order_of_the_nodes() -> None:
    Hosts.numbers = (0, 1, 1, *[0] * (SIZE - 3))
    with allreduce.Topology(Hosts(WORLD)) as topology, topology.split(0) as duplicate:
        for each in (topology, duplicate):
            assert each.node.allgather(each.rank) == ([1, 2] if topology.rank in (1, 2) else [0, *range(3, SIZE)])
            pair = {0: [0, 1], 1: [3, 2]}.get(topology.node_rank, [topology.rank])
            assert each.cross.allgather(each.rank) == pair


def test_cores_that_ranks_share_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not reported again for each part, with another number of ranks."""
    said: list[str] = []
    monkeypatch.setattr(notices, "once", lambda rank, text: said.append(text))
    monkeypatch.setattr(machine, "cores", lambda: [0])
    with allreduce.Topology() as topology, topology.split(0):
        assert len(said) == (SIZE > 1)


def test_cores_are_those_that_ranks_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores in the affinity masks of all ranks of a node together, not all cores of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {WORLD.rank % 2})
    with allreduce.Topology() as topology:
        assert topology.cores == min(2, topology.size)


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    last = WORLD.rank == SIZE - 1
    monkeypatch.setattr(allreduce, "__version__", "0.0.1" if last else "0.0.2")
    with pytest.raises(DisagreementError) as caught:
        allreduce.Topology()
    assert "allreduce 0.0.2" in str(caught.value)
    assert "allreduce 0.0.1" in str(caught.value)


@pytest.mark.skipif(SIZE < 2, reason="one rank has no table")
def test_the_next_user_of_a_refused_ones_slot_goes_on_counting(flat: allreduce.Topology) -> None:
    """Otherwise the fingerprints that the refused backend has left in the table would count as new ones."""

    class Refusing(Ring):
        def __init__(self, context: allreduce.Context) -> None:
            super().__init__(context)
            for _ in range(3):
                context.executor.fence()
            raise on_all_ranks(OptionError("refused after all"), context.topology.world)

    tables = flat.service(Tables)
    slot = tables.take()
    assert slot is not None
    tables.release(slot, slot.sequence)
    with pytest.raises(OptionError):
        allreduce.create(Refusing, flat)
    again = tables.take()
    assert again is not None
    assert (again.number, again.sequence) == (slot.number, slot.sequence + 3)
    tables.release(again, again.sequence)
    with allreduce.create("ring", flat) as reduce:
        array = np.ones(5)
        reduce(array, "sum")
        assert set(array) == {SIZE}


def test_a_user_may_close_the_topology_that_is_closing_it() -> None:
    """A trainer does that: after a failure it owns the topology of the remaining ranks."""

    class Owner:
        closed = False

        def close(self) -> None:
            if not self.closed:
                self.closed = True
                topology.close()

        abandon = close

    topology, owner = allreduce.Topology(), Owner()
    topology.register(owner)
    part = topology.split(0)
    allreduce.create("ring", topology)
    topology.close()
    assert topology.closed
    assert part.closed
    assert owner.closed

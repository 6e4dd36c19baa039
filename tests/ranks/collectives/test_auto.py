"""Auto: the algorithm with the lowest cost, the same on all ranks and in all calls; algorithms that can't be used."""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import kernels, notices
from allreduce.algorithms import auto
from allreduce.arrays.memory_kinds import ALLOCATED, UNREGISTERED
from allreduce.call.call import Call
from allreduce.errors import UnavailableError
from allreduce.transport.cost import Machine
from allreduce.tuning import constants, measuring
from tests.ranks.grid import run_grid

JOBS = "openmpi 1 2 3, mpich 2 3"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
FLOAT32, FLOAT16 = np.dtype("float32"), np.dtype("float16")
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to reduce")


@pytest.fixture(params=[None, 1], ids=["one node", "nodes of one"])
def topology(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> allreduce.Topology:
    return topology_of(request.param)


def by_default(topology: allreduce.Topology, **options: Any) -> Any:
    """Create "auto" with the built-in constants, on two ranks too."""
    reduce = allreduce.create("auto", topology, table="", measure=False, **options)
    reduce._algorithm._constants = constants.Known(Machine(), "by default")
    return reduce


@several
def test_a_short_sum_by_c_is_cheaper_than_another_operation(topology: allreduce.Topology) -> None:
    with by_default(topology) as reduce:
        total, largest = (
            reduce.chosen(Call("all_reduce", 1 << 14, FLOAT32, op, UNREGISTERED), reason=True) for op in ("sum", "max")
        )
        assert (total != largest) == (topology.nodes == 1 and kernels.status() == "C")
        if total != largest:
            assert reduce.chosen(np.zeros(1 << 14, np.float32)) == "shared"


@several
def test_choice_is_what_reduces(topology: allreduce.Topology) -> None:
    with allreduce.create("auto", topology, table="") as reduce:
        array = reduce.allocate(1 << 20, "float32")
        found, reason = reduce.chosen(array), reduce.chosen(array, reason=True)
        for _ in range(3):
            reduce(array, "sum")
            assert (found, reason) == (reduce.chosen(array), reduce.chosen(array, reason=True))
        assert f"{found} " in reason
        assert "measured here" in reason


@several
def test_every_algorithm_reduces_when_it_is_the_cheapest(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_default(topology) as reduce:
        names = auto.candidates(reduce.topology.layout)
        assert {"native", "ring", "halving_doubling", "reduce_to_one"} <= set(names)
        for name in names:
            reduce._algorithm._choices.clear()
            reduce._known.clear()
            with monkeypatch.context() as patch:
                patch.setattr(reduce._algorithm._algorithms[name], "cost", lambda *_: 0.0)
                run_grid(reduce, "float64", WORLD, (1, 1000))
                run_grid(reduce, "float16", WORLD, (1, 1000))
                assert reduce.chosen(np.ones(10)) == name
                halves = reduce.chosen(np.ones(10, "float16"))
                assert halves == name or name == "native" != halves


@several
def test_near_costs_are_decided_by_order(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """So noise in the constants does not decide."""
    with by_default(flat) as reduce:
        seconds = {"ring": 1.0, "native": 1.05, "shared": 1.09}
        for name, each in reduce._algorithm._algorithms.items():
            monkeypatch.setattr(each, "cost", lambda *_, name=name: seconds.get(name, 2.0))
        assert reduce._algorithm._cheapest(1000, FLOAT32, ALLOCATED)[0] == "shared"
        monkeypatch.setattr(reduce._algorithm._algorithms["shared"], "cost", lambda *_: 1.2)
        assert reduce._algorithm._cheapest(1000, FLOAT32, ALLOCATED)[0] == "native"


@several
def test_ranks_agree_though_they_measure_differently(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest rank counts."""

    def seconds(comm: MPI.Comm, work: Callable[[], object], tries: int) -> float:
        work()
        return 1e-6 * (WORLD.rank + 1)

    monkeypatch.setattr(measuring, "_seconds", seconds)
    found = measuring.measure(topology)
    assert len(set(WORLD.allgather(found))) == 1
    assert (found.net_alpha if topology.nodes > 1 else found.alpha) == pytest.approx(1e-6 * (SIZE // 2 * 2), rel=0.01)
    assert found.switch == 0


@several
def test_constants_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each topology; and not at all where nothing may depend on them."""
    measured = []
    real = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda topology: measured.append(topology) or real(topology))
    with allreduce.Topology() as topology:
        for measure, times in ((False, int(SIZE == 2)), (True, 1), (True, 1)):
            with allreduce.create("auto", topology, table="", measure=measure) as reduce:
                assert len(measured) == times
                source = reduce._algorithm._constants.source  # type: ignore[attr-defined]
                assert source == ("measured here" if times else "by default")
    assert all(topology is measured[0] for topology in measured)


@several
@pytest.mark.parametrize("name", ["auto", "shared"])
def test_copies_are_told_to_who_has_chosen_them(
    name: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(flat.cma, "works", False)
    with caplog.at_level(logging.WARNING, "allreduce"), allreduce.create(name, flat) as reduce:
        for length in (1 << 18, 1 << 18, 1 << 19):
            reduce(np.zeros(length, "float32"), "sum")
    said = [record.message for record in caplog.records if "two more copies" in record.message]
    assert len(said) == (name == "shared" and reduce.rank == 0)


def _no_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    class Full:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Full())


@several
def test_falls_back_where_shared_memory_is_too_small(
    topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It works all the same; rank 0 reports it once."""
    monkeypatch.setattr(notices, "_said", set())
    _no_shared_memory(monkeypatch, 1000)
    with caplog.at_level(logging.WARNING, "allreduce"), allreduce.create("auto", topology) as reduce:
        for dtype in ("float32", "float16"):
            run_grid(reduce, dtype, WORLD, (1, 1000, 100003))
        name = reduce.chosen(reduce.allocate(1 << 22))
    assert name in (("ring", "native") if topology.nodes == 1 else ("ring", "native", "halving_doubling"))
    monkeypatch.undo()
    with allreduce.create("auto", topology) as reduce:  # that exists already when shared memory is full
        _no_shared_memory(monkeypatch, (1 << 20) + 100)
        run_grid(reduce, "bfloat16", WORLD, (1, 1000, 100003))
        monkeypatch.undo()
    said = [record.message for record in caplog.records if "does not use" in record.message]
    assert len(said) == (WORLD.rank == 0)


@several
def test_shared_refuses_several_nodes(topology_of: Callable[..., allreduce.Topology]) -> None:
    with pytest.raises(UnavailableError, match='use "hierarchical_copy"'):
        allreduce.create("shared", topology_of(1))
    assert "shared" not in allreduce.available(topology_of(1))
    assert "hierarchical_copy" in allreduce.available(topology_of(1))


@pytest.mark.skipif(SIZE < 3, reason="needs a node of several ranks, and another one")
def test_a_mean_of_all_ranks_as_a_part_of_another_backend(topology_of: Any) -> None:
    """Across nodes fewer ranks add up than the mean divides by."""
    with allreduce.create("hierarchical_copy", topology_of(2), cross="auto") as reduce:
        for length in (1000, 50_000, 1_000_000):
            array = np.full(length, WORLD.rank + 1.0)
            reduce(array, "mean")
            assert (array == (SIZE + 1) / 2).all(), length

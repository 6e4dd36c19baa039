"""Auto: the rule, the table that replaces it, and backends that can't be used."""

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.backends import auto
from allreduce.errors import UnavailableError
from tests.ranks.grid import run_grid

SIZE = MPI.COMM_WORLD.size
FLOAT32, FLOAT16 = np.dtype("float32"), np.dtype("float16")
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to reduce")


class _Nodes:
    def __init__(self, nodes: int, size: int, reaches: bool = True) -> None:
        self.nodes, self.size = nodes, size
        self.cma = SimpleNamespace(works=reaches)


@pytest.mark.parametrize(
    ("nodes", "nbytes", "dtype", "memory", "chosen"),
    [
        (1, 1000, FLOAT32, ALLOCATED, "native"),
        (1, 1000, FLOAT16, ALLOCATED, "shared"),
        (1, 1 << 24, FLOAT32, ALLOCATED, "shared"),
        (1, 1 << 30, FLOAT32, ALLOCATED, "shared"),
        (1, 1000, FLOAT32, UNREGISTERED, "native"),
        (1, 1 << 20, FLOAT32, UNREGISTERED, "shared"),
        (1, 1 << 25, FLOAT32, UNREGISTERED, "shared"),
        (2, 1000, FLOAT32, ALLOCATED, "native"),
        (2, 1000, FLOAT16, UNREGISTERED, "hierarchical_copy"),
        (2, 1 << 24, FLOAT32, UNREGISTERED, "hierarchical_copy"),
        (1, 1 << 24, FLOAT32, GPU, "nccl"),
        (2, 1000, FLOAT32, GPU, "nccl"),
    ],
)
def test_rule(nodes: int, nbytes: int, dtype: np.dtype, memory: int, chosen: str) -> None:
    name, why = auto.rule(_Nodes(nodes, 2 * nodes), nbytes, dtype, memory)  # type: ignore[arg-type]
    assert name == chosen
    assert why


@pytest.mark.parametrize(("nbytes", "chosen"), [(1 << 20, "shared"), (1 << 25, "ring")])
def test_rule_where_ranks_can_not_reach_memory(nbytes: int, chosen: str) -> None:
    """Arrays that fit the staging buffer go through it; a longer one would have to go through in turns."""
    assert auto.rule(_Nodes(1, 2, reaches=False), nbytes, FLOAT32, UNREGISTERED)[0] == chosen  # type: ignore[arg-type]


@several
@pytest.mark.parametrize("nodes", [None, 1])
def test_choice_is_what_reduces(nodes: int | None, topology_of: Callable[..., allreduce.Topology]) -> None:
    with allreduce.create("auto", topology_of(nodes), table="") as reduce:
        name, why = reduce.choice(1 << 20, "float32")  # type: ignore[attr-defined]
        assert name == ("shared" if nodes is None else "hierarchical_copy")
        assert why
        foreign = np.ones(1 << 20, "float32")
        assert reduce.chosen(foreign) in ("shared", "ring", "hierarchical_copy")
        assert not reduce._made  # type: ignore[attr-defined]  # nobody else is needed for an answer
        array = reduce.allocate(1 << 20, "float32")
        reduce(array, "sum")
        assert (name, why) == reduce.choice(array.size, array.dtype)  # type: ignore[attr-defined]
        assert reduce.chosen(array) == name
        assert name in reduce._made  # type: ignore[attr-defined]


@several
@pytest.mark.parametrize("name", ["auto", "shared"])
def test_copies_are_told_to_who_has_chosen_them(
    name: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(flat.cma, "works", False)
    with caplog.at_level(logging.WARNING, "allreduce"), allreduce.create(name, flat) as reduce:
        reduce(np.zeros(1 << 18, "float32"), "sum")
    said = [record.message for record in caplog.records if "two more copies" in record.message]
    assert len(said) == (name == "shared" and reduce.rank == 0)


@several
def test_own_rule(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    asked = []

    def choose(topology: allreduce.Topology, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
        asked.append(nbytes)
        return ("reduce_to_one" if nbytes < 1000 else "halving_doubling"), "mine"

    with allreduce.create("auto", flat, choose=choose) as reduce:
        run_grid(reduce, "float64", world, (0, 1, 1000))
        made = reduce._made  # type: ignore[attr-defined]
        assert {"reduce_to_one", "halving_doubling"} <= set(made)
    assert len(asked) < 100  # once for each signature, not in every call


def _no_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    class Full:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Full())


@several
@pytest.mark.parametrize("nodes", [None, 1])
def test_falls_back_where_shared_memory_is_too_small(
    nodes: int | None,
    topology_of: Callable[..., allreduce.Topology],
    world: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It works all the same; rank 0 reports it once."""
    monkeypatch.setattr(notices, "_said", set())
    _no_shared_memory(monkeypatch, 1000)
    with caplog.at_level(logging.WARNING, "allreduce"), allreduce.create("auto", topology_of(nodes)) as reduce:
        for dtype in ("float32", "float16"):
            run_grid(reduce, dtype, world, (1, 1000, 100003))
        name, why = reduce.choice(1 << 22)  # type: ignore[attr-defined]
    assert name == "ring"
    assert "shared memory is too small" in why
    said = [record.message for record in caplog.records if "does not use" in record.message]
    assert len(said) == (world.rank == 0)


@several
@pytest.mark.parametrize("nodes", [None, 1])
def test_allocates_ordinary_memory_where_its_window_does_not_fit(
    nodes: int | None,
    topology_of: Callable[..., allreduce.Topology],
    world: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend exists already when shared memory is full."""
    with allreduce.create("auto", topology_of(nodes)) as reduce:
        reduce._part("shared" if nodes is None else "hierarchical_copy")  # type: ignore[attr-defined]
        _no_shared_memory(monkeypatch, (1 << 20) + 100)
        run_grid(reduce, "bfloat16", world, (1, 1000, 100003))
        monkeypatch.undo()


@several
def test_shared_refuses_several_nodes(topology_of: Callable[..., allreduce.Topology]) -> None:
    with pytest.raises(UnavailableError, match='use "hierarchical_copy"'):
        allreduce.create("shared", topology_of(1))
    assert "shared" not in allreduce.available(topology_of(1))
    assert "hierarchical_copy" in allreduce.available(topology_of(1))

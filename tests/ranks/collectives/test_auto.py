"""Auto: the rule, the table that replaces it, and backends that can't be used."""

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices, registry
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce
from allreduce.backends import auto, trials
from allreduce.backends.auto import Auto
from allreduce.engine.call import Call
from allreduce.engine.engine import Work
from allreduce.errors import OptionError, UnavailableError
from allreduce.transport.control import on_all_ranks
from tests.ranks.grid import run_grid
from tests.ranks.together import raised_everywhere

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
        (1, 1 << 16, FLOAT32, ALLOCATED, "shared"),
        (1, 1 << 16, FLOAT32, UNREGISTERED, "native"),
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
    with allreduce.create("auto", topology_of(nodes), table="", trial=False) as reduce:
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


# Trials: the backends are real, the times are not


class _Tried:
    """An "auto" whose clock moves by `delays` (seconds by backend) in each call; `done`: who reduced, call by call."""

    def __init__(
        self, topology: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, delays: dict[str, float], **options: object
    ) -> None:
        self.delays, self.done, self.now = delays, [], 0.0
        self.refuses = ""  # the name of a backend that raises UnavailableError in its next call
        monkeypatch.setattr(trials, "clock", lambda: self.now)
        names = tuple(registry.BACKENDS)
        self.reduce = Auto(topology, make=self._make, names=names, table="", **options)  # type: ignore[arg-type]
        self.first = "hierarchical_copy" if topology.nodes > 1 else "shared"

    def _make(self, name: str, topology: allreduce.Topology, **options: Any) -> AllReduce:
        if self.delays.get(name) == MISSING:
            raise on_all_ranks(UnavailableError("it is not installed"), topology.world)
        backend = allreduce.create(name, topology, check="never", **options)
        route = backend.hooks.route

        def measured_route(call: Call) -> Work:
            work = route(call)

            def measured(flat: np.ndarray, op: Op) -> None:
                if name == self.refuses:
                    raise on_all_ranks(UnavailableError("it works no longer"), topology.world)
                work(flat, op)
                self.done.append(name)
                self.now += self.delays.get(name, 1.0)

            return measured

        backend._route = measured_route  # type: ignore[method-assign]
        del backend.hooks  # which are cached
        return backend

    def __enter__(self) -> "_Tried":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.reduce.close()

    def calls(self, count: int, array: np.ndarray, call: Callable[[], None] | None = None, op: str = "sum") -> None:
        """Reduce `array`, and compare each result."""
        for _ in range(count):
            array[...] = self.reduce.rank + 1
            if call is None:
                self.reduce(array, op)
            else:
                call()
            assert (array == SIZE * (SIZE + 1) // 2).all()


MISSING = -1.0
LENGTH = 4096
ROW = trials.ROWS[0][1]
ROUND = 2 * ROW  # calls of a round with two candidates
TRIAL = trials.CLEAR[0][0] * ROUND  # calls of the first trial, if one candidate is clearly the fastest
NODES = pytest.mark.parametrize("nodes", [None, 1])


@several
@NODES
@pytest.mark.parametrize("fast", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
def test_the_fastest_is_selected(
    nodes: int | None,
    fast: int,
    dtype: str,
    topology_of: Callable[..., allreduce.Topology],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = topology_of(nodes)
    names = "hierarchical_copy" if topology.nodes > 1 else "shared", "native"
    fastest, slowest = names[fast], names[1 - fast]
    with _Tried(topology, monkeypatch, {fastest: 1e-5, slowest: 3e-5}) as tried:
        array = tried.reduce.allocate(8 * LENGTH, dtype)
        tried.calls(TRIAL, array)
        assert sorted(tried.done) == sorted([fastest, slowest] * (TRIAL // 2))
        tried.calls(3, array)
        assert tried.done[TRIAL:] == [fastest] * 3
        why = f"measured: {fastest} 10 us, {slowest} 30 us, in the first {TRIAL} calls"
        assert tried.reduce.choice(array.size, dtype) == (fastest, why)
        assert tried.reduce.chosen(array) == fastest
        assert tried.reduce.chosen(np.empty(10, dtype)) == "native"


@several
def test_close_times_take_more_rounds(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closer, the more. A backend that is hardly faster does not replace the one in use."""
    with _Tried(flat, monkeypatch, {"native": 11e-5, "shared": 10e-5}) as tried:
        array = tried.reduce.allocate(1 << 17, "float32")
        tried.calls(trials.ROUNDS * ROUND + 5, array)
        assert tried.reduce.choice(array.size)[0] == "shared"
        assert tried.done.count("native") == trials.ROUNDS * ROW
        tried.delays["native"] = 9.6e-5
        tried.calls(trials.CHECK + trials.ROUNDS * ROUND, array)
        assert tried.reduce.choice(array.size)[0] == "shared"
        tried.done.clear()
        tried.delays["native"] = 7e-5
        tried.calls(2 * trials.CHECK + trials.ROUNDS * ROUND, array)
        assert tried.reduce.choice(array.size)[0] == "native"
        assert tried.done.count("shared") == 2 * trials.CHECK - 5 + trials.CLEAR[1][0] * ROW


@several
@pytest.mark.parametrize("length", [1 << 12, 1 << 20, 1 << 21])
def test_late_calls_do_not_decide(length: int, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each row takes a hundred times as long; in short rows another one of the fastest, too."""
    with _Tried(flat, monkeypatch, {"shared": 1e-5, "native": 15e-6}) as tried:
        array = tried.reduce.allocate(length, "float32")
        row = next((calls for most, calls in trials.ROWS if array.nbytes < most), trials.LONGEST_ROW)
        usual, late = tried.delays, {"shared": 1e-3, "native": 1e-3}
        for call in range(2 * row * trials.ROUNDS):
            tried.delays = late if call % row == 0 or (row > 2 and call % (2 * row) == 1) else usual
            tried.calls(1, array)
        assert tried.reduce.choice(array.size)[0] == "shared"


@several
def test_long_arrays_stay_with_the_rule(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trial is short; a few late calls, as beside a thread that computes, do not end it with the other one."""
    round_of_two = 2 * trials.LONGEST_ROW
    for late_rounds, rounds in ((0, 2), (2, 4)):
        with _Tried(flat, monkeypatch, {"shared": 1e-3, "native": 2e-3}) as tried:
            array, usual = tried.reduce.allocate(1 << 21, "float32"), tried.delays
            tried.delays = {"shared": 9e-3, "native": 2e-3}
            tried.calls(late_rounds * round_of_two, array)
            tried.delays = usual
            tried.calls((rounds - late_rounds) * round_of_two + 1, array)
            name, why = tried.reduce.choice(array.size)
            assert name == "shared"
            assert f"in the first {rounds * round_of_two} calls" in why


@several
def test_ranks_agree_though_they_measured_differently(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    """The slowest rank of each call counts."""
    delays = {"shared": 1e-5 if world.rank else 9e-5, "native": 3e-5}
    with _Tried(flat, monkeypatch, delays) as tried:
        array = tried.reduce.allocate(1 << 17, "float32")
        tried.calls(TRIAL + 2, array)
        found = tried.reduce.choice(array.size)
        assert found[0] == "native"
        assert "shared 90 us" in found[1]
        assert len(set(world.allgather(found))) == 1
        assert len(set(world.allgather(tuple(tried.done)))) == 1


@several
def test_it_looks_again(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound function and calls share one selection; each check that changes nothing doubles the time to the next."""
    with _Tried(flat, monkeypatch, {"shared": 1e-5, "native": 3e-5}) as tried:
        array = tried.reduce.allocate(LENGTH, "float32")
        bound = tried.reduce.bind(array, "sum")
        tried.calls(TRIAL // 2, array, bound)
        tried.calls(TRIAL // 2, array)
        tried.done.clear()
        tried.calls(trials.CHECK // 2, array, bound)
        tried.calls(trials.CHECK // 2, array)
        assert set(tried.done) == {"shared"}
        tried.calls(ROUND, array, bound)
        assert tried.done[trials.CHECK :].count("native") == ROW
        tried.done.clear()
        tried.calls(2 * trials.CHECK, array)
        assert set(tried.done) == {"shared"}
        tried.delays["shared"] = 9e-5
        tried.calls(TRIAL, array)
        tried.done.clear()
        tried.calls(10, array, bound)
        tried.calls(10, array)
        assert set(tried.done) == {"native"}
        begin = TRIAL + trials.CHECK + ROUND + 2 * trials.CHECK + 1
        why = f"measured: native 30 us, shared 90 us, in calls {begin} to {begin + TRIAL - 1}"
        assert tried.reduce.choice(array.size) == ("native", why)


@several
@NODES
def test_a_candidate_that_is_not_available(
    nodes: int | None, topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its creation, or in its first call: the others go on, on all ranks."""
    monkeypatch.setattr(notices, "_said", set())
    topology = topology_of(nodes)
    with _Tried(topology, monkeypatch, {"native": MISSING}) as tried:
        array = np.empty(LENGTH, "float32")
        tried.calls(5, array)
        assert "native" not in tried.done
    with _Tried(topology, monkeypatch, {}) as tried:
        array = np.empty(1 << 17, "float32")
        tried.refuses = tried.first
        tried.calls(3 * TRIAL, array)
        assert tried.first not in tried.done
        assert tried.reduce.chosen(array) == "native"


@several
def test_a_new_signature_of_a_known_size_is_not_tried(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _Tried(flat, monkeypatch, {"shared": 3e-5, "native": 1e-5}) as tried:
        array = tried.reduce.allocate(LENGTH + 10, "float32")
        tried.calls(TRIAL, array[:LENGTH])
        tried.done.clear()
        tried.calls(trials.CHECK, array)
        assert set(tried.done) == {"native"}
        tried.calls(TRIAL, array)
        assert "shared" in tried.done


@several
def test_trees_are_tried(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    with _Tried(flat, monkeypatch, {"shared": 1e-5, "native": 3e-5}) as tried:
        tree = {"a": np.empty((64, 64), "float32"), "b": [np.empty(10, "float32"), np.empty(LENGTH, "float64")]}
        for _ in range(TRIAL + 1):
            for array in (tree["a"], *tree["b"]):
                array[...] = tried.reduce.rank + 1
            tried.reduce(tree, "sum")
            for array in (tree["a"], *tree["b"]):
                assert (array == SIZE * (SIZE + 1) // 2).all()
        assert tried.done[-2:] == ["shared", "shared"]
        assert tried.done.count("native") == TRIAL


@several
@pytest.mark.parametrize("options", [{"trial": False}, {"choose": lambda *_: ("shared", "mine")}])
def test_without_trials(options: dict[str, Any], flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    with _Tried(flat, monkeypatch, {"shared": 9e-5, "native": 1e-5}, **options) as tried:
        array = tried.reduce.allocate(1 << 17, "float32")
        tried.calls(TRIAL + trials.CHECK + 5, array)
        assert set(tried.done) == {"shared"}
        assert "measured" not in tried.reduce.choice(array.size)[1]


@several
def test_small_arrays_and_16_bit_floats_are_not_tried(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _Tried(flat, monkeypatch, {}) as tried:
        tried.calls(TRIAL, np.empty(trials.LEAST_BYTES // 4 - 1, "float32"))
        assert set(tried.done) == {"native"}
        tried.done.clear()
        tried.calls(TRIAL, tried.reduce.allocate(LENGTH * 10, "float16"))
        assert set(tried.done) == {"shared"}


@several
def test_same_bits(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where all orders of the ranks give the same bits; then repeated runs give the same bits, too."""
    with _Tried(flat, monkeypatch, {}, trial="same_bits") as tried:
        for dtype, op, free in (("int32", "sum", True), ("float32", "sum", SIZE == 2), ("float32", "max", False)):
            tried.done.clear()
            array = tried.reduce.allocate(1 << 17, dtype)
            for _ in range(TRIAL):
                tried.reduce(array, op)
            assert (len(set(tried.done)) == 2) == free, (dtype, op)


@several
def test_bits_of_trials_of_two_ranks(flat: allreduce.Topology) -> None:
    if SIZE > 2:
        pytest.skip("of three ranks the backends add in different orders")
    mine = np.random.default_rng(flat.rank).standard_normal(LENGTH).astype("float32")
    for op in ("sum", "mean", "prod"):
        seen = set()
        with allreduce.create("auto", flat, table="", trial="same_bits") as reduce:
            for _ in range(3 * TRIAL):
                array = mine.copy()
                reduce(array, op)
                seen.add(array.tobytes())
        assert len(seen) == 1


def test_unknown_trial(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    text = raised_everywhere(world, OptionError, lambda: allreduce.create("auto", flat, trial="sometimes"))
    assert "'sometimes' is unknown; use True, False, 'same_bits'" in text


@pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="needs a node of several ranks, and another one")
def test_a_mean_of_all_ranks_as_a_part_of_another_backend(topology_of: Any) -> None:
    """Across nodes fewer ranks add up than the mean divides by."""
    with allreduce.create("hierarchical_copy", topology_of(2), cross="auto") as reduce:
        for length in (1000, 50_000, 1_000_000):
            array = np.full(length, MPI.COMM_WORLD.rank + 1.0)
            reduce(array, "mean")
            assert (array == (MPI.COMM_WORLD.size + 1) / 2).all(), length

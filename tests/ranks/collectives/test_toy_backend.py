"""A new algorithm is one class, and one call of `register`."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Algorithm, Context, algorithms
from allreduce.algorithms.ring import Ring
from allreduce.arrays import dtypes
from allreduce.arrays.ops import Op
from allreduce.errors import DisagreementError, OptionError
from allreduce.topology import Topology
from tests.ranks.grid import run_grid
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 1 2 3"

WORLD = MPI.COMM_WORLD
several = pytest.mark.skipif(WORLD.size == 1, reason="one rank has nothing to select")


class Toy(Algorithm):
    """Every rank gets all arrays, and adds them in rank order. backwards: add in the opposite order."""

    def __init__(self, context: Context, *, backwards: bool = False) -> None:
        super().__init__(context)
        self._order = list(range(self.size))[:: -1 if backwards else 1]

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        everything = self.workspace.array("all", buffer.size * self.size, buffer.dtype)
        self.comm.Allgather(dtypes.wire(buffer), dtypes.wire(everything))
        total = self.workspace.array("total", buffer.size, dtypes.TYPES[buffer.dtype].accumulator)
        sides = everything.reshape(self.size, buffer.size)
        np.copyto(total, sides[self._order[0]])
        for rank in self._order[1:]:
            op.combine(total, sides[rank], out=total)
        op.finish(total)
        np.copyto(buffer, total, casting="unsafe")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "BACKENDS", dict(algorithms.BACKENDS))
    allreduce.register("toy", Toy)


def test_what_can_not_be_registered() -> None:
    class Old:
        def _reduce(self, buffer: np.ndarray, op: Op) -> None: ...

    with pytest.raises(OptionError, match="def reduce"):
        allreduce.register("old", Old)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="there is an algorithm of this name"):
        allreduce.register("ring", Toy)


def test_options_and_names(flat: Topology) -> None:
    assert "toy" in allreduce.available(flat)
    with allreduce.create("toy", flat, backwards=True, check=True) as reduce:
        array = np.full(4, reduce.rank)
        reduce(array, "max")
        assert set(array.tolist()) == {reduce.size - 1}
    with pytest.raises(OptionError, match="Its options are: backwards, check, compress"):
        allreduce.create("toy", flat, forwards=True)


@pytest.mark.parametrize("part", ["node", "cross"])
def test_as_a_part(part: str, topology_of: Callable[..., Topology]) -> None:
    """Any backend can work across nodes; inside nodes a backend needs two phases."""
    topology = topology_of(1)
    if part == "node":
        with pytest.raises(OptionError, match="node='toy' can't be used inside nodes"):
            allreduce.create("hierarchical_copy", topology, node="toy")
        return
    with allreduce.create("hierarchical_copy", topology, cross="toy") as reduce:
        run_grid(reduce, "float32", WORLD, (0, 1, 1000))


def test_auto_selects_it_if_its_cost_is_the_lowest(flat: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, 1.0):
        monkeypatch.setattr(Toy, "cost", staticmethod(lambda *_, seconds=seconds: seconds))
        with allreduce.create("auto", flat, table="") as reduce:
            array = np.full(1000, reduce.rank, "float16")
            assert (reduce.chosen(array) == "toy") == (seconds == 0 and reduce.size > 1)
            reduce(array, "sum")
            assert set(array.tolist()) == {sum(range(reduce.size))}


def _free(*_: object) -> float:
    return 0.0


@several
def test_ranks_that_registered_other_algorithms_disagree(flat: Topology) -> None:
    if WORLD.rank == 0:
        allreduce.register("mine", type("Mine", (Toy,), {"cost": staticmethod(_free)}))
    text = raised_everywhere(WORLD, DisagreementError, lambda: allreduce.create("auto", flat, table=""))
    assert "mine: Mine" in text


@several
@pytest.mark.parametrize("kind", ["inherits", "keyword", "rounds", "by_array"])
def test_auto_leaves_out_what_it_can_not_select(kind: str, flat: Topology) -> None:
    class Mine(Toy):
        cost = staticmethod(_free)
        by_array = kind == "by_array"

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            if kind == "rounds":
                self.lossless = context.make("native")

    class Keyword(Toy):
        cost = staticmethod(_free)

        def __init__(self, context: Context, *, needed: int) -> None:
            super().__init__(context)

    class Inherits(Ring):
        def __init__(self, context: Context, *, needed: int = 1) -> None:
            super().__init__(context)

    allreduce.register("mine", {"keyword": Keyword, "inherits": Inherits}.get(kind, Mine))
    with allreduce.create("auto", flat, table="") as reduce:
        array = np.full(1000, reduce.rank + 0.0)
        assert reduce.chosen(array) != "mine"
        assert "mine" not in reduce.chosen(array, reason=True)
        reduce(array, "sum")
        assert set(array.tolist()) == {sum(range(reduce.size))}


@several
def test_what_auto_refuses_by_name(flat: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (-1.0, float("nan")):
        monkeypatch.setattr(Toy, "cost", staticmethod(lambda *_, seconds=seconds: seconds))
        with allreduce.create("auto", flat, table="") as reduce:
            text = raised_everywhere(WORLD, OptionError, partial(reduce, np.ones(10), "sum"))
            assert f"the cost of 'toy' is {seconds} s for 80 bytes" in text

    class Holder(Toy):
        cost = staticmethod(_free)

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.holds = [context.make("auto", table="")]

    allreduce.register("holder", Holder)
    for name in ("holder", "auto"):
        text = raised_everywhere(WORLD, OptionError, partial(allreduce.create, name, flat))
        assert "'holder' makes 'auto'" in text
        assert "without end" in text


@several
def test_a_wrong_backend_is_found(flat: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid can fail: on wrong sums, on different bits on one rank, on memory written beside a slice."""
    right = Toy.reduce

    def wrong(kind: str, self: Toy, buffer: np.ndarray, op: Op) -> None:
        right(self, buffer, op)
        if kind == "different bits" and self.rank == 0:
            buffer[-1] = np.nextafter(buffer[-1], np.float32(9))
        if kind == "wrong results":
            buffer[:] = np.roll(buffer, 1)
        if kind == "wrote outside of the slice" and isinstance(buffer.base, np.ndarray):
            before = buffer.ctypes.data - buffer.base.ctypes.data
            buffer.base.reshape(-1).view(np.uint8)[max(before - buffer.itemsize, 0) : before] = 0

    for words in ("different bits", "wrong results", *["wrote outside of the slice"] * (WORLD.size <= 3)):
        monkeypatch.setattr(Toy, "reduce", lambda *given, words=words: wrong(words, *given))
        with allreduce.create("toy", flat) as reduce, pytest.raises(AssertionError, match=words):
            run_grid(reduce, "float32", WORLD, (1000,))

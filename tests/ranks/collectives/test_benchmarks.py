"""The measuring code of the benchmarks on real ranks: what is timed, and what is verified."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from benchmarks.lib.timing import MOST_BURST, PERIOD, Cell, Checker, Plan, measure
from tests.ranks.grid import numpy_dtype

JOBS = "openmpi 1 2 3, mpich 2"

DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8", "int8")
CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("sum", "mean", "max", "min", "prod")
    if op != "mean" or "int" not in dtype
]


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_right_results_pass_and_wrong_ones_are_counted(
    dtype: str, op: str, flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    checker = Checker(world, numpy_dtype(dtype), op)
    array = np.zeros(3 * PERIOD + 100, numpy_dtype(dtype))
    with allreduce.create("ring", flat) as reduce:
        checker.fill(array)
        mine = array.copy()
        reduce(array, op)
    assert checker.wrong(array) == 0
    places = [0, PERIOD - 1, PERIOD, array.size - 1]
    array[places] = array[places] + 32  # more than any rounding
    assert checker.wrong(array) == len(places) * world.size
    if world.size > 1 and op != "mean":
        assert checker.wrong(mine) > 0, "unreduced values pass"


def test_results_in_the_wrong_place_are_wrong(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    checker = Checker(world, np.dtype("float32"), "sum")
    array = np.zeros(1 << 16, np.float32)
    with allreduce.create("ring", flat) as reduce:
        checker.fill(array)
        reduce(array, "sum")
    for shift in (1, 1 << 10, 1 << 13, 1 << 15):
        assert checker.wrong(np.roll(array, shift)) > array.size // 2 * world.size
    array[7] = np.nan if world.rank == world.size - 1 else array[7]
    assert checker.wrong(array) == 1


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that `measure` uses."""
    made = Clock()
    monkeypatch.setattr(sys.modules["benchmarks.lib.timing"], "time", made)
    return made


def test_an_iteration_takes_as_long_as_its_slowest_rank(world: MPI.Intracomm, clock: Clock) -> None:
    def late(array: np.ndarray) -> None:
        if world.rank == world.size - 1:
            clock.now += 0.02

    cells = [Cell("late", "foreign", late, np.zeros(8)), Cell("quick", "foreign", lambda array: None, np.zeros(8))]
    times, wrong = measure(world, cells, 8, Plan(1.0, iterations=12, warmups=1), None)
    assert times.shape == (2, 12)
    assert times[0] == pytest.approx([0.02] * 12)
    assert times[1].max() == 0
    assert wrong == [None, None]
    assert len(set(world.allgather(times.tobytes()))) == 1, "the ranks differ about the times"


def test_contenders_take_turns(world: MPI.Intracomm) -> None:
    """A B B A ..., in an order that is drawn, in bursts for small arrays and one by one for large ones."""
    order: list[str] = []
    small, large = np.zeros(8), np.zeros(1 << 20)
    for array, burst in ((small, "A" * (MOST_BURST + 1)), (large, "A")):
        cells = [Cell(name, "foreign", lambda _, name=name: order.append(name), array) for name in "AB"]  # type: ignore[misc]
        order.clear()
        measure(world, cells, array.size, Plan(1.0, iterations=40, warmups=0), None)
        rounds = len(burst) * 2
        last = "".join(order[-4 * rounds :])
        found = {last[start : start + rounds] for start in range(0, len(last), rounds)}
        assert found == {burst + burst.replace("A", "B"), burst.replace("A", "B") + burst}
        assert len(set(world.allgather("".join(order)))) == 1


def test_a_contender_may_return_its_results(world: MPI.Intracomm) -> None:
    """As MLX does. They are verified, and the array is not."""
    dtype, checker = np.dtype("float32"), Checker(world, np.dtype("float32"), "sum")
    sums = [lambda array: world.allreduce(array), lambda array: world.allreduce(array) + (world.rank == 0)]
    cells = [Cell(name, "foreign, cold", call, np.zeros(100, dtype)) for name, call in zip("AB", sums, strict=True)]
    _, wrong = measure(world, cells, 100, Plan(1.0, iterations=2, warmups=1), checker)
    assert wrong == [0, 100]


def test_iterations_follow_the_budget(world: MPI.Intracomm, clock: Clock) -> None:
    def slow(array: np.ndarray) -> None:
        clock.now += 0.002

    cells = [Cell("slow", "foreign", slow, np.zeros(1 << 20))]
    few, _ = measure(world, cells, 1 << 20, Plan(0.001), None)
    assert few.shape == (1, 5)
    more, _ = measure(world, cells, 1 << 20, Plan(0.3), None)
    assert 145 <= more.shape[1] <= 150

"""The measuring code of the benchmarks on real ranks: what is timed, and what is verified."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from benchmarks.lib.timing import MOST_BURST, PERIOD, Cell, Checker, Plan, measure
from tests.ranks.grid import numpy_dtype

JOBS = "openmpi 1 2, mpich 2"

WORLD = MPI.COMM_WORLD
DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8", "int8")
CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("sum", "mean", "max", "min", "prod")
    if op != "mean" or "int" not in dtype
]


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_right_results_pass_and_wrong_ones_are_counted(dtype: str, op: str, flat: allreduce.Topology) -> None:
    checker = Checker(WORLD, numpy_dtype(dtype), op)
    array = np.zeros(3 * PERIOD + 100, numpy_dtype(dtype))
    with allreduce.create("ring", flat) as reduce:
        checker.fill(array)
        mine = array.copy()
        reduce(array, op)
    assert checker.wrong(array) == 0
    if op == "sum" and dtype.startswith("float"):
        for shift in (1, 1 << 10, 1 << 12):
            assert checker.wrong(np.roll(array, shift)) > array.size // 2 * WORLD.size
        spoilt = array.copy()
        spoilt[7] = np.nan if WORLD.rank == WORLD.size - 1 else spoilt[7]
        assert checker.wrong(spoilt) == 1
    places = [0, PERIOD - 1, PERIOD, array.size - 1]
    array[places] = array[places] + 32  # more than any rounding
    assert checker.wrong(array) == len(places) * WORLD.size
    if WORLD.size > 1 and op != "mean":
        assert checker.wrong(mine) > 0, "unreduced values pass"


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


def test_an_iteration_takes_as_long_as_its_slowest_rank(clock: Clock) -> None:
    def late(array: np.ndarray) -> None:
        if WORLD.rank == WORLD.size - 1:
            clock.now += 0.02

    cells = [Cell("late", "foreign", late, np.zeros(8)), Cell("quick", "foreign", lambda array: None, np.zeros(8))]
    times, wrong = measure(WORLD, cells, 8, Plan(1.0, iterations=12, warmups=1), None)
    assert times.shape == (2, 12)
    assert times[0] == pytest.approx([0.02] * 12)
    assert times[1].max() == 0
    assert wrong == [None, None]
    assert len(set(WORLD.allgather(times.tobytes()))) == 1, "the ranks differ about the times"


def test_contenders_take_turns() -> None:
    """A B B A ..., in an order that is drawn, in bursts for small arrays and one by one for large ones."""
    order: list[str] = []
    small, large = np.zeros(8), np.zeros(1 << 20)
    for array, burst in ((small, "A" * (MOST_BURST + 1)), (large, "A")):
        cells = [Cell(name, "foreign", lambda _, name=name: order.append(name), array) for name in "AB"]  # type: ignore[misc]
        order.clear()
        measure(WORLD, cells, array.size, Plan(1.0, iterations=40, warmups=0), None)
        rounds = len(burst) * 2
        last = "".join(order[-4 * rounds :])
        found = {last[start : start + rounds] for start in range(0, len(last), rounds)}
        assert found == {burst + burst.replace("A", "B"), burst.replace("A", "B") + burst}
        assert len(set(WORLD.allgather("".join(order)))) == 1


def test_a_contender_may_return_its_results() -> None:
    """As MLX does. They are verified, and the array is not."""
    dtype, checker = np.dtype("float32"), Checker(WORLD, np.dtype("float32"), "sum")
    sums = [lambda array: WORLD.allreduce(array), lambda array: WORLD.allreduce(array) + (WORLD.rank == 0)]
    cells = [Cell(name, "foreign, cold", call, np.zeros(100, dtype)) for name, call in zip("AB", sums, strict=True)]
    _, wrong = measure(WORLD, cells, 100, Plan(1.0, iterations=2, warmups=1), checker)
    assert wrong == [0, 100]


def test_iterations_follow_the_budget(clock: Clock) -> None:
    def slow(array: np.ndarray) -> None:
        clock.now += 0.002

    cells = [Cell("slow", "foreign", slow, np.zeros(1 << 20))]
    few, _ = measure(WORLD, cells, 1 << 20, Plan(0.001), None)
    assert few.shape == (1, 5)
    more, _ = measure(WORLD, cells, 1 << 20, Plan(0.3), None)
    assert 145 <= more.shape[1] <= 150

"""The test grid of the design on every backend, topology and dtype; see grid.py."""

import itertools
import zlib
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError
from allreduce.transport import point_to_point
from tests.ranks.grid import DTYPES, QUICK, compare, expected, lengths, numpy_dtype, run_grid, shapes, values
from tests.ranks.variants import Staged

JOBS = "quick 1 2 3, openmpi 1 2 3 4 5, mpich 1 2 3 4 5"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
SHAPES = shapes(SIZE)
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in allreduce.NAMES},
    "hierarchical_copy+ring+halving_doubling": ("hierarchical_copy", {"node": "ring", "cross": "halving_doubling"}),
    "hierarchical_copy+halving_doubling+reduce_to_one": (
        "hierarchical_copy",
        {"node": "halving_doubling", "cross": "reduce_to_one"},
    ),
    "shared+staged": (Staged, {}),
    "reduce_to_one+root": ("reduce_to_one", {"root": SIZE - 1}),
}
PLACES = [(variant, shape) for variant in VARIANTS for shape in SHAPES]

WITHOUT_SEGMENTS = ("native", "nccl", "auto", "shared", "hierarchical_copy")  # of messages of their own
LONG = [*(set(allreduce.NAMES) - {*WITHOUT_SEGMENTS}), "hierarchical_copy+ring+halving_doubling"]
LONG_PLACES = [place for place in PLACES if place[0] in LONG and place[1] in ("flat", "uneven")]


def dtypes_at(variant: str) -> tuple[str, ...]:
    """Return the dtypes of a variant on this number of ranks.

    On 2 ranks all dtypes; of composed backends, on 1, 4 and 5 ranks, and in a quick run one for each kind of sum; on
    3 ranks of Open MPI the three others. On 3 and more ranks of MPICH, whose calls take longest, one or two, which are
    others for each number of ranks.
    """
    if MPI.get_vendor()[0] == "MPICH" and SIZE > 2:
        return {3: ("float16", "int64"), 4: ("bfloat16",)}.get(SIZE, ("float32",))
    if SIZE == 2 and "+" not in variant and not QUICK:
        return DTYPES
    other = SIZE == 3 and not QUICK
    return ("float16", "float64", "int32") if other else ("bfloat16", "float32", "int64")


CASES = [(place, dtype) for place in PLACES for dtype in dtypes_at(place[0])]
every_place = pytest.mark.parametrize("reduce", PLACES, ids="-".join, indirect=True)


def each_of(cases: list[tuple[tuple[str, str], str]]) -> pytest.MarkDecorator:
    names = ["-".join([*place, dtype]) for place, dtype in cases]
    return pytest.mark.parametrize(("reduce", "dtype"), cases, ids=names, indirect=["reduce"])


every_case, every_float_case = each_of(CASES), each_of([case for case in CASES if not case[1].startswith("int")])


@pytest.fixture(scope="module")
def reduce(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    variant, shape = request.param
    name, options = VARIANTS[variant]
    # Comparing what ranks bring is a third of the time of many ranks, so these do it on one node alone.
    check = SIZE <= 2 or shape == "flat"
    try:
        made = allreduce.create(name, topology_of(SHAPES[shape]), check=check, **options)
    except UnavailableError as error:
        pytest.skip(f"{variant} on {shape}: {error}")
    yield made
    made.close()


@every_case
def test_grid(reduce: AllReduce, dtype: str) -> None:
    if not reduce.sums_half and dtype.endswith("float16"):
        pytest.skip(f"{reduce.name} refuses {dtype} by name")
    assert run_grid(reduce, dtype, WORLD) >= 4 * 4 * 2


@pytest.mark.parametrize("reduce", LONG_PLACES, ids="-".join, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_segments(reduce: AllReduce, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a segment is reduced, the next ones arrive in scratch memory that is used again. The segments are longer
    than those that MPI copies when it is called, so they are read later."""
    monkeypatch.setattr(point_to_point, "SEGMENT_BYTES", 16384)
    run_grid(reduce, dtype, WORLD, (100_003,))


@every_case
def test_phases(reduce: AllReduce, dtype: str) -> None:
    """reduce_scatter finishes this rank's slice; all_gather sends the owners' slices to all ranks."""
    if not reduce.two_phase:
        pytest.skip(f"{reduce.name} has no phases")
    failures, digests, parsed = [], {}, numpy_dtype(dtype)
    for length in lengths(SIZE):
        for kind, array in (("allocated", reduce.allocate(length, dtype)), ("foreign", np.empty(length, parsed))):
            for turn, op in enumerate(("sum", "max")):
                case = f"{kind}, length {length}, {op}"
                array[...] = values(parsed, length, WORLD.rank, turn)
                mine = reduce.reduce_scatter(array, op)
                want = expected(parsed, length, op, SIZE, turn)
                own = reduce.owned(length)
                if not (type(want)(want.low[own], want.high[own]).hold(mine) and _is_view(mine, array, own)):
                    failures.append(f"{case}: reduce_scatter gave {mine[:5]}")
                np.multiply(mine, 2, out=mine)
                reduce.all_gather(array)
                if not type(want)(2 * want.low, 2 * want.high).hold(array):
                    failures.append(f"{case}: all_gather gave {array[:5]}")
                digests[case] = zlib.adler32(array.view(np.uint8)) if length else 0
    compare(digests, WORLD)
    assert not failures, "\n".join(failures[:5])


@every_float_case
def test_max_and_min_keep_nan(reduce: AllReduce, dtype: str) -> None:
    """A NaN of any rank reaches all ranks, as in NumPy; with MPI_MAX that depends on its position."""
    parsed = numpy_dtype(dtype)
    if not reduce.sums_half and dtype.endswith("float16"):
        pytest.skip(f"{reduce.name} does not reduce {dtype}")
    wrong = []
    for length in (SIZE, 1001, 100003):
        for array in (reduce.allocate(length, dtype), np.empty(length, parsed)):
            for op in ("max", "min"):
                array[:] = WORLD.rank
                array[WORLD.rank :: 2 * SIZE] = np.nan  # one rank's
                array[SIZE :: 2 * SIZE] = np.nan  # of all ranks
                wanted = np.full(length, SIZE - 1 if op == "max" else 0, np.float32)
                for rank in range(SIZE + 1):
                    wanted[rank :: 2 * SIZE] = np.nan
                reduce(array, op)
                if not np.array_equal(array.astype(np.float32), wanted, equal_nan=True):
                    wrong.append((length, op))
    assert not wrong


@every_place
def test_zeros_and_nans_have_the_same_bits_on_all_ranks(reduce: AllReduce) -> None:
    """Of zeros of both signs, and of NaNs of several bits, the result depends on the order of the operands: it must be
    the same order on all ranks. MPICH's own sums of NaNs have other bits on some ranks."""
    own = {
        "zeros": np.array([0.0, -0.0], np.float32)[WORLD.rank % 2],
        "nans": np.array(0x7FC00000 | WORLD.rank << 4 | WORLD.rank % 2 << 31, np.uint32).view(np.float32),
    }
    by_mpich = MPI.get_vendor()[0] == "MPICH" and reduce.name in ("native", "auto")
    digests = {}
    wanted = (1, SIZE + 1, 1001)
    memories = {"allocated": [reduce.allocate(length, "float32") for length in wanted]}
    memories["foreign"] = [np.empty(length, "float32") for length in wanted]
    for name, kind, op in itertools.product(own, memories, ("sum", "max", "min")):
        if by_mpich and op == "sum" and name == "nans":
            continue
        for array in memories[kind]:
            array[:] = own[name]
            reduce(array, op)
            digests[f"{name}, {kind}, {op}, length {array.size}"] = zlib.adler32(array.view(np.uint8))
    compare(digests, WORLD)


@every_place
def test_average_is_another_name_of_mean(reduce: AllReduce) -> None:
    for names in (("mean", "average"), ("average", "mean"), ("average", "average")):
        for name in names:  # whatever a rank calls it
            array = np.full(SIZE + 1, WORLD.rank, "float32")
            reduce(array, name if WORLD.rank else "mean")
            assert (array == np.float32((SIZE - 1) / 2)).all()


def _is_view(mine: np.ndarray, array: np.ndarray, own: slice) -> bool:
    """Whether `mine` is this slice of `array`, not a copy."""
    return mine.size == array[own].size and (mine.size == 0 or mine.ctypes.data == array[own].ctypes.data)

"""CMA: access to the memory of other ranks, and the calls that do without it."""

import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import kernels, notices
from allreduce.algorithms import shared
from allreduce.errors import CommunicationError
from allreduce.transport import cma, huge_pages
from allreduce.transport.cma import CMA
from tests.ranks.grid import expected, values

JOBS = "openmpi 2 3 5, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
SUMMED = kernels.SUMMED if SIZE == 2 else ("bfloat16", "int32", "float64")  # one of each size, as many ranks take long


@several
def test_memory_that_is_gone() -> None:
    reached = CMA(WORLD)
    if not reached.works:
        pytest.skip("this system forbids it")
    with pytest.raises(CommunicationError, match="is no longer accessible: Bad address"):
        reached.read((WORLD.rank + 1) % SIZE, 8, np.zeros(3))


@pytest.fixture
def reached(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short arrays are reached by CMA too, and not staged."""
    if not flat.cma.works:
        pytest.skip("this system forbids it")
    monkeypatch.setattr(shared, "CACHED_BYTES", 0)


def mapped(length: int) -> tuple[mmap.mmap, int]:
    """Return anonymous memory, and its address."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(length))
    return memory, MPI.Get_address(memory)


def need_huge_pages() -> None:
    """Skip the test on all ranks unless all can move pages."""
    try:
        memory, address = mapped(4 * huge_pages.HUGE)
        memory.madvise(huge_pages.COLLAPSE, -address % huge_pages.HUGE, huge_pages.HUGE)
        works = "[never]" not in huge_pages.SETTING.read_text()
    except OSError:
        works = False
    if not WORLD.allreduce(works, MPI.LAND):
        pytest.skip("this system can't move pages")


def huge_bytes(address: int, field: str = "AnonHugePages") -> int:
    """Return how many bytes of the mapping that holds `address` are in huge pages."""
    for mapping in re.finditer(rf"^(\w+)-(\w+) (?:.*\n)*?{field}: +(\d+)", SMAPS.read_text(), re.MULTILINE):
        if int(mapping[1], 16) <= address < int(mapping[2], 16):
            return 1024 * int(mapping[3])
    raise AssertionError


SMAPS = Path("/proc/self/smaps")


@several
def test_an_array_that_is_reduced_again_is_moved_to_huge_pages(flat: allreduce.Topology) -> None:
    """Its values and its address stay."""
    need_huge_pages()
    if not flat.cma.works:
        pytest.skip("this system forbids it")
    memory, address = mapped(4 * huge_pages.HUGE)
    array = np.frombuffer(memory, np.float32)
    array[:] = np.arange(array.size) % 97
    before = huge_bytes(address)  # of neighbours
    with allreduce.create("shared", flat) as reduce:
        for moved in (0, 0, 3):
            assert huge_bytes(address) >= before + moved * huge_pages.HUGE
            assert moved or huge_bytes(address) == before
            reduce(array, "max")
            assert (array == np.arange(array.size) % 97).all()


@several
def test_allocated_arrays_are_in_huge_pages(flat: allreduce.Topology) -> None:
    """All ranks map all of them so; the rest of an array, which fills no huge page, is as usual."""
    need_huge_pages()
    with allreduce.create("shared", flat) as reduce:
        array = reduce.allocate((4 * huge_pages.HUGE + 12) // 4)
        assert huge_bytes(MPI.Get_address(array), "ShmemPmdMapped") >= SIZE * 3 * huge_pages.HUGE
        array[:] = np.arange(array.size) % 97
        reduce(array, "max")
        assert (array == np.arange(array.size) % 97).all()


@several
@pytest.mark.parametrize("call", ["_read", "_write"])
@pytest.mark.parametrize("lacking", ["everywhere", "one rank"])
def test_forbidden(monkeypatch: pytest.MonkeyPatch, lacking: str, call: str) -> None:
    """If the system forbids it on one rank, no rank uses it."""
    if lacking == "everywhere" or WORLD.rank == SIZE - 1:
        monkeypatch.setattr(cma, call, lambda *_: -1)
    assert not allreduce.Topology(WORLD).cma.works


@several
@pytest.mark.usefixtures("reached")
def test_a_few_bytes_at_a_time(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system moves at most 2 GiB in a call, and returns the number of bytes moved."""

    def limited(function: Callable[..., int]) -> Callable[..., int]:
        def move(pid: int, here: cma._Span, _: int, there: cma._Span, *rest: int) -> int:
            here.nbytes = there.nbytes = min(here.nbytes, 1001)
            return function(pid, here, 1, there, *rest)

        return move

    for call in ("_read", "_write"):
        monkeypatch.setattr(cma, call, limited(getattr(cma, call)))
    with allreduce.create("shared", flat) as reduce:
        array = values(np.dtype("float32"), 10_000, WORLD.rank, 0).copy()
        part = array.copy()
        reduce(array, "sum")
        assert expected(np.dtype("float32"), 10_000, "sum", SIZE, 0).hold(array)
        reduce.reduce_scatter(part, "sum")  # type: ignore[attr-defined]
        reduce.all_gather(part)
        assert np.array_equal(array, part)


@several
@pytest.mark.usefixtures("reached")
def test_memory_that_nobody_reaches(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory of a device, say, on one rank: the array goes through the staging buffer on all ranks, which is
    reported."""
    monkeypatch.setattr(notices, "_said", set())
    with allreduce.create("shared", flat) as reduce:
        staging = reduce._algorithm._staging  # type: ignore[attr-defined]
        array = values(np.dtype("float32"), 1000, WORLD.rank, 0).copy()
        reduce(array, "max")
        assert not staging.any()
        with monkeypatch.context() as patch:
            if WORLD.rank == SIZE - 1:
                patch.setattr(flat.cma, "address", lambda _: 0)
            again = values(np.dtype("float32"), 1000, WORLD.rank, 0).copy()
            reduce(again, "max")
        assert staging.any()
        assert expected(np.dtype("float32"), 1000, "max", SIZE, 0).hold(again)
        assert np.array_equal(array, again)
    said = [record.message for record in caplog.records if "two more copies" in record.message]
    assert said == [f"allreduce: {shared.STAGES}"] * (WORLD.rank == 0)


@several
@pytest.mark.usefixtures("reached")
def test_float16_at_any_address(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast code for float16 is used at whatever address a rank's chunk begins, in long arrays."""
    real, fast = kernels.sum_arrays, []

    def sum_arrays(*args: Any) -> bool:
        fast.append(real(*args))
        return fast[-1]

    monkeypatch.setattr(kernels, "sum_arrays", sum_arrays)
    monkeypatch.setattr(shared, "STAGED_BYTES", 0)
    with allreduce.create("shared", flat) as reduce:
        for length in range(600_000, 600_000 + 2 * SIZE):
            reduce(np.ones(length, np.float16), "sum")
    assert fast == [kernels.status() == "C"] * 2 * SIZE


@several
@pytest.mark.parametrize("cores", [1, SIZE])
@pytest.mark.parametrize("dtype", SUMMED)
def test_short_sums(dtype: str, cores: int, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that are copied, staged, summed in place, and too long for one call of C; one rank after the other is
    late. cores: of the node, for staging needs one for each rank."""
    monkeypatch.setattr(flat, "cores", cores)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with allreduce.create("shared", flat) as reduce:
        _, room = shared._divided(SIZE, crowded=False)
        limits = {*shared.COPIED_BYTES, shared.STAGED_BYTES // SIZE, room, shared.IN_PLACE_BYTES}
        for length in (1, SIZE + 1, 1025, *(limit // kind.itemsize + more for limit in limits for more in (0, 1))):
            for array in (reduce.allocate(length + 3, kind)[3:], np.empty(length, kind)):
                other, bound = np.empty_like(array), reduce.bind(array, "sum")
                for turn in range(min(SIZE, 4)):
                    if turn == WORLD.rank:
                        time.sleep(2e-3)
                    for each in (array, other, array):
                        each[:] = values(kind, length, WORLD.rank, turn)
                        bound() if turn % 2 and each is array else reduce(each, "sum")
                        assert expected(kind, length, "sum", SIZE, turn).hold(each)


@several
def test_short_sums_of_many_ranks(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node of very many ranks, arrays from `allocate` that are copied elsewhere do not fit among the copies."""
    monkeypatch.setattr(shared, "STAGED_BYTES", SIZE * min(shared.CROWDED_BYTES) // 4)
    test_short_sums("float32", 1, flat, monkeypatch)


@several
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_short_sums_have_the_bits_of_long_ones(dtype: str, flat: allreduce.Topology) -> None:
    """Also on all ranks, whose arrays begin at other addresses; of two NaNs that are added, either may remain."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(WORLD.rank).integers(0, 256, (999, kind.itemsize), np.uint8)
    source = np.frombuffer(bits.tobytes(), kind)
    with allreduce.create("shared", flat) as reduce:
        for op in ("sum", "mean"):
            room = np.empty(999 + SIZE, kind)
            short = room[WORLD.rank : WORLD.rank + 999]
            long = np.zeros(max(shared.STAGED_BYTES, 999), kind)
            short[:] = long[:999] = source
            reduce(short, op)
            reduce(long, op)
            found, wanted = (each.view(f"u{kind.itemsize}") for each in (short, long[:999]))
            number = ~np.isnan(short)
            assert (number == ~np.isnan(long[:999])).all()
            assert number.sum() > 500
            assert (found[number] == wanted[number]).all()
            assert (reduce.stack(found) == found).all()


@several
def test_short_sums_where_shared_memory_is_almost_full(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for the copies of short arrays, on any rank."""
    monkeypatch.setattr(shared, "STAGED_BYTES", 1 << 50)
    with allreduce.create("shared", flat) as reduce:
        for array in (reduce.allocate(3), np.zeros(3, np.float32)):
            array[:] = reduce.rank
            reduce(array, "sum")
            assert array.tolist() == [sum(range(SIZE))] * 3

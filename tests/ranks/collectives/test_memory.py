"""Memory: a second call allocates nothing, slices count as allocated, arrays outlive their backend."""

import errno
import gc
import itertools
import os
import re
import secrets
import tracemalloc
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.algorithms.shared import ALL_CACHED_BYTES, CACHED_BYTES, Shared
from allreduce.arrays.memory_kinds import ALLOCATED
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError
from allreduce.transport.shared_segment import STAGING_BYTES
from tests.ranks.grid import expected, numpy_dtype, shapes, values
from tests.ranks.together import raised_everywhere, usable
from tests.ranks.variants import Staged
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
LENGTH = 200_000
SMALL_BYTES = 100_000  # requests, views and lists; an array of LENGTH elements is at least four times that


@pytest.fixture(params=[*allreduce.NAMES, "ring, int8"])
def reduce(request: pytest.FixtureRequest, flat: allreduce.Topology) -> Generator[AllReduce]:
    name, _, compress = request.param.partition(", ")
    made = usable(name, flat, **({"compress": compress} if compress else {}))
    yield made
    made.close()


@pytest.mark.parametrize(("dtype", "op"), [("float32", "mean"), ("float64", "sum"), ("bfloat16", "max")])
@pytest.mark.parametrize("where", ["allocated", "slice", "foreign"])
def test_second_call_allocates_nothing(reduce: AllReduce, where: str, dtype: str, op: str) -> None:
    if dtype == "bfloat16" and not reduce.sums_half:
        pytest.skip(f"{reduce.name} refuses {dtype}")
    array = reduce.allocate(LENGTH + 10, dtype)
    array = {"allocated": array, "slice": array[5:-5], "foreign": np.zeros(LENGTH, numpy_dtype(dtype))}[where]
    reduce(array, op)
    gc.collect()
    tracemalloc.start()  # NumPy reports its memory to it
    try:
        reduce(array, op)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SMALL_BYTES, (
        f"{peak} bytes allocated in the second call: take scratch memory from self.workspace.array(name, length, "
        "dtype), which keeps it from call to call, not from np.empty (docs/contribute/backend.md)"
    )


def test_arrays_outlive_their_backend(reduce: AllReduce) -> None:
    array = reduce.allocate(1000, "float64")
    unused = reduce.allocate(10, "int64")
    assert not array.any()
    assert not unused.any()
    del unused
    array[:] = np.arange(1000)
    part = array[10:20]
    reduce.close()
    assert np.array_equal(array, np.arange(1000))
    array += 1
    del array
    gc.collect()
    assert np.array_equal(part, np.arange(11, 21))


def _shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("rw-s")  # whatever made them


NETWORK = partial(NumpyNetwork, [64, 32, 3])
DROPPED: dict[str, Callable[[], object]] = {
    "replicated": lambda: MirroredTrainer(NETWORK()),
    "sharded": lambda: MirroredTrainer(NETWORK(), update="sharded"),
    "central": lambda: CentralStorageTrainer(NETWORK()),
    "backend": lambda: allreduce.create("shared").allocate(LENGTH, "float32")[:0].size,
    "topology": lambda: allreduce.create("auto", allreduce.Topology()).allocate(LENGTH, "float32")[:0].size,
}


@pytest.mark.parametrize("kind", DROPPED)
def test_what_is_dropped_with_its_topology_gives_its_memory_back(kind: str) -> None:
    """Without close(), and without another rank's help."""
    mappings = []
    for _ in range(4):
        DROPPED[kind]()
        gc.collect()
        mappings.append(_shared_mappings())
        WORLD.Barrier()
    assert mappings[1] == mappings[-1], mappings


@pytest.mark.parametrize("name", ["shared", "auto", "hierarchical_copy"])
def test_arrays_give_their_memory_back(name: str, flat: allreduce.Topology) -> None:
    """Also arrays that are alive when the backend is closed, without another rank's help."""
    mappings, kept = [], []
    for _ in range(6):
        with allreduce.create(name, flat) as reduce:
            array = reduce.allocate(LENGTH)
            kept.append(array if WORLD.rank == 0 else None)  # one rank holds all of them
        del array
        mappings.append(_shared_mappings())
    assert mappings[-1] - mappings[0] == (5 if WORLD.rank == 0 else 0)
    kept.clear()
    assert _shared_mappings() == mappings[-1] - (6 if WORLD.rank == 0 else 0)


@pytest.mark.parametrize("shape", shapes(SIZE))
@pytest.mark.parametrize("name", ["shared", "hierarchical_copy"])
def test_slices_are_reduced_without_staging(
    name: str, shape: str, topology_of: Callable[..., allreduce.Topology]
) -> None:
    topology = topology_of(shapes(SIZE)[shape])
    if name == "shared" and topology.nodes > 1:
        pytest.skip("several nodes")
    reduce = allreduce.create(name, topology)
    algorithm = reduce._algorithm
    shared = algorithm if isinstance(algorithm, Shared) else algorithm._node  # type: ignore[attr-defined]
    array = reduce.allocate(1000, "float32")
    for span in (slice(0, 1000), slice(3, 500), slice(999, 1000), slice(10, 10)):
        part = array[span]
        part[:] = values(part.dtype, part.size, WORLD.rank, 0)
        if part.size:
            assert reduce._allocations.memory_of(part) == ALLOCATED
        reduce(part, "sum")
        assert expected(part.dtype, part.size, "sum", SIZE, 0).hold(part)
    assert not shared._staging.any()  # nothing was ever staged
    reduce.close()


class _Full:
    f_bavail, f_frsize = 100, 1024


def _full(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _Full() if "shm" in str(path) else real(path))


@pytest.mark.parametrize("taken", ["before", "meanwhile"])
@pytest.mark.parametrize("name", ["shared", "hierarchical_copy"])
def test_too_small_shared_memory_is_refused(
    name: str, taken: str, topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, also if one node or rank lacks it: no bus error at the first write. The nodes number later arrays
    alike."""
    topology = topology_of(None if name == "shared" else 2)
    file = WORLD.bcast(f"refused-{os.getpid()}")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with allreduce.create(name, topology) as reduce:
        if taken == "before" and topology.node_index == topology.nodes - 1:
            _full(monkeypatch)
        if taken == "meanwhile" and topology.rank == SIZE - 1:
            monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(secrets, "token_hex", lambda _: f"{file}-{topology.node_index}")
        for call in (lambda: reduce.allocate(1_000_000), lambda: allreduce.create(name, topology)):
            text = raised_everywhere(WORLD, UnavailableError, call)
            assert re.search(r"shared memory is too small: .* --shm-size", text)
        monkeypatch.undo()
        assert not [*Path("/dev/shm").glob(f"*{file}*")]
        array = reduce.allocate(1_000_000)
        array[:] = reduce.rank
        reduce(array, "sum")
        assert array[0] == array[-1] == sum(range(SIZE))


def test_shared_memory_of_which_the_system_tells_nothing(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may forbid it. "auto" does without."""

    def forbidden(path: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "statvfs", forbidden)
    with pytest.raises(UnavailableError, match=r"can't share memory in .*Permission denied"):
        allreduce.create("shared", flat)
    array = np.ones(3)
    with allreduce.create("auto", flat) as reduce:
        reduce(array, "sum")
    assert array[0] == SIZE


@pytest.mark.skipif(SIZE == 1, reason="one rank stages nothing")
def test_the_staging_buffer_grows_as_far_as_there_is_memory(
    flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    with allreduce.create(Staged, flat) as reduce:
        sizes = []
        for length in (1000, 200_000, 1000, 12_000_000, 1000):
            if length == 12_000_000 and WORLD.rank == SIZE - 1:
                _full(monkeypatch)
            array = np.full(length, WORLD.rank, "float32")
            reduce(array, "max")
            assert (array == SIZE - 1).all()
            sizes.append(reduce._algorithm._staging.size)  # type: ignore[attr-defined]
        monkeypatch.undo()
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3] == sizes[4] < STAGING_BYTES


@pytest.mark.skipif(SIZE == 1, reason="one rank stages nothing")
@pytest.mark.parametrize("name", ["shared", "hierarchical_copy"])
def test_arrays_have_one_sum_however_they_are_reached(
    name: str, topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones are staged, long ones and those without memory for a larger staging buffer are reached by CMA; those
    from `allocate` lie in shared memory."""
    longest = min(CACHED_BYTES, ALL_CACHED_BYTES // SIZE) // 4
    topology = topology_of(2 if name != "shared" and SIZE > 2 else None)
    with allreduce.create(name, topology) as reduce, allreduce.create(name, topology) as without:
        algorithm = without._algorithm
        shared = algorithm if isinstance(algorithm, Shared) else algorithm._node  # type: ignore[attr-defined]
        monkeypatch.setattr(shared, "_may_grow", False)
        kinds = (("float32", "sum"), ("bfloat16", "mean"), ("int8", "sum"), ("float64", "max"), ("uint8", "min"))
        for (kind, op), length in itertools.product(kinds, (3000, longest - 1, longest, longest + 1)):
            dtype = numpy_dtype(kind)
            staged = values(dtype, length * 4 // dtype.itemsize, topology.rank, 0).copy()
            reached, allocated = staged.copy(), reduce.allocate(staged.size, dtype)
            allocated[:] = staged
            reduce(staged, op)
            without(reached, op)
            reduce(allocated, op)
            assert expected(dtype, staged.size, op, SIZE, 0).hold(staged)
            assert staged.tobytes() == reached.tobytes() == allocated.tobytes()


@pytest.mark.skipif(SIZE == 1, reason="one rank stages nothing")
def test_ranks_stage_alike_whenever_they_bind(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer can't grow, which a rank that has bound its call before does not know."""
    with allreduce.create("shared", flat) as reduce:
        _full(monkeypatch)
        arrays = [np.full(length, flat.rank, "float32") for length in (CACHED_BYTES, 200_000, 200_000)]
        reduce(arrays[0], "max")  # by CMA, where it works
        early = reduce.bind(arrays[2], "max") if flat.rank == 0 else None
        reduce(arrays[1], "max")
        (early or reduce.bind(arrays[2], "max"))()
        monkeypatch.undo()
        assert all((array == SIZE - 1).all() for array in arrays)

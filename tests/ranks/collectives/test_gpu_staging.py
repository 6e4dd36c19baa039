"""CuPy arrays: through pinned memory with every CPU backend (with a fake CuPy), and the real CuPy on a GPU."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.arrays import dtypes
from allreduce.errors import DisagreementError, NotAnArrayError, NotContiguousError, UnavailableError
from tests.backends import ON_CPU
from tests.gpu import fake_cupy
from tests.ranks.grid import DTYPES, OPS, expected, lengths, numpy_dtype, shapes, values
from tests.ranks.together import usable

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to stage")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch)


def check(reduce: Any, kind: type, dtypes_: tuple[str, ...], ops: tuple[str, ...], lengths_: tuple[int, ...]) -> None:
    """Reduce arrays on the GPU, of this kind, and compare them with NumPy's results."""
    failures = []
    for dtype in map(numpy_dtype, dtypes_):
        if dtypes.is_half(dtype) and not reduce.sums_half:
            continue
        for length, (turn, op) in itertools.product(lengths_, enumerate(ops)):
            if op == "mean" and dtype.kind == "i":
                continue
            array = reduce.allocate(length, dtype, device="cuda")
            assert type(array) is kind
            array.set(values(dtype, length, reduce.rank, turn))
            reduce(array, op)
            if not expected(dtype, length, op, SIZE, turn).hold(array.get()):
                failures.append((dtype, length, op))
    assert not failures


@pytest.mark.parametrize("shape", shapes(SIZE))
@pytest.mark.parametrize("name", ON_CPU)
def test_staged(name: str, shape: str, cupy: Any, topology_of: Callable[..., allreduce.Topology]) -> None:
    with usable(name, topology_of(shapes(SIZE)[shape])) as reduce:
        check(reduce, cupy.ndarray, ("bfloat16", "float32", "int64"), OPS, (0, 1, 1000))
    assert SIZE == 1 or (cupy.counters.pinned_bytes and cupy.gpu.synchronized)


@several
@pytest.mark.parametrize("name", ON_CPU)
def test_staging_memory_is_used_again(name: str, cupy: Any, flat: allreduce.Topology) -> None:
    reduce = usable(name, flat)
    array = reduce.allocate(1000, "float32", device="cuda")
    reduce(array, "sum")
    pinned = cupy.counters.pinned_bytes
    before = cupy.counters.to_host, cupy.counters.to_device
    reduce(array, "sum")
    reduce(array[100:200], "sum")
    reduce(array.reshape(10, 100), "sum")
    assert cupy.counters.pinned_bytes == pinned
    assert (cupy.counters.to_host, cupy.counters.to_device) == (before[0] + 3, before[1] + 3)
    reduce.close()


@several
@pytest.mark.parametrize("compress", ["int8", "powersgd:1"])
def test_error_feedback_of_gpu_arrays(compress: Any, cupy: Any, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress=compress) as reduce:
        array = reduce.allocate(6000, "float32", device="cuda")
        reduce.describe(array, [allreduce.Part("w", 0, (60, 100))])
        for step in range(11):
            array.set(np.random.default_rng([step, flat.rank]).normal(size=6000).astype("float32"))
            reduce(array)
        assert any(values.any() for name, values in reduce.state().items() if name.endswith("residual"))


@pytest.mark.parametrize("name", ON_CPU)
def test_named_errors(name: str, cupy: Any, flat: allreduce.Topology) -> None:
    reduce = usable(name, flat)
    array = reduce.allocate(10, "float32", device="cuda")
    with pytest.raises(NotContiguousError):
        reduce(array[::2], "sum")
    if SIZE > 1:
        with pytest.raises(DisagreementError, match="GPU memory"):
            reduce(array if WORLD.rank else np.zeros(10, "float32"), "sum")
    if reduce.two_phase:
        with pytest.raises(NotAnArrayError, match="in GPU memory"):
            reduce.reduce_scatter(array.reshape(2, 5))
    reduce.close()


def test_no_cupy(flat: allreduce.Topology) -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("CuPy is installed")
    with pytest.raises(UnavailableError, match=r'"nccl" needs CuPy.*pip install "\.\[cuda12\]"'):
        allreduce.create("nccl", flat)
    with allreduce.create("ring", flat) as reduce, pytest.raises(UnavailableError, match=r"cuda12"):
        reduce.allocate(10, device="cuda")


def test_no_gpu(cupy: Any, flat: allreduce.Topology) -> None:
    with pytest.raises(UnavailableError, match=r'"nccl" needs an NVIDIA GPU'):
        allreduce.create("nccl", flat)


# With a GPU


@pytest.fixture
def real_cupy() -> Any:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU")
    return cupy


@pytest.mark.parametrize("name", [*ON_CPU, "nccl"])
def test_real_gpu(name: str, real_cupy: Any, flat: allreduce.Topology) -> None:
    with usable(name, flat) as reduce:
        try:
            check(reduce, real_cupy.ndarray, DTYPES, ("sum", "max", "prod"), lengths(SIZE))
        except UnavailableError as error:  # raised on all ranks
            if name != "nccl" or "hold the same GPU" not in str(error):
                raise
            pytest.skip(str(error))

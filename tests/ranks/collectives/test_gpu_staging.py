"""CuPy arrays: through pinned memory with every CPU backend (with a fake CuPy), and the real CuPy on a GPU."""

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
from tests.ranks.grid import OPS, expected, lengths, numpy_dtype, shapes, values
from tests.ranks.together import usable

JOBS = "openmpi 1 2 3, mpich 2"

SIZE = MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to stage")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch)


@pytest.mark.parametrize("shape", shapes(SIZE))
@pytest.mark.parametrize("name", ON_CPU)
def test_staged(
    name: str, shape: str, cupy: Any, topology_of: Callable[..., allreduce.Topology], world: MPI.Intracomm
) -> None:
    reduce = usable(name, topology_of(shapes(SIZE)[shape]))
    failures = []
    for dtype in map(numpy_dtype, ("bfloat16", "float32", "int64") if reduce.sums_half else ("float32", "int64")):
        for length in (0, 1, 1000):
            for turn, op in enumerate(OPS if dtype.kind != "i" else ("sum", "prod")):
                array = reduce.allocate(length, dtype, device="cuda")
                assert type(array) is cupy.ndarray
                array.set(values(dtype, length, world.rank, turn))
                reduce(array, op)
                if not expected(dtype, length, op, SIZE, turn).hold(array.get()):
                    failures.append((dtype, length, op))
    assert not failures
    assert SIZE == 1 or (cupy.counters.pinned_bytes and cupy.gpu.synchronized)
    reduce.close()


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
def test_named_errors(name: str, cupy: Any, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    reduce = usable(name, flat)
    array = reduce.allocate(10, "float32", device="cuda")
    with pytest.raises(NotContiguousError):
        reduce(array[::2], "sum")
    if SIZE > 1:
        with pytest.raises(DisagreementError, match="GPU memory"):
            reduce(array if world.rank else np.zeros(10, "float32"), "sum")
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
def test_real_gpu(name: str, real_cupy: Any, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    reduce = usable(name, flat)
    failures = []
    try:
        for dtype in map(numpy_dtype, ("float16", "bfloat16", "float32", "float64", "int32", "int64")):
            if dtypes.is_half(dtype) and not reduce.sums_half:
                continue
            for length in lengths(SIZE):
                for turn, op in enumerate(("sum", "max", "prod")):
                    array = reduce.allocate(length, dtype, device="cuda")
                    array.set(values(dtype, length, world.rank, turn))
                    reduce(array, op)
                    if not expected(dtype, length, op, SIZE, turn).hold(array.get()):
                        failures.append((dtype, length, op))
    except UnavailableError as error:  # raised on all ranks
        if name != "nccl" or "hold the same GPU" not in str(error):
            raise
        pytest.skip(str(error))
    assert not failures
    reduce.close()


def test_real_gpu_stream_order(real_cupy: Any, flat: allreduce.Topology) -> None:
    """Work that is still running on the caller's stream when the call begins is part of the result."""
    reduce = allreduce.create("auto", flat)
    stream = real_cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = real_cupy.zeros(1 << 22, "float32")
        for _ in range(50):
            array += 1
        reduce(array, "mean")
        result = float(array.min()), float(array.max())
    assert result == (50.0, 50.0)
    reduce.close()

"""Run by test_cuda.py on several ranks: what trains on a GPU, on a stand-in for CuPy, NCCL and PyTorch's streams.

What is reduced and updated must be right, and no work on a stream may touch what another stream has not been waited
for with; see tests/ranks/fake_gpu.py.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import fake_cupy
import numpy as np
import pytest
from fake_gpu import Gpu
from grid import expected, numpy_dtype, values

import allreduce
from allreduce.errors import NotAnArrayError

GPU = Gpu()
PATCH = pytest.MonkeyPatch()
TOPOLOGY = allreduce.Topology()
WORLD = TOPOLOGY.world.Dup()
RANK, SIZE = WORLD.rank, WORLD.size
CUPY: Any = fake_cupy.install(PATCH, GPU, WORLD)
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32")


def tracked(array: Any) -> Any:
    GPU.track(array.data.ptr, array.nbytes)
    return array


def no_races() -> None:
    races = WORLD.allgather(list(GPU.races))
    assert not any(races), races


def check_nccl() -> None:
    """The backend itself: reduced whole and in two phases, of CuPy's and NumPy's arrays, whatever is left over."""
    with allreduce.create("nccl", TOPOLOGY) as reduce:
        for dtype in map(numpy_dtype, DTYPES):
            ops = ("sum", "mean", "max", "prod") if dtype.kind not in "iub" else ("sum", "max")
            for length in (0, 1, SIZE - 1, 1000, 1001):
                for turn, op in enumerate(ops):
                    check_one(reduce, dtype, length, op, turn)
        bad = reduce.allocate(6, "float32")
        with pytest.raises(NotAnArrayError, match="takes a 1-D NumPy array"):
            reduce.reduce_scatter(bad.reshape(2, 3))
    with allreduce.create("ring", TOPOLOGY) as ring, pytest.raises(NotAnArrayError, match="in GPU memory"):
        ring.reduce_scatter(CUPY.zeros(8, "float32"))
    no_races()


def check_one(reduce: Any, dtype: np.dtype, length: int, op: str, turn: int) -> None:
    wanted, mine = expected(dtype, length, op, SIZE, turn), reduce.owned(length)
    on_gpu = tracked(reduce.allocate(length, dtype))
    assert type(on_gpu) is CUPY.ndarray
    for array in (on_gpu, np.empty(length, dtype)):
        fill = array.set if array is on_gpu else lambda new, to=array: np.copyto(to, new)
        fill(values(dtype, length, RANK, turn))
        reduce(array, op)
        whole = array.get() if array is on_gpu else array
        assert wanted.hold(whole), (dtype, length, op)
        fill(values(dtype, length, RANK, turn))
        part = reduce.reduce_scatter(array, op)
        assert part.size == mine.stop - mine.start
        reduce.all_gather(array)
        again = array.get() if array is on_gpu else array
        assert again.tobytes() == whole.tobytes(), (dtype, length, op)


if __name__ == "__main__":
    check_nccl()
    if RANK == 0:
        print("done")

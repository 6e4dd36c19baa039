"""Run by test_cuda.py on several ranks: training on a GPU, with stand-ins for CuPy, NCCL and PyTorch's streams.

The results must be right, and no stream may use memory before it has waited for the stream that used it last; see
fake_gpu.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
import tests.without_dynamo  # noqa: F401

# isort: split
import torch

from allreduce.errors import NotAnArrayError, UnavailableError
from tests.gpu import fake_cupy
from tests.gpu.cuda_training import compare, fitted, optimized
from tests.gpu.fake_gpu import Gpu, TorchCuda
from tests.ranks.grid import expected, numpy_dtype, values
from trainers import CentralStorageTrainer, ClipNorm, MirroredTrainer
from trainers.callbacks import CheckDivergence, CheckGradients
from trainers.pytorch import MirroredOptimizer
from trainers.pytorch.buckets import allocate_flat
from trainers.replicas.pytorch import devices
from trainers.strategies.sharded import SliceOwners

GPU = Gpu()
CUDA = TorchCuda(GPU)
PATCH = pytest.MonkeyPatch()
HOST = torch.device("cpu")
TOPOLOGY = allreduce.Topology()
WORLD = TOPOLOGY.world.Dup()
RANK, SIZE = WORLD.rank, WORLD.size
CUPY: Any = fake_cupy.install(PATCH, GPU, WORLD)
DTYPES = ("bfloat16", "float32", "int32")
PINNED: list[int] = []  # the rows of tensors that were copied to the GPU in advance


def tracked(array: Any) -> Any:
    GPU.track(array.data.ptr, array.nbytes)
    return array


def no_races() -> None:
    races = WORLD.allgather(list(GPU.races))
    assert not any(races), races


def check_backends() -> None:
    """One-phase and two-phase reductions of CuPy's and NumPy's arrays, of all lengths."""
    for name, lengths in (("nccl", (0, 1, 1000, 1001)), ("ring", (1001,)), ("shared", (1001,))):
        with allreduce.create(name, TOPOLOGY) as reduce:
            for dtype in map(numpy_dtype, DTYPES):
                ops = ("sum", "mean", "max") if dtype.kind not in "iub" else ("sum",)
                for length in lengths:
                    for turn, op in enumerate(ops):
                        check_one(reduce, dtype, length, op, turn)
            bad = reduce.allocate(6, "float32", device="cuda")
            with pytest.raises(NotAnArrayError, match="takes a 1-D array"):
                reduce.reduce_scatter(bad.reshape(2, 3))
    GPU.forget()
    no_races()


def check_streams() -> None:
    """Two streams that use one backend in turns wait for each other before they use its scratch memory."""
    for dtype, compress in (("bfloat16", None), ("float32", "float16")):
        with allreduce.create("nccl", TOPOLOGY, compress=compress) as reduce:
            arrays = [reduce.allocate(100, dtype) for _ in range(2)]
            reduce(arrays[0], "sum")
            held = reduce._algorithm
            tracked(held._wide if compress is None else held._scratch[np.dtype(compress), "cuda"])
            for array in arrays:
                with CUPY.cuda.Stream(non_blocking=True):
                    reduce(array, "sum")
        GPU.forget()
        no_races()


def check_background() -> None:
    """Calls in a thread run on the caller's stream."""
    with allreduce.create("nccl", TOPOLOGY) as reduce:
        array = tracked(reduce.allocate(10, "float32"))
        with CUPY.cuda.Stream(non_blocking=True):
            array.set(np.full(10, RANK, np.float32))
            reduce.submit(array, "sum").wait()
            assert array.get().tolist() == [sum(range(SIZE))] * 10
    GPU.forget()
    no_races()


def check_one_rank() -> None:
    """A backend on one rank copies nothing to the host and back; a check of gradients still sees them."""
    with allreduce.Topology(MPI.COMM_SELF) as topology, allreduce.create("ring", topology) as reduce:
        memory = allocate_flat(reduce, 8, "float32", devices.Cuda(HOST, CUDA)).part(2, 6)
        memory.tensor.fill_(1.0)
        memory.run_on_array(lambda: reduce(memory.array))
        assert not memory.array.any()
        assert memory.tensor.eq(1).all()
        assert memory.fetched().all()


def check_abandon() -> None:
    """Work on the GPU is ended, because it may wait for failed ranks."""
    topology = allreduce.Topology()
    reduce = allreduce.create("nccl", topology)
    reduce(reduce.allocate(1), "sum")
    reduce.abandon()
    assert GPU.log[-1] == "abort"
    topology.abandon()


def check_shared_gpu() -> None:
    """Ranks that share a GPU get the error when the optimizer or the trainer is created, not in the first step."""
    patch = pytest.MonkeyPatch()
    patch.setattr(CUPY.cuda.runtime, "deviceGetPCIBusId", lambda _: "0000:00:00.0")
    for run in (optimized, fitted):
        with pytest.raises(UnavailableError, match="hold the same GPU"):
            on_gpu(run, lambda *_: pytest.fail("it was made"), allreduce="nccl")
    patch.undo()


def check_one(reduce: Any, dtype: np.dtype, length: int, op: str, turn: int) -> None:
    wanted, mine = expected(dtype, length, op, SIZE, turn), reduce.owned(length)
    on_gpu = tracked(reduce.allocate(length, dtype, device="cuda"))
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


def on_gpu(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of `run` on "the GPU", where PyTorch's current stream differs from CuPy's default stream."""
    patch = pytest.MonkeyPatch()
    patch.setattr(devices, "device_of", lambda _: devices.Cuda(HOST, CUDA))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: PINNED.append(len(tensor)) or tensor)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    stream = CUDA.Stream()
    try:
        with CUDA.stream(stream):
            return run(TOPOLOGY, HOST, *arguments, **options)
    finally:
        GPU.forget()
        patch.undo()


def watched(optimizer: MirroredOptimizer, model: torch.nn.Module) -> None:
    """Look for races in the gradients and parameters, and check that gradients are in the right memory."""
    for bucket in optimizer._parts.reducer.dense:
        GPU.track(bucket.memory.tensor.data_ptr(), bucket.memory.tensor.nbytes)
        assert type(bucket.memory.array) is (CUPY.ndarray if optimizer.backend.name == "nccl" else np.ndarray)
    for parameter in model.parameters():
        GPU.track(parameter.data_ptr(), parameter.nbytes)


def check_optimizer() -> None:
    """MirroredOptimizer with nccl and staged, replicated and sharded, during and after backward: results as on the
    host."""
    for update in ("replicated", "sharded"):
        clips = [ClipNorm(0.5)]
        wanted = optimized(TOPOLOGY, HOST, allreduce="ring", update=update, transforms=clips)
        # a model on the host, by GPUs
        compare(optimized(TOPOLOGY, HOST, allreduce="nccl", update=update, transforms=clips), wanted)
        for name, overlap in (("auto", True), ("auto", False), ("ring", True)):
            transforms = [CheckGradients(), CheckDivergence(2), *clips]
            options = {"allreduce": name, "update": update, "overlap": overlap, "transforms": transforms}
            compare(on_gpu(optimized, watched, **options), wanted)
            no_races()


def check_waits() -> None:
    """Without any single one of the waits between streams there is a race, so the checks above would detect it."""
    for where, name in (
        (devices._Streams, "submitted"),
        (devices._Streams, "wait_on_stream"),
        (CUPY.cuda.Stream, "wait_event"),
    ):
        patch = pytest.MonkeyPatch()
        patch.setattr(where, name, lambda *_: None)
        on_gpu(optimized, watched, steps=2, allreduce="nccl", overlap=True)
        patch.undo()
        assert GPU.races, f"{where.__name__}.{name} is not needed"
        GPU.races.clear()


def check_replica() -> None:
    """TorchReplica under MirroredTrainer: CuPy reduces the array and PyTorch writes and reads it, each on its own
    stream."""

    def watch(trainer: MirroredTrainer) -> None:
        tracked(trainer.buffer)
        if isinstance(trainer.strategy.owners, SliceOwners):
            assert type(tracked(trainer.strategy.owners._array)) is CUPY.ndarray

    for name in ("torch_after_cupy", "cupy_after_torch"):
        patch = pytest.MonkeyPatch()
        patch.setattr(devices.Cuda, name, lambda _: None)
        on_gpu(fitted, watch, allreduce="nccl")
        patch.undo()
        assert GPU.races, f"{name} is not needed"
        GPU.races.clear()
    wanted, scores, _ = fitted(TOPOLOGY, HOST, allreduce="ring")
    ways = [{"allreduce": name, "update": update} for name in ("auto", "ring") for update in ("replicated", "sharded")]
    for options in (*ways, {"kind": CentralStorageTrainer}):
        found, here, kind = on_gpu(fitted, watch, **options)
        assert kind is CUPY.ndarray
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(here, scores, rtol=1e-5)
        no_races()
    assert PINNED


if __name__ == "__main__":
    check_backends()
    check_streams()
    check_background()
    check_one_rank()
    check_abandon()
    check_shared_gpu()
    check_optimizer()
    check_waits()
    check_replica()
    if RANK == 0:
        print("done")

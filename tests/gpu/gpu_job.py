"""Run by scripts/gpu_test.sh under mpirun: trainings on GPUs must give the results of the host.

Ranks take the GPUs in turn; ranks that share a GPU stage through the host, because NCCL needs one GPU for each rank.
One rank alone needs no NCCL, so its calls are then made directly. If PyTorch sees no GPU, the models stay on the host.
"""

import os

import cupy
import numpy as np
import torch

import allreduce
from allreduce.algorithms.nccl import SHARED_GPU_VERSION
from allreduce.arrays import dtypes, ops
from tests.gpu.cuda_training import compare, fitted, networks, optimized
from trainers import ClipNorm
from trainers.callbacks import CheckDivergence, CheckGradients

TOPOLOGY = allreduce.Topology()
HOST = torch.device("cpu")
GPUS = cupy.cuda.runtime.getDeviceCount()
SHARING = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and cupy.cuda.nccl.get_version() >= SHARED_GPU_VERSION
NAMES = ("auto", "ring", *["nccl"] * (SHARING or TOPOLOGY.node_size <= GPUS))
LOOSE = {"rtol": 2e-2, "atol": 2e-3}  # 16-bit floats inside, whose last digit another kernel rounds otherwise


def main() -> None:
    say(f"NCCL {cupy.cuda.nccl.get_version()}, PyTorch {torch.__version__} for CUDA {torch.version.cuda}")
    check_nccl()
    check_networks()
    if not torch.cuda.is_available():
        say("this PyTorch sees no GPU (no build for CUDA, or for a newer driver): modules on GPUs are left out")
        return
    place = torch.device("cuda", TOPOLOGY.node_rank % torch.cuda.device_count())
    torch.cuda.set_device(place)
    check_optimizer(place)
    check_replica(place)


def check_nccl() -> None:
    """NCCL itself on one rank, where every array stays as it is: checks its calls, CuPy's kernels, and their order."""
    if TOPOLOGY.size > 1:
        return
    with allreduce.create("nccl", TOPOLOGY) as reduce:
        nccl = reduce._algorithm
        for dtype in dtypes.TYPES:
            for name in ("sum", "max", "prod", *["mean"] * (dtype.kind not in "iub")):
                op = ops.resolve(name, dtype, 1)
                wanted = (np.arange(1001) % 100 + 0.5).astype(dtype)
                array = cupy.asarray(wanted)
                for launch in (nccl._all_reduce, nccl._scatter):
                    nccl._reduce_gpu(launch, array, op, slice(None))
                    assert array.get().tobytes() == wanted.tobytes(), (dtype, name)
                nccl._gather_gpu(array)
                assert array.get().tobytes() == wanted.tobytes(), (dtype, name)
                host = wanted.copy()
                nccl.reduce(host, op)
                assert host.tobytes() == wanted.tobytes(), (dtype, name)
    say("NCCL's calls on one rank, of every dtype: as they should be")


def check_networks() -> None:
    """NumpyNetwork on CuPy, which needs no PyTorch."""
    wanted = networks(TOPOLOGY, "cpu", allreduce="ring")
    for update in ("replicated", "sharded"):
        for name in NAMES:
            found = networks(TOPOLOGY, "cuda", allreduce=name, update=update)
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
            say(f"NumpyNetwork, {update}, {name}: as on the host")


def check_optimizer(place: torch.device) -> None:
    """The results are roughly those on the host, and closely those on this GPU with "ring" after backward."""
    clips = [ClipNorm(0.5)]
    transforms = [CheckGradients(), CheckDivergence(2), *clips]
    for update in ("replicated", "sharded"):
        wanted = optimized(TOPOLOGY, place, allreduce="ring", update=update, overlap=False, transforms=clips)
        compare(wanted, optimized(TOPOLOGY, HOST, allreduce="ring", update=update, transforms=clips), **LOOSE)
        for name in NAMES:
            compare(optimized(TOPOLOGY, HOST, allreduce=name, update=update, transforms=clips), wanted, **LOOSE)
            for overlap in (True, False):
                options = {"allreduce": name, "update": update, "overlap": overlap, "transforms": transforms}
                close = {"rtol": 1e-3, "atol": 1e-4}
                compare(optimized(TOPOLOGY, place, **options), wanted, **close)
                with torch.cuda.stream(torch.cuda.Stream(place)):
                    compare(optimized(TOPOLOGY, place, **options), wanted, **close)
                say(f"MirroredOptimizer, {update}, {name}, overlap={overlap}: as on the host")


def check_replica(place: torch.device) -> None:
    wanted, scores, _ = fitted(TOPOLOGY, HOST, allreduce="ring")
    for update in ("replicated", "sharded"):
        for name in NAMES:
            found, here, kind = fitted(TOPOLOGY, place, allreduce=name, update=update)
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(here, scores, rtol=1e-3)
            with torch.cuda.stream(torch.cuda.Stream(place)):
                found, *_ = fitted(TOPOLOGY, place, allreduce=name, update=update)
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
            say(f"TorchReplica, {update}, {name}, {kind.__module__}: as on the host")
    even = {"eps": 1e-3}  # otherwise it makes steps of what is noise: a bias before batch norm has no gradient
    wanted, *_ = fitted(TOPOLOGY, HOST, adam=even, allreduce="ring")
    for fused in (False, True):  # its counts of steps are on the host, or on the GPU
        found, *_ = fitted(TOPOLOGY, place, adam={"fused": fused, **even}, update="sharded")
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    say("Adam, sharded, also fused: as on the host")


def say(text: str) -> None:
    if TOPOLOGY.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

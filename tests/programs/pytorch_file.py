"""Run files of PyTorch's own tests of its distributed parts on the ranks of mpirun, over one backend.

    mpirun -n 2 python -m tests.programs.pytorch_file gloo test/distributed/algorithms/test_join.py
    mpirun -n 2 python -m tests.programs.pytorch_file allreduce test_zero_redundancy_optimizer.py Distributed

The tests would start their ranks themselves; here they run on those of mpirun, as many as there are. Words at the end
choose the tests with one of them in their names; -test_name leaves a test out. Prints a line for each test, and how
many passed; the tracebacks too if TRACEBACKS=1. If CPU_ONLY=1, a copy of each file runs in which CPUs stand in for GPUs
(CPU_EDITS), and decorators that ask for GPUs do nothing. Needs expecttest (the extra "test").
"""

import importlib
import itertools
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import allreduce
import allreduce.torch_backend
from allreduce.transport.control import root_value
from tests.torch_backend.pytorch_suite import GROUP_SECONDS, SKIPPED, make_groups, together

PORTS = itertools.count(20000)
ARGUMENTS = r"(?:[^()]|\([^()]*\))*"
CPU_EDITS = [
    (r"cpu:gloo,cuda:nccl|nccl\b(?=[\"'])", "gloo"),
    (r"cuda:(\d|\{[^}]*\})|(?<=[\"'])cuda(?=[\"'])", "cpu"),
    (r"\bdevice=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
    (rf"torch\.device\(([\"'])cpu\1, {ARGUMENTS}\)", r"torch.device(\1cpu\1)"),
    (rf"\.cuda\({ARGUMENTS}\)", ".cpu()"),
    (r"torch\.cuda\b", "torch.cpu"),
    (r"not TEST_CUDA\b", "False"),
    (r",\s*device_ids=\[self\.rank\]", ""),
]


def cpus_for_gpus(path: Path, folder: str, ranks: int) -> Path:
    """Return the path of a copy of a file, in which CPUs stand in for GPUs, and let decorators ask for none."""
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed._shard import sharded_tensor

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, lambda *_, **__: lambda test: test)
    FullyShardedDataParallel.__init__ = partialmethod(  # type: ignore[method-assign, assignment]
        FullyShardedDataParallel.__init__, device_id=torch.device("cpu")
    )
    sharded_tensor.with_comms.__defaults__ = None, True, "gloo"
    common_utils.get_cycles_per_ms = lambda: 1.0
    torch.cpu.device_count = lambda: ranks
    torch.cpu._sleep = lambda _: None  # type: ignore[attr-defined]
    text = path.read_text()
    for pattern, instead in CPU_EDITS:
        text = re.sub(pattern, instead, text)
    copy = Path(folder, path.name)
    copy.write_text(text)
    sys.path.insert(0, folder)
    return copy


def chosen(name: str, words: list[str]) -> bool:
    wanted = [word for word in words if not word.startswith("-")]
    return (not wanted or any(word in name for word in wanted)) and not any(
        f"-{part}" in words for part in name.split(".")
    )


def cases(module: Any, words: list[str]) -> Iterator[tuple[type, str]]:
    """Yield the classes of a file's tests, each with the name of a test."""
    from torch.testing._internal import common_distributed as common

    bases = common.MultiProcessTestCase, common.MultiThreadedTestCase, common.MultiProcContinuousTest
    for cls in list(vars(module).values()):  # a test may add to them
        if isinstance(cls, type) and issubclass(cls, bases) and cls.__module__ == module.__name__:
            for name in sorted(name for name in dir(cls) if name.startswith("test_")):
                if chosen(f"{cls.__name__}.{name}", words):
                    yield cls, name


def attempt(case: Any, name: str) -> None:
    """Run a test, in the process group that its class makes for it."""
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    makers = common_fsdp.FSDPTest, common_distributed.MultiThreadedTestCase, common_distributed.MultiProcContinuousTest
    if isinstance(case, makers):
        store = dist.FileStore(f"{case.file_name}_of_the_class", case.world_size)
        dist.init_process_group("gloo", store=store, rank=case.rank, world_size=case.world_size)
        type(case).pg = dist.group.WORLD
    common_utils.set_rng_seed()
    getattr(case, name)()


def run(topology: allreduce.Topology, cls: Any, name: str) -> dict[str, str]:
    """Run one test on all ranks. Collective."""
    if any(getattr(part, "__unittest_skip__", False) for part in (cls, getattr(cls, name))):
        return {"status": SKIPPED, "why": "its own mark"}
    folder = root_value(topology.world, tempfile.mkdtemp() if topology.rank == 0 else None, "know the test's folder")
    case = cls(name)
    case.rank, case.file_name = topology.rank, f"{folder}/store"
    os.environ.update(TEMP_DIR=folder, MASTER_PORT=str(next(PORTS)))
    result = together(topology, partial(attempt, case, name))
    with suppress(Exception):
        dist.destroy_process_group()
    topology.world.Barrier()
    return result


def run_file(topology: allreduce.Topology, path: Path, words: list[str], backend: str) -> int:
    """Run the tests of a file, print how they ended, and return how many failed. Collective."""
    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)  # of a file with the same name in another folder
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        if os.environ.get("CPU_ONLY") == "1":
            path = cpus_for_gpus(path, folder, topology.size)
        tests = list(cases(importlib.import_module(path.stem), words))
    for cls, name in tests:
        cls.world_size = topology.size  # type: ignore[attr-defined]
        result = run(topology, cls, name)
        counts[result["status"]] += 1
        if topology.rank == 0:
            why = (result["why"].strip().splitlines() or [""])[-1]
            print(f"{result['status']:8}{cls.__name__}.{name}  {why[:170]}", flush=True)
            if os.environ.get("TRACEBACKS") == "1":
                print(result["why"], flush=True)
    if topology.rank == 0:
        print(f"{path.name} over {backend}, {topology.size} ranks: {dict(counts)}", flush=True)
    return counts["failed"]


def main(backend: str, *given: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    topology = allreduce.Topology()
    make_groups(backend)
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=GROUP_SECONDS)
    files = [Path(each).resolve() for each in given if each.endswith(".py")]
    words = [each for each in given if not each.endswith(".py")]
    failed = sum(run_file(topology, path, words, backend) for path in files)
    os._exit(bool(failed))  # threads of tests may still run


if __name__ == "__main__":
    main(*sys.argv[1:])

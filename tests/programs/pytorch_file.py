"""Run a file of PyTorch's own tests of its distributed parts on the ranks of mpirun, over one backend.

    mpirun -n 2 python -m tests.programs.pytorch_file gloo test/distributed/algorithms/test_join.py
    mpirun -n 2 python -m tests.programs.pytorch_file allreduce test_zero_redundancy_optimizer.py Distributed

The tests would start their ranks themselves; here they run on those of mpirun, as many as there are. Words at the end
choose the tests with one of them in their names. Prints a line for each test, and how many passed. If CPU_ONLY=1, a
copy of the file runs in which CPUs stand in for GPUs (CPU_EDITS), and decorators that ask for GPUs do nothing. Needs
expecttest (the extra "test"). TRACEBACKS=1 prints the tracebacks too.
"""

import importlib
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allreduce
import allreduce.torch_backend
from allreduce.transport.control import root_value
from tests.torch_backend.pytorch_suite import GROUP_SECONDS, SKIPPED, make_groups, together

CPU_EDITS = [
    (r"[\"']cuda(:\d)?[\"']", '"cpu"'),
    (r"torch\.device\(\"cpu\", [^)]*\)", 'torch.device("cpu")'),
    (r"\.cuda\([^)]*\)", ".cpu()"),
    (r"torch\.cuda\b", "torch.cpu"),
    (r"not TEST_CUDA\b", "False"),
    (r",\s*device_ids=\[self\.rank\]", ""),
]


def cpus_for_gpus(path: Path, ranks: int) -> Path:
    """Return the path of a copy of a file, in which CPUs stand in for GPUs, and let decorators ask for none."""
    from torch.testing._internal import common_distributed, common_utils

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common_utils.get_cycles_per_ms = lambda: 1.0
    torch.cpu.device_count = lambda: ranks
    torch.cpu._sleep = lambda _: None  # type: ignore[attr-defined]
    text = path.read_text()
    for pattern, instead in CPU_EDITS:
        text = re.sub(pattern, instead, text)
    copy = Path(tempfile.mkdtemp(), path.name)
    copy.write_text(text)
    return copy


def cases(module: Any, words: list[str]) -> Iterator[tuple[type, str]]:
    """Yield the classes of a file's tests, each with the name of a test."""
    from torch.testing._internal import common_distributed as common

    bases = common.MultiProcessTestCase, common.MultiThreadedTestCase, common.MultiProcContinuousTest
    for cls in list(vars(module).values()):  # a test may add to them
        if isinstance(cls, type) and issubclass(cls, bases) and cls.__module__ == module.__name__:
            names = sorted(name for name in dir(cls) if name.startswith("test_"))
            yield from ((cls, name) for name in names if not words or any(w in f"{cls.__name__}.{name}" for w in words))


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


def run(topology: allreduce.Topology, cls: Any, name: str, number: int) -> dict[str, str]:
    """Run one test on all ranks. Collective."""
    if any(getattr(part, "__unittest_skip__", False) for part in (cls, getattr(cls, name))):
        return {"status": SKIPPED, "why": "its own mark"}
    folder = root_value(topology.world, tempfile.mkdtemp() if topology.rank == 0 else None, "know the test's folder")
    case = cls(name)
    case.rank, case.file_name = topology.rank, f"{folder}/store"
    os.environ.update(TEMP_DIR=folder, MASTER_PORT=str(20000 + number))
    result = together(topology, partial(attempt, case, name))
    with suppress(Exception):
        dist.destroy_process_group()
    topology.world.Barrier()
    return result


def main(backend: str, file: str, *words: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    topology = allreduce.Topology()
    make_groups(backend)
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=GROUP_SECONDS)
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    if os.environ.get("CPU_ONLY") == "1":
        path = cpus_for_gpus(path, topology.size)
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    counts: Counter[str] = Counter()
    for number, (cls, name) in enumerate(cases(module, list(words))):
        cls.world_size = topology.size  # type: ignore[attr-defined]
        result = run(topology, cls, name, number)
        counts[result["status"]] += 1
        if topology.rank == 0:
            why = (result["why"].strip().splitlines() or [""])[-1]
            print(f"{result['status']:8}{cls.__name__}.{name}  {why[:170]}", flush=True)
            if os.environ.get("TRACEBACKS") == "1":
                print(result["why"], flush=True)
    if topology.rank == 0:
        print(f"{path.name} over {backend}, {topology.size} ranks: {dict(counts)}", flush=True)
    os._exit(bool(counts["failed"]))  # threads of tests may still run


if __name__ == "__main__":
    main(*sys.argv[1:])

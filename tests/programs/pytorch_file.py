"""Run a file of PyTorch's own tests of its distributed parts on the ranks of mpirun, over one backend.

    mpirun -n 2 python -m tests.programs.pytorch_file gloo test/distributed/algorithms/test_join.py
    mpirun -n 2 python -m tests.programs.pytorch_file allreduce test_zero_redundancy_optimizer.py Distributed

The tests would start their ranks themselves; here they run on those of mpirun, as many as there are. Words at the end
choose the tests with one of them in their names. Prints a line for each test, and how many passed. Decorators that ask
for GPUs do nothing if CPU_ONLY=1. Needs expecttest (the extra "test").
"""

import importlib
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allreduce
import allreduce.torch_backend
from allreduce.transport.control import root_value
from tests.torch_backend.pytorch_suite import SKIPPED, make_groups, together


def cases(module: Any, base: type, words: list[str]) -> Iterator[tuple[type, str]]:
    """Yield the classes of a file's tests, each with the name of a test."""
    for cls in list(vars(module).values()):  # a test may add to them
        if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == module.__name__:
            names = sorted(name for name in dir(cls) if name.startswith("test_"))
            yield from ((cls, name) for name in names if not words or any(w in f"{cls.__name__}.{name}" for w in words))


def run(topology: allreduce.Topology, cls: Any, name: str, number: int) -> dict[str, str]:
    """Run one test on all ranks. Collective."""
    if any(getattr(part, "__unittest_skip__", False) for part in (cls, getattr(cls, name))):
        return {"status": SKIPPED, "why": "its own mark"}
    folder = root_value(topology.world, tempfile.mkdtemp() if topology.rank == 0 else None, "know the test's folder")
    case = cls(name)
    case.rank, case.file_name = topology.rank, f"{folder}/store"
    os.environ.update(TEMP_DIR=folder, MASTER_PORT=str(20000 + number))
    torch.manual_seed(0)
    result = together(topology, getattr(case, name))
    with suppress(Exception):
        dist.destroy_process_group()
    topology.world.Barrier()
    return result


def main(backend: str, path: str, *words: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    topology = allreduce.Topology()
    make_groups(backend)
    from torch.testing._internal import common_distributed

    if os.environ.get("CPU_ONLY") == "1":
        common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    sys.path.insert(0, str(Path(path).parent))
    module = importlib.import_module(Path(path).stem)
    counts: Counter[str] = Counter()
    base = common_distributed.MultiProcessTestCase
    for number, (cls, name) in enumerate(cases(module, base, list(words))):
        cls.world_size = topology.size  # type: ignore[attr-defined]
        result = run(topology, cls, name, number)
        counts[result["status"]] += 1
        if topology.rank == 0:
            why = (result["why"].strip().splitlines() or [""])[-1]
            print(f"{result['status']:8}{cls.__name__}.{name}  {why[:170]}", flush=True)
    if topology.rank == 0:
        print(f"{Path(path).name} over {backend}, {topology.size} ranks: {dict(counts)}", flush=True)
    os._exit(bool(counts["failed"]))  # threads of tests may still run


if __name__ == "__main__":
    main(*sys.argv[1:])

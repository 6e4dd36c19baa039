"""PyTorch's own tests of torch.distributed (in its wheel), over our backend or over gloo, on the ranks of one mpirun.

    mpirun -n 3 python -m tests.torch_backend.pytorch_suite
    mpirun -n 3 python -m tests.torch_backend.pytorch_suite --backend gloo

The tests are written for gloo, MPI and NCCL, and select by a constant; here it is gloo, and the process groups that
they create use the backend under test. Each test gets its own process group. A test passes if it passes on every rank.
Prints a line for each test. The exit code is 1 if a test fails that LIMITS does not name, or one passes that it names.
Needs expecttest (the extra "test").
"""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allreduce
import allreduce.torch_backend
from allreduce.transport.control import all_values, root_value

# Why tests that pass on gloo fail on ours.
LIMITS = {"test_get_backend": "asks for the name gloo"}
GROUP_SECONDS, TEST_SECONDS = 20, int(os.environ.get("TEST_SECONDS", "60"))
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def imported(topology: allreduce.Topology, folder: str) -> Any:
    """Import PyTorch's module, which reads these variables at its import."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(topology.size), TEMP_DIR=folder, MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        from torch.testing._internal.distributed import distributed_test
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"PyTorch's tests need what is missing ({error}): pip install --group test in the checkout"
        ) from None

    if topology.size > 2:
        os.environ["BACKEND"] = "mpi"  # for which groups of some ranks are tested on fewer than 8
    return distributed_test


def case_class(suite: Any) -> type[unittest.TestCase]:
    class Case(suite.DistributedTest._DistTestBase, suite.TestDistBackend):  # type: ignore[misc,name-defined]
        """Runs the tests in this process, without spawned ones."""

    return Case


def make_groups(backend: str) -> None:
    """Make every process group that a test creates use `backend`."""
    for name, place in (("init_process_group", 0), ("new_group", 2)):
        original = getattr(dist, name)

        def made(*args: Any, _original: Any = original, _place: int = place, **options: Any) -> Any:
            args = (*args[:_place], backend, *args[_place + 1 :]) if len(args) > _place else args
            if len(args) <= _place:
                options["backend"] = backend
            return _original(*args, **options)

        setattr(dist, name, made)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, made)


def start(topology: allreduce.Topology, backend: str, file: str) -> None:
    """Create a process group for one test, and set the same random seeds on all ranks."""
    dist.init_process_group(
        backend, init_method=f"file://{file}", world_size=topology.size, rank=topology.rank,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )  # fmt: skip
    torch.manual_seed(0)


def outcome(action: Callable[[], object]) -> tuple[str, str]:
    """Return the outcome of a test, or of its setup, on this rank, and the reason."""

    def late(*_: object) -> None:
        raise TimeoutError(f"over {TEST_SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            action()
    except unittest.SkipTest as skipped:
        return SKIPPED, str(skipped)
    except SystemExit as left:  # how its decorators skip
        return SKIPPED, f"exit {left.code}"
    except BaseException as error:
        return FAILED, "".join(traceback.format_exception(error))
    finally:
        signal.alarm(0)
    return PASSED, ""


def together(topology: allreduce.Topology, action: Callable[[], object]) -> dict[str, str]:
    """Return the outcome over all ranks: failed if it failed on one. Collective."""
    found = all_values(topology.world, outcome(action), "compare how a test ended")
    status = next(wanted for wanted in (FAILED, SKIPPED, PASSED) if any(wanted == each[0] for each in found))
    whys = [f"rank {rank}: {why}" for rank, (each, why) in enumerate(found) if each == status and why]
    return {"status": status, "why": "\n".join(whys)}


def run(topology: allreduce.Topology, suite: Any, cls: Any, name: str, backend: str) -> dict[str, str]:
    """Run one test on all ranks. Collective."""
    folder = root_value(topology.world, tempfile.mkdtemp() if topology.rank == 0 else None, "know the test's folder")
    for part in ("barrier", "test_dir", "init_dir"):
        Path(folder, part).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = folder
    suite.Barrier.init()
    case = cls(name)
    case.rank, case.file_name = topology.rank, f"{folder}/store"
    if getattr(getattr(cls, name), "__unittest_skip__", False):
        return {"status": SKIPPED, "why": getattr(cls, name).__unittest_skip_why__}
    result = together(topology, partial(start, topology, backend, case.file_name))
    if result["status"] == PASSED:
        result = together(topology, getattr(case, name))
    with suppress(Exception):
        dist.destroy_process_group()
    topology.world.Barrier()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--backend", default="allreduce", help="default: allreduce")
    parser.add_argument("--only", nargs="*", help="names of tests")
    parser.add_argument("--json", type=Path, help="write how each test ended, with the tracebacks")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with allreduce.Topology() as topology:
        suite = imported(topology, tempfile.gettempdir())
        make_groups(options.backend)
        cls = case_class(suite)
        names = options.only or sorted(name for name in dir(cls) if name.startswith("test_"))
        results = {}
        for name in names:
            results[name] = run(topology, suite, cls, name, options.backend)
            if topology.rank == 0:
                last = results[name]["why"].strip().splitlines()[-1:] or [""]
                print(f"{results[name]['status']:8}{name}  {last[0][:150]}", flush=True)
        statuses = {name: result["status"] for name, result in results.items()}
        limits = LIMITS if options.backend == "allreduce" else {}
        unexpected = [name for name, status in statuses.items() if status == (PASSED if name in limits else FAILED)]
        if topology.rank == 0:
            print(f"{dict(Counter(statuses.values()))}, not as expected: {', '.join(unexpected) or 'none'}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())

"""The time of one PyTorch training step on several ranks, by how gradients are averaged.

    mpirun -n 2 python -m benchmarks.training_step --json out.json

All variants train the same model in the same processes, one step of each in turn, so that a machine that
drifts hits all of them alike. A step is zero_grad, forward, backward, step; its time is the slowest rank's.
Every rank computes with one thread unless OMP_NUM_THREADS says otherwise.

glibc's malloc gives large blocks back to the system and takes them again, or not, by chance of the heap's
layout; 10,000 page faults a step decide then which variant is fast. So malloc is told to keep memory here,
for all variants alike; --malloc default leaves it alone.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import allreduce

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise SystemExit(f'benchmarks.training_step needs PyTorch ({error}): pip install "allreduce[torch]"') from error

from benchmarks.models import WORKLOADS, Workload
from trainers.model_file import replacing
from trainers.pytorch import MirroredOptimizer

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

PLAIN, DDP_GLOO, DDP_OURS = "no communication", "DDP + gloo", "DDP + allreduce"
REPLICATED, REPLICATED_OVERLAP = "replicated", "replicated, overlap"
SHARDED, SHARDED_OVERLAP = "sharded", "sharded, overlap"


class Variant(NamedTuple):
    module: torch.nn.Module  # what is called
    optimizer: torch.optim.Optimizer
    close: Callable[[], object]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()


class Bench:
    """Makes the variants; holds what they share."""

    def __init__(self, topology: allreduce.Topology, options: argparse.Namespace) -> None:
        self.topology, self.comm, self.options = topology, topology.world, options
        self.groups: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        _join_process_group(self.comm)
        self.names = [name for name in options.variants if self._possible(name)]

    def _possible(self, name: str) -> bool:
        if name == DDP_OURS and importlib.util.find_spec("allreduce.torch_backend") is None:
            self.skipped[name] = "allreduce.torch_backend is not in this checkout"
        return name not in self.skipped

    def make(self, name: str, workload: Workload) -> Variant:
        """A variant with a fresh model, equal on all ranks. Collective."""
        torch.manual_seed(0)
        model = workload.model()
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if name == PLAIN:
            return Variant(model, plain, lambda: None)
        if name in (DDP_GLOO, DDP_OURS):
            module = torch.nn.parallel.DistributedDataParallel(model, process_group=self._group(name))
            return Variant(module, plain, lambda: None)
        mirrored = MirroredOptimizer(
            plain,
            model,
            self.options.allreduce,
            topology=self.topology,
            update=name.partition(",")[0],
            overlap=name in (REPLICATED_OVERLAP, SHARDED_OVERLAP),
        )
        return Variant(model, mirrored, mirrored.close)

    def _group(self, name: str) -> Any:
        if name not in self.groups:
            if name == DDP_OURS:
                importlib.import_module("allreduce.torch_backend")
            self.groups[name] = dist.new_group(backend="gloo" if name == DDP_GLOO else "allreduce")
        return self.groups[name]

    def batches(self, workload: Workload, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless batches, other ones on each rank, the same for each variant."""
        generator = torch.Generator().manual_seed(1 + self.comm.rank)
        prepared = [workload.batch(size, generator) for _ in range(8)]
        while True:
            yield from prepared

    # Time

    def times(self, workload: Workload, size: int) -> dict[str, list[float]]:
        """For each variant the seconds of each step, the slowest rank's."""
        variants = {name: self.make(name, workload) for name in self.names}
        batches = self.batches(workload, size)
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(self.options.warmup + self.options.steps):
            x, y = next(batches)
            for name, variant in variants.items():
                self.comm.Barrier()
                begin = time.perf_counter()
                variant.step(x, y)
                mine = time.perf_counter() - begin
                if turn >= self.options.warmup:
                    taken[name].append(mine)
        for name, variant in variants.items():
            if self.options.report and isinstance(variant.optimizer, MirroredOptimizer) and self.comm.rank == 0:
                print(f"{name}: {variant.optimizer.report()}", file=sys.stderr)
            variant.close()
        slowest = np.array([taken[name] for name in variants])
        self.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return dict(zip(variants, slowest.tolist(), strict=True))

    # The same result

    def differences(self, workload: Workload, size: int, steps: int) -> dict[str, dict[str, Any]]:
        """How far each variant's parameters are from DDP + gloo's after some steps on the same batches."""
        results = {}
        for name in self.names:
            variant = self.make(name, workload)
            batches = self.batches(workload, size)
            for _ in range(steps):
                variant.step(*next(batches))
            flat = torch.cat([each.detach().reshape(-1) for each in variant.module.parameters()])
            results[name] = flat.clone()
            variant.close()
        reference = results.get(DDP_GLOO)
        found = {}
        for name, flat in results.items():
            if reference is not None and name not in (PLAIN, DDP_GLOO):
                largest = self.comm.allreduce(float((flat - reference).abs().max()), MPI.MAX)
                found[name] = {
                    "bits_equal": self.comm.allreduce(torch.equal(flat, reference), MPI.LAND),
                    "largest": largest,
                }
        return found

    # Memory

    def memory(self, workload: Workload, size: int) -> dict[str, float]:
        """The peak of each variant alone: bytes of a rank, shared pages divided among those that share them."""
        peaks = {}
        for name in [self.names[0], *self.names]:  # the first also loads libraries, so it counts the second time
            _trim()
            self.comm.Barrier()
            with _peak_memory() as peak:
                variant = self.make(name, workload)
                batches = self.batches(workload, size)
                for _ in range(8):
                    variant.step(*next(batches))
                self.comm.Barrier()
            variant.close()
            del variant
            peaks[name] = self.comm.allreduce(peak[0], MPI.MAX)
        return peaks


def _join_process_group(comm: MPI.Intracomm) -> None:
    """torch.distributed, for the peers: the address from rank 0 by MPI."""
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = (socket.gethostbyname(socket.gethostname()), probe.getsockname()[1])
    else:
        address = None
    host, port = comm.bcast(address)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size)


def _keep_freed_memory() -> None:
    """Have glibc's malloc serve every block from its heap, and never shrink that."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def _trim() -> None:
    """Give freed memory back to the system, so that the next variant starts from the same place."""
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _memory_now() -> float:
    """This process's proportional set size in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0.0


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """Sample the memory while the block runs; the one number in the list becomes the highest rise in bytes."""
    before, peak, done = _memory_now(), [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory_now() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


# Printing


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds, and ratios of medians: > 1 is faster than DDP + gloo, <= 1 is no slower than no communication."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    rows = {}
    for name, each in times.items():
        rows[name] = {
            "median_ms": 1e3 * medians[name],
            "min_ms": 1e3 * min(each),
            "p90_ms": 1e3 * sorted(each)[-1 - len(each) // 10],
        }
        if DDP_GLOO in medians:
            rows[name]["faster_than_ddp_gloo"] = medians[DDP_GLOO] / medians[name]
        if PLAIN in medians:
            rows[name]["of_no_communication"] = medians[name] / medians[PLAIN]
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':<22}{'median ms':>10}{'min':>8}{'p90':>8}{'x DDP+gloo':>12}{'/ no comm.':>12}"]
    for name, row in rows.items():
        faster, of = row.get("faster_than_ddp_gloo"), row.get("of_no_communication")
        lines.append(
            f"{name:<22}{row['median_ms']:>10.1f}{row['min_ms']:>8.1f}{row['p90_ms']:>8.1f}"
            + (f"{faster:>12.2f}" if faster else f"{'':>12}")
            + (f"{of:>12.2f}" if of else "")
        )
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    everything = [PLAIN, DDP_GLOO, DDP_OURS, REPLICATED, REPLICATED_OVERLAP, SHARDED, SHARDED_OVERLAP]
    parser.add_argument("--models", default="mlp,transformer,conv", help=f"of {', '.join(WORKLOADS)}; default all")
    parser.add_argument("--batch", default="16,128", help="rows per rank, default 16,128")
    parser.add_argument("--variants", help=f"separated by ';', of: {'; '.join(everything)}. Default all")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each variant, default 30")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, default 5")
    parser.add_argument(
        "--verify", type=int, default=50, metavar="STEPS", help="compare parameters after so many steps; 0: don't"
    )
    parser.add_argument("--allreduce", default="auto", help="the backend of MirroredOptimizer, default auto")
    parser.add_argument("--no-memory", action="store_true", help="don't measure the peak of memory")
    parser.add_argument("--malloc", choices=["keep", "default"], default="keep", help="see above; default keep")
    parser.add_argument("--report", action="store_true", help="print each MirroredOptimizer's report")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON, to stdout without FILE"
    )
    options = parser.parse_args(argv)
    options.models = [each.strip() for each in options.models.split(",")]
    options.variants = [each.strip() for each in options.variants.split(";")] if options.variants else everything
    for given, known in ((options.models, WORKLOADS), (options.variants, everything)):
        unknown = [each for each in given if each not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is unknown; choose from: {'; '.join(known)}")
    try:
        options.batch = [int(each) for each in options.batch.split(",")]
    except ValueError:
        parser.error(f"--batch {options.batch!r}: give whole numbers, separated by commas")
    if min(options.batch) < 1 or options.steps < 1 or options.warmup < 0 or options.verify < 0:
        parser.error("batch sizes and steps are at least 1, warm-up and verification steps at least 0")
    return options


def run(bench: Bench, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All models and batch sizes; one result for each."""
    results = []
    for model in bench.options.models:
        workload = WORKLOADS[model]
        parameters = sum(each.numel() for each in workload.model().parameters())
        memory = {} if bench.options.no_memory else bench.memory(workload, bench.options.batch[0])
        differences = (
            bench.differences(workload, bench.options.batch[0], bench.options.verify) if bench.options.verify else {}
        )
        for at, size in enumerate(bench.options.batch):
            rows = summary(bench.times(workload, size))
            say(f"\n{workload.what}, {parameters / 1e6:.1f} M parameters, batch {size} per rank, SGD with momentum")
            say(table(rows))
            results.append({"model": model, "parameters": parameters, "batch": size, "times": rows})
            if at == 0:
                results[-1].update(peak_memory_bytes=memory, after_steps=bench.options.verify, differences=differences)
                for name, each in differences.items():
                    same = "the same bits as" if each["bits_equal"] else f"within {each['largest']:.1e} of"
                    say(f"  {name}: {same} DDP + gloo after {bench.options.verify} steps")
                if any(memory.values()):
                    say(
                        "  peak MiB per rank: "
                        + ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in memory.items())
                    )
    return results


def main() -> None:
    options = arguments()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if options.malloc == "keep":
        _keep_freed_memory()
    topology = allreduce.Topology()
    bench = Bench(topology, options)
    first = topology.rank == 0

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)

    say(f"{topology}, {torch.get_num_threads()} thread(s) each; PyTorch {torch.__version__}, {platform.machine()}")
    for name, why in bench.skipped.items():
        say(f"without {name}: {why}")
    results = {
        "ranks": topology.size,
        "nodes": topology.nodes,
        "threads": torch.get_num_threads(),
        "malloc": options.malloc,
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0"),
        "skipped": bench.skipped,
        "results": run(bench, say),
    }
    dist.destroy_process_group()
    if first and options.json:
        text = json.dumps(results, indent=1)
        if options.json == "-":
            print(text)
        else:
            with replacing(options.json) as file:
                file.write(text.encode())
    topology.close()


if __name__ == "__main__":
    main()

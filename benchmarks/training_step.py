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
import importlib
import itertools
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise SystemExit(
        f'benchmarks.training_step needs PyTorch ({error}): pip install ".[torch]" in the checkout'
    ) from error

from allreduce.machine import identify
from allreduce.topology import Topology
from allreduce.transport.control import combine, on_all
from benchmarks.lib import cli, outputs, timing
from benchmarks.lib.contenders import join
from benchmarks.lib.machine import peak_memory, trim
from benchmarks.lib.workloads import WORKLOADS, Workload
from trainers import malloc
from trainers.pytorch import MirroredOptimizer

PLAIN, DDP_GLOO, DDP_OURS = "no communication", "DDP + gloo", "DDP + allreduce"
REPLICATED, REPLICATED_OVERLAP = "replicated", "replicated, overlap"
SHARDED, SHARDED_OVERLAP = "sharded", "sharded, overlap"
NAMES = (PLAIN, DDP_GLOO, DDP_OURS, REPLICATED, REPLICATED_OVERLAP, SHARDED, SHARDED_OVERLAP)


class Variant(NamedTuple):
    module: torch.nn.Module  # what is called
    optimizer: torch.optim.Optimizer
    close: Callable[[], object]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()


def _step_on_next(variant: Variant, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    variant.step(*next(batches))


class Variants:
    """Makes variants; holds the process groups that DDP averages over.

    backend: the one of MirroredOptimizer, by name. Creating it, `make` and `close` are collective.
    """

    def __init__(self, topology: Topology, backend: str) -> None:
        self._topology, self._backend = topology, backend
        self._groups: dict[str, Any] = {}
        join(dist, topology)

    def make(self, name: str, workload: Workload) -> Variant:
        """A variant with a fresh model, equal on all ranks. Collective."""
        torch.manual_seed(0)
        model = workload.model()
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=workload.momentum)
        if name == PLAIN:
            return Variant(model, plain, lambda: None)
        if name in (DDP_GLOO, DDP_OURS):
            module = torch.nn.parallel.DistributedDataParallel(model, process_group=self._group(name))
            return Variant(module, plain, lambda: None)
        mirrored = MirroredOptimizer(
            plain,
            model,
            self._backend,
            topology=self._topology,
            update=name.partition(",")[0],
            overlap=name in (REPLICATED_OVERLAP, SHARDED_OVERLAP),
        )
        return Variant(model, mirrored, mirrored.close)

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            if name == DDP_OURS:
                importlib.import_module("allreduce.torch_backend")  # registers it, pip or not
            self._groups[name] = dist.new_group(backend="gloo" if name == DDP_GLOO else "allreduce")
        return self._groups[name]

    def close(self) -> None:
        dist.destroy_process_group()


class Bench:
    """Measures the variants that the options name. All methods are collective.

    options: of benchmarks.training_step: variants, steps, warmup, report, allreduce.
    """

    def __init__(self, topology: Topology, options: argparse.Namespace) -> None:
        self.options, self._comm = options, topology.world
        self._variants = Variants(topology, options.allreduce)
        self.close = self._variants.close

    def _batches(self, workload: Workload, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless batches, other ones on each rank, the same for each variant."""
        generator = torch.Generator().manual_seed(1 + self._comm.rank)
        return itertools.cycle([workload.batch(size, generator) for _ in range(8)])

    def times(self, workload: Workload, size: int) -> dict[str, list[float]]:
        """For each variant the seconds of each step, the slowest rank's."""
        variants = {name: self._variants.make(name, workload) for name in self.options.variants}
        steps = {name: partial(_step_on_next, each, self._batches(workload, size)) for name, each in variants.items()}
        found = timing.take_turns(self._comm, steps, self.options.steps, self.options.warmup)
        for name, variant in variants.items():
            if self.options.report and isinstance(variant.optimizer, MirroredOptimizer) and self._comm.rank == 0:
                print(f"{name}: {variant.optimizer.report()}", file=sys.stderr)
            variant.close()
        return found

    def differences(self, workload: Workload, size: int, steps: int) -> dict[str, dict[str, Any]]:
        """How far each variant's parameters are from DDP + gloo's after some steps on the same batches."""
        results = {}
        for name in self.options.variants:
            variant = self._variants.make(name, workload)
            batches = self._batches(workload, size)
            for _ in range(steps):
                variant.step(*next(batches))
            flat = torch.cat([each.detach().reshape(-1) for each in variant.module.parameters()])
            results[name] = flat.clone()
            variant.close()
        reference = results.get(DDP_GLOO)
        found = {}
        for name, flat in results.items():
            if reference is not None and name not in (PLAIN, DDP_GLOO):
                largest = self._largest(float((flat - reference).abs().max()))
                found[name] = {
                    "bits_equal": on_all(self._comm, torch.equal(flat, reference), "compare bits"),
                    "largest": largest,
                }
        return found

    def memory(self, workload: Workload, size: int) -> dict[str, float]:
        """The peak of each variant alone: bytes of a rank, shared pages divided among those that share them."""
        peaks = {}
        names = self.options.variants
        for name in [names[0], *names]:  # the first also loads libraries, so it counts the second time
            trim()
            self._comm.Barrier()
            with peak_memory() as peak:
                variant = self._variants.make(name, workload)
                batches = self._batches(workload, size)
                for _ in range(8):
                    variant.step(*next(batches))
                self._comm.Barrier()
            variant.close()
            del variant
            peaks[name] = self._largest(peak[0])
        return peaks

    def _largest(self, value: float) -> float:
        """Of all ranks' values. Collective."""
        return float(combine(self._comm, np.array([value], np.float64), "find the largest", MPI.MAX)[0])


try:
    import torch
except ImportError as error:
    raise SystemExit(
        f'benchmarks.training_step needs PyTorch ({error}): pip install ".[torch]" in the checkout'
    ) from error

PROGRAM = "benchmarks.training_step"


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds, and ratios of medians: > 1 is faster than DDP + gloo, <= 1 is no slower than no communication."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    rows = {}
    for name, each in times.items():
        rows[name] = timing.summary(each)
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


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(PROGRAM, __doc__)
    add = parser.add_argument
    cli.add_some(parser, "--models", WORKLOADS)
    add("--batch", type=_numbers, default=[16, 128], metavar="N,N", help="rows per rank, default 16,128")
    cli.add_some(parser, "--variants", NAMES, ";")
    add("--steps", type=cli.at_least(1), default=30, metavar="N", help="timed steps of each variant, default 30")
    add("--warmup", type=cli.at_least(0), default=5, metavar="N", help="steps before them, default 5")
    add(
        "--verify", type=cli.at_least(0), default=50, metavar="N",
        help="compare parameters after so many steps, default 50; 0: don't",
    )  # fmt: skip
    add("--allreduce", default="auto", metavar="NAME", help="the backend of MirroredOptimizer, default auto")
    add("--no-memory", action="store_true", help="don't measure the peak of memory")
    add("--malloc", choices=["keep", "default"], default="keep", help="see above; default keep")
    add("--report", action="store_true", help="print each MirroredOptimizer's report")
    cli.add_json_option(parser)
    return parser


def _numbers(text: str) -> list[int]:
    return [cli.at_least(1)(each) for each in text.split(",")]


def run(bench: Bench, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All models and batch sizes; one result for each."""
    results = []
    for model in bench.options.models:
        workload = WORKLOADS[model]
        parameters = sum(each.numel() for each in workload.model().parameters())
        memory = {} if bench.options.no_memory else bench.memory(workload, bench.options.batch[0])
        verify = bench.options.verify
        differences = bench.differences(workload, bench.options.batch[0], verify) if verify else {}
        for at, size in enumerate(bench.options.batch):
            rows = summary(bench.times(workload, size))
            sgd = f"SGD with{'' if workload.momentum else 'out'} momentum"
            say(f"\n{workload.what}, {parameters / 1e6:.1f} M parameters, batch {size} per rank, {sgd}")
            say(table(rows))
            results.append({"model": model, "parameters": parameters, "batch": size, "times": rows})
            if at == 0:
                results[-1].update(peak_memory_bytes=memory, after_steps=verify, differences=differences)
                for name, each in differences.items():
                    same = "the same bits as" if each["bits_equal"] else f"within {each['largest']:.1e} of"
                    say(f"  {name}: {same} DDP + gloo after {verify} steps")
                if any(memory.values()):
                    peaks = ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in memory.items())
                    say(f"  peak MiB per rank: {peaks}")
    return results


def _run(topology: Topology, options: argparse.Namespace) -> int:
    screen = outputs.Screen(topology.world, options.json)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    os.environ[malloc.OPTION] = options.malloc
    malloc.keep_freed_memory()  # from the first step, of all variants
    threads = torch.get_num_threads()
    screen.say(f"{topology}, {threads} thread(s) each; PyTorch {torch.__version__}, {platform.machine()}")
    bench = Bench(topology, options)
    results = run(bench, screen.say)
    bench.close()
    about = {"ranks": topology.size, "nodes": topology.nodes, "threads": threads, "malloc": options.malloc}
    screen.put({**about, "torch": torch.__version__, "mpi": identify()["mpi"], "results": results})
    return 0


main = cli.command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())

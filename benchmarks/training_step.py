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
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

import allreduce

try:
    import torch
except ImportError as error:
    raise SystemExit(f'benchmarks.training_step needs PyTorch ({error}): pip install "allreduce[torch]"') from error

from benchmarks.models import WORKLOADS
from benchmarks.step_measures import Bench
from benchmarks.step_memory import keep_freed_memory
from benchmarks.step_variants import DDP_GLOO, NAMES, PLAIN
from trainers.model_file import replacing


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
    everything = list(NAMES)
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
        keep_freed_memory()
    topology = allreduce.Topology()
    bench = Bench(topology, options)
    first = topology.rank == 0

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)

    say(f"{topology}, {torch.get_num_threads()} thread(s) each; PyTorch {torch.__version__}, {platform.machine()}")
    results = {
        "ranks": topology.size,
        "nodes": topology.nodes,
        "threads": torch.get_num_threads(),
        "malloc": options.malloc,
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0"),
        "results": run(bench, say),
    }
    bench.close()
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

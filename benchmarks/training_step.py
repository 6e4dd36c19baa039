"""Measures the time of a PyTorch training step on several ranks, for each way of averaging gradients.

    mpirun -n 2 python -m benchmarks.training_step --json out.json
    mpirun -n 2 python -m benchmarks.training_step --models mlp,transformer --ways ddp,zero,fsdp
    sudo GLOO_SOCKET_IFNAME=eth0 bash scripts/cluster_sim.sh 2x1 1gbit -- \
        python -m benchmarks.training_step --models mlp,conv --batch 64 --ways hosts    between simulated hosts

All variants train the same model in the same processes. They take turns, one step each, so that a drifting machine
affects all of them alike. A step is zero_grad, forward, backward, step; its time is the slowest rank's. Every rank
computes with one thread unless OMP_NUM_THREADS says otherwise.

Whether glibc's malloc returns large blocks to the system depends on the layout of the heap; the page faults (10,000 a
step) would then decide which variant is fast. So malloc keeps freed memory here, unless ALLREDUCE_MALLOC=default.
"""

import argparse
import importlib
import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor
except ImportError as error:
    raise SystemExit(
        f'benchmarks.training_step needs PyTorch ({error}): pip install ".[torch]" in the checkout'
    ) from error

from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.transport.control import on_all, on_all_ranks
from benchmarks.lib import cli, timing
from benchmarks.lib.columns import columns
from benchmarks.lib.hosts import interface_bytes
from benchmarks.lib.machine import peak_memory, trim
from benchmarks.lib.networks import Trained, convolutional, one_thread, perceptron
from benchmarks.lib.outputs import Screen
from benchmarks.lib.peers import join
from trainers import Sharded
from trainers.pytorch import Buckets, MirroredOptimizer

PLAIN, DDP_GLOO, DDP_OURS = "no communication", "DDP + gloo", "DDP + allreduce"
DDP_GLOO_HALF, DDP_OURS_HALF = "DDP + gloo, float16", "DDP + allreduce, float16"  # by PyTorch's hook
DDP_NOTHING, BARE = "DDP, hook without all-reduce", "all-reduce alone"  # the floor of DDP; of the gradients' bytes
GLOO, OURS = " + gloo", " + allreduce"  # endings of a way's names
MIRRORED: dict[str, dict[str, Any]] = {  # options of MirroredOptimizer
    "replicated": {"update": "replicated", "buckets": Buckets(False)},
    "replicated, overlap": {"update": "replicated", "buckets": Buckets(True)},
    "sharded": {"update": "sharded", "buckets": Buckets(False)},
    "sharded, overlap": {"update": "sharded", "buckets": Buckets(True)},
    "replicated, bfloat16": {"compress": "bfloat16"},
    "replicated, int8": {"compress": "int8"},
    "sharded, copies=2": {"update": Sharded(copies=2), "buckets": Buckets(False)},  # with mpirun --with-ft ulfm
}
HOSTS = (
    DDP_GLOO,
    DDP_OURS,
    "replicated, overlap",
    DDP_GLOO_HALF,
    DDP_OURS_HALF,
    "replicated, bfloat16",
    "replicated, int8",
)
WAYS = {
    "hosts": HOSTS,
    "ddp": (DDP_NOTHING, BARE, DDP_GLOO, DDP_OURS),
    "zero": ("ZeRO-1 + gloo", "ZeRO-1 + allreduce"),
    "fsdp": ("FSDP2 + gloo", "FSDP2 + allreduce"),
}
NAMES = tuple(dict.fromkeys((PLAIN, *itertools.chain(*WAYS.values()), *MIRRORED)))
DEFAULT = [PLAIN, DDP_GLOO, DDP_OURS, *itertools.islice(MIRRORED, 4)]
UNAVERAGED = (PLAIN, DDP_NOTHING, BARE)
DENSE_ONLY = (*WAYS["zero"], *WAYS["fsdp"])
MEMORY_STEPS = 8  # of the training whose peak of memory is measured


# Models, and batches for them


class Workload(NamedTuple):
    """A model, and the rows of batches: rows(size, generator)."""

    model: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], Tensor]
    title: str
    momentum: float = 0.9
    sparse: bool = False  # its gradients

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.rows(size, generator), torch.randint(0, 10, (size,), generator=generator)

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.model().parameters())


class Transformer(nn.Module):
    """An encoder of 4 layers, width 256, on 32 tokens, 3.4 M parameters; classifies the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def embedding() -> nn.Module:
    """A table of 1,000,000 vectors of 64 elements with sparse gradients; each row of a batch uses one vector."""
    return nn.Sequential(nn.Embedding(1_000_000, 64, sparse=True), nn.Linear(64, 10))


WORKLOADS = {
    "mlp": Workload(  # much memory, little arithmetic
        partial(perceptron, (784, 2048, 2048, 2048, 10)),
        lambda size, generator: torch.randn(size, 784, generator=generator),
        "MLP 784-2048-2048-2048-10",
    ),
    "transformer": Workload(
        Transformer,
        lambda size, generator: torch.randint(0, 1000, (size, 32), generator=generator),
        "transformer, 4 layers of width 256, 32 tokens",
    ),
    "conv": Workload(  # little memory, much arithmetic
        partial(convolutional, (3, 32, 64, 128, 256, 512)),
        lambda size, generator: torch.randn(size, 3, 32, 32, generator=generator),
        "convolutional network on 3x32x32",
    ),
    "embedding": Workload(
        embedding,
        lambda size, generator: torch.randint(0, 1_000_000, (size,), generator=generator),
        "embedding of 1,000,000 x 64 with sparse gradients",
        momentum=0.0,
        sparse=True,
    ),
}


# Ways of averaging gradients


class Bench:
    """Measures the variants that the options name. All methods are collective."""

    def __init__(self, topology: Topology, options: argparse.Namespace) -> None:
        self._topology, self._options, self._comm = topology, options, topology.world
        self._groups: dict[str, Any] = {}  # process groups of DDP
        join(dist, topology)

    def close(self) -> None:
        dist.destroy_process_group()

    def _make(self, name: str, workload: Workload) -> Trained:
        """Return a variant with a new model, equal on all ranks."""
        torch.manual_seed(0)
        model = workload.model()
        sgd = partial(torch.optim.SGD, lr=0.01, momentum=workload.momentum)
        if name in MIRRORED:
            options = MIRRORED[name]
            mirrored = MirroredOptimizer(
                sgd(model.parameters()), model, self._options.allreduce, topology=self._topology, **options
            )
            return Trained(model, mirrored, mirrored.close)
        if name in WAYS["fsdp"]:
            mesh = DeviceMesh.from_group(self._group(name), "cpu")
            for part in _parts(model):
                fully_shard(part, mesh=mesh)
        if name in WAYS["fsdp"] or name == PLAIN:
            return Trained(model, sgd(model.parameters()))
        module = nn.parallel.DistributedDataParallel(model, process_group=self._group(name))
        if name == DDP_NOTHING:
            module.register_comm_hook(None, _without_all_reduce)
        if name in (DDP_GLOO_HALF, DDP_OURS_HALF):
            module.register_comm_hook(self._group(name), default_hooks.fp16_compress_hook)
        if name in WAYS["zero"]:
            given: dict[str, Any] = {"process_group": self._group(name), "parameters_as_bucket_view": True}
            return Trained(
                module, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **sgd.keywords, **given)
            )
        return Trained(module, sgd(model.parameters()))

    def _group(self, name: str) -> Any:
        """Return the process group of a variant: gloo's, or the one over this library."""
        backend = "gloo" if GLOO in name else "allreduce"
        if backend not in self._groups:
            if backend == "allreduce":
                importlib.import_module("allreduce.torch_backend")  # registers it, also without an installation
            self._groups[backend] = dist.new_group(backend=backend)
        return self._groups[backend]

    def _all_reduce_alone(self, workload: Workload) -> Callable[[], object]:
        """Return a function that all-reduces a tensor of as many elements as the model has. Collective."""
        tensor = torch.zeros(workload.parameters)
        return partial(dist.all_reduce, tensor, group=self._group(BARE))

    def _batches(self, workload: Workload, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches endlessly: different on each rank, the same for each variant."""
        generator = torch.Generator().manual_seed(1 + self._comm.rank)
        return itertools.cycle([workload.batch(size, generator) for _ in range(8)])

    def _train(self, variant: Trained, workload: Workload, size: int, steps: int) -> None:
        for x, y in itertools.islice(self._batches(workload, size), steps):
            variant.step(x, y)

    def times(self, workload: Workload, size: int, screen: Screen) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Return variant -> the seconds of each step, on the slowest rank, and the bytes that a host sends."""
        variants = {name: self._make(name, workload) for name in self._options.variants if name != BARE}
        steps: dict[str, Callable[[], object]] = {
            name: partial(_step, each, self._batches(workload, size)) for name, each in variants.items()
        }
        if BARE in self._options.variants:
            steps[BARE] = self._all_reduce_alone(workload)
        counts: dict[str, list[int]] = {name: [] for name in steps}  # before and after each step
        several = self._topology.nodes > 1
        count = {name: partial(self._count, each) for name, each in counts.items()} if several else None
        given = self._options
        found = timing.take_turns(self._comm, steps, given.steps, given.warmup, screen, before=count, after=count)
        for variant in variants.values():
            variant.close()
        sent = {name: median(np.diff(each)[::2]) if several else 0 for name, each in counts.items()}
        return found, {name: self._largest(each) for name, each in sent.items()}

    def _count(self, counts: list[int]) -> None:
        """Append the bytes that this host has sent to other hosts, when no rank makes a step."""
        self._comm.Barrier()
        counts.append(interface_bytes())

    def differences(self, workload: Workload, size: int, steps: int) -> dict[str, dict[str, Any]]:
        """Return how far each variant's parameters are from DDP + gloo's after `steps` steps on the same batches."""
        results = {}
        for name in self._options.variants:
            if name in UNAVERAGED:
                continue
            variant = self._make(name, workload)
            self._train(variant, workload, size, steps)
            results[name] = torch.cat([_whole(each).reshape(-1) for each in variant.module.parameters()])
            variant.close()
        reference = results.get(DDP_GLOO)
        found = {}
        for name, flat in results.items():
            if reference is not None and name != DDP_GLOO:
                largest = self._largest(float((flat - reference).abs().max()))
                equal = on_all(self._comm, torch.equal(flat, reference), "compare bits")
                found[name] = {"bits_equal": equal, "largest": largest}
        return found

    def memory(self, workload: Workload, size: int) -> dict[str, float]:
        """Measure each variant's peak of memory, in bytes per rank; ranks that share a page divide it among them."""
        peaks = {}
        names = [name for name in self._options.variants if name != BARE]
        for name in [names[0], *names]:  # the first one also loads libraries, so it is measured twice
            trim()
            self._comm.Barrier()
            with peak_memory() as peak:
                variant = self._make(name, workload)
                self._train(variant, workload, size, MEMORY_STEPS)
                self._comm.Barrier()
            variant.close()
            del variant
            peaks[name] = self._largest(peak[0])
        return peaks

    def _largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return float(timing.slowest(self._comm, np.array([value]))[0])


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP shards one by one: the layers with many parameters, then the model."""
    kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
    layers: list[nn.Module] = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    return [*(layers or [each for each in model.children() if isinstance(each, kinds)]), model]


def _step(variant: Trained, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    variant.step(*next(batches))


def _without_all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _whole(parameter: Tensor) -> Tensor:
    """Return a parameter of all ranks, gathered if it is sharded. Collective then."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return milliseconds and ratios of medians: > 1: faster than DDP + gloo; <= 1: no slower than no communication."""
    rows = {name: timing.summary(each) for name, each in times.items()}
    for name, row in rows.items():
        if DDP_GLOO in times:
            row["faster_than_ddp_gloo"] = median(times[DDP_GLOO]) / median(times[name])
        if PLAIN in times:
            row["of_no_communication"] = median(times[name]) / median(times[PLAIN])
        if (peer := name.removesuffix(OURS) + GLOO) in times and name.endswith(OURS):
            row["faster_than_gloo"] = median(times[peer]) / median(times[name])
        if DDP_NOTHING in times and name in (DDP_GLOO, DDP_OURS):
            row["added_to_ddp_ms"] = row["median_ms"] - rows[DDP_NOTHING]["median_ms"]
            if BARE in times:
                row["added_of_all_reduce_alone"] = row["added_to_ddp_ms"] / rows[BARE]["median_ms"]
    return rows


def _say_ratios(rows: dict[str, dict[str, float]], screen: Screen) -> None:
    """Print how each way over this library compares with gloo, and the time that it adds to DDP."""
    for name, row in rows.items():
        if "faster_than_gloo" in row:
            screen.say(f"  {name}: {row['faster_than_gloo']:.2f}x as fast as over gloo")
        if "added_of_all_reduce_alone" in row:
            ratio, added = row["added_of_all_reduce_alone"], row["added_to_ddp_ms"]
            screen.say(f"  {name}: adds {added:.1f} ms to DDP, {ratio:.2f} times the all-reduce alone")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cli.add_some(parser, "--models", WORKLOADS)
    add(
        "--batch",
        type=cli.several(cli.at_least(1)),
        default=[16, 128],
        metavar="N,N",
        help="rows per rank, default 16,128",
    )
    cli.add_some(parser, "--variants", NAMES, ";", DEFAULT)
    cli.add_some(parser, "--ways", WAYS, default=[], about="over gloo and over this library, instead of --variants")
    add("--steps", type=cli.at_least(1), default=30, metavar="N", help="timed steps of each variant, default 30")
    add("--warmup", type=cli.at_least(0), default=5, metavar="N", help="steps before them, default 5")
    add(
        "--verify", type=cli.at_least(0), default=50, metavar="N",
        help="compare parameters after N steps, default 50; 0: don't",
    )  # fmt: skip
    add("--allreduce", default="auto", metavar="NAME", help="the backend of MirroredOptimizer, default auto")
    add("--no-memory", action="store_true", help="don't measure the peak of memory")
    cli.add_json_option(parser)


def measure(bench: Bench, ranks: int, options: argparse.Namespace, screen: Screen) -> list[dict[str, Any]]:
    """Measure all models and batch sizes; returns one result for each. Collective."""
    results = []
    for model in options.models:
        workload = WORKLOADS[model]
        memory = {} if options.no_memory else bench.memory(workload, options.batch[0])
        differences = bench.differences(workload, options.batch[0], options.verify) if options.verify else {}
        for size in options.batch:
            times, sent = bench.times(workload, size, screen)
            sgd = f"SGD with{'' if workload.momentum else 'out'} momentum"
            screen.say(
                f"\n{workload.title}, {workload.parameters / 1e6:.1f} M parameters, batch {size} per rank, {sgd}"
            )
            screen.say(timing.table(times, DDP_GLOO, PLAIN))
            rows = summary(times)
            for name, row in rows.items():
                row.update(samples_per_second=size * ranks / median(times[name]), sent_bytes=sent[name])
            cells = [
                [n, f"{row['samples_per_second']:.0f}", f"{row['sent_bytes'] / 1e6:.2f}"] for n, row in rows.items()
            ]
            screen.say("", *columns(["", "samples/s", "MB that a host sends in a step"], cells))
            _say_ratios(rows, screen)
            results.append({"model": model, "parameters": workload.parameters, "batch": size, "times": rows})
            if size == options.batch[0]:
                results[-1].update(peak_memory_bytes=memory, after_steps=options.verify, differences=differences)
                for name, each in differences.items():
                    same = "the same bits as" if each["bits_equal"] else f"within {each['largest']:.1e} of"
                    screen.say(f"  {name}: {same} DDP + gloo after {options.verify} steps")
                if any(memory.values()):
                    peaks = ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in memory.items())
                    screen.say(f"  peak MiB per rank: {peaks}")
    return results


def _run(topology: Topology, options: argparse.Namespace, screen: Screen) -> int:
    one_thread()
    if options.ways:
        options.variants = list(dict.fromkeys([PLAIN, *itertools.chain(*(WAYS[way] for way in options.ways))]))
    sparse = [model for model in options.models if WORKLOADS[model].sparse]
    if refused := sparse and [name for name in options.variants if name in DENSE_ONLY]:
        text = f"the model {sparse[0]} has sparse gradients, which {', '.join(refused)} don't take"
        raise on_all_ranks(OptionError(f"{text}; give other models or other ways"), topology.world)
    malloc.keep_freed_memory()  # from the first step, of all variants
    threads = torch.get_num_threads()
    screen.say(f"{topology}, {threads} thread(s) each; PyTorch {torch.__version__}, {platform.machine()}")
    bench = Bench(topology, options)
    results = measure(bench, topology.size, options, screen)
    bench.close()
    about = {"ranks": topology.size, "nodes": topology.nodes, "threads": threads}
    screen.write_record({**about, "torch": torch.__version__, "mpi": identify()["mpi"], "results": results})
    return 0


main = cli.command("benchmarks.training_step", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())

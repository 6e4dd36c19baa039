"""Training: the time to an accuracy on a slow network, by each way of sending less, and by PyTorch's own ways.

A method is written as parts with "+" between them:

    none, bfloat16, int8, powersgd:4                  MirroredOptimizer(compress=...)
    sync:50, diloco:50                                MirroredOptimizer(average=LocalSGD(50)), outer="diloco"
    sync:50+int8, diloco:50+streamed                  with compressed averages; with fragments in turns
    ddp, ddp+fp16, ddp+powersgd:4, ddp+postlocal:50   DistributedDataParallel with gloo, and PyTorch's own hooks

Every method trains the same model from the same parameters on the same batches. The data are the digits that this
package contains, enlarged to 28x28 pixels. The accuracy is the mean of the ranks' replicas on the test rows. It is
measured every --every steps, and at the end of a round if the ranks have parameters of their own in between; the clock
stands meanwhile, and nothing is being sent. The target is the mean of the last five accuracies of `none`, less half a
point. A method has reached it at the first of two evaluations in a row that are not below it. Every rank computes with
one thread unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from allreduce.arrays import compression as options
from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, on_all_ranks
from benchmarks.compressing.speed import compression
from benchmarks.lib import hosts
from benchmarks.lib.networks import Trained, one_thread, perceptron
from benchmarks.lib.outputs import Screen
from benchmarks.lib.peers import join
from trainers import LocalSGD, datasets
from trainers.pytorch import MirroredOptimizer

PLAIN, PEER = "none", "ddp"
METHODS = (
    PLAIN, "bfloat16", "int8", "powersgd:4",
    "sync:10", "sync:10+streamed", "sync:10+int8", "sync:50", "sync:50+streamed", "sync:50+int8",
    "diloco:10", "diloco:10+streamed", "diloco:50", "diloco:50+streamed", "diloco:50+int8",
    PEER, "ddp+fp16", "ddp+powersgd:4", "ddp+postlocal:10", "ddp+postlocal:50",
)  # fmt: skip
POINTS = 0.005  # the target is this much below the accuracy of `none`
LAST = 5  # evaluations of `none` whose mean is its accuracy
WARMUP = 2  # calls of PowerSGD in full precision; PyTorch's takes no less
ONE_BUCKET = 4096  # MiB: more than any model here
PATIENCE = 3  # a method may take this many times the steps of `none`
TIMES = 2  # and this many times its seconds


# Models


class Workload(NamedTuple):
    """model: makes it, for images (rows, 1, 28, 28). batch: rows of all ranks together. steps: of `none`."""

    model: Callable[[], nn.Module]
    learning_rate: float
    batch: int
    steps: int


def convolutional() -> nn.Module:
    """Two 3x3 convolutions and two dense layers, 1.08 M parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 336), nn.ReLU(), nn.Linear(336, 10),
    )  # fmt: skip


DENSE = (784, 2048, 2048, 2048, 10)
WORKLOADS = {"mlp": Workload(partial(perceptron, DENSE), 5e-4, 256, 65), "conv": Workload(convolutional, 1e-3, 64, 200)}


class Data(NamedTuple):
    """x: (rows, 1, 28, 28) float32, of mean 0 and standard deviation 1. y: (rows,) classes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def enlarged(digits: np.ndarray) -> np.ndarray:
    """Enlarge digits, (rows, 64) with values 0 to 16, to (rows, 28, 28) uint8 images, by linear interpolation.

    The digit fills a box of 20x20 pixels in the middle, as in MNIST.
    """
    side, box = 28, 20
    centres = np.clip((np.arange(box) + 0.5) * 8 / box - 0.5, 0, 7)  # of the new pixels' centres, in old pixels
    weights = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(8)))
    inside = np.rint(weights @ digits.reshape(-1, 8, 8) @ weights.T * (255 / 16)).astype(np.uint8)
    border = (side - box) // 2
    return np.pad(inside, ((0, 0), (border, border), (border, border)))


def load() -> Data:
    """Return the digits as images of 28x28 pixels. Local."""
    digits = datasets.load("digits")
    x, x_test = (enlarged(each).astype(np.float32)[:, None] for each in (digits.x_train, digits.x_test))
    shift, scale = x.mean(), 1 / x.std()
    arrays = ((x - shift) * scale, digits.y_train, (x_test - shift) * scale, digits.y_test)
    return Data(*map(torch.from_numpy, arrays))


def batches(data: Data, batch: int, topology: Topology) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch, endlessly, from a new permutation of all rows each epoch. Local."""
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(len(data.x), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            mine = order[start : start + batch][topology.rank :: topology.size]
            yield data.x[mine], data.y[mine]


# Methods


@dataclass(frozen=True)
class Method:
    """compress: of gradients, or of the averages of `interval` steps. peer: DDP with gloo, not this library. outer: the
    outer optimizer, or "postlocal" for PyTorch's."""

    name: str
    peer: bool = False
    compress: str | None = None
    interval: int | None = None
    outer: str = "average"
    streamed: bool = False

    def evaluated_every(self, steps: int) -> int:
        """Return the number of steps between evaluations. steps: of methods whose replicas are equal, or
        streamed, which average a fragment before each evaluation."""
        return steps if self.interval is None or self.streamed else self.interval

    def options(self, every: int) -> dict[str, Any]:
        """Return the options of MirroredOptimizer. every: the steps between evaluations."""
        found: dict[str, Any] = {
            "compress": compression(self.compress or PLAIN, WARMUP if self.interval is None else 0)
        }
        if self.interval is not None:
            found["average"] = LocalSGD(self.interval, self.outer)
        if self.streamed and self.interval is not None:
            found["average"] = LocalSGD(self.interval, self.outer, self.interval // every)
        return found


def parse(name: str, every: int) -> Method:
    """Return the method of a name. every: the steps between evaluations. Local. Raises OptionError."""
    first, *parts = name.split("+")
    found = Method(name, peer=first == PEER)
    for part in parts if found.peer or first == PLAIN else (first, *parts):
        kind, _, number = part.partition(":")
        if kind in (("postlocal",) if found.peer else ("sync", "diloco")):
            if not number.isdecimal() or int(number) < 1:
                raise OptionError(f"method {name!r}: write the number of steps between averages, as in {kind}:50")
            outer = "average" if kind == "sync" else kind
            found = replace(found, interval=int(number), outer=outer)
        elif part == "streamed" and not found.peer:
            found = replace(found, streamed=True)
        else:
            found = replace(found, compress=_known(name, part, found.peer))
    if found.streamed and (found.interval is None or found.interval % every):
        raise OptionError(
            f"method {name!r}: streamed fragments need sync:N or diloco:N with a multiple of --every {every}: a "
            "fragment is averaged before each evaluation"
        )
    if found.peer and found.interval and found.compress:
        raise OptionError(f"method {name!r}: PyTorch's post-local SGD has no compression; leave one of them out")
    return found


def _known(name: str, part: str, peer: bool) -> str:
    if not peer:
        options.parse(part)
    elif part != "fp16" and not (part.startswith("powersgd:") and part[9:].isdecimal() and int(part[9:]) > 0):
        raise OptionError(f"method {name!r}: {part!r} is unknown; use ddp+ fp16, powersgd:4 or postlocal:50")
    return part


class Bench:
    """Trains a model by the methods. All methods of this class are collective."""

    def __init__(self, topology: Topology, args: argparse.Namespace) -> None:
        self._topology, self._args, self._data = topology, args, load()
        self._node: Any = None  # PyTorch's process group of this node's ranks

    def prepare(self, methods: Sequence[Method]) -> None:
        """Connect the ranks by gloo, if a method needs it."""
        if any(method.peer for method in methods):
            join(dist, self._topology)
            numbers = all_values(self._topology.world, self._topology.node_index, "group the ranks by nodes")
            for node in sorted(set(numbers)):
                group = dist.new_group([rank for rank, number in enumerate(numbers) if number == node])
                if node == self._topology.node_index:
                    self._node = group

    def close(self) -> None:
        if self._node is not None:
            dist.destroy_process_group()

    def _make(self, method: Method, workload: Workload) -> tuple[nn.Module, Trained]:
        """Return a new model, equal on all ranks, and its contestant."""
        torch.manual_seed(0)
        model = workload.model()
        adam = torch.optim.Adam(model.parameters(), workload.learning_rate, fused=True)
        if not method.peer:
            given = method.options(self._args.every)
            ours = MirroredOptimizer(adam, model, self._args.backend, topology=self._topology, **given)
            return model, Trained(model, ours, ours.close)
        # The PowerSGD hook starts collective calls in callbacks, in threads of gloo. With two buckets the order differs
        # between ranks, and gloo aborts ("Received data size doesn't match"). So that hook has one bucket.
        cap = ONE_BUCKET if (method.compress or "").startswith("powersgd") else None
        module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        optimizer: Any = adam
        if method.interval is not None:  # the averager counts from 0; its first average is to follow step `interval`
            module.register_comm_hook(PostLocalSGDState(None, self._node, 0), post_localSGD_hook)
            averager = PeriodicModelAverager(method.interval, warmup_steps=method.interval - 1)
            optimizer = PostLocalSGDOptimizer(adam, averager)
        elif method.compress == "fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method.compress is not None:
            state = powerSGD_hook.PowerSGDState(None, int(method.compress[9:]), start_powerSGD_iter=WARMUP)
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, Trained(module, optimizer)

    def run(
        self, method: Method, workload: Workload, steps: int, done: Callable[["Run"], bool], screen: Screen
    ) -> "Run":
        """Train by a method, for `steps` steps or until done(run)."""
        model, contestant = self._make(method, workload)
        mine, found = batches(self._data, workload.batch, self._topology), Run(method.name)
        part = method.evaluated_every(self._args.every)
        with screen.bar(steps, "step") as bar:
            while found.steps < steps and not done(found):
                before = hosts.sent_bytes(self._topology)
                self._topology.world.Barrier()
                begin = time.perf_counter()
                for _ in range(part):
                    contestant.step(*next(mine))
                self._topology.world.Barrier()
                seconds = time.perf_counter() - begin
                after = hosts.sent_bytes(self._topology)
                sent = None if before is None or after is None else after - before
                found.add(part, seconds, sent, self._accuracy(model))
                bar.set_postfix_str(f"{method.name}: accuracy {found.accuracies[-1]:.4f}")
                bar.update(part)
        contestant.close()
        return found

    def _accuracy(self, model: nn.Module) -> float:
        """Return the mean accuracy of the ranks' replicas on the test rows."""
        with torch.no_grad():
            right = int((model(self._data.x_test).argmax(1) == self._data.y_test).sum())
        total = int(combine(self._topology.world, np.array([right], np.int64), "evaluate", MPI.SUM)[0])
        return total / len(self._data.y_test) / self._topology.size


# Results


@dataclass
class Run:
    """A training: after each evaluation the number of steps, the seconds of training, the accuracy; and the bytes that
    the hosts have sent in all steps, None on one host. reached: the index of the evaluation at which it has reached the
    target, or None."""

    method: str
    at: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    sent_bytes: int | None = None
    reached: int | None = None

    @property
    def steps(self) -> int:
        """The steps that were taken."""
        return self.at[-1] if self.at else 0

    @property
    def bytes_per_step(self) -> float | None:
        """The bytes that all hosts together send in a step; None on one host."""
        return None if self.sent_bytes is None else self.sent_bytes / self.steps

    def add(self, steps: int, seconds: float, sent: int | None, accuracy: float) -> None:
        """Append an evaluation after some more steps."""
        self.at.append(self.steps + steps)
        self.seconds.append(seconds + (self.seconds[-1] if self.seconds else 0))
        self.accuracies.append(accuracy)
        self.sent_bytes = None if sent is None else sent + (self.sent_bytes or 0)

    def look(self, target: float) -> bool:
        """Set `reached`; returns whether the target is reached."""
        good = [accuracy >= target for accuracy in self.accuracies]
        twice = [index for index in range(len(good) - 1) if good[index] and good[index + 1]]
        self.reached = twice[0] if twice else None
        return self.reached is not None


def target_of(plain: Run) -> float:
    """Return the accuracy that the methods have to reach."""
    return float(np.mean(plain.accuracies[-LAST:])) - POINTS


def row(run: Run, plain: Run) -> dict[str, Any]:
    """Return the numbers of a run, and its comparison with the uncompressed one, for JSON."""
    index, first = run.reached, plain.reached
    faster = None if index is None or first is None else plain.seconds[first] / run.seconds[index]
    own, others = run.bytes_per_step, plain.bytes_per_step
    return {
        **asdict(run),
        "seconds_to_target": None if index is None else run.seconds[index],
        "steps_to_target": None if index is None else run.at[index],
        "ms_per_step": 1e3 * run.seconds[-1] / run.steps,
        "bytes_per_step": own,
        "speedup": faster,
        "of_bytes": None if own is None or not others else own / others,
        "best_accuracy": max(run.accuracies),
    }


HEAD = (
    f"  {'':<20}{'seconds to':>11}{'speed-up':>10}{'steps':>7}{'ms a':>9}{'MB a step':>11}{'of the':>9}{'best':>10}\n"
    f"  {'':<20}{'the target':>11}{'':>10}{'':>7}{'step':>9}{'all hosts':>11}{'bytes':>9}{'accuracy':>10}"
)


def line(row: dict[str, Any]) -> str:
    """Return a method's line of the table. row: of `row`."""
    reached = row["seconds_to_target"] is not None
    seconds = f"{row['seconds_to_target']:.1f}" if reached else "not"
    speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
    steps = row["steps_to_target"] if reached else f"> {row['at'][-1]}"
    sent = "-" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1e6:.3f}"
    share = "-" if row["of_bytes"] is None else f"{row['of_bytes']:.4f}"
    return (
        f"  {row['method']:<20}{seconds:>11}{speedup:>10}{steps:>7}{row['ms_per_step']:>9.0f}{sent:>11}{share:>9}"
        f"{row['best_accuracy']:>10.4f}"
    )


def run(topology: Topology, args: argparse.Namespace, screen: Screen, write: Callable[[dict[str, Any]], None]) -> None:
    """Train the models by the methods, and print the table. Collective. write: is given the record after each run."""
    try:
        methods = [parse(name, args.every) for name in args.methods if name != PLAIN]
        if unknown := [name for name in args.models if name not in WORKLOADS]:
            raise OptionError(f"--models {unknown[0]} is unknown; use {' or '.join(WORKLOADS)}")
    except OptionError as error:
        raise on_all_ranks(error, topology.world) from None
    one_thread()
    bench = Bench(topology, args)
    bench.prepare(methods)
    trained: list[dict[str, Any]] = []
    for name in args.models:
        workload = WORKLOADS[name]
        steps = args.steps or workload.steps
        parameters = sum(each.numel() for each in workload.model().parameters())
        screen.say(
            f"# {name}: {parameters / 1e6:.2f} M parameters, Adam {workload.learning_rate}, batches of "
            f"{workload.batch} rows; {topology}"
        )
        plain = bench.run(Method(PLAIN), workload, steps, lambda _: False, screen)
        target, most = target_of(plain), plain.seconds[-1] * TIMES
        plain.look(target)
        runs = [row(plain, plain)]
        screen.say(f"# target: accuracy {target:.4f}", HEAD, *map(line, runs))
        trained.append({"model": name, "parameters": parameters, "target": target, "runs": runs})
        write({"models": trained})
        for method in methods:

            def done(one: Run, target: float = target, most: float = most) -> bool:
                stop = one.look(target) or bool(one.seconds and one.seconds[-1] > most)
                return bool(combine(topology.world, np.array([stop], np.int64), "end a training", MPI.MAX)[0])

            ended = bench.run(method, workload, PATIENCE * steps, done, screen)
            ended.look(target)
            runs.append(row(ended, plain))
            screen.say(line(runs[-1]))
            write({"models": trained})
    bench.close()

"""Trains a transformer by stages: each rank has some of the layers (torch.distributed.pipelining).

mpirun -n 3 python scripts/torch_pipeline.py --stages 3 --schedule 1f1b --microbatches 4
mpirun -n 6 python scripts/torch_pipeline.py --stages 3               # two replicas of three stages
mpirun -n 4 python scripts/torch_pipeline.py --stages 2 --tensor-parallel 2
mpirun -n 3 python scripts/torch_pipeline.py --stages 3 --pause 0.02  # the bubble, on fewer cores than ranks

The ranks form a mesh: replicas x stages x tensor parallel. A stage sends its activations to the next stage, and the
gradients of the activations to the previous one, one message for each microbatch. The replicas of a stage average their
gradients by the process group's all-reduce. A rank waits while the pipeline fills and drains: this part of the
pipeline's time is the bubble.

Prints, for each epoch, the loss and the accuracy on the training rows, rows/s, the bubble measured, and the part of the
time that other things take: the optimizer, the all-reduce, the next rows. First comes the bubble predicted.
"""

import argparse
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import allreduce.torch_backend
from allreduce.machine import cores
from benchmarks.lib.cli import at_least
from benchmarks.predicting.pipeline import SCHEDULES, bubble, crowded
from trainers import datasets
from trainers.cli.parser import Parser
from trainers.files.model_file import replacing

HEADS = 4
SPLIT = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "mix": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}  # of a block, for tensor parallel: each rank has some of the heads and of the hidden units


class Embed(nn.Module):
    """Makes 8 tokens of an 8x8 image, one of each row of pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pixels = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(8, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pixels(x.view(-1, 8, 8)) + self.places


class Block(nn.Module):
    """Attention, then a perceptron, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.first(x)
        query, key, value = (self._heads(part(normal)) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class Classify(nn.Module):
    """Makes the scores of the 10 classes from the mean of the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x.mean(1))


def layers(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Return all layers, with the same initial parameters on every rank."""
    torch.manual_seed(options.seed)
    blocks: dict[str, nn.Module] = {f"block{number}": Block(options.width) for number in range(options.layers)}
    found = {"embed": Embed(options.width), **blocks, "classify": Classify(options.width)}
    return {name: layer.to(getattr(torch, options.dtype)) for name, layer in found.items()}


class Part(nn.Sequential):
    """The layers of one stage, called one after the other."""


class Stage(PipelineStage):
    """A stage that measures its computation. pause: seconds that a forward pass waits; a backward pass waits twice.

    busy: seconds that it computed, on a core, or waited for `pause`. Waits for a core are no computation.
    """

    busy = pause = 0.0

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._measured(self.pause):
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        with self._measured(2 * self.pause):
            super().backward_one_chunk(*args, **options)

    @contextmanager
    def _measured(self, pause: float) -> Iterator[None]:
        time.sleep(pause)
        begin = time.thread_time()
        yield
        self.busy += time.thread_time() - begin + pause


class Pipeline(NamedTuple):
    """This rank's stages (more than one if interleaved), their layers, and the schedule that runs them."""

    mesh: DeviceMesh
    parts: list[Part]
    stages: list[Stage]
    schedule: Any

    @property
    def first(self) -> bool:
        return self.stages[0].is_first

    @property
    def last(self) -> bool:
        return self.stages[-1].is_last

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    """Create the mesh of all ranks, with a process group for each row of each dimension. Collective.

    The ranks of the last dimension follow each other, so they share a node: tensor parallel sends the most messages.
    """
    replicas = dist.get_world_size() // (options.stages * options.tensor_parallel)
    override = None
    if options.backend == "allreduce" and options.allreduce:
        override = {"replica": ("allreduce", allreduce.torch_backend.Options(options.allreduce))}
    shape = (replicas, options.stages, options.tensor_parallel)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage", "tensor"), backend_override=override)


def make_pipeline(options: argparse.Namespace, mesh: DeviceMesh, whole: dict[str, nn.Module]) -> Pipeline:
    """Create this rank's stages on their layers, of the `whole` model. Collective over the mesh."""
    group, names, blocks = mesh["stage"].get_group(), list(whole), options.layers
    count = options.stages * options.chunks
    parts, stages = [], []
    for number in range(mesh["stage"].get_local_rank(), count, options.stages):
        begin, end = blocks * number // count, blocks * (number + 1) // count
        mine = names[begin + 1 : end + 1]
        mine = ["embed"] * (number == 0) + mine + ["classify"] * (number == count - 1)
        part = Part()
        for name in mine:
            part.add_module(name, whole[name])
            if options.tensor_parallel > 1 and name.startswith("block"):
                parallelize_module(whole[name], mesh["tensor"], SPLIT)
        stage = Stage(part, number, count, torch.device("cpu"), group=group)
        stage.pause = options.pause / options.chunks
        parts.append(part)
        stages.append(stage)
    loss = nn.functional.cross_entropy
    if options.schedule == "interleaved":
        schedule: Any = ScheduleInterleaved1F1B(stages, options.microbatches, loss)
    else:
        kind = ScheduleGPipe if options.schedule == "gpipe" else Schedule1F1B
        schedule = kind(stages[0], options.microbatches, loss)
    return Pipeline(mesh, parts, stages, schedule)


# Gradients: one tensor with the gradients of all parameters as views, averaged over the replicas by one all-reduce


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that tensor parallel may have divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bind_gradients(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return a tensor of zeros, and make the gradients of `parameters` views of it."""
    lengths = [local(parameter).numel() for parameter in parameters]
    gradients = torch.zeros(sum(lengths), dtype=parameters[0].dtype)
    for parameter, piece in zip(parameters, gradients.split(lengths), strict=True):
        view = piece.view(local(parameter).shape)
        if isinstance(parameter, DTensor):
            view = DTensor.from_local(
                view, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = view
    return gradients


def average(gradients: torch.Tensor, mesh: DeviceMesh) -> None:
    """Average the gradients of the replicas of a stage. Collective over them."""
    if mesh["replica"].size() > 1:
        dist.all_reduce(gradients, group=mesh["replica"].get_group())
        gradients /= mesh["replica"].size()


# Training


class Batches:
    """The rows of this replica: of each batch an equal share. x on the first stage and y on the last are used."""

    def __init__(self, x: np.ndarray, y: np.ndarray, options: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.x, self.y = torch.tensor(x).to(getattr(torch, options.dtype)), torch.tensor(y)
        self.batch, self.share = options.batch, slice(mesh["replica"].get_local_rank(), None, mesh["replica"].size())

    def __len__(self) -> int:
        return len(self.x) // self.batch

    def shuffled(self, seed: int) -> Any:
        """Yield this replica's rows of each whole batch, in an order that depends on `seed` alone."""
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        for number in range(len(self)):
            rows = order[number * self.batch :][: self.batch][self.share]
            yield self.x[rows], self.y[rows]


def step(pipeline: Pipeline, x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
    """Run one batch forward and backward; return the loss and the number of right answers, 0 but on the last stage."""
    losses: list[torch.Tensor] = []
    given: dict[str, Any] = {"target": y, "losses": losses} if pipeline.last else {}
    scores = pipeline.schedule.step(*([x] if pipeline.first else []), **given)
    if not pipeline.last:
        return 0.0, 0
    return float(torch.stack(losses).mean().detach()), int((scores.argmax(1) == y).sum())


class Epoch(NamedTuple):
    """What is printed of an epoch. bubble: the part of the pipeline's time in which a rank did not compute. rest: the
    part of the epoch outside of the pipeline."""

    number: int
    loss: float
    accuracy: float
    rows: float
    bubble: float
    rest: float

    def __str__(self) -> str:
        return (
            f"epoch {self.number:2}  loss {self.loss:.6f}  accuracy {self.accuracy:.3f}  {self.rows:.0f} rows/s  "
            f"bubble {self.bubble:.0%}  rest {self.rest:.0%}"
        )


def train(pipeline: Pipeline, optimizer: torch.optim.Optimizer, gradients: torch.Tensor, batches: Any) -> torch.Tensor:
    """Take a step for each batch; return the sums of the losses, of the right answers (both 0 but on the last stage),
    and of the seconds in the pipeline."""
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in batches:
        gradients.zero_()
        begin = time.perf_counter()
        loss, right = step(pipeline, x, y)
        sums += torch.tensor([loss, right, time.perf_counter() - begin], dtype=torch.float64)
        average(gradients, pipeline.mesh)
        optimizer.step()
    return sums


def run(
    options: argparse.Namespace, mesh: DeviceMesh, everyone: dist.ProcessGroup
) -> tuple[list[Epoch], dict[str, nn.Parameter]]:
    """Train, and print a line for each epoch on rank 0; return the epochs and this rank's parameters.

    Collective over `everyone`, the ranks of the mesh.
    """
    whole, done, momentum = layers(options), 0, {}
    if options.load:
        done, momentum = load(options.load, whole)
    pipeline = make_pipeline(options, mesh, whole)
    parameters = pipeline.named_parameters()
    gradients = bind_gradients(list(parameters.values()))
    optimizer = torch.optim.SGD(parameters.values(), lr=options.lr, momentum=0.9, foreach=False)
    restore(optimizer, parameters, momentum)
    data = datasets.load("digits")
    batches = Batches((data.x_train - data.shift) * data.scale, data.y_train, options, mesh)
    replicas, rows = mesh["replica"].size(), len(batches) * options.batch
    if not rows:
        raise SystemExit(f"--batch {options.batch} is more than the {len(data.x_train)} training rows")
    speaks = pipeline.last and mesh["tensor"].get_local_rank() == 0  # for its replica
    found = []
    for epoch in range(done, done + options.epochs):
        dist.barrier(everyone)
        begin = time.perf_counter()
        for stage in pipeline.stages:
            stage.busy = 0.0
        sums = train(pipeline, optimizer, gradients, batches.shuffled(options.seed + epoch))
        dist.barrier(everyone)
        seconds = time.perf_counter() - begin
        busy = sum(stage.busy for stage in pipeline.stages)
        totals = torch.cat([sums[:2] * speaks, sums[2:], torch.tensor([busy], dtype=torch.float64)])
        dist.all_reduce(totals, group=everyone)
        loss, right, inside, busy = totals.tolist()
        loss, rest = loss / replicas / len(batches), 1 - inside / seconds / mesh.size()
        found.append(Epoch(epoch + 1, loss, right / rows, rows / seconds, 1 - busy / inside, rest))
        if dist.get_rank() == 0:
            print(found[-1], flush=True)
    if options.save:
        save(options.save, pipeline, optimizer, done + options.epochs)
        dist.barrier(everyone)  # the new files are complete
        remove_older(options.save, mesh)
        dist.barrier(everyone)
    return found, parameters


# Files: one for each stage, with the complete parameters by name, so that any number of stages can load them


def save(folder: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write the parameters and the optimizer's momentum of each stage of the first replica. Collective."""
    arrays = {"epochs": np.array(epochs)}
    for name, parameter in pipeline.named_parameters().items():
        arrays[name] = complete(parameter)
        arrays[f"momentum.{name}"] = complete(optimizer.state[parameter]["momentum_buffer"])
    mesh = pipeline.mesh
    if mesh["replica"].get_local_rank() == mesh["tensor"].get_local_rank() == 0:
        number, count = mesh["stage"].get_local_rank(), mesh["stage"].size()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(str(folder / f"stage{number}of{count}.npz")) as file:
            np.savez(file, **arrays)


def remove_older(folder: Path, mesh: DeviceMesh) -> None:
    """Remove the files of other numbers of stages. Local; the first rank of the mesh does it."""
    if mesh["replica"].get_local_rank() == mesh["stage"].get_local_rank() == mesh["tensor"].get_local_rank() == 0:
        for older in {*folder.glob("stage*of*.npz")} - {*folder.glob(f"stage*of{mesh['stage'].size()}.npz")}:
            older.unlink()


def complete(tensor: torch.Tensor) -> np.ndarray:
    """Return the whole tensor, of which tensor parallel may have divided the values. Collective over its ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()


def load(folder: Path, whole: dict[str, nn.Module]) -> tuple[int, dict[str, np.ndarray]]:
    """Set the parameters of all layers from the files of `save`; return epochs done, and momentum by name."""
    arrays, files = dict[str, np.ndarray](), sorted(folder.glob("stage*of*.npz"))
    expected = {f"stage{number}of{len(files)}.npz" for number in range(len(files))}
    if not files or {each.name for each in files} != expected:
        raise SystemExit(
            f"--load {folder}: give a folder with the files of one --save, such as stage0of2.npz and stage1of2.npz; it "
            f"has {', '.join(each.name for each in files) or 'none'}"
        )
    for file in files:
        try:
            found = dict(np.load(file))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise SystemExit(f"--load {folder}: {file.name} is damaged: {error}") from error
        if found.get("epochs") != arrays.get("epochs", found.get("epochs")):
            raise SystemExit(f"--load {folder}: {file.name} was saved after another epoch than the files before it")
        arrays |= found
    parameters = {f"{name}.{rest}": each for name, layer in whole.items() for rest, each in layer.named_parameters()}
    for name, parameter in parameters.items():
        if not {name, f"momentum.{name}", "epochs"} <= arrays.keys() or arrays[name].shape != parameter.shape:
            shape = arrays[name].shape if name in arrays else "missing"
            raise SystemExit(
                f"--load {folder}: {name} must have the shape {tuple(parameter.shape)}, and is {shape}: give the "
                "--layers and --width of the training that wrote it"
            )
        parameter.data.copy_(torch.from_numpy(arrays[name]))
    return int(arrays["epochs"]), {name: arrays[f"momentum.{name}"] for name in parameters}


def restore(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], momentum: dict[str, np.ndarray]
) -> None:
    """Give the optimizer the momentum of this rank's parameters, if there is any. Collective."""
    for name, parameter in parameters.items() if momentum else ():
        tensor = torch.from_numpy(momentum[name]).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        optimizer.state[parameter]["momentum_buffer"] = tensor


# The command line


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, usage="%(prog)s [OPTION...]")
    add = parser.add_argument
    add("--stages", type=at_least(1), default=2, help="ranks that divide the layers; default 2")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="the order of the microbatches; default 1f1b")
    add("--microbatches", type=at_least(1), default=4, help="parts of a replica's batch; more: a smaller bubble")
    add("--chunks", type=at_least(1), help="stages of each rank, for interleaved: a smaller bubble; default 2")
    add("--tensor-parallel", type=at_least(1), default=1, metavar="N", help="ranks that divide each layer; default 1")
    add("--backend", choices=("allreduce", "gloo"), default="allreduce", help="of torch.distributed")
    add("--allreduce", metavar="NAME", help="which averages the gradients: ring, shared ...; default auto")
    add("--batch", type=at_least(1), default=96, help="rows of a step, of all replicas; default 96")
    add("--epochs", type=at_least(1), default=5)
    add("--lr", type=at_least(0, float), default=0.05, help="default 0.05")
    add("--layers", type=at_least(1), default=6, help="blocks of attention and perceptron; default 6")
    add("--width", type=at_least(HEADS), default=32, help="of a token; default 32")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--seed", type=int, default=0)
    add("--pause", type=at_least(0, float), default=0.0, metavar="SECONDS", help="added to each microbatch's forward")
    add("--save", type=Path, metavar="FOLDER", help="write the parameters of each stage at the end")
    add("--load", type=Path, metavar="FOLDER", help="continue from --save, also with other numbers of ranks")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int) -> None:
    """End the program on all ranks with the same message if the options don't fit together."""
    each = options.stages * options.tensor_parallel
    if options.chunks is None:
        options.chunks = 2 if options.schedule == "interleaved" else 1
    if ranks % each:
        parser.error(
            f"{options.stages} stages x {options.tensor_parallel} of tensor parallel are {each} ranks, and this job "
            f"has {ranks}; start it by mpirun -n {each}, or a multiple"
        )
    replicas, parts = ranks // each, options.stages * options.chunks
    if options.chunks > 1 and options.schedule != "interleaved":
        parser.error(f"--chunks {options.chunks} needs --schedule interleaved, not {options.schedule}")
    if parts > options.layers:
        parser.error(f"{parts} stages need {parts} layers or more, not {options.layers}; give --layers")
    if options.batch % (replicas * options.microbatches):
        parser.error(
            f"--batch {options.batch} can't be divided among {replicas} replicas of {options.microbatches} "
            "microbatches; give a multiple of their product"
        )
    if options.schedule == "1f1b" and options.microbatches < options.stages:
        parser.error(f"1f1b needs {options.stages} --microbatches or more, as many as stages")
    if options.schedule == "interleaved" and options.microbatches % options.stages:
        parser.error(f"interleaved needs a multiple of {options.stages} --microbatches, the number of stages")
    if options.allreduce and options.backend != "allreduce":
        parser.error(f"--allreduce {options.allreduce} needs --backend allreduce, not {options.backend}")
    if options.width % HEADS or HEADS % options.tensor_parallel:
        parser.error(f"--width must be a multiple of {HEADS} heads, and {HEADS} one of --tensor-parallel")


def predicted(options: argparse.Namespace) -> str:
    """Return the bubble predicted, in words, also by the cores of this machine, on which all ranks are assumed."""
    found, ranks, available = (
        bubble(options.stages, options.microbatches, options.chunks),
        dist.get_world_size(),
        cores(),
    )
    text = f"a bubble of {found:.0%} is predicted"
    if crowded(ranks, len(available)) <= found:
        return text
    if options.pause:
        return f"{text}, more if the {ranks} ranks on {len(available)} cores have much to compute besides --pause"
    return f"{text} on {ranks} cores, and {crowded(ranks, len(available)):.0%} on the {len(available)} of this machine"


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    check(parser, options, dist.get_world_size())
    mesh = make_mesh(options)
    if dist.get_rank() == 0:
        print(
            f"{mesh['replica'].size()} replicas of {options.stages} stages x {options.tensor_parallel}, "
            f"{options.schedule}, {options.microbatches} microbatches, {options.backend}: {predicted(options)}",
            flush=True,
        )
    run(options, mesh, dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

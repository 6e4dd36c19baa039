"""Measures how long a training step waits for images that worker processes read and augment.

    mpirun -n 2 python -m benchmarks.data --json out.json

Two sides take turns, an epoch each, in the same processes: MirroredTrainer.fit with a TorchReplica, and PyTorch's DDP
over gloo. Both read by a DataLoader with as many workers. Both train the same convolutional network on the same data
set: images in a file, of which a random part is cut out, flipped at random, and changed in brightness and contrast.

A step is from its beginning to the beginning of the next one, on the slowest rank; it begins with the wait for its
batch. The first steps of each turn, in which the workers start, are not counted. Workers and ranks share the cores: the
time that workers need is in the steps of both sides, while the wait shows only reading that is late.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset, DistributedSampler
except ImportError as error:
    raise SystemExit(f'benchmarks.data needs PyTorch ({error}): pip install ".[torch]" in the checkout') from error

from allreduce.topology import Topology
from allreduce.transport.control import root_value, together
from benchmarks.lib import cli, timing
from benchmarks.lib.networks import Trained, convolutional, one_thread
from benchmarks.lib.outputs import Screen
from benchmarks.lib.peers import join
from trainers import Loader, MirroredTrainer
from trainers.replicas.pytorch import TorchReplica

OURS, DDP = "fit(DataLoader)", "DDP + DataLoader"
MARGIN = 8  # pixels of an image that are cut off
CLASSES = 10
Times = tuple[list[float], list[float]]  # when each step begins, and when its batch is there


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=cli.at_least(1), default=2, metavar="N", help="per rank (default: 2)")
    add("--batch", type=cli.at_least(1), default=32, metavar="N", help="rows per rank (default: 32)")
    add("--size", type=cli.at_least(8), default=64, metavar="N", help="pixels of a side (default: 64)")
    add("--width", type=cli.at_least(1), default=16, metavar="N", help="channels of the network (default: 16)")
    add("--steps", type=cli.at_least(8), default=24, metavar="N", help="in a turn (default: 24)")
    add("--skip", type=cli.at_least(0), default=6, metavar="N", help="steps of a turn not counted (default: 6)")
    add("--turns", type=cli.at_least(1), default=5, metavar="N", help="of each side (default: 5)")
    cli.add_json_option(parser)


class Images(Dataset):
    """Images in an .npy file that each process opens, (rows, height, width, 3) bytes. Row r has class r % 10."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size
        self._images: np.ndarray | None = None
        self._rows = len(np.load(path, mmap_mode="r"))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self._images is None:
            self._images = np.load(self._path, mmap_mode="r")
        top, left = np.random.randint(0, MARGIN, 2)
        image = self._images[row, top : top + self._size, left : left + self._size].astype(np.float32)
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        mean, contrast, brightness = image.mean(), *np.random.uniform(0.8, 1.2, 2)
        image = (np.clip((image - mean) * contrast + mean * brightness, 0, 255) - 128) / 64
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1), np.float32)), row % CLASSES

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_images": None}


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return convolutional([3, width, 2 * width, 4 * width, 8 * width, 8 * width], CLASSES)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Timed(TorchReplica):
    """Notes when it gets a batch."""

    arrivals: list[float]

    def gradients(self, *rows: Any) -> Any:
        self.arrivals.append(time.perf_counter())
        return super().gradients(*rows)


def loader_of(topology: Topology, images: Images, options: argparse.Namespace) -> Any:
    """Return a DataLoader of this rank's images."""
    return DataLoader(
        images,
        options.batch,
        sampler=DistributedSampler(images, topology.size, topology.rank),
        num_workers=options.workers,
        multiprocessing_context="forkserver",
    )


class Ddp:
    """The loop of PyTorch: DDP over gloo, and a DataLoader."""

    def __init__(self, topology: Topology, images: Images, options: argparse.Namespace) -> None:
        join(dist, topology)
        model = DistributedDataParallel(network(options.width))
        self._trained = Trained(model, optimizer_of(model))
        self._loader = loader_of(topology, images, options)

    def turn(self, number: int) -> Times:
        begins: list[float] = []
        ready: list[float] = []
        self._loader.sampler.set_epoch(number)
        batches = iter(self._loader)
        for _ in range(len(self._loader)):
            begins.append(time.perf_counter())
            x, y = next(batches)
            ready.append(time.perf_counter())
            self._trained.step(x, y)
        return begins, ready

    def close(self) -> None:
        dist.destroy_process_group()


def measure(topology: Topology, options: argparse.Namespace, path: str, screen: Screen) -> dict[str, Any]:
    """Return, for each side, the seconds of each counted step, and for each turn the share of them that the rank that
    waits longest waits. Collective."""
    images, module = Images(path, options.size), network(options.width)
    replica = Timed(module, nn.CrossEntropyLoss(), optimizer_of(module))
    seconds: dict[str, list[float]] = {OURS: [], DDP: []}
    shares: dict[str, list[float]] = {OURS: [], DDP: []}
    ddp, loader = Ddp(topology, images, options), loader_of(topology, images, options)

    def fit(number: int) -> Times:
        clock, replica.arrivals = timing.Clock(), []
        trainer.fit(Loader(loader, rows="divided"), epochs=1, seed=number, callbacks=[clock], progress=False)
        return clock.begins, replica.arrivals

    with MirroredTrainer(replica, "auto", topology) as trainer, screen.bar(2 * options.turns, "turn") as bar:
        sides = [(OURS, fit), (DDP, ddp.turn)]
        for number in range(options.turns):
            for name, turn in sides if number % 2 else sides[::-1]:
                begins, ready = (np.array(each[options.skip :]) for each in turn(number))
                seconds[name] += timing.slowest(topology.world, np.diff(begins)).tolist()
                waits = (ready - begins)[:-1].sum() / (begins[-1] - begins[0])
                shares[name] += timing.slowest(topology.world, np.array([waits])).tolist()
                bar.update()
    ddp.close()
    return {"parameters": replica.gradient_length, "seconds": seconds, "waiting": shares}


def write_images(path: Path, rows: int, size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (rows, size + MARGIN, size + MARGIN, 3), np.uint8)
    np.save(path, pixels)


@contextmanager
def images_of(topology: Topology, rows: int, size: int) -> Iterator[str]:
    """Context manager: the path of a file of images, the same on every node, in a temporary folder. Collective."""
    with tempfile.TemporaryDirectory(prefix="images-") as own:
        path = root_value(topology.node, str(Path(own) / "images.npy"), "learn the file")
        leads = topology.node.rank == 0
        together(topology.world, partial(write_images, Path(path), rows, size) if leads else int)
        yield path
        together(topology.world, int)  # a leader removes its folder when all ranks are done


def _run(topology: Topology, options: argparse.Namespace, screen: Screen) -> int:
    one_thread()
    with images_of(topology, options.steps * options.batch * topology.size, options.size) as path:
        result = measure(topology, options, path, screen)
    side, parameters = options.size, result["parameters"] / 1e6
    screen.say(
        f"{topology}, {options.workers} workers each; PyTorch {torch.__version__}",
        f"{options.batch} images of {side} x {side} per rank, {parameters:.2f} M parameters",
        timing.table(result["seconds"], DDP),
        *(f"{name} waits for data in {median(each):.1%} of its time" for name, each in result["waiting"].items()),
    )
    screen.write_record({**vars(options), "ranks": topology.size, "nodes": topology.nodes, **result})
    return 0


main = cli.command("benchmarks.data", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())

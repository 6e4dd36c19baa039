"""The command `python -m trainers export`: writes a saved model as an ONNX file."""

import argparse
import time
from collections.abc import Sequence

from allreduce.elastic.ranks import together
from allreduce.topology import Topology
from trainers import datasets
from trainers.cli.command import Command
from trainers.datasets import Dataset
from trainers.errors import ArgumentError
from trainers.files import model_file
from trainers.mirrored import MirroredTrainer
from trainers.replicas.numpy.categories import NETWORKS, load_network
from trainers.replicas.numpy.network import NumpyNetwork

ABOUT = """Write a saved model as an ONNX file (.onnx), which runs without this package, by onnxruntime or in a browser.

The file takes raw rows: scaling, the categories of a table, and the names of classes are inside. onnxruntime runs the
file on rows of --data, without it on random rows. Only a file that answers as the model does replaces an older file.
"""
EXAMPLES = """examples:
  python -m trainers export --load model.npz --out model.onnx
  python -m trainers export --load model.npz --out model.onnx --data digits
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--load", metavar="FILE", required=True, help="the model, as --save has written it, or a checkpoint"
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the ONNX file")
    parser.add_argument(
        "--data", help="the data on which the model was trained, as `python -m trainers --data` takes them"
    )


COMMAND = Command("--load FILE --out FILE [--data DATA]", ABOUT, EXAMPLES, add_options)


def run(arguments: Sequence[str], world: Topology, program: str) -> None:
    """Run the command. Collective. Raises the same error on all ranks."""
    options = together(world.world, lambda: COMMAND.parse(arguments, world.rank == 0, program))
    network, data = together(world.world, lambda: _prepared(options))
    begin = time.perf_counter()
    with MirroredTrainer(network, topology=world) as trainer:
        if data is None:
            about = trainer.export(options.out)
        else:
            named = data.columns is None and network.probabilities and len(data.classes) == network.sizes[-1]
            names = data.classes if named else None
            about = trainer.export(options.out, data.x_train, classes=names)
    if world.rank == 0:
        print(f"exported: {options.out} ({time.perf_counter() - begin:.1f} s), {about}", flush=True)


def _prepared(options: argparse.Namespace) -> tuple[NumpyNetwork, Dataset | None]:
    """Return the network, and the data if there are any. Raises ArgumentError, ModelFileError,
    DataError."""
    path = options.load
    kind, _ = model_file.read_header(path)
    if kind not in NETWORKS:
        raise ArgumentError(
            f"{path} holds: {kind}. The command exports {', '.join(NETWORKS)}; other models export themselves, "
            "by trainer.export(path), and of an ensemble each member does"
        )
    network = load_network(path)
    data = None if options.data is None else datasets.load(options.data, columns=network.columns)
    return network, data

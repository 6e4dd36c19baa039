"""The command `python -m trainers predict`: writes a saved model's predictions for the rows of files."""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from allreduce.elastic.ranks import together
from allreduce.topology import Topology
from trainers.apps.serving.models import Model, load_whole
from trainers.apps.tables.predicting import predict_into
from trainers.apps.tables.streams import open_stream
from trainers.cli.command import Command
from trainers.data import Tree
from trainers.group import RankGroup

ABOUT = """Predict the rows of files by a saved model, on all ranks, in constant memory.

A table (.csv, .tsv) has the columns of the table on which the model was trained, in their order; the label may be there
or not, and is not read. A .npy file, or the array x of an .npz, has rows of numbers. A line of the predictions has the
number of the row, from 0, the class, and its probability. The class is a word if the model was trained on a table, or
if an .onnx file has the names of the classes.
"""
EXAMPLES = """examples:
  mpirun -n 4 python -m trainers predict --load model.npz --data new.csv --out predictions.csv
  mpirun -n 4 python -m trainers predict --load model.npz --data new.npy --out predictions.jsonl
  mpirun -n 4 python -m trainers predict --load model.npz --data 'new-*.csv' --out predictions.csv
  mpirun -n 4 python -m trainers predict --load model.onnx --data new.csv --out predictions.csv
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--load", metavar="FILE", required=True, help="the model: a .npz file of --save, or an .onnx file",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="FILE", required=True, nargs="+", action="extend",
        help="a .csv, .tsv, .npy or .npz file, or a pattern such as 'new-*.csv'; several follow one another",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", required=True,
        help="the predictions: a file that ends in .csv or .jsonl (JSON lines), with the rows in order",
    )  # fmt: skip


COMMAND = Command("--load FILE --data FILE... --out FILE", ABOUT, EXAMPLES, add_options)


def run(arguments: Sequence[str], world: Topology, program: str) -> None:
    """Run the command. Collective. Raises the same error on all ranks."""
    options = together(world.world, lambda: COMMAND.parse(arguments, world.rank == 0, program))
    model = together(world.world, lambda: load_whole(options.load))
    begin = time.perf_counter()
    path = _Predicting(model, world).files(options)
    if world.rank == 0:
        print(f"predictions: {path} ({time.perf_counter() - begin:.1f} s)", flush=True)


class _Predicting:
    """A loaded model as `predict_into` takes it, on all ranks. Creating it is collective. See Predictor."""

    def __init__(self, model: Model, world: Topology) -> None:
        self._model = model
        self.columns, self.probabilities = model.columns, model.probabilities
        self._features = model.shape[0] if len(model.shape) == 1 else None
        self._group = RankGroup(world, self)

    def check(self, x: Tree, y: Tree | None) -> None:
        self._model.check(x)

    def predict(self, x: Any) -> Tree:
        return self._model.predict(x)

    def files(self, options: argparse.Namespace) -> str:
        """Predict the rows of files; returns the path of the predictions. Collective."""
        group = self._group
        group.enter(f"predict: {options.load} of {self._model.stamp}, {options.data}, out={options.out}")
        rows = partial(open_stream, options.data, self.columns, self._features)
        return predict_into(group, self, rows, options.out, self._model.classes)

    def close(self) -> None:
        self._group.release()

    def abandon(self) -> None:
        self._group.abandon()

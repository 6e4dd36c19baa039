"""The command `python -m trainers predict`: writes a saved model's predictions for the rows of files."""

import argparse
import time
import zlib
from collections.abc import Sequence
from functools import partial

from allreduce.elastic.ranks import together
from allreduce.topology import Topology
from trainers.apps.serving.versions import load_whole
from trainers.apps.tables.predicting import predict_into
from trainers.apps.tables.streams import open_stream
from trainers.cli.command import Command

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
    row = f"predict: {options.load} of {model.stamp}, {options.data}, out={options.out}"
    world.agree([zlib.crc32(row.encode())], row)
    features = model.shape[0] if len(model.shape) == 1 else None
    rows = partial(open_stream, options.data, model.columns, features)
    path = predict_into(world.world, model, rows, options.out, model.classes)
    if world.rank == 0:
        print(f"predictions: {path} ({time.perf_counter() - begin:.1f} s)", flush=True)

"""The command `python -m trainers predict`: writes what a saved model predicts for the rows of files."""

import argparse
import logging
import time
from collections.abc import Sequence

from allreduce.arrays import gpu
from allreduce.topology import Topology
from allreduce.transport.control import together
from trainers.datasets.parser import RankParser
from trainers.mirrored import MirroredTrainer
from trainers.replicas.numpy.categories import load_network

log = logging.getLogger("trainers")

ABOUT = """Predict the rows of files by a saved model, on all ranks, in constant memory.

A table (.csv, .tsv) has the columns of the table on which the model was trained, in their order; the label may be there
or not, and is not read. A .npy file, or the array x of an .npz, has rows of numbers. A line of the predictions has the
number of the row, from 0, the class, and its probability. The class is a word if the model was trained on a table.
"""
EXAMPLES = """examples:
  mpirun -n 4 python -m trainers predict --load model.npz --data new.csv --out predictions.csv
  mpirun -n 4 python -m trainers predict --load model.npz --data new.npy --out predictions.jsonl
  mpirun -n 4 python -m trainers predict --load model.npz --data 'new-*.csv' --out predictions/
"""


def make_parser(shown: bool, program: str) -> RankParser:
    """Return the parser. shown: whether this rank prints."""
    usage = "%(prog)s --load FILE --data FILE... --out FILE"
    parser = RankParser(shown, "--help", prog=program, usage=usage, description=ABOUT, epilog=EXAMPLES)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--load", metavar="FILE", required=True, help="the model, as --save has written it")
    parser.add_argument(
        "--data", metavar="FILE", required=True, nargs="+", action="extend",
        help="a .csv, .tsv, .npy or .npz file, or a pattern such as 'new-*.csv'; several follow one another",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", required=True,
        help="the predictions: a file that ends in .csv or .jsonl (JSON lines), with the rows in order; or a new "
        "folder (or FOLDER/part-*.jsonl), in which each rank writes a file",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs CuPy (default: cpu)")


def run(arguments: Sequence[str], world: Topology, program: str) -> None:
    """Run the command. Collective. Raises the same error on all ranks."""
    options = together(world.world, lambda: make_parser(world.rank == 0, program).parse_args(arguments))
    if options.device == "cuda":
        gpu.choose_device(world.node_rank)
    network = together(world.world, lambda: load_network(options.load, options.device))
    begin = time.perf_counter()
    with MirroredTrainer(network, topology=world) as trainer:
        paths = trainer.predict(options.data, options.out)
    if world.rank == 0:
        written = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
        print(f"predictions: {written} ({time.perf_counter() - begin:.1f} s)", flush=True)

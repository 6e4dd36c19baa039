"""The command line's options: what they mean, what they are when they are not given, and what is wrong with them."""

import argparse
from collections.abc import Sequence
from typing import Any

from trainers import datasets, strategies
from trainers.checkpoints import period
from trainers.errors import ArgumentError
from trainers.parsing import RankParser, integer, layer_sizes, positive, ranks_per_node, table_file
from trainers.replicas.numpy.layers import ACTIVATIONS
from trainers.replicas.numpy.optimizers import OPTIMIZERS
from trainers.watching import options as watching

DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 20, "batch_size": 100, "hidden": (64, 32), "lr": 0.002},
    "iris": {"epochs": 50, "batch_size": 16, "hidden": (10, 10), "lr": 0.01},
}
FILE_DEFAULTS: dict[str, Any] = {"epochs": 10, "batch_size": 128, "hidden": (128, 64), "lr": 0.001}
NETWORK = {"activation": "relu", "optimizer": "adam"}  # with the learning rates above; other optimizers have their own

EXAMPLES = """examples:
  mpirun -n 4 python -m trainers --data digits
  mpirun -n 4 python -m trainers --data iris --allreduce ring --json result.json
  python -m trainers.datasets make mnist/                                          (a small folder of such files)
  mpirun -n 4 python -m trainers --data mnist/ --hidden 256,128 --batch-size 512 --save model.npz
  mpirun -n 4 python -m trainers --data mnist/ --load model.npz --epochs 0       (only test a saved model)
  mpirun -n 4 python -m trainers --data mnist/ --checkpoint run --resume         (again after it was killed, say)
  mpirun -n 4 python -m trainers --trace trace.json --tensorboard logs          (who waits for whom; curves)
  mpirun -n 4 python -m trainers --allreduce hierarchical_copy --ranks-per-node 2  (two simulated nodes)
  mpirun -n 5 python -m trainers --strategy parameter_server --servers 1 --updates async
  mpirun -n 4 python -m trainers --strategy spare_replicas --spare 1
"""


def parse(arguments: Sequence[str] | None, shown: bool) -> argparse.Namespace:
    """The options, with the defaults of the chosen data set filled in. Raises ArgumentError; --help exits."""
    options = _parser(shown).parse_args(arguments)
    given = [name for name in ("hidden", "activation", "optimizer", "lr") if getattr(options, name) is not None]
    if options.load and given:
        names = ", ".join(f"--{name}" for name in given)
        raise ArgumentError(f"--load takes the network and its optimizer from the file; leave out {names}")
    for name in ("resume", "checkpoint_every"):
        if getattr(options, name) and not options.checkpoint:
            raise ArgumentError(f"--{name.replace('_', '-')} needs the folder of the checkpoints: --checkpoint DIR")
    if options.other_data and not options.resume:
        raise ArgumentError("--other-data is for a training that goes on: give --resume too")
    strategies.settle(options)
    watching.settle(options)
    defaults = {**FILE_DEFAULTS, **NETWORK, **DEFAULTS.get(options.data, {})}
    if options.optimizer not in (None, NETWORK["optimizer"]):
        defaults["lr"] = OPTIMIZERS[options.optimizer].default_lr
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _parser(shown: bool) -> RankParser:
    parser = RankParser(
        shown,
        prog="python -m trainers",
        description="Train a small network on all ranks together, and test it.",
        epilog=EXAMPLES,
    )
    _add_training(parser.add_argument_group("training"))
    strategies.add_options(
        parser.add_argument_group("strategy: which ranks hold the parameters, and who waits for whom")
    )
    _add_roles(parser.add_argument_group("roles, which TF_CONFIG may tell instead"))
    _add_network(parser.add_argument_group("network"))
    _add_machine(parser.add_argument_group("machine"))
    _add_files(parser.add_argument_group("files"))
    watching.add_options(parser.add_argument_group("watching"))
    return parser


def _add_training(group: Any) -> None:
    add = group.add_argument
    names = " or ".join(datasets.NAMES)
    add(
        "--data", default="digits", metavar="SET",
        help=f"{names}, a folder of MNIST-format files, an .npz, or a .csv with the label in the last column "
        "(default: digits)",
    )  # fmt: skip
    add("--epochs", type=integer(0), metavar="N", help=f"passes over the data ({_per_set('epochs')})")
    add(
        "--batch-size", type=integer(1), metavar="N",
        help=f"samples in a global batch, divided among the ranks ({_per_set('batch_size')})",
    )  # fmt: skip
    add("--seed", type=integer(0), default=0, metavar="N", help="of the weights and of the shuffling (default: 0)")


def _add_network(group: Any) -> None:
    add = group.add_argument
    add(
        "--hidden", type=layer_sizes, metavar="N,N,...",
        help=f'sizes of the hidden layers, or "none" ({_per_set("hidden")})',
    )  # fmt: skip
    add("--activation", choices=list(ACTIVATIONS), help="of the hidden layers (default: relu)")
    add("--optimizer", choices=list(OPTIMIZERS), help="(default: adam)")
    others = ", ".join(f"{name} {kind.default_lr}" for name, kind in OPTIMIZERS.items() if name != "adam")
    add("--lr", type=positive, metavar="X", help=f"learning rate ({_per_set('lr')}; {others})")


def _add_machine(group: Any) -> None:
    add = group.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs CuPy (default: cpu)")
    add(
        "--ranks-per-node", type=ranks_per_node, metavar="N", help="simulate nodes of N ranks, or of N,N,... ranks"
    )  # fmt: skip


def _add_roles(group: Any) -> None:
    add = group.add_argument
    add("--chief", type=integer(0), metavar="R", help="the rank that prints and writes files (default: 0)")
    add(
        "--evaluator", action="store_true", default=None,
        help="the last rank does not train: it evaluates each checkpoint as it comes (with --checkpoint)",
    )  # fmt: skip
    add(
        "--evaluations", type=table_file, metavar="FILE",
        help="where the evaluator writes its metrics: JSON lines in FILE.jsonl, a table in FILE.csv",
    )  # fmt: skip


def _add_files(group: Any) -> None:
    add = group.add_argument
    add("--save", metavar="FILE", help="write the trained model (.npz, no pickle)")
    add("--load", metavar="FILE", help="begin with a saved model")
    add("--checkpoint", metavar="DIR", help="write checkpoints of the training to this folder")
    add(
        "--checkpoint-every", type=_period, metavar="WHEN",
        help='"epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes", ... (default: epoch)',
    )  # fmt: skip
    add(
        "--resume", action="store_true",
        help="go on from the newest good checkpoint, if there is one; --epochs counts from the beginning of training",
    )  # fmt: skip
    add(
        "--other-data", action="store_true",
        help="with --resume: go on with other rows, or in another order, which is an error without this option",
    )  # fmt: skip
    add(
        "--json", metavar="FILE",
        help="write the results: test_accuracy, history, ...; - writes them to stdout, and all else to stderr",
    )  # fmt: skip


def _period(text: str) -> str:
    try:
        period(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _per_set(name: str) -> str:
    """The defaults of one option: 20 for digits, 50 for iris, 10 for files."""

    def text(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    each = [f"{text(values[name])} for {data}" for data, values in DEFAULTS.items()]
    return f"default: {', '.join(each)}, {text(FILE_DEFAULTS[name])} for files"

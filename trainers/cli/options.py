"""The command line's options: what they mean, what they are when they are not given, and what is wrong with them."""

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import allreduce
import trainers
from allreduce.topology import Topology
from allreduce.wrappers.compressed import SHORT
from trainers import checks, datasets
from trainers.backends import UPDATES
from trainers.datasets.parser import Parser
from trainers.errors import ArgumentError
from trainers.recovery.recovery import CHOICES
from trainers.replica import Replica
from trainers.replicas.numpy.layers import ACTIVATIONS
from trainers.replicas.numpy.optimizers import OPTIMIZERS
from trainers.state.checkpoints import period
from trainers.trainer import Trainer


class RankParser(Parser):
    """Raises ArgumentError for bad arguments, and is silent on all ranks but one.

    shown: whether this rank prints.
    """

    def __init__(self, shown: bool, **options: Any) -> None:
        super().__init__(**options)
        self._shown = shown

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (--help shows all options)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._shown:
            super()._print_message(message, file)


def flag(name: str) -> str:
    """An option as the command line spells it: "--max-staleness" of "max_staleness"."""
    return "--" + name.replace("_", "-")


def integer(least: int) -> Any:
    """Converts to an integer of at least `least`."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 18) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        return int(text)

    return convert


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def layer_sizes(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'must be a list of layer sizes such as 64,32, or "none", got {text!r}')
    return tuple(map(int, parts))


def ranks_per_node(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be a number of ranks such as 2, or a list such as 3,1, got {text!r}")
    return int(text) if len(parts) == 1 else tuple(map(int, parts))


def table_file(text: str) -> str:
    if not text.endswith((".jsonl", ".csv")):
        raise argparse.ArgumentTypeError(f"must be the name of a file that ends in .jsonl or .csv, got {text!r}")
    return text


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
    settle(options)
    settle_watching(options)
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
    add_options(parser.add_argument_group("strategy: which ranks hold the parameters, and who waits for whom"))
    _add_roles(parser.add_argument_group("roles, which TF_CONFIG may tell instead"))
    _add_network(parser.add_argument_group("network"))
    _add_machine(parser.add_argument_group("machine"))
    _add_files(parser.add_argument_group("files"))
    add_watching_options(parser.add_argument_group("watching"))
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


class Strategy(NamedTuple):
    """trainer: the name of its class. help: in a few words. keywords: what the trainer calls an option, if otherwise.

    options: those that it has use for, with their defaults.
    """

    trainer: str
    help: str
    options: dict[str, Any]
    keywords: Mapping[str, str] = MappingProxyType({})

    def make(self, chosen: argparse.Namespace, replica: Replica, topology: Topology, servers: int) -> Trainer[Any]:
        """The trainer. Collective over the ranks of `topology`, of which the last ones, so many, are servers."""
        given = {self.keywords.get(name, name): getattr(chosen, name) for name in self.options if name != "spares"}
        if "servers" in given:
            given["servers"] = tuple(range(topology.size - servers, topology.size))
        return getattr(trainers, self.trainer)(replica, topology=topology, **given)


ASYNC_ONLY = {"stale": "keep", "max_staleness": None, "warm_up": 0, "lr_by_workers": "keep"}

STRATEGIES = {
    "mirrored": Strategy(
        "MirroredTrainer",
        "all ranks hold the model and average their gradients in every step",
        {"allreduce": "auto", "update": "replicated", "compress": None, "copies": 1, "on_failure": None, "spares": 0},
    ),
    "central_storage": Strategy(
        "CentralStorageTrainer",
        "one rank holds the parameters and updates them; all compute",
        {"storage_rank": 0, "copies": 1, "on_failure": None, "spares": 0},
        {"storage_rank": "storage"},
    ),
    "parameter_server": Strategy(
        "ParameterServerTrainer",
        "server ranks hold the parameters; workers fetch them and send gradients",
        {"servers": None, "updates": "async", **ASYNC_ONLY, "on_failure": None},
        {"lr_by_workers": "learning_rate"},
    ),
    "spare_replicas": Strategy(
        "SpareReplicasTrainer",
        "as mirrored, but a step takes the first gradients and drops those of the slowest ranks",
        {"spare": 1, "on_failure": None},
    ),
}


def add_options(group: Any) -> None:
    """The options that choose a strategy, and those of single strategies; all of them are None when not given."""
    add = group.add_argument
    each = "; ".join(f"{name}: {strategy.help}" for name, strategy in STRATEGIES.items())
    add("--strategy", choices=list(STRATEGIES), default="mirrored", help=f"{each} (default: mirrored)")
    add(
        "--allreduce", metavar="NAME",
        help=f"how gradients are averaged: {', '.join(allreduce.NAMES)} (default: auto; {_of('allreduce')})",
    )  # fmt: skip
    add(
        "--update", choices=UPDATES,
        help="replicated: every rank updates all parameters; sharded: its own slice, which divides the work "
        f"(default: replicated; {_of('update')})",
    )  # fmt: skip
    add(
        "--compress", choices=SHORT,
        help="gradients travel with 16 bits, which rounds them; for networks between nodes "
        f"(default: with all of them; {_of('compress')})",
    )  # fmt: skip
    add(
        "--copies", type=integer(1), metavar="N",
        help="2: what one rank alone would have (a slice with --update sharded, the storage) another one keeps too, so "
        f"that no checkpoint is needed when it is lost; costs a message a step (default: 1; {_of('copies')})",
    )  # fmt: skip
    add(
        "--spares", type=integer(0), metavar="N",
        help=f"the last N ranks wait, and take the places of lost ones; with --on-failure continue ({_of('spares')})",
    )  # fmt: skip
    add(
        "--on-failure", choices=CHOICES,
        help="when a rank is lost, and the job was started with mpirun --with-ft ulfm: continue: the others go on; "
        f"stop: they write a checkpoint where --checkpoint asks for some, and stop ({_of('on_failure')})",
    )  # fmt: skip
    add(
        "--storage-rank", type=integer(0), metavar="R",
        help=f"the rank that holds the parameters (default: 0; {_of('storage_rank')})",
    )  # fmt: skip
    add(
        "--servers", type=integer(1), metavar="N",
        help=f"how many ranks, the last ones, are servers (default: 1; {_of('servers')})",
    )  # fmt: skip
    add(
        "--updates", choices=["sync", "async"],
        help="async: a server applies each gradient as it comes; sync: it waits for all workers' "
        f"(default: async; {_of('updates')})",
    )  # fmt: skip
    add(
        "--stale", choices=["keep", "drop", "scale"],
        help="what becomes of a gradient whose parameters others have updated meanwhile: applied as it is, dropped "
        "when more than --max-staleness updates behind, or applied with the learning rate divided by 1 + so many "
        "(default: keep; with --updates async)",
    )  # fmt: skip
    add(
        "--max-staleness", type=integer(0), metavar="N",
        help="with --stale keep or scale no gradient is more than N updates behind: fast workers wait for slow ones "
        "(default: no bound; with --updates async)",
    )  # fmt: skip
    add(
        "--warm-up", type=integer(0), metavar="N",
        help="the first N epochs are trained by one worker (default: 0; with --updates async)",
    )  # fmt: skip
    add(
        "--lr-by-workers", choices=["keep", "divide"],
        help="divide: each worker's gradients are applied with the learning rate divided by the number of workers "
        "(default: keep; with --updates async)",
    )  # fmt: skip
    add(
        "--spare", type=integer(0), metavar="N",
        help=f"a step does not wait for the N slowest ranks (default: 1; {_of('spare')})",
    )  # fmt: skip


def settle(options: argparse.Namespace) -> None:
    """Fill in the defaults of the chosen strategy. Raises ArgumentError for options that it has no use for."""
    own = STRATEGIES[options.strategy].options
    for name in dict.fromkeys(name for strategy in STRATEGIES.values() for name in strategy.options):
        given = getattr(options, name)
        if given is not None and name not in own:
            raise ArgumentError(
                f"{flag(name)} {given}: --strategy {options.strategy} has no use for it; leave it out, or take "
                f"--strategy {' or '.join(with_option(name))}"
            )
    if options.updates == "sync":
        for name in ASYNC_ONLY:
            if getattr(options, name) is not None:
                raise ArgumentError(
                    f"{flag(name)} {getattr(options, name)}: with --updates sync no gradient is stale; leave it out, "
                    "or take --updates async"
                )
    if options.stale == "drop" and options.max_staleness is None:
        raise ArgumentError("--stale drop needs --max-staleness N: how many updates behind is too many")
    for name, default in own.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def servers(options: argparse.Namespace) -> int | None:
    """How many servers the options ask for; None: those of TF_CONFIG, or else one."""
    return options.servers if options.strategy in with_option("servers") else 0


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The strategy and its options, as --json has them."""
    return {"strategy": options.strategy} | {
        name: getattr(options, name) for name in STRATEGIES[options.strategy].options
    }


def with_option(name: str) -> list[str]:
    """The strategies that have use for an option."""
    return [each for each, strategy in STRATEGIES.items() if name in strategy.options]


def _of(name: str) -> str:
    return f"with {' or '.join(with_option(name))}"


def add_watching_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--trace", metavar="FILE",
        help="write what each rank does when, for https://ui.perfetto.dev and python -m benchmarks.timeline",
    )  # fmt: skip
    add("--tensorboard", metavar="DIR", help='write events for TensorBoard (with the extra "tensorboard")')
    add("--csv", metavar="FILE", help="write a line for each epoch; with --resume, go on with the file")
    add(
        "--early-stopping", type=integer(1), metavar="N",
        help="stop when the loss of the training has not become smaller for N epochs",
    )  # fmt: skip
    add(
        "--check-divergence", type=integer(1), metavar="N",
        help="every N steps see that all ranks still have the same parameters, in bits",
    )  # fmt: skip
    add(
        "--on-divergence", choices=checks.DIVERGENCE_ANSWERS,
        help="with --check-divergence: stop with an error, or copy those that most ranks have (default: raise)",
    )  # fmt: skip
    add(
        "--check-gradients", choices=checks.ANSWERS,
        help="see in every step that no rank brings NaN or infinite gradients, and say which one: stop with an error, "
        "or leave the step out",
    )  # fmt: skip


def settle_watching(chosen: argparse.Namespace) -> None:
    """Raises ArgumentError for options that have no use."""
    if chosen.on_divergence and not chosen.check_divergence:
        raise ArgumentError("--on-divergence needs --check-divergence N: how often the ranks compare")


def callbacks(chosen: argparse.Namespace) -> list[Any]:
    """The same on all ranks."""
    from trainers.callbacks import CheckDivergence, CheckGradients, CSVLogger, EarlyStopping, TensorBoard, Timeline

    made: list[Any] = []
    if chosen.trace:
        made.append(Timeline(chosen.trace))
    if chosen.tensorboard:
        made.append(TensorBoard(chosen.tensorboard))
    if chosen.csv:
        made.append(CSVLogger(chosen.csv, append=chosen.resume))
    if chosen.early_stopping:
        made.append(EarlyStopping("loss", patience=chosen.early_stopping))
    if chosen.check_divergence:
        made.append(CheckDivergence(chosen.check_divergence, chosen.on_divergence or "raise"))
    if chosen.check_gradients:
        made.append(CheckGradients(chosen.check_gradients))
    return made

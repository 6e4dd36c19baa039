"""The options of `python -m trainers`, each declared once in OPTIONS.

The parser, --help and --help-all, the checks, the arguments of the trainer and the callbacks all follow from the
declarations.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

import allreduce
from allreduce.arrays import compression as compressions
from allreduce.errors import AllReduceError
from allreduce.topology import Topology
from trainers import callbacks, checks, datasets
from trainers.arguments import BELOW_ONE, POSITIVE, Check, Flag, integer
from trainers.central_storage import CentralStorageTrainer
from trainers.cli.parser import RankParser
from trainers.errors import ArgumentError
from trainers.fit.checkpointing import period
from trainers.fit.weights import BALANCED
from trainers.mirrored import MirroredTrainer
from trainers.options.average import UPDATES, Exact, LocalSGD, Sharded
from trainers.parameter_server import ParameterServerTrainer
from trainers.recovery.recovery import ON_FAILURE
from trainers.replica import Replica
from trainers.replicas.numpy.categories import network_of
from trainers.replicas.numpy.network import ACTIVATIONS, NumpyNetwork
from trainers.replicas.numpy.optimizers import OPTIMIZERS
from trainers.spare_replicas import SpareReplicasTrainer
from trainers.strategies.servers.options import CHOICES as SERVER_CHOICES
from trainers.strategies.transforms.chosen import TRANSFORMS
from trainers.trainer import Trainer

EXAMPLES = """examples:
  mpirun -n 4 python -m trainers --data digits
  mpirun -n 4 python -m trainers --data iris --allreduce ring --json result.json
  mpirun -n 4 python -m trainers --data mnist/ --hidden 256,128 --save model.npz    (a folder of MNIST's files)
  mpirun -n 4 python -m trainers --data mnist/ --load model.npz --epochs 0          (only test a saved model)
  mpirun -n 4 python -m trainers --data people.csv --label income --save model.npz  (a table of words and numbers)
  mpirun -n 4 python -m trainers predict --load model.npz --data new.csv --out predictions.csv
  mpirun -n 4 python -m trainers --data mnist/ --checkpoint run --resume            (again after it was killed, say)
  mpirun -n 4 python -m trainers --trace trace.json --tensorboard logs              (who waits for whom; curves)
  mpirun -n 4 python -m trainers --allreduce hierarchical_copy --ranks-per-node 2   (two simulated nodes)
  mpirun -n 5 python -m trainers --strategy parameter_server --servers 1 --updates async
  mpirun -n 4 python -m trainers --strategy spare_replicas --backup-workers 1
  mpirun -n 4 python -m trainers --members 5 --bagging rows --save ensemble.npz     (five networks that vote)

--help-all shows the other options: strategies, failures, network, traces, checks.
python -m trainers predict --help shows the options of predict; export, which writes an ONNX file, has options too.
"""

Convert = Callable[[str], Any]

# Converters of values: each raises argparse.ArgumentTypeError


def accepted_by(check: Callable[[str], object]) -> Convert:
    """Returns the text itself, if `check` accepts it."""

    def convert(text: str) -> str:
        try:
            check(text)
        except (AllReduceError, ArgumentError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return convert


def sizes(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise ValueError(text)
    return tuple(map(int, text.split(",")))


def layer_sizes(text: str) -> tuple[int, ...]:
    return () if text == "none" else sizes(text)


def ranks_per_node(text: str) -> int | tuple[int, ...]:
    found = sizes(text)
    return found[0] if len(found) == 1 else found


def address(text: str) -> tuple[int, str]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise ValueError(text)
    return int(port), host or "127.0.0.1"


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


BACKUPS = Check("0 or 1", read=("0", "1").index)
LAYERS = Check('a list of layer sizes such as 64,32, or "none"', read=layer_sizes)
NODES = Check("a number of ranks such as 2, or a list such as 3,1", read=ranks_per_node)
PORT = Check("PORT or ADDRESS:PORT such as 0.0.0.0:9400", read=address)


# The declarations


class PerData(NamedTuple):
    """A default that depends on the data set."""

    digits: Any
    iris: Any
    files: Any

    def of(self, data: str) -> Any:
        return getattr(self, data) if data in datasets.NAMES else self.files

    def __str__(self) -> str:
        texts = [",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in self]
        return ", ".join(f"{text} for {name}" for name, text in zip(self._fields, texts, strict=True))


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    name: of its value among the parsed options: "batch_size" for --batch-size.
    metavar, type, help, choices: as argparse takes them. An option without metavar and choices is a flag.
    default: the value when the option is not given. default_text: the default in --help, if it is not `default`.
    strategies: the values of --strategy that take the option; none if the option does not depend on the strategy.
    needs: other options that must be given too -> their allowed values, () for any.
    excludes: other options that can't be given too -> why.
    argument: the name of the trainer's argument, if it differs from `name`; "" if the trainer has no such argument.
    common: whether --help shows the option; --help-all shows all.
    writes: whether the value names a file, which must be writable before the training begins.
    callback: makes the callback that the option asks for, from all parsed options.
    """

    name: str
    metavar: str = ""
    type: Callable[[str], Any] = str
    _: KW_ONLY
    help: str
    choices: Sequence[str] = ()
    default: Any = None
    default_text: str = ""
    strategies: tuple[str, ...] = ()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    excludes: Mapping[str, str] = field(default_factory=dict)
    argument: str | None = None
    common: bool = False
    writes: bool = False
    callback: Callable[[argparse.Namespace], Any] | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def given(self, value: Any) -> str:
        """The option with its value, as it was given."""
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        return self.flag if value is True else f"{self.flag} {value}"

    @property
    def audience(self) -> str:
        """The strategies that take the option, as text for --help-all; "" if all strategies take it."""
        some = self.strategies if self.strategies != tuple(STRATEGIES) else ()
        return _required("strategy", some) if some else ""

    def add_to(self, group: Any, shown: bool = True) -> None:
        """Add the option to a group of a parser, where its value is None when it is not given.

        shown: whether the help contains the option.
        """
        text = self._text() if shown else argparse.SUPPRESS
        if self.choices:
            group.add_argument(self.flag, choices=list(self.choices), help=text)
        elif self.metavar:
            group.add_argument(self.flag, type=self.type, metavar=self.metavar, help=text)
        else:
            group.add_argument(self.flag, action="store_true", default=None, help=text)

    def _text(self) -> str:
        """The text of --help: the option's help, its default, and the options that it needs."""
        notes = []
        if self.default_text or not (self.default is None or self.default is False):
            notes.append(f"default: {self.default_text or self.default}")
        if self.needs:
            notes.append(f"with {' and '.join(_required(name, values) for name, values in self.needs.items())}")
        return f"{self.help} ({'; '.join(notes)})" if notes else self.help


def flags_of(kind: type) -> dict[str, tuple[Flag, Check, Any]]:
    """Return what an option object declares for the command line: field -> its Flag, its Check and its default."""
    found = {}
    for each in fields(kind):
        check, *flags = getattr(each.type, "__metadata__", [None])
        for flag in flags:
            found[each.name] = flag, check, None if each.default is MISSING else each.default
    return found


def options_of(kind: type, **others: Any) -> tuple[Option, ...]:
    """Return the options that give the fields of an option object. others: more arguments of each Option.

    The value of an option whose Flag has a default of its own is None when it is not given.
    """
    return tuple(
        Option(
            flag.name, flag.metavar, check, help=flag.help, choices=flag.choices, default_text=flag.default,
            default=None if flag.default else default, **others,
        )
        for flag, check, default in flags_of(kind).values()
    )  # fmt: skip


def object_of(kind: type, options: argparse.Namespace) -> Any:
    """Return the option object that the options describe; None if they are as without it. Raises ArgumentError."""
    flags = {field: flag for field, (flag, _, _) in flags_of(kind).items()}
    given = {field: value for field, flag in flags.items() if (value := getattr(options, flag.name)) is not None}
    if all(value == BY_NAME[flags[field].name].default for field, value in given.items()):
        return None
    try:
        return kind(**given)
    except ArgumentError as error:
        text = str(error).removeprefix(f"{kind.__name__}: ")
        for field, flag in flags.items():
            text = text.replace(f"{field}=", f"{BY_NAME[flag.name].flag} ")
        raise ArgumentError(text) from None


MIRRORED, CENTRAL, SERVERS, SPARE = "mirrored", "central_storage", "parameter_server", "spare_replicas"
STRATEGIES: dict[str, tuple[type[Trainer[Any]], str]] = {  # a value of --strategy -> its trainer, and its help
    MIRRORED: (MirroredTrainer, "all ranks hold the model and average their gradients in every step"),
    CENTRAL: (CentralStorageTrainer, "one rank holds the parameters and updates them; all ranks compute"),
    SERVERS: (ParameterServerTrainer, "server ranks hold the parameters; worker ranks fetch them and send gradients"),
    SPARE: (
        SpareReplicasTrainer,
        "as mirrored, but a step takes the first gradients and drops those of the slowest ranks",
    ),
}
ASYNC = {"updates": ("async",)}
EVERY, *FRAGMENTS = options_of(LocalSGD, strategies=(MIRRORED,), argument="")
DECAYS = ("momentum", "beta1", "beta2")  # of optimizers
UNITS = 64  # of a hidden layer, if --layers is given alone
RATES = PerData(0.002, 0.01, 0.001)  # of Adam
OTHER_RATES = ", ".join(f"{name} {kind.default_lr}" for name, kind in OPTIMIZERS.items() if name != "adam")

ONE_FILE = "all members would write one file"
ONE_MODEL = {  # options of the training of one model -> why an ensemble takes none of them
    "load": "members begin with their own seeds",
    "standby": "the ranks of an ensemble have no standby ranks",
    **dict.fromkeys(("trace", "tensorboard", "csv"), ONE_FILE),
    "prometheus": "all members would have one port",
}
SOFT, HARD = "soft", "hard"

# fmt: off
OPTIONS: dict[str, tuple[Option, ...]] = {
    "training": (
        Option(
            "data", "SET", default="digits", common=True,
            help=f"{' or '.join(datasets.NAMES)}, a folder of MNIST-format files, an .npz file, a .csv file of numbers "
            "with the label in the last column, or with --label a .csv or .tsv table; or a pattern ('part-*.csv'), of "
            "which each rank reads its own files",
        ),
        Option(
            "label", "NAME", default_text="the last column",
            help="the column of a table that is predicted; the others may have numbers, words and missing values",
        ),
        Option("ignore", "NAME,NAME,...", names, needs={"label": ()}, help="columns of a table that are left out"),
        Option(
            "categories", "NAME,NAME,...", names, needs={"label": ()},
            help="columns of a table whose numbers are categories (postcodes, say); columns with words are anyway",
        ),
        Option(
            "epochs", "N", integer(0), default=PerData(20, 50, 10), common=True, help="number of passes over the data"
        ),
        Option(
            "batch_size", "N", integer(1), default=PerData(100, 16, 128), common=True,
            help="number of samples in a global batch, which is divided among the ranks",
        ),
        Option(
            "class_weight", choices=(BALANCED,), default_text="none",
            help="weigh the loss of each row, so that all classes count alike, however many rows they have",
        ),
        *(option for kind in TRANSFORMS for option in options_of(kind)),
        Option("seed", "N", integer(0), default=0, help="seed of the initial weights and of the order of the rows"),
    ),
    "strategy: which ranks hold the parameters, and which ranks wait for which": (
        Option(
            "strategy", choices=tuple(STRATEGIES), default=MIRRORED, common=True,
            help="; ".join(f"{name}: {text}" for name, (_, text) in STRATEGIES.items()),
        ),
        Option(
            "allreduce", "NAME", default="auto", strategies=(MIRRORED, SERVERS), common=True,
            help="the backend that averages the gradients (of a worker's ranks with --ranks-per-worker): "
            f"{', '.join(allreduce.NAMES)}",
        ),
        Option(
            "update", choices=UPDATES, default="replicated", strategies=(MIRRORED,),
            help="replicated: every rank updates all parameters; sharded: every rank updates its own slice, which "
            "divides the work and the optimizer's memory",
        ),
        Option(
            "compress", "NAME", accepted_by(compressions.parse), default_text="none", strategies=(MIRRORED,),
            help="send gradients with fewer bits, for slow networks between nodes: "
            f"{', '.join(compressions.NAMES)} (any rank)",
        ),
        Option(
            "exact", strategies=(MIRRORED,), argument="",
            excludes={"sync_every": "ranks that train on their own rows differ"},
            help="the bits of the training depend on nothing but the data: equal on any number of ranks, with every "
            "backend, after failures; slower",
        ),
        *options_of(Exact, strategies=(MIRRORED,), argument="", needs={"exact": ()}),
        EVERY,
        *(replace(option, needs={EVERY.name: ()}) for option in FRAGMENTS),
        Option(
            "storage_rank", "R", integer(0), default=0, strategies=(CENTRAL,), argument="storage",
            help="the rank that holds the parameters",
        ),
        Option(
            "backups", "N", BACKUPS, default=0, strategies=(MIRRORED, CENTRAL), argument="copies",
            help="1: another rank has a backup of each slice (--update sharded) or of the storage (central_storage), "
            "so the training continues after a failure without a checkpoint. Backups cost a message in every step",
        ),
        Option(
            "servers", "N", integer(1), default=1, strategies=(SERVERS,),
            help="number of servers; the last ranks are the servers",
        ),
        Option(
            "updates", choices=SERVER_CHOICES["updates"], default="async", strategies=(SERVERS,),
            help="async: a server applies each gradient when it arrives; sync: a server waits for the gradients of all "
            "workers",
        ),
        Option(
            "stale", choices=SERVER_CHOICES["stale"], default="keep", strategies=(SERVERS,), needs=ASYNC,
            help="what a server does with a gradient whose parameters have been updated since it was computed (the "
            "number of these updates is its staleness). keep: apply it; drop: discard it if its staleness exceeds "
            "--max-staleness; scale: divide the learning rate by 1 + its staleness",
        ),
        Option(
            "max_staleness", "N", integer(0), default_text="no bound", strategies=(SERVERS,), needs=ASYNC,
            help="the largest staleness of a gradient; with --stale keep or scale fast workers wait to stay within it",
        ),
        Option(
            "warm_up", "N", integer(0), default=0, strategies=(SERVERS,), needs=ASYNC,
            help="in the first N epochs one worker computes at a time, all in turn",
        ),
        Option(
            "ranks_per_worker", "N", integer(1), default=1, strategies=(SERVERS,), needs=ASYNC,
            help="the ranks of a worker: they divide its rows and sum their gradients, and one of them speaks with the "
            "servers",
        ),
        Option(
            "backup_workers", "N", integer(0), default=1, strategies=(SPARE,), argument="spare",
            help="a step does not wait for the N slowest ranks",
        ),
        Option(
            "on_failure", choices=ON_FAILURE, default_text="stop", strategies=tuple(STRATEGIES),
            help="what happens when a rank fails, if the job was started with mpirun --with-ft ulfm. continue: the "
            "other ranks continue; stop: they write a checkpoint, if --checkpoint is given, and the job ends",
        ),
        Option(
            "standby", "N", integer(0), default=0, strategies=(MIRRORED, CENTRAL), needs={"on_failure": ("continue",)},
            argument="", help="the last N ranks stand by, and replace failed ranks",
        ),
    ),
    "ensemble": (
        Option(
            "members", "N", integer(1), default_text="one model", strategies=(MIRRORED,), argument="",
            excludes=ONE_MODEL,
            help="train an ensemble of N networks, each on a part of the ranks; the vote of all is tested, and "
            "--save writes one file",
        ),
        Option(
            "bagging", choices=("rows", "shards"), default_text="all rows", needs={"members": ()},
            help="the rows of a member. rows: a bootstrap sample, and the out-of-bag score is printed; shards: each "
            "row belongs to one member",
        ),
        Option(
            "voting", choices=(SOFT, HARD), default=SOFT, needs={"members": ()},
            help="soft: the mean of the members' probabilities; hard: each member votes for a class",
        ),
    ),
    "network": (
        Option(
            "hidden", "N,N,...", LAYERS, default=PerData((64, 32), (10, 10), (128, 64)), common=True,
            help='sizes of the hidden layers, or "none"',
        ),
        Option(
            "layers", "N", integer(0), default_text="--hidden",
            help=f"the number of hidden layers of one size, instead of --hidden; the size is --units, or {UNITS}",
        ),
        Option(
            "units", "N", integer(1), default_text="--hidden",
            help="the size of each hidden layer, instead of --hidden; their number is --layers, or 1",
        ),
        Option("activation", choices=tuple(ACTIVATIONS), default="relu", help="the activation of the hidden layers"),
        Option("optimizer", choices=tuple(OPTIMIZERS), default="adam", help="the optimizer"),
        Option(
            "lr", "X", POSITIVE, default=RATES, default_text=f"{RATES}; {OTHER_RATES}", common=True,
            help="the learning rate",
        ),
        Option(
            "momentum", "X", BELOW_ONE, default_text="0.9", needs={"optimizer": ("momentum",)},
            help="the share of the velocity that a step keeps",
        ),
        Option(
            "beta1", "X", BELOW_ONE, default_text="0.9", needs={"optimizer": ("adam",)},
            help="the decay of Adam's mean of the gradients",
        ),
        Option(
            "beta2", "X", BELOW_ONE, default_text="0.999", needs={"optimizer": ("adam",)},
            help="the decay of Adam's mean of their squares",
        ),
    ),
    "machine": (
        Option("device", choices=("cpu", "cuda"), default="cpu", help="where the network is; cuda needs CuPy"),
        Option("ranks_per_node", "N", NODES, help="simulate nodes of N ranks, or of N,N,... ranks"),
    ),
    "files": (
        Option("save", "FILE", writes=True, common=True, help="write the trained model (.npz, no pickle)"),
        Option("load", "FILE", help="begin with a saved model"),
        Option("checkpoint", "DIR", common=True, help="write checkpoints of the training to this folder"),
        Option(
            "checkpoint_every", "WHEN", accepted_by(period), default="epoch", needs={"checkpoint": ()},
            help='when to write a checkpoint: "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes", ...',
        ),
        Option(
            "resume", default=False, needs={"checkpoint": ()}, common=True,
            help="continue from the newest usable checkpoint, if there is one; --epochs counts from the beginning of "
            "the training",
        ),
        Option(
            "other_data", default=False, needs={"resume": ()},
            help="allow --resume with other rows, or with rows in another order",
        ),
        Option(
            "json", "FILE", writes=True,
            help="write the results (test_accuracy, history, ...); - writes them to stdout, and all else to stderr",
        ),
    ),
    "watching": (
        Option(
            "trace", "FILE", writes=True, callback=lambda options: callbacks.Timeline(options.trace),
            help="write what each rank does, and when, for https://ui.perfetto.dev and python -m benchmarks.timeline",
        ),
        Option(
            "tensorboard", "DIR", callback=lambda options: callbacks.TensorBoard(options.tensorboard),
            help='write events for TensorBoard (with the extra "tensorboard")',
        ),
        Option(
            "prometheus", "PORT", PORT, callback=lambda options: callbacks.Prometheus(*options.prometheus),
            help="serve metrics for Prometheus at this port of 127.0.0.1, or at ADDRESS:PORT (with the extra "
            '"prometheus")',
        ),
        Option("log_dir", "DIR", help="write each rank's log to DIR/rank-N.log, and its last calls after an error"),
        Option(
            "csv", "FILE", writes=True,
            callback=lambda options: callbacks.CSVLogger(options.csv, append=options.resume),
            help="write a line for each epoch; with --resume, append to the file",
        ),
        Option(
            "early_stopping", "N", integer(1),
            callback=lambda options: callbacks.EarlyStopping("loss", patience=options.early_stopping),
            help="stop when the training loss has not improved for N epochs",
        ),
        Option(
            "check_divergence", "N", integer(1),
            callback=lambda options: callbacks.CheckDivergence(options.check_divergence, options.on_divergence),
            help="check every N steps that all ranks have the same parameters, bit for bit",
        ),
        Option(
            "on_divergence", choices=checks.DIVERGENCE_ANSWERS, default="raise", needs={"check_divergence": ()},
            help="what happens when ranks differ. raise: the job ends with an error; copy: all ranks get the "
            "parameters that most ranks have",
        ),
        Option(
            "check_gradients", choices=checks.ANSWERS,
            callback=lambda options: callbacks.CheckGradients(options.check_gradients),
            help="check in every step that no rank has NaN or infinite gradients, and name the ranks that have some. "
            "raise: the job ends with an error; skip: all ranks leave the step out",
        ),
    ),
}
# fmt: on
BY_NAME = {option.name: option for group in OPTIONS.values() for option in group}


# What is derived from the declarations


def add_options(parser: argparse.ArgumentParser, everything: bool = True) -> None:
    """Add the options. everything: --help shows them all, by strategy."""
    parser.add_argument("--help-all", action="help", help="show all options")
    groups: dict[str, Any] = {}
    for title, options in OPTIONS.items():
        for option in options:
            heading = "the options that most trainings need"
            if everything:
                heading = f"with {option.audience} only" if option.audience else title
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            option.add_to(groups[heading], everything or option.common)


def parse(arguments: Sequence[str], shown: bool, program: str = "python -m trainers") -> argparse.Namespace:
    """Return the checked options, with their defaults. Raises ArgumentError; --help and --help-all exit.

    The options of other strategies stay None. shown: whether this rank prints. program: its name in --help.
    """
    parser = RankParser(
        shown,
        prog=program,
        usage="%(prog)s [OPTION...]",
        description="Train a small network on all ranks together, and test it.",
        epilog=EXAMPLES,
    )
    add_options(parser, "--help-all" in arguments)
    options = parser.parse_args(arguments)
    options.strategy = options.strategy or MIRRORED
    options.data = options.data or BY_NAME["data"].default
    for option in BY_NAME.values():
        if getattr(options, option.name) is not None:
            _check_needs(option, options)
    _check_values(options)
    if options.lr is None and options.optimizer not in (None, "adam"):
        options.lr = OPTIMIZERS[options.optimizer].default_lr
    for option in BY_NAME.values():
        if getattr(options, option.name) is None and options.strategy in (option.strategies or STRATEGIES):
            default = option.default.of(options.data) if isinstance(option.default, PerData) else option.default
            setattr(options, option.name, default)
    return options


def _check_needs(option: Option, options: argparse.Namespace) -> None:
    """Raise ArgumentError when an option was given without the options that it needs."""
    value = getattr(options, option.name)
    given = option.given(value)
    needs = {"strategy": option.strategies} if option.strategies else {}
    if value != 0:  # 0 switches an option off, so it needs no others
        needs |= option.needs
    for name, values in needs.items():
        found = getattr(options, name) or (BY_NAME[name].default if values else None)
        if found is None:
            raise ArgumentError(f"{given} needs {_required(name, values)}")
        if values and found not in values:
            raise ArgumentError(
                f"{given} has no effect with {BY_NAME[name].given(found)}; leave it out, or use "
                f"{_required(name, values)}"
            )
    for name, reason in option.excludes.items():
        if found := getattr(options, name):
            raise ArgumentError(f"{given} can't be used with {BY_NAME[name].given(found)}: {reason}; leave out one")


def _required(name: str, values: Sequence[str]) -> str:
    """Return an option that another one needs, as it is written on the command line."""
    return f"{BY_NAME[name].flag} {' or '.join(values) or BY_NAME[name].metavar}".rstrip()


def _check_values(options: argparse.Namespace) -> None:
    """Raise ArgumentError for values that contradict each other."""
    if options.stale == "drop" and options.max_staleness is None:
        raise ArgumentError("--stale drop needs --max-staleness N: gradients of a larger staleness are dropped")
    given = [each.flag for each in OPTIONS["network"] if getattr(options, each.name) is not None]
    if options.load and given:
        raise ArgumentError(f"--load takes the network and its optimizer from the file; leave out {', '.join(given)}")
    sizes = [each for each in (options.layers, options.units) if each is not None]
    if options.hidden is not None and sizes:
        raise ArgumentError("--hidden gives the size of each hidden layer; leave it out, or --layers and --units")


def strategy_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the strategy and its options as a dict, as --json writes them."""
    own = [option.name for option in BY_NAME.values() if options.strategy in option.strategies]
    if options.members is None:
        own = [name for name in own if name != "members"]
    if options.strategy == SERVERS and options.ranks_per_worker == 1:
        own.remove("allreduce")  # no ranks average gradients
    return {name: getattr(options, name) for name in ("strategy", *own)}


def make_network(options: argparse.Namespace, data: datasets.Dataset | datasets.Shards) -> NumpyNetwork:
    """Create the network that the options describe, for these data. Local."""
    decays = {name: value for name in DECAYS if (value := getattr(options, name)) is not None}
    hidden = options.hidden
    if options.layers is not None or options.units is not None:
        hidden = (options.units or UNITS,) * (1 if options.layers is None else options.layers)
    return network_of(
        data,
        hidden,
        activation=options.activation,
        optimizer=OPTIMIZERS[options.optimizer](options.lr, **decays),
        seed=options.seed,
        device=options.device,
    )


def trainer_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the trainer, by the names of its arguments."""
    given = {}
    for option in BY_NAME.values():
        if options.strategy in option.strategies and option.argument != "":
            given[option.argument or option.name] = getattr(options, option.name)
    if "copies" in given:
        given["copies"] += 1  # the original and the backups
    if options.strategy == MIRRORED:
        given["average"] = object_of(Exact, options) or Exact() if options.exact else object_of(LocalSGD, options)
        if given.pop("copies") == 2:
            if options.update != "sharded":
                raise ArgumentError(
                    f"--backups 1: with --update {options.update} all ranks have the whole state; leave out --backups, "
                    "or use --update sharded"
                )
            given["update"] = Sharded(copies=2)
    return given


def make_trainer(options: argparse.Namespace, replica: Replica, topology: Topology) -> Trainer[Any]:
    """Create the trainer that the options describe. Collective."""
    try:
        return STRATEGIES[options.strategy][0](replica, topology=topology, **trainer_options(options))
    except ArgumentError as error:
        for option in BY_NAME.values():
            if option.argument and re.search(rf"\b{option.argument}\b", str(error)):
                error.args = (f"{option.given(getattr(options, option.name))}: {error}",)
        raise


def step_options(options: argparse.Namespace) -> dict[str, Any]:
    transforms = [made for kind in TRANSFORMS if (made := object_of(kind, options)) is not None]
    return {"class_weight": options.class_weight, "transforms": transforms}


def make_callbacks(options: argparse.Namespace) -> list[Any]:
    """Create the callbacks that the options ask for, the same on all ranks."""
    asked = [option for option in BY_NAME.values() if option.callback and getattr(options, option.name)]
    return [option.callback(options) for option in asked if option.callback]

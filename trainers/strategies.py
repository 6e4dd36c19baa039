"""The strategies of training by name: what each is, which options it has use for, and how its trainer is made.

A new strategy is one line of STRATEGIES: the command line and its help pick it up from there.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import allreduce
import trainers
from allreduce.topology import Topology
from allreduce.wrappers.compressed import SHORT
from trainers import on_failure
from trainers.backends import UPDATES
from trainers.base import Trainer
from trainers.errors import ArgumentError
from trainers.parsing import flag, integer
from trainers.replica import Replica

Make = Callable[[argparse.Namespace, Replica, Topology, int], Trainer]


class Strategy(NamedTuple):
    """help: in a few words. options: those that it has use for, with their defaults.

    make: the trainer, of the options, this rank's replica, the ranks that train, and how many of them, the last,
        are servers. Collective over the ranks that train.
    """

    help: str
    options: dict[str, Any]
    make: Make


def _mirrored(chosen: argparse.Namespace, replica: Replica, topology: Topology, servers: int) -> Trainer:
    return trainers.MirroredTrainer(
        replica,
        chosen.allreduce,
        topology,
        update=chosen.update,
        compress=chosen.compress,
        copies=chosen.copies,
        on_failure=chosen.on_failure,
    )


def _central_storage(chosen: argparse.Namespace, replica: Replica, topology: Topology, servers: int) -> Trainer:
    return trainers.CentralStorageTrainer(
        replica, topology, storage=chosen.storage_rank, copies=chosen.copies, on_failure=chosen.on_failure
    )


def _parameter_server(chosen: argparse.Namespace, replica: Replica, topology: Topology, servers: int) -> Trainer:
    return trainers.ParameterServerTrainer(
        replica,
        topology,
        servers=tuple(range(topology.size - servers, topology.size)),
        updates=chosen.updates,
        stale=chosen.stale,
        max_staleness=chosen.max_staleness,
        warm_up=chosen.warm_up,
        learning_rate=chosen.lr_by_workers,
        on_failure=chosen.on_failure,
    )


def _spare_replicas(chosen: argparse.Namespace, replica: Replica, topology: Topology, servers: int) -> Trainer:
    return trainers.SpareReplicasTrainer(replica, topology, spare=chosen.spare, on_failure=chosen.on_failure)


ASYNC_ONLY = {"stale": "keep", "max_staleness": None, "warm_up": 0, "lr_by_workers": "keep"}

STRATEGIES = {
    "mirrored": Strategy(
        "all ranks hold the model and average their gradients in every step",
        {"allreduce": "auto", "update": "replicated", "compress": None, "copies": 1, "on_failure": None, "spares": 0},
        _mirrored,
    ),
    "central_storage": Strategy(
        "one rank holds the parameters and updates them; all compute",
        {"storage_rank": 0, "copies": 1, "on_failure": None, "spares": 0},
        _central_storage,
    ),
    "parameter_server": Strategy(
        "server ranks hold the parameters; workers fetch them and send gradients",
        {"servers": None, "updates": "async", **ASYNC_ONLY, "on_failure": None},
        _parameter_server,
    ),
    "spare_replicas": Strategy(
        "as mirrored, but a step takes the first gradients and drops those of the slowest ranks",
        {"spare": 1, "on_failure": None},
        _spare_replicas,
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
        "--on-failure", choices=on_failure.CHOICES,
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

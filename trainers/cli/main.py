"""The command line: mpirun -n 4 python -m trainers --data digits"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, TextIO

from allreduce import Topology
from allreduce.arrays import gpu
from allreduce.elastic import standby
from allreduce.elastic.retry import attempt
from allreduce.errors import (
    AllReduceError,
    BrokenError,
    CollectiveTimeoutError,
    CommunicationError,
    LauncherError,
    RankLeftError,
    RankLostError,
)
from allreduce.health import abort
from allreduce.transport import processes
from allreduce.transport.control import everywhere, on_all_ranks, together
from allreduce.transport.wait import waiting
from trainers import datasets
from trainers.cli import results
from trainers.cli.options import (
    make_callbacks,
    make_network,
    make_trainer,
    parse,
    step_options,
    trainer_options,
)
from trainers.datasets.shards import is_pattern
from trainers.errors import ArgumentError, DivergedError, TrainerError
from trainers.fit.checkpointing import Checkpoint
from trainers.fit.shards import load_shards
from trainers.recovery.terminating import Terminating
from trainers.replica import saved_columns
from trainers.replicas.numpy.categories import load_network
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.watching.logs import log_to, write_error

log = logging.getLogger("trainers")

FAULTS = (DivergedError, RankLostError, RankLeftError, CollectiveTimeoutError, BrokenError, CommunicationError)
COMMANDS = {  # the first argument -> the module with its COMMAND and `run`, imported when it is asked for
    "export": "trainers.apps.export.command",
    "predict": "trainers.apps.tables.command",
    "search": "trainers.apps.search.command",
    "serve": "trainers.apps.serving.command",
}
ENSEMBLE = "trainers.apps.ensemble.command"  # its `train` trains with --members, imported when it is asked for
FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130  # exit codes; a job that exits with 1 may be started again


def main(arguments: Sequence[str] | None = None, program: str = "python -m trainers") -> int:
    """Run the command line on all ranks; returns the exit code, the same on each. program: its name in --help."""
    try:
        world = Topology.of_survivors()
    except LauncherError as error:  # no other rank is known
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_ARGUMENTS
    code = 0
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with Terminating() as sigterm:  # also on ranks that do not train, and while data is loaded
            if given[:1] and given[0] in COMMANDS:
                command = import_module(COMMANDS[given[0]])
                sigterm.agreed = bool(command.run(given[1:], world, f"{program} {given[0]}"))  # True: it obeys SIGTERM
                return code
            while (prepared := prepare(given, world, program)) is None:
                world = world.survivors()
            job, member = prepared
            if member := member or join(job, world):
                train = import_module(ENSEMBLE).train if job.options.members else _train
                train(job, member)
            sigterm.agreed = True  # all work is done: ignore the signal
    except (AllReduceError, TrainerError) as error:
        if world.size > 1 and not everywhere(error, world.world):
            raise  # the other ranks do not have this error: the hook of Topology shows the traceback and ends the job
        own = processes.world_ranks(world.world)
        if processes.here()[0] == min(getattr(error, "ranks", None) or own) == own[0]:  # not a rank that joined others
            say(world, f"error: {error}", sys.stderr)
            abort.log_job(str(error))
        write_error(error)
        code = FAILED if isinstance(error, FAULTS) else BAD_ARGUMENTS
        with waiting(world.world, "end together, after an error"):
            world.world.Barrier()  # the first rank to leave with a code ends the job, so let rank 0 print
    except KeyboardInterrupt:
        if world.size > 1:
            raise
        say(world, "interrupted", sys.stderr)
        code = INTERRUPTED
    return code


# Before the training


class Job(NamedTuple):
    """The options and data of the job; the same on all ranks."""

    options: argparse.Namespace
    data: datasets.Dataset | datasets.Shards

    @property
    def stream(self) -> TextIO:
        """The stream for messages: stderr with `--json -`, which uses stdout for the results; else stdout."""
        return sys.stderr if self.options.json == results.STANDARD_OUTPUT else sys.stdout


class Member(NamedTuple):
    """A rank that trains: the topology of the ranks that train, and its network."""

    topology: Topology
    network: NumpyNetwork


def prepare(arguments: Sequence[str], world: Topology, program: str) -> tuple[Job, Member | None] | None:
    """Read the options and data, and create this rank's topology and network. Collective.

    Returns None if a rank failed meanwhile and --on-failure continue is given: the remaining ranks begin again. With
    --standby, Member is None: `join` makes it later, because it blocks on a standby rank.
    """

    def read_and_join() -> tuple[Job, Member | None]:
        job = _read(arguments, world, program)
        return job, None if job.options.standby else join(job, world)

    outcome = attempt(world, read_and_join)
    if world.finished(outcome.failure is None):
        return outcome.result()
    if not _goes_on(arguments):
        raise outcome.failure or RankLostError("a rank failed before the training")
    if world.rank == 0:
        log.warning("trainers: a rank failed before the training; the other ranks start again without it")
    return None


def _goes_on(arguments: Sequence[str]) -> bool:
    """Whether --on-failure continue is given; False if the arguments are invalid."""
    try:
        return parse(arguments, shown=False).on_failure == "continue"
    except (Exception, SystemExit):
        return False


def _read(arguments: Sequence[str], world: Topology, program: str) -> Job:
    """Read the options and the data. Collective."""
    options = together(world.world, lambda: parse(arguments, world.rank == 0, program))
    together(world.world, lambda: check(options, world.size))
    if options.log_dir:
        together(world.world, lambda: log_to(options.log_dir))
        log.info("%s: %s", world, " ".join(arguments))
    together(world.world, lambda: results.check_targets(options) if world.rank == 0 else None)
    return Job(options, together(world.world, lambda: _data(options, world)))


def _data(options: argparse.Namespace, world: Topology) -> datasets.Dataset | datasets.Shards:
    """Load the data. With --load the columns of a table are those of the saved model. Collective."""
    columns = together(world.world, lambda: saved_columns(options.load) if options.load else None)
    if options.load and options.label and columns is None:
        raise ArgumentError(f"--label {options.label}: the model of --load {options.load} was not trained on a table")
    choices = {"ignore": options.ignore or (), "categories": options.categories or ()}
    if is_pattern(options.data):
        return load_shards(options.data, options.label, topology=world, columns=columns, **choices)
    return datasets.load(options.data, options.label, columns=columns, **choices)


def check(options: argparse.Namespace, ranks: int) -> None:
    """Raise ArgumentError if the options do not fit each other, or the number of ranks."""
    trainer_options(options)
    given = options.ranks_per_node
    if isinstance(given, int) and given > ranks:
        raise ArgumentError(
            f"--ranks-per-node {given}: this job has {ranks} rank{'s' * (ranks != 1)}, so no node has {given}; give at "
            f"most {ranks}, or start more ranks (mpirun -n {2 * given})"
        )
    if options.standby and options.ranks_per_node:
        raise ArgumentError(f"--standby {options.standby} can't be used with --ranks-per-node; leave out one of them")
    if options.members and is_pattern(options.data):
        raise ArgumentError(
            f"--data {options.data}: each rank reads its own files, and a member of an ensemble takes rows of all: "
            "give one file, or leave out --members"
        )


def join(job: Job, world: Topology) -> Member | None:
    """Create the topology of the ranks that train, and this rank's network. Collective.

    A standby rank waits here until it replaces a failed rank. Returns None if it was not needed.
    """
    options = job.options
    if options.standby:
        topology = standby.elastic_world(world, options.standby)
    else:
        topology = Topology(world.world, options.ranks_per_node, world.timeout)
    if topology is None:
        return None
    return Member(topology, together(topology.world, lambda: _network(job, topology)))


def _network(job: Job, topology: Topology) -> NumpyNetwork:
    options, data = job.options, job.data
    if options.device == "cuda":
        gpu.choose_device(topology.node_rank)
    if options.load:
        network = load_network(options.load, options.device)
        if "accuracy" not in network.metrics:
            loss = network.config["loss"]
            raise ArgumentError(f"--load {options.load}: its loss is {loss}; this program trains classifiers only")
        return network
    return make_network(options, data)


# The training


def _train(job: Job, member: Member) -> None:
    """Train, test and write the results. Collective over the ranks that train."""
    options, data, stream = job.options, job.data, job.stream
    with make_trainer(options, member.network, member.topology) as trainer:
        if not isinstance(member.topology, standby.JoiningRank):  # the other ranks have printed it
            introduce(job, member, [results.strategy_line(trainer, options)])
        train, test = (data.train, data.test) if isinstance(data, datasets.Shards) else (data.x_train, data.x_test)
        labels = (None, None) if isinstance(data, datasets.Shards) else (data.y_train, data.y_test)
        history = trainer.fit(
            train,
            labels[0],
            options.epochs,
            options.batch_size,
            seed=options.seed,
            callbacks=make_callbacks(options),
            progress=stream,
            checkpoint=checkpoint_of(options),
            resume=options.resume,
            **step_options(options),
        )
        scores = trainer.evaluate(test, labels[1])
        check_loss(scores["loss"], trainer.topology)
        if options.save:
            trainer.save(options.save)
            say(trainer.topology, f"saved: {options.save}", stream)
        if options.json:

            def write() -> None:
                result = results.result(options, trainer, history, scores)
                trainer.group.on_one(lambda: results.write_json(options.json, result))

            trainer.surviving(write)
        say(trainer.topology, f"test accuracy: {scores['accuracy']:.4f}", stream)
    if options.standby:
        trainer.topology.close()  # ends the wait of the standby ranks


def checkpoint_of(options: argparse.Namespace) -> Checkpoint | None:
    if not options.checkpoint:
        return None
    return Checkpoint(options.checkpoint, options.checkpoint_every, same_data=not options.other_data)


def introduce(job: Job, member: Member, training: Sequence[str]) -> None:
    """Print on rank 0 the ranks, lines about the training, the data and the model. Collective."""
    options, data, (topology, network) = job.options, job.data, member
    lines = [f"{topology}, on {network.device}"]
    if options.standby:
        lines.append(f"standby ranks: {options.standby}")
    lines += [*training, f"data: {data}"]
    if data.columns is not None:
        lines.append(f"table: {data.columns}")
    layers, optimizer = "-".join(map(str, network.sizes)), network.config["optimizer"]
    model = f"{layers}, {network.gradient_length:,} parameters"
    lines.append(f"model: {model}; {optimizer}, learning rate {network.optimizer.lr:g}")
    say(topology, "\n".join(lines), job.stream)


def check_loss(loss: float, world: Topology) -> None:
    """Raise DivergedError on all ranks if the test loss is not finite."""
    if not math.isfinite(loss):
        error = DivergedError(f"the loss of the test data is {loss}: lower the learning rate, or scale the features")
        raise on_all_ranks(error, world.world)  # all ranks have the same loss


def say(world: Topology, text: str, stream: TextIO) -> None:
    """Print a text on rank 0."""
    if world.rank == 0:
        print(text, file=stream, flush=True)

"""The command line: mpirun -n 4 python -m trainers --data digits"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TextIO

from allreduce import Topology
from allreduce.arrays import gpu
from allreduce.elastic import standby
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
from allreduce.transport import processes, ulfm
from allreduce.transport.control import everywhere, known, raise_together, root_value, together
from allreduce.transport.wait import waiting
from trainers import datasets
from trainers.cli import options, results, roles
from trainers.cli import options as watching
from trainers.cli.evaluator import Ending, Evaluator
from trainers.errors import ArgumentError, DivergedError, TrainerError
from trainers.recovery.terminating import Terminated, Terminating
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.state.checkpoints import Checkpoint
from trainers.trainer import Trainer
from trainers.watching.history import History

log = logging.getLogger("trainers")


class Start(NamedTuple):
    """What all ranks know before they divide."""

    chosen: argparse.Namespace
    roles: roles.Roles
    data: datasets.Dataset


class Trained(NamedTuple):
    """The ranks that train, and this one's network."""

    topology: Topology
    network: NumpyNetwork


def begin(arguments: Sequence[str] | None, world: Topology) -> tuple[Start, Trained | None] | None:
    """What comes before the training. Collective.

    None when a rank was lost meanwhile, and those that are left are to begin again: --on-failure continue.
    """
    begun, error, lost = None, None, None
    try:
        start = _prepare(arguments, world)
        begun = start, None if start.chosen.spares else trained(start, world)  # spare ranks wait in that
    except Exception as met:
        error, lost = met, ulfm.lost(met)
        if lost is not None:
            world.revoke()
        elif world.size > 1 and not everywhere(met, world.world):
            raise
    if world.finished(lost is None):
        if error is not None:
            raise error
        return begun
    if begun is not None and begun[1] is not None:
        begun[1].topology.abandon()
    if not _goes_on(arguments):
        raise lost or RankLostError("a rank was lost before the training")
    if world.rank == 0:
        log.warning("trainers: a rank was lost before the training; the others begin it")
    return None


def _goes_on(arguments: Sequence[str] | None) -> bool:
    """Whether the others are to go on, as far as the arguments can be read."""
    try:
        return options.parse(arguments, shown=False).on_failure == "continue"
    except (Exception, SystemExit):
        return False


def _prepare(arguments: Sequence[str] | None, world: Topology) -> Start:
    chosen = together(world.world, lambda: options.parse(arguments, shown=world.rank == 0))
    assigned = roles.assign(world, options.servers(chosen), chosen.evaluator, chief=chosen.chief)
    if chosen.strategy in options.with_option("servers"):
        chosen.servers = len(assigned.servers)
    together(world.world, lambda: check(chosen, assigned))
    together(world.world, lambda: results.check_targets(chosen) if world.rank == assigned.chief else None)
    return Start(chosen, assigned, together(world.world, lambda: datasets.load(chosen.data)))


def trained(start: Start, world: Topology) -> Trained | None:
    """Collective; None on a spare rank that was not needed."""
    chosen, assigned, data = start
    topology = _training(chosen, assigned, world)
    if topology is None:
        return None
    network = together((topology if chosen.spares else world).world, lambda: _network(chosen, data, topology))
    return Trained(topology, network)


def _training(chosen: argparse.Namespace, assigned: roles.Roles, world: Topology) -> Topology | None:
    """The ranks that train; spare ones wait here until they do, and None is for those that were not needed."""
    if chosen.spares:
        return standby.man(world, chosen.spares)
    return roles.training(world, assigned, chosen.ranks_per_node)


def _network(chosen: argparse.Namespace, data: datasets.Dataset, topology: Topology) -> NumpyNetwork:
    if chosen.device == "cuda":
        gpu.choose_device(topology.node_rank)
    if chosen.load:
        network = NumpyNetwork.load(chosen.load, chosen.device)
        if "accuracy" not in network.metrics:
            loss = network.config()["loss"]
            raise ArgumentError(f"--load {chosen.load}: its loss is {loss}; this trains and tests classifiers only")
        return network
    network = NumpyNetwork(
        [data.features, *chosen.hidden, len(data.classes)],
        activation=chosen.activation,
        optimizer=chosen.optimizer,
        lr=chosen.lr,
        seed=chosen.seed,
        device=chosen.device,
    )
    network.scale_input(data.shift, data.scale)
    return network


def check(chosen: argparse.Namespace, assigned: roles.Roles) -> None:
    """Find out before the training what the options ask of ranks that are not there. Raises ArgumentError."""
    given, ranks = chosen.ranks_per_node, len(assigned.training)
    if isinstance(given, int) and given > ranks:
        raise ArgumentError(
            f"--ranks-per-node {given}: this job has {ranks} rank{'s' * (ranks != 1)}, so no node has {given}; give at "
            f"most {ranks}, or start more ranks (mpirun -n {2 * given})"
        )
    if chosen.on_failure == "continue" and (assigned.evaluator is not None or assigned.chief):
        raise ArgumentError("--on-failure continue: not with an evaluator or another --chief, whom nobody replaces")
    if chosen.spares and chosen.ranks_per_node:
        raise ArgumentError(f"--spares {chosen.spares}: not with --ranks-per-node")
    if chosen.spares and chosen.on_failure != "continue":
        raise ArgumentError(f"--spares {chosen.spares} take the places of lost ranks: add --on-failure continue")
    if assigned.evaluator is not None and not chosen.checkpoint:
        raise ArgumentError("an evaluator evaluates checkpoints: add --checkpoint DIR")
    if assigned.evaluator is None and chosen.evaluations:
        raise ArgumentError(f"--evaluations {chosen.evaluations}: nobody evaluates; add --evaluator")


ENDS: tuple[type[Exception] | type[Terminated], ...] = (Terminated, DivergedError, TrainerError)  # of a training
FAULTS = (DivergedError, RankLostError, RankLeftError, CollectiveTimeoutError, BrokenError, CommunicationError)
FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130  # exit codes; who starts again a job that has failed does so after 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on all ranks; returns the exit code, the same on each."""
    try:
        world = Topology.of_survivors()
    except LauncherError as error:  # no other rank is known
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_ARGUMENTS
    code = 0
    try:
        with Terminating() as sigterm:  # also of ranks that don't train, and while data is loaded
            while (begun := begin(arguments, world)) is None:
                world = world.survivors()
            _run(*begun, world)
            sigterm.heard = True  # too late: all is done
    except (AllReduceError, TrainerError) as error:
        if world.size > 1 and not everywhere(error, world.world):
            raise  # the other ranks don't know: the hook of Topology shows the traceback and ends the job
        own = processes.world_ranks(world.world)
        if processes.here()[0] == min(getattr(error, "ranks", None) or own) == own[0]:  # not one that has joined others
            _say(world, f"error: {error}", sys.stderr)
            abort.write_down(str(error))
        code = FAILED if isinstance(error, FAULTS) else BAD_ARGUMENTS
        with waiting(world.world, "end together, after an error"):
            world.world.Barrier()  # the first rank to leave with a code ends the job, so let rank 0 print
    except KeyboardInterrupt:
        if world.size > 1:
            raise
        _say(world, "interrupted", sys.stderr)
        code = INTERRUPTED
    return code


def _run(start: Start, ready: Trained | None, world: Topology) -> None:
    chosen, assigned, data = start
    ready = ready or trained(start, world)
    if ready is None:
        return
    topology, network = ready
    shown = sys.stderr if chosen.json == results.STANDARD_OUTPUT else sys.stdout  # what a program reads is alone there
    job = _Job(chosen, assigned, data, network, shown)
    if assigned.evaluator is None:
        _train(job, topology)
    else:
        _train_and_evaluate(job, world, topology)


class _Job(NamedTuple):
    """What a rank needs for its part."""

    chosen: argparse.Namespace
    roles: roles.Roles
    data: datasets.Dataset
    network: NumpyNetwork
    shown: TextIO


def _train(job: _Job, topology: Topology) -> None:
    """The part of the ranks that train. Collective over them."""
    chosen, data, network, shown = job.chosen, job.data, job.network, job.shown
    make = options.STRATEGIES[chosen.strategy].make
    with make(chosen, network, topology, len(job.roles.servers)) as trainer:
        if not isinstance(topology, standby.JoiningRank):  # the others have said so
            _introduce(job, trainer, topology)
        history = trainer.fit(
            data.x_train,
            data.y_train,
            chosen.epochs,
            chosen.batch_size,
            seed=chosen.seed,
            callbacks=watching.callbacks(chosen),
            stream=shown,
            checkpoint=_checkpoint(chosen),
            resume=chosen.resume,
        )
        scores = trainer.evaluate(data.x_test, data.y_test)
        _check_loss(scores["loss"], trainer.topology)
        if chosen.save:
            trainer.save(chosen.save)
            _say(trainer.topology, f"saved: {chosen.save}", shown)
        if chosen.json:
            trainer.surviving(lambda: _write_results(job, trainer, history, scores))
        _say(trainer.topology, f"test accuracy: {scores['accuracy']:.4f}", shown)
    if chosen.spares:
        trainer.topology.close()  # lets those go that wait


def _checkpoint(chosen: argparse.Namespace) -> Checkpoint | None:
    if not chosen.checkpoint:
        return None
    return Checkpoint(chosen.checkpoint, chosen.checkpoint_every or "epoch", same_data=not chosen.other_data)


def _introduce(job: _Job, trainer: Trainer[Any], topology: Topology) -> None:
    """Say who trains what, and how. Collective."""
    chosen, network, shown = job.chosen, job.network, job.shown
    _say(topology, f"{topology}, on {network.device}", shown)
    if chosen.spares:
        _say(topology, f"spare ranks: {chosen.spares}, which wait", shown)
    if job.roles.servers or job.roles.evaluator is not None:
        _say(topology, f"roles: {job.roles}", shown)
    _say(topology, results.how(trainer, chosen), shown)
    if ulfm.in_force() or chosen.on_failure:
        _say(topology, f"if a rank is lost: {trainer.recovery}", shown)
    _say(topology, f"data: {job.data}", shown)
    _say(topology, f"rows of each class: {job.data.classes_in_words()}", shown)
    for warning in job.data.warnings() if topology.rank == 0 else ():
        log.warning("trainers: %s", warning)
    layers = "-".join(map(str, network.sizes))
    _say(topology, f"model: {layers}, {network.gradient_length:,} parameters; {_optimizer(network)}", shown)


def _write_results(job: _Job, trainer: Trainer[Any], history: History, scores: dict[str, float]) -> None:
    """Collective over those who train."""
    result = results.result(job.chosen, trainer, job.roles, job.network, history, scores)
    written = partial(results.write_json, job.chosen.json, result)
    together(trainer.topology.world, lambda: written() if trainer.rank == 0 else None)


def _train_and_evaluate(job: _Job, world: Topology, topology: Topology) -> None:
    """The parts of all ranks, of which one evaluates. Collective; an error of either part is raised on all ranks."""
    chosen, evaluates = job.chosen, world.rank == job.roles.evaluator
    evaluator = together(world.world, lambda: _evaluator(job) if evaluates else None)
    error: Exception | Terminated | None = None
    try:
        with Ending(world.private(), job.roles.chief, job.roles.evaluator) as end:
            if evaluator is not None:
                evaluator.run(end.heard)
            else:
                _train(job, topology)
    except (Exception, Terminated) as met:
        if not (evaluates or everywhere(met, topology.world)):
            raise  # the others who train don't know
        error = met
    _end_together(job, world, error)
    if chosen.evaluations:
        _say(world, f"evaluations: {chosen.evaluations}", job.shown)


def _end_together(job: _Job, world: Topology, error: Exception | Terminated | None) -> None:
    """Raise on all ranks the error of those who train, which all of them bring, or else the evaluator's. Collective."""
    kind = next((number for number, each in enumerate(ENDS) if isinstance(error, each)), len(ENDS) - 1)
    told = None if error is None else (kind, str(error))
    failed = root_value(world.world, told, "hear how the training has ended", job.roles.chief)
    if failed is None:
        assert not isinstance(error, Terminated)
        raise_together(world.world, error)
        return
    if error is None or world.rank == job.roles.evaluator:
        kind, text = failed
        error = ENDS[kind](text)
    raise known(error, world.world)


def _evaluator(job: _Job) -> Evaluator:
    chosen, data = job.chosen, job.data
    return Evaluator(
        job.network,
        chosen.checkpoint,
        data.x_test,
        data.y_test,
        output=chosen.evaluations,
        append=chosen.resume,
        stream=job.shown,
    )


def _optimizer(network: NumpyNetwork) -> str:
    return f"{network.config()['optimizer']}, learning rate {network.optimizer.lr:g}"


def _check_loss(loss: float, world: Topology) -> None:
    """The last step's update may be the one that ruins the model, which no later step measures."""
    if not math.isfinite(loss):
        error = DivergedError(f"the loss of the test data is {loss}: lower the learning rate, or scale the features")
        raise known(error, world.world)  # the ranks have measured it together


def _say(world: Topology, text: str, stream: Any = None) -> None:
    if world.rank == 0:
        print(text, file=stream or sys.stdout, flush=True)

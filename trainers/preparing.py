"""What comes before the training of the command line: the ranks' roles, the data, the networks."""

import argparse
import logging
from collections.abc import Sequence
from typing import NamedTuple

from allreduce import Topology, spares
from allreduce.arrays import gpu
from allreduce.errors import RankLostError
from allreduce.messages import losses
from allreduce.messages.agreement import everywhere, together
from trainers import datasets, options, results, roles, strategies
from trainers.errors import ArgumentError
from trainers.replicas.numpy.network import NumpyNetwork

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
        error, lost = met, losses.lost(met)
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
    assigned = roles.assign(world, strategies.servers(chosen), chosen.evaluator, chief=chosen.chief)
    if chosen.strategy in strategies.with_option("servers"):
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
        return spares.man(world, chosen.spares)
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

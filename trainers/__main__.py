"""The command line: mpirun -n 4 python -m trainers --data digits"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from allreduce import Topology
from allreduce.arrays import gpu
from allreduce.errors import AllReduceError
from allreduce.messages.agreement import everywhere, known, together
from trainers import datasets, options, results, strategies
from trainers.errors import ArgumentError, DivergedError, TrainerError
from trainers.replicas.numpy.network import NumpyNetwork

FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on all ranks; returns the exit code, the same on each."""
    world = Topology()
    code = 0
    try:
        chosen = together(world.world, lambda: options.parse(arguments, shown=world.rank == 0))
        _run(chosen, world)
    except (AllReduceError, TrainerError) as error:
        if world.size > 1 and not everywhere(error, world.world):
            raise  # the other ranks don't know: the hook of Topology shows the traceback and ends the job
        _say(world, f"error: {error}", sys.stderr)
        code = FAILED if isinstance(error, DivergedError) else BAD_ARGUMENTS
        world.world.Barrier()  # the first rank to leave with a code ends the job, so let rank 0 print
    except KeyboardInterrupt:
        if world.size > 1:
            raise
        _say(world, "interrupted", sys.stderr)
        code = INTERRUPTED
    return code


def _run(chosen: argparse.Namespace, world: Topology) -> None:
    shown = (
        sys.stderr if chosen.json == results.STANDARD_OUTPUT else sys.stdout
    )  # what is read by a program is alone there
    together(world.world, lambda: _check_nodes(chosen, world.size))
    together(world.world, lambda: results.check_targets(chosen) if world.rank == 0 else None)  # it writes alone
    data = together(world.world, lambda: datasets.load(chosen.data))
    topology = Topology(world.world, chosen.ranks_per_node)
    network = together(world.world, lambda: _network(chosen, data, topology))
    with strategies.STRATEGIES[chosen.strategy].make(chosen, network, topology, chosen.servers or 0) as trainer:
        _say(world, f"{topology}, on {network.device}", shown)
        _say(world, results.how(trainer, chosen), shown)
        _say(world, f"data: {data}", shown)
        layers = "-".join(map(str, network.sizes))
        _say(world, f"model: {layers}, {network.gradient_length:,} parameters; {_optimizer(network)}", shown)
        history = trainer.fit(
            data.x_train, data.y_train, chosen.epochs, chosen.batch_size, seed=chosen.seed, stream=shown
        )
        scores = trainer.evaluate(data.x_test, data.y_test)
        _check_loss(scores["loss"], world)
        if chosen.save:
            trainer.save(chosen.save)
            _say(world, f"saved: {chosen.save}", shown)
        if chosen.json:
            result = results.result(chosen, trainer, network, history, scores)
            together(world.world, lambda: results.write_json(chosen.json, result) if world.rank == 0 else None)
        _say(world, f"test accuracy: {scores['accuracy']:.4f}", shown)


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


def _optimizer(network: NumpyNetwork) -> str:
    return f"{network.config()['optimizer']}, learning rate {network.optimizer.lr:g}"


def _check_nodes(chosen: argparse.Namespace, ranks: int) -> None:
    given = chosen.ranks_per_node
    if isinstance(given, int) and given > ranks:
        raise ArgumentError(
            f"--ranks-per-node {given}: this job has {ranks} rank{'s' * (ranks != 1)}, so no node has {given}; give at "
            f"most {ranks}, or start more ranks (mpirun -n {2 * given})"
        )


def _check_loss(loss: float, world: Topology) -> None:
    """The last step's update may be the one that ruins the model, which no later step measures."""
    if not math.isfinite(loss):
        error = DivergedError(f"the loss of the test data is {loss}: lower the learning rate, or scale the features")
        raise known(error, world.world)  # the ranks have measured it together


def _say(world: Topology, text: str, stream: Any = None) -> None:
    if world.rank == 0:
        print(text, file=stream or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: mpirun -n 4 python -m trainers --data digits"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from allreduce import Topology
from allreduce.arrays import gpu
from allreduce.backends.auto import Auto
from allreduce.errors import AllReduceError
from allreduce.messages.agreement import everywhere, known, together
from trainers import datasets, options
from trainers.errors import ArgumentError, DivergedError, TrainerError
from trainers.files.model_file import is_special, replacing
from trainers.mirrored import MirroredTrainer
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.watching.history import History

STANDARD_OUTPUT = "-"
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
    shown = sys.stderr if chosen.json == STANDARD_OUTPUT else sys.stdout  # what is read by a program is alone there
    together(world.world, lambda: _check_nodes(chosen, world.size))
    together(world.world, lambda: _check_targets(chosen) if world.rank == 0 else None)  # it writes alone
    data = together(world.world, lambda: datasets.load(chosen.data))
    topology = Topology(world.world, chosen.ranks_per_node)
    network = together(world.world, lambda: _network(chosen, data, topology))
    with MirroredTrainer(network, chosen.allreduce, topology, update=chosen.update) as trainer:
        backend, why = _backend(trainer, chosen)
        _say(world, f"{topology}, on {network.device}", shown)
        _say(world, f"allreduce: {backend} ({why})", shown)
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
            result = _result(chosen, trainer, network, history, scores, backend)
            together(world.world, lambda: _write_json(chosen.json, result, world.rank))
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


def _backend(trainer: MirroredTrainer, chosen: argparse.Namespace) -> tuple[str, str]:
    """The backend that reduces the gradients, and why this one."""
    if isinstance(trainer.allreduce, Auto):
        name, why = trainer.allreduce.choice(len(trainer.buffer), trainer.buffer.dtype, trainer.replica.device)
        return name, f"chosen by auto: {why}"
    why = "as asked for" if chosen.allreduce == trainer.allreduce.name else "chosen for the sharded update"
    return trainer.allreduce.name, why


def _optimizer(network: NumpyNetwork) -> str:
    return f"{network.config()['optimizer']}, learning rate {network.optimizer.lr:g}"


def _result(
    chosen: argparse.Namespace,
    trainer: MirroredTrainer,
    network: NumpyNetwork,
    history: History,
    scores: dict[str, float],
    backend: str,
) -> dict[str, Any]:
    """What --json writes. Collective."""
    return {
        "data": chosen.data,
        "test_accuracy": scores["accuracy"],
        "test_loss": scores["loss"],
        "history": [epoch.as_dict() for epoch in history],
        "allreduce": chosen.allreduce,
        "allreduce_used": backend,
        "update": chosen.update,
        "ranks": trainer.size,
        "nodes": trainer.topology.nodes,
        "device": network.device,
        "epochs": chosen.epochs,
        "batch_size": chosen.batch_size,
        "seed": chosen.seed,
        "model": network.config(),
        "parameters": network.gradient_length,
        "parameters_sha256": trainer.parameters_sha256(),
    }


def _check_nodes(chosen: argparse.Namespace, ranks: int) -> None:
    given = chosen.ranks_per_node
    if isinstance(given, int) and given > ranks:
        raise ArgumentError(
            f"--ranks-per-node {given}: this job has {ranks} rank{'s' * (ranks != 1)}, so no node has {given}; give at "
            f"most {ranks}, or start more ranks (mpirun -n {2 * given})"
        )


def _check_targets(chosen: argparse.Namespace) -> None:
    """Find out before the training whether its results can be written."""
    for option in ("save", "json"):
        path = getattr(chosen, option)
        if not path or (option, path) == ("json", STANDARD_OUTPUT):
            continue
        if path == STANDARD_OUTPUT:
            raise ArgumentError(f"--{option} -: a model is no text for the standard output; name a file")
        written = path if is_special(path) else os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path) or not os.access(written, os.W_OK):
            raise ArgumentError(f"--{option} {path}: this can't be written; give a file in a folder that exists")


def _check_loss(loss: float, world: Topology) -> None:
    """The last step's update may be the one that ruins the model, which no later step measures."""
    if not math.isfinite(loss):
        error = DivergedError(f"the loss of the test data is {loss}: lower the learning rate, or scale the features")
        raise known(error, world.world)  # the ranks have measured it together


def _write_json(path: str, result: dict[str, Any], rank: int) -> None:
    if rank:
        return
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    try:
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ArgumentError(f"--json {path}: {error.strerror or error}") from error


def _say(world: Topology, text: str, stream: Any = None) -> None:
    if world.rank == 0:
        print(text, file=stream or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""What the command line writes about a training: where it goes, and what is in it."""

import argparse
import json
import math
import sys
from typing import Any

from allreduce.backends.auto import Auto
from allreduce.files import writable
from trainers.cli import options
from trainers.cli.options import flag
from trainers.cli.roles import Roles
from trainers.errors import ArgumentError
from trainers.files.model_file import replacing
from trainers.mirrored import MirroredTrainer
from trainers.replicas.numpy.network import NumpyNetwork
from trainers.trainer import Trainer
from trainers.watching.history import History

STANDARD_OUTPUT = "-"
WRITTEN = ("save", "json", "evaluations", "trace", "csv")  # options that name a file


def check_targets(chosen: argparse.Namespace) -> None:
    """Find out before the training whether its results can be written. Raises ArgumentError."""
    for option in WRITTEN:
        path = getattr(chosen, option)
        if not path or (option, path) == ("json", STANDARD_OUTPUT):
            continue
        if path == STANDARD_OUTPUT:
            raise ArgumentError(f"{flag(option)} -: a model is no text for the standard output; name a file")
        if not writable(path):
            raise ArgumentError(f"{flag(option)} {path}: this can't be written; give a file in a folder that exists")


def how(trainer: Trainer, chosen: argparse.Namespace) -> str:
    """How the ranks work together, in a line."""
    if isinstance(trainer, MirroredTrainer) and chosen.strategy == "mirrored":
        name, why = _backend(trainer, chosen)
        return f"allreduce: {name} ({why})"
    described = {name: value for name, value in options.described(chosen).items() if name != "strategy"}
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in described.items() if value is not None)
    return f"strategy: {chosen.strategy} ({shown})"


def _backend(trainer: MirroredTrainer, chosen: argparse.Namespace) -> tuple[str, str]:
    """The backend that reduces the gradients, and why this one."""
    if isinstance(trainer.allreduce, Auto):
        name, why = trainer.allreduce.choice(len(trainer.buffer), trainer.buffer.dtype, trainer.replica.device)
        return name, f"chosen by auto: {why}"
    why = "as asked for" if chosen.allreduce == trainer.allreduce.name else "chosen for the sharded update"
    return trainer.allreduce.name, why


def result(
    chosen: argparse.Namespace,
    trainer: Trainer,
    assigned: Roles,
    network: NumpyNetwork,
    history: History,
    scores: dict[str, float],
) -> dict[str, Any]:
    """What --json writes. Collective over the ranks that train."""
    used = {}
    if isinstance(trainer, MirroredTrainer) and chosen.strategy == "mirrored":
        used = {"allreduce_used": _backend(trainer, chosen)[0]}
    return {
        "data": chosen.data,
        "test_accuracy": scores["accuracy"],
        "test_loss": scores["loss"],
        "history": [epoch.as_dict() for epoch in history],
        **options.described(chosen),
        **used,
        "roles": assigned.as_dict(),
        "ranks": trainer.size,
        "nodes": trainer.topology.nodes,
        "device": network.device,
        "epochs": chosen.epochs,
        "batch_size": chosen.batch_size,
        "seed": chosen.seed,
        "model": network.config(),
        "parameters": network.gradient_length,
        "parameters_sha256": trainer.parameters_sha256(),
        **({"lost": [loss._asdict() for loss in trainer.losses]} if trainer.losses else {}),
    }


def without_nan(value: Any) -> Any:
    """What JSON can hold: None in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str, written: dict[str, Any]) -> None:
    """Write what a program reads to a file, or to the standard output; null for NaN. Raises ArgumentError."""
    text = json.dumps(without_nan(written), indent=2, allow_nan=False) + "\n"
    try:
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ArgumentError(f"--json {path}: {error.strerror or error}") from error

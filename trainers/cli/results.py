"""Collects and writes the results of the command line's training (--json)."""

import argparse
import json
import math
import sys
from typing import Any

from allreduce.files import writable
from trainers.cli import options as declared
from trainers.errors import ArgumentError, as_error
from trainers.files.model_file import replacing
from trainers.mirrored import MirroredTrainer
from trainers.strategies.transforms.chosen import TRANSFORMS
from trainers.trainer import Trainer
from trainers.watching.history import History

STANDARD_OUTPUT = "-"


def check_targets(options: argparse.Namespace) -> None:
    """Raise ArgumentError if a file that an option names can't be written. Call before the training."""
    for option in declared.BY_NAME.values():
        path = getattr(options, option.name)
        if not option.writes or not path or (option.name, path) == ("json", STANDARD_OUTPUT):
            continue
        if path == STANDARD_OUTPUT:
            raise ArgumentError(f"{option.flag} -: only --json can go to the standard output; name a file")
        if not writable(path):
            raise ArgumentError(f"{option.flag} {path}: this can't be written; give a file in a folder that exists")


def strategy_line(trainer: Trainer, options: argparse.Namespace) -> str:
    """Return one line that names the backend, or the strategy and its options."""
    if isinstance(trainer, MirroredTrainer):
        return "allreduce: {} ({})".format(*_backend(trainer, options))
    strategy, *own = [(name.replace("_", " "), value) for name, value in declared.strategy_options(options).items()]
    shown = ", ".join(f"{name} {value}" for name, value in own if value is not None)
    return f"strategy: {strategy[1]} ({shown})"


def _backend(trainer: MirroredTrainer, options: argparse.Namespace) -> tuple[str, str]:
    """Return the name of the backend that reduces the gradients, and why it was selected."""
    assert trainer.allreduce is not None
    name, why = (trainer.allreduce.chosen(trainer.buffer, reason=reason) for reason in (False, True))
    return name, f"selected by auto: {why}" if why else "as given"


# options of which most jobs give none
STEP = ("class_weight", *(flag.name for kind in TRANSFORMS for flag, *_ in declared.flags_of(kind).values()))


def result(options: argparse.Namespace, trainer: Trainer, history: History, scores: dict[str, float]) -> dict[str, Any]:
    """Return the results that --json writes. Collective over the ranks that train."""
    backend = {"allreduce_used": _backend(trainer, options)[0]} if isinstance(trainer, MirroredTrainer) else {}
    return {
        "data": options.data,
        "test_accuracy": scores["accuracy"],
        "test_loss": scores["loss"],
        "history": [epoch.as_dict() for epoch in history],
        **declared.strategy_options(options),
        **{name: value for name in STEP if (value := getattr(options, name)) != declared.BY_NAME[name].default},
        **backend,
        "ranks": trainer.size,
        "nodes": trainer.topology.nodes,
        "device": trainer.replica.device,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "model": dict(trainer.replica.config),
        "parameters": trainer.replica.gradient_length,
        "parameters_sha256": trainer.parameters_sha256(),
        **({"lost": [each._asdict() for each in trainer.failures]} if trainer.failures else {}),
    }


def without_nan(value: Any) -> Any:
    """Return a copy of `value` in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str, written: dict[str, Any]) -> None:
    """Write results to a file, or to the standard output; null for NaN. Raises ArgumentError."""
    text = json.dumps(without_nan(written), indent=2, allow_nan=False) + "\n"
    with as_error(ArgumentError, f"--json {path}"):
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        with replacing(path) as file:
            file.write(text.encode())

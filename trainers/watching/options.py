"""The command line's options for who wants to see the training, and the callbacks that they mean."""

import argparse
from typing import Any

from trainers import divergence, finite
from trainers.errors import ArgumentError
from trainers.parsing import integer


def add_options(group: Any) -> None:
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
        "--on-divergence", choices=divergence.ANSWERS,
        help="with --check-divergence: stop with an error, or copy those that most ranks have (default: raise)",
    )  # fmt: skip
    add(
        "--check-gradients", choices=finite.ANSWERS,
        help="see in every step that no rank brings NaN or infinite gradients, and say which one: stop with an error, "
        "or leave the step out",
    )  # fmt: skip


def settle(chosen: argparse.Namespace) -> None:
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

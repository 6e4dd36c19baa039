"""The command line's options for who wants to see the training, and the callbacks that they mean."""

import argparse
from typing import Any

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


def callbacks(chosen: argparse.Namespace) -> list[Any]:
    """The same on all ranks."""
    from trainers.callbacks import CSVLogger, EarlyStopping, TensorBoard, Timeline

    made: list[Any] = []
    if chosen.trace:
        made.append(Timeline(chosen.trace))
    if chosen.tensorboard:
        made.append(TensorBoard(chosen.tensorboard))
    if chosen.csv:
        made.append(CSVLogger(chosen.csv, append=chosen.resume))
    if chosen.early_stopping:
        made.append(EarlyStopping("loss", patience=chosen.early_stopping))
    return made

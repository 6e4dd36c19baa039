"""Exact training: the SHA-256 of the parameters for each number of ranks, backend, kind of nodes, and update; and the
milliseconds of a step."""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import allreduce
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks, root_value
from benchmarks.lib import timing
from benchmarks.lib.columns import columns
from benchmarks.lib.outputs import Screen
from trainers import Exact, MirroredTrainer, NumpyNetwork, datasets
from trainers.datasets.dataset import Dataset

NODES = ("flat", "nodes")
UPDATES = ("replicated", "sharded")
LAYERS = (64, 32)  # hidden ones
BATCH, MICRO_BATCH = 100, 8  # rows; neither divides the other, nor the rows of the digits
SHOWN = 8  # digits of a SHA-256 in the table
FEATURES, CLASSES = 784, 10  # of the network whose steps are timed
PLAIN = "not exact"
TIMED = 2  # steps of a turn, after a first one


@dataclass(frozen=True)
class Cell:
    """A training. nodes: "flat", or "nodes": of two ranks each, the last perhaps of one (two ranks: nodes of one).
    sha256: of the parameters; several values, joined by "|", if its ranks differ; None if the backend can't be used:
    `unavailable` says why ("shared" on several nodes). seconds: of the fit."""

    ranks: int
    backend: str
    nodes: str
    update: str
    sha256: str | None = None
    seconds: float | None = None
    unavailable: str | None = None


def cells(most: int, backends: list[str]) -> list[Cell]:
    """Return all cells for 1 to `most` ranks, not trained yet."""
    return [
        Cell(ranks, backend, nodes, update)
        for ranks in range(1, most + 1)
        for backend in backends
        for nodes in NODES
        for update in UPDATES
    ]


def run(topology: Topology, args: argparse.Namespace, screen: Screen, write: Callable[[dict[str, Any]], None]) -> bool:
    """Train all cells, print the table, and return whether all have the same bits. Collective."""
    usable = allreduce.available(topology)
    backends = args.methods or list(usable)
    if unknown := [name for name in backends if name not in usable]:
        text = f"--methods {unknown[0]}: of the backends, use some of {', '.join(usable)}"
        raise on_all_ranks(OptionError(text), topology.world)
    data = datasets.load("digits")
    screen.say(f"# exact training on {data.name}, {args.epochs} epochs, batches of {BATCH}, {topology}")
    found: list[Cell] = []
    planned = cells(topology.size, backends)
    with screen.bar(len(planned), "training") as bar:
        for cell in planned:
            found.append(_trained(topology, cell, args.epochs, data))
            bar.update()
    common, different = compare(found)
    screen.say(*table(found, topology.size))
    screen.say(verdict(found, common, different))
    write({"epochs": args.epochs, "cells": [asdict(cell) for cell in found], "equal": not different, "sha256": common})
    return not different


def _trained(topology: Topology, cell: Cell, epochs: int, data: Dataset) -> Cell:
    """Return the cell with its results, on all ranks: the first `cell.ranks` ranks train. Collective."""
    mine = topology.rank < cell.ranks
    per_node = None if cell.nodes == "flat" or not mine else min(2, max(1, cell.ranks - 1))
    with topology.split(0 if mine else 1, per_node) as part:
        result = _fit(part, cell, epochs, data) if mine else {}
    return Cell(**{**asdict(cell), **root_value(topology.world, result, "tell the result of a training")})


def _fit(part: Topology, cell: Cell, epochs: int, data: Dataset) -> dict[str, Any]:
    network = NumpyNetwork([data.features, *LAYERS, len(data.classes)], optimizer="adam", seed=1)
    network.scale_input(data.shift, data.scale)
    options: dict[str, Any] = {"update": cell.update, "average": Exact(micro_batch=MICRO_BATCH)}
    try:
        with MirroredTrainer(network, cell.backend, part, **options) as trainer:
            begin = time.perf_counter()
            trainer.fit(data.x_train, data.y_train, epochs=epochs, batch_size=BATCH, progress=False)
            seconds = time.perf_counter() - begin
            return {"sha256": "|".join(sorted(set(trainer.parameters_sha256()))), "seconds": seconds}
    except UnavailableError as error:
        return {"unavailable": str(error)}


def compare(found: list[Cell]) -> tuple[str | None, list[Cell]]:
    """Return the SHA-256 of most trainings, and the cells with another one."""
    trained = [cell for cell in found if cell.sha256 is not None]
    values = Counter(cell.sha256 for cell in trained)
    common = values.most_common(1)[0][0] if values else None
    return common, [cell for cell in trained if cell.sha256 != common]


def verdict(found: list[Cell], common: str | None, different: list[Cell]) -> str:
    """Return the line that says whether all cells are equal."""
    trained = sum(cell.sha256 is not None for cell in found)
    if not different:
        return f"all {trained} cells equal: {common}"
    first = different[0]
    where = f"{first.backend}, {first.nodes}, {first.update}, on {first.ranks} ranks"
    return f"{len(different)} of {trained} cells differ from {common}; the first one is {where}: {first.sha256}"


def table(found: list[Cell], most: int) -> list[str]:
    """Return a line for each backend, nodes and update, with the beginning of the SHA-256 on 1 to `most` ranks."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for cell in found:
        shown = "-" if cell.sha256 is None else "differ" if "|" in cell.sha256 else cell.sha256[:SHOWN]
        rows.setdefault((cell.backend, cell.nodes, cell.update), []).append(shown)
    heads = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in range(1, most + 1)]
    return columns(["backend", "", "update", *heads], [[*key, *row] for key, row in rows.items()], left=(0, 1, 2))


def run_steps(
    topology: Topology, args: argparse.Namespace, screen: Screen, write: Callable[[dict[str, Any]], None]
) -> None:
    """Time the steps of trainings that are exact, with each micro-batch, and not. They take turns. Collective."""
    options: dict[str, dict[str, Any]] = {PLAIN: {}}
    options |= {f"micro_batch={rows}": {"average": Exact(micro_batch=rows)} for rows in args.micro_batches}
    random = np.random.default_rng(0)
    sizes = [FEATURES, *args.layers, CLASSES]
    x = random.standard_normal(((1 + TIMED) * args.batch, FEATURES), np.float32)
    y = random.integers(0, CLASSES, len(x))
    clock, times = timing.Clock(), np.zeros((len(options), args.iters + 1, TIMED))
    with ExitStack() as stack, screen.bar(args.iters + 1, "turn") as bar:
        trainers = [
            stack.enter_context(
                MirroredTrainer(NumpyNetwork(sizes, optimizer="sgd", seed=1), args.backend, topology, **each)
            )
            for each in options.values()
        ]
        for turn in range(args.iters + 1):
            for row, trainer in enumerate(trainers):
                trainer.fit(x, y, epochs=1, batch_size=args.batch, progress=False, callbacks=[clock])
                times[row, turn] = np.diff(clock.begins)
            bar.update()
    measured = timing.slowest(topology.world, times[:, 1:]).reshape(len(options), -1).tolist()
    found = dict(zip(options, measured, strict=True))
    shown = "-".join(map(str, sizes))
    screen.say(f"# a training step of {shown} with a batch of {args.batch}, {topology}", timing.table(found, PLAIN))
    write({"batch": args.batch, "sizes": sizes, "seconds": found})

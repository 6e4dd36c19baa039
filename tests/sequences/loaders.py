"""Random fits with loaders, each checked against one process that trains on the rows of all ranks."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import allreduce
from tests.sequences.cases import KINDS, Fits, trainer_of
from tests.sequences.models import FEATURES, numpy_network
from trainers import Loader
from trainers.callbacks import Callback
from trainers.errors import DataError
from trainers.fit.checkpointing import Checkpoint

Pair = tuple[np.ndarray, np.ndarray]
SOURCES = ("list", "stream", "iterator", "triples")


class Stream:
    """A loader without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class StopAt(Callback):
    """Stops a fit after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        self.trainer.stop_training |= self.left <= 0


@dataclass
class Case:
    """A fit. parts: the batches of each part, some without rows. source: the loader's kind. limit: the Loader's steps.
    stop: the steps after which the fit is stopped, and resumed by another trainer; 0 for never."""

    kind: str
    servers: int
    rows: str
    source: str
    optimizer: str
    parts: list[list[Pair]]
    epochs: int
    limit: int | None
    prefetch: bool
    stop: int

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "parts"}
        return f"{shown}, rows of the batches: {[[len(x) for x, _ in part] for part in self.parts]}"

    def read(self) -> list[list[list[Pair]]]:
        """Return for each part the batches with rows that it gives in each epoch."""
        found = []
        for part in self.parts:
            with_rows = [batch for batch in part if len(batch[0])]
            once, whole = self.source == "iterator", [with_rows] * self.epochs
            if self.limit is None:
                found.append([with_rows, *[[]] * (self.epochs - 1)] if once else whole)
                continue
            endless = iter(with_rows) if once else itertools.cycle(with_rows)
            found.append([list(itertools.islice(endless, self.limit)) for _ in range(self.epochs)])
        return found

    def batches(self) -> list[list[Pair]]:
        """Return the global batches of each epoch; those of the epochs after one without batches are left out."""
        found = []
        for own in zip(*self.read(), strict=True):
            steps = [[part[step] for part in own if step < len(part)] for step in range(max(map(len, own)))]
            if not steps:
                break
            found.append(
                [(np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step])) for step in steps]
            )
        return found

    def loader(self, part: int | None) -> Any:
        """Return the loader of the rank that has this part."""
        if part is None:
            return None
        batches: list[Any] = self.parts[part if self.rows == "divided" else 0]
        if self.source == "triples":
            batches = [(x, y, np.ones(len(x))) for x, y in batches]
        if self.source == "iterator":
            return iter(batches)
        return Stream(batches) if self.source == "stream" else batches

    def trainer(self, topology: allreduce.Topology) -> Any:
        servers = {"servers": self.servers} if self.servers else {}
        return trainer_of(self.kind, numpy_network(self.optimizer, 1), topology, **servers)


def draw_case(draw: random.Random, ranks: int) -> Case:
    """Draw a case."""
    kind = draw.choice(KINDS[: len(KINDS) - (ranks == 1)])
    servers = draw.randrange(1, ranks) if kind == "servers" else 0
    rows, numbers = draw.choice(["divided", "divided", "whole"]), np.random.default_rng(draw.randrange(100))
    parts: list[list[Pair]] = []
    for _ in range(ranks - servers if rows == "divided" else 1):
        parts.append([])
        for _ in range(draw.choice([0, 1, 2, 3, 5])):
            x = numbers.normal(size=(draw.choice([0, 1, 1, 2, 3, 7]), FEATURES)).astype("float32")
            parts[-1].append((x, np.abs(x[:, :3]).argmax(1)))
    source = draw.choice(SOURCES)
    limit = draw.choice([None, None, 1, 2, 4, 7])
    stop = draw.randrange(1, 9) if draw.random() < 0.3 and source != "iterator" and kind != "spare" else 0
    optimizer, prefetch = draw.choice(["sgd", "momentum"]), draw.random() < 0.3
    epochs = 1 if source == "iterator" and draw.random() < 0.7 else draw.choice([1, 2, 3])
    return Case(kind, servers, rows, source, optimizer, parts, epochs, limit, prefetch, stop)


def alone(case: Case, epochs: list[list[Pair]]) -> tuple[np.ndarray, list[float]]:
    """Train in this process; returns the parameters, and the mean loss of each epoch."""
    replica, losses = numpy_network(case.optimizer, 1), []
    replica.bind(None, np.empty(replica.gradient_length, replica.gradient_dtype))
    for batches in epochs:
        total = 0.0
        for x, y in batches:
            total += float(replica.gradients(x, y, 1.0)[0]) * len(x)
            replica.update()
        losses.append(total / sum(len(x) for x, _ in batches))
    return replica.state()["parameters"].copy(), losses


def fit(case: Case, topology: allreduce.Topology, folder: str) -> tuple[np.ndarray, list[float], list[str]]:
    """Train on all ranks; returns the parameters, the losses and the hashes of all ranks. Collective."""
    for resume in (False, True)[: 1 + bool(case.stop)]:
        with case.trainer(topology) as trainer:
            stop = [StopAt(case.stop)] if case.stop and not resume else []
            checkpoint = Checkpoint(folder, "1 step") if case.stop else None
            history = trainer.fit(
                Loader(case.loader(trainer.strategy.part), case.rows, case.limit, prefetch=case.prefetch),
                epochs=case.epochs, callbacks=stop, checkpoint=checkpoint, resume=resume, progress=False,
            )  # fmt: skip
            hashes = trainer.parameters_sha256()
    return trainer.replica.state()["parameters"], [epoch.loss for epoch in history], hashes


def check(case: Case, topology: allreduce.Topology, folder: str) -> str:
    """Run a case; returns its outcome. Raises AssertionError. Collective."""
    epochs = case.batches()
    if len(epochs) < case.epochs:
        with pytest.raises(DataError, match=f"gives a batch in epoch {len(epochs) + 1}"):
            fit(case, topology, folder)
        return "no batches"
    parameters, losses, hashes = fit(case, topology, folder)
    expected, means = alone(case, epochs)
    assert len(set(hashes)) == 1
    np.testing.assert_allclose(parameters, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(losses, means, rtol=1e-4, atol=1e-6)
    return f"{case.kind}, {case.rows}"


LOADERS = Fits("loaders", draw_case, check)

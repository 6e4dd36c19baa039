"""Random fits on shards and on tables, each checked against one process that trains on the rows of all ranks."""

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.transport.control import together
from tests.sequences.cases import KINDS, Fits, trainer_of
from tests.sequences.fits import Rows
from trainers import EMA, Accumulate, ClipNorm, MirroredTrainer, datasets, load_shards, network_of
from trainers.errors import DataError

SOURCES = ("arrays", "tables", "table")  # shards of .npz archives, shards of tables, one table that all ranks read
WORDS = ("red", "green, dark", "blue", "Ünder", 'a "quoted" one')


@dataclass
class Case:
    """A fit. rows: of each file. labels: "words" or "numbers". columns: of tables: "number", "category" (one-hot) or
    "embedded". parts: whether archives have rows to test. by_row: a table's rows are read one by one, not as arrays.
    options: of fit."""

    source: str
    kind: str
    servers: dict[str, int]
    rows: list[int]
    labels: str
    columns: list[str]
    parts: bool
    dtype: str
    hidden: list[int]
    optimizer: str
    by_row: bool
    options: dict[str, Any]
    seed: int

    def write(self, folder: Path) -> None:
        numbers = np.random.default_rng(self.seed)
        for number, rows in enumerate(self.rows):
            if self.source == "arrays":
                self._write_arrays(folder / f"part-{number}.npz", numbers, rows)
            else:
                self._write_table(folder / f"part-{number}.csv", numbers, rows)

    def _write_arrays(self, path: Path, numbers: Any, rows: int) -> None:
        arrays = {}
        for name, count in (("train", rows), ("test", rows // 4)) if self.parts else (("", rows),):
            x = numbers.normal(100, 30, size=(count, 3)).clip(0, 255).astype(self.dtype)
            end = f"_{name}" if name else ""
            arrays |= {f"x{end}": x, f"y{end}": (x.astype(float).sum(axis=1) // 150).astype(np.int64).clip(0, 2)}
        np.savez(path, **arrays)

    def _write_table(self, path: Path, numbers: Any, rows: int) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*(f"{kind} {place}" for place, kind in enumerate(self.columns)), "label"])
            for _ in range(rows):
                cells, total = [], 0
                for place, kind in enumerate(self.columns):
                    value = int(numbers.integers(60 if kind == "embedded" else 4))
                    texts = {"number": str(value * 10**place + 0.5), "category": WORDS[value % 4]}
                    cells.append("" if numbers.random() < 0.1 else texts.get(kind, f"no. {value}"))
                    total += value
                label = (total + int(numbers.random() < 0.1)) % 3
                writer.writerow([*cells, WORDS[label] if self.labels == "words" else label])

    def load(self, folder: Path, topology: allreduce.Topology) -> Any:
        """Load the data: Shards, or a Dataset. Collective."""
        if self.source == "table":
            return datasets.load(str(folder / "part-0.csv"), "label")
        pattern = folder / ("part-*.npz" if self.source == "arrays" else "part-*.csv")
        return load_shards(str(pattern), None if self.source == "arrays" else "label", topology=topology)

    def train(self, data: Any, trainer: Any, options: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[float]]:
        """Train and evaluate; returns the state and the losses. Collective."""
        given, test = [data.train] if self.source != "table" else [data.x_train, data.y_train], []
        if self.source != "table":
            test = [data.test]
        else:
            test = [data.x_test, data.y_test]
            if self.by_row:
                given = [Rows(*given)]
        history = trainer.fit(*given, **self.options | options, progress=False)
        scores = trainer.evaluate(*test)
        assert len(set(trainer.parameters_sha256())) == 1
        return trainer.strategy.owners.snapshot({}, trainer.rank == 0), [
            *history.column("loss"),
            scores["loss"],
            scores["accuracy"],
        ]


def draw_case(draw: random.Random, ranks: int) -> Case:
    """Draw a case."""
    source = draw.choice(SOURCES)
    kinds = [kind for kind in KINDS if (kind != "servers" or ranks > 1) and kind != "spare"]
    kind, servers = draw.choice(kinds), {}
    if kind == "servers":
        servers = {"servers": draw.randrange(1, ranks)}
        servers["ranks_per_worker"] = draw.choice([1, 1, min(2, ranks - servers["servers"])])
    files = 1 if source == "table" else draw.choice([1, 2, 3, 4, 7])
    rows = [draw.choice([0, 0, 1, 3, 10, 30, 60]) for _ in range(files)]
    rows[draw.randrange(files)] = draw.choice([5, 12, 40, 90])
    columns = [draw.choice(["number", "number", "category", "embedded"]) for _ in range(draw.choice([1, 2, 3, 5]))]
    options: dict[str, Any] = {"epochs": draw.choice([1, 2]), "batch_size": draw.choice([1, 4, 7, 16, 500])}
    options["batch_size"] = max(options["batch_size"], sum(rows) // 20)  # a case is short
    options |= {"seed": draw.randrange(100), "shuffle": draw.random() < 0.8}
    steps = {Accumulate: [2, 3], ClipNorm: [0.05, 0.5], EMA: [0.5, 0.9]}
    options["transforms"] = [kind(draw.choice(values)) for kind, values in steps.items() if draw.random() < 0.3]
    by_row = source == "table" and draw.random() < 0.3
    return Case(
        source, kind, servers, rows, draw.choice(["words", "numbers"]), columns, draw.random() < 0.3,
        draw.choice(["float32", "float64", "uint8"]), draw.choice([[], [5], [6, 4]]),
        draw.choice(["sgd", "momentum", "adam"]), by_row, options, draw.randrange(1000),
    )  # fmt: skip


def check(case: Case, topology: allreduce.Topology, folder: str) -> str:
    """Run a case; returns its outcome. Raises AssertionError. Collective."""
    together(topology.world, lambda: None if topology.rank else case.write(Path(folder)))

    def network(data: Any) -> Any:
        rate = 0.005 if case.optimizer == "adam" else 0.02
        return network_of(data, case.hidden, seed=3, lr=rate, optimizer=case.optimizer, activation="tanh")

    with allreduce.Topology(MPI.COMM_SELF) as alone:
        try:
            whole = case.load(Path(folder), alone)
        except DataError as error:  # too few rows, or labels of one class
            whole, refused = None, error
        if whole is not None:
            plain: dict[str, Any] = {
                "transforms": [each for each in case.options["transforms"] if not isinstance(each, Accumulate)]
            }
            with MirroredTrainer(network(whole), "native", alone) as trainer:
                expected, scores = case.train(whole, trainer, plain)
    if whole is None:
        with pytest.raises(type(refused)) as met:
            case.load(Path(folder), topology)
        assert len(set(topology.world.allgather(str(met.value)))) == 1
        return f"{case.source}, refused"
    data = case.load(Path(folder), topology)
    assert (data.columns, tuple(data.classes)) == (whole.columns, tuple(whole.classes))
    assert np.array_equal(data.shift, whole.shift)
    assert np.array_equal(data.scale, whole.scale)
    with trainer_of(case.kind, network(data), topology, **case.servers) as trainer:
        found, losses = case.train(data, trainer, {})
    np.testing.assert_allclose(losses, scores, rtol=1e-3, atol=1e-5)
    if topology.rank == 0:
        assert found.keys() == expected.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=2e-3, atol=1e-4, err_msg=name)
    return f"{case.source}, {case.kind}"


FILES = Fits("files", draw_case, check)

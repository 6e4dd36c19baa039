"""Tables on several ranks: the training is that of one rank, and predictions of files are those of arrays."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.training.test_tables import HEADER, people, write
from trainers import MirroredTrainer, NumpyNetwork, datasets, load_network, network_of
from trainers.apps.tables import streams
from trainers.cli.main import main
from trainers.errors import ArgumentError, DataError

JOBS = "openmpi 1 2"
SIZES: dict[str, Any] = {"epochs": 2, "batch_size": 32, "progress": False}


def network(data: Any) -> NumpyNetwork:
    return network_of(data, (6,), seed=3, lr=0.02)


@pytest.fixture
def table(folder: Path, world: MPI.Intracomm) -> str:
    """A table of 200 rows with an embedded category, missing values and a quoted cell."""
    if world.rank == 0:
        folder.mkdir()
        write(folder / "people.csv", people(200))
    world.Barrier()
    return str(folder / "people.csv")


def rows_of(path: str) -> list[list[str]]:
    """Return the lines of a file of predictions, as texts."""
    text = Path(path).read_text()
    if path.endswith(".jsonl"):
        return [list(map(str, json.loads(line).values())) for line in text.splitlines()]
    header, *rows = csv.reader(text.splitlines())
    assert header == ["row", "prediction", "probability"]
    return rows


def test_predictions_of_a_table(
    table: str, folder: Path, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CSV and as JSON lines, of several tables, with and without a label."""
    monkeypatch.setattr("trainers.datasets.rows.BLOCK", 300)
    data = datasets.load(table, "income")
    rows = people(61, seed=5)
    if flat.rank == 0:
        write(folder / "new-1.csv", [row[:3] for row in rows[:40]], HEADER[:3])
        write(folder / "new-2.csv", rows[40:])
        write(folder / "new-3.csv", [])
        (folder / "stored").touch()
        (folder / "link.jsonl").symlink_to("stored")
    with MirroredTrainer(network(data), "native", flat) as trainer:
        trainer.fit(data.x_train, data.y_train, **SIZES)
        assert data.columns is not None
        x = data.columns.encode(list(zip(*rows, strict=True))[:3], str)
        outputs = trainer.predict(x)
        expected = [data.classes[number] for number in outputs.argmax(axis=1)]
        trainer.save(str(folder / "model.npz"))
        trainer.replica.columns = None  # as of a network that was made for no table
        trainer.load(str(folder / "model.npz"))
        assert trainer.replica.columns == data.columns
        for out in ("all.csv", "all.jsonl", "link.jsonl"):
            written = trainer.predict(str(folder / "new-*.csv"), str(folder / out))
            assert written == str((folder / out).resolve())
            found = rows_of(str(folder / out))
            assert [row[:2] for row in found] == [[str(number), word] for number, word in enumerate(expected)]
            np.testing.assert_allclose([float(row[2]) for row in found], outputs.max(axis=1), rtol=1e-4)
        assert rows_of(trainer.predict(str(folder / "new-3.csv"), str(folder / "none.csv"))) == []
        with pytest.raises(ArgumentError, match=r"give a file that ends in .csv or .jsonl"):
            trainer.predict(str(folder / "new-1.csv"), str(folder / "all.json"))


def test_predictions_of_arrays(folder: Path, flat: allreduce.Topology) -> None:
    random = np.random.default_rng(1)
    for rows in (0, 1, 23):
        x = random.normal(size=(rows, 2, 2)).astype(np.float32)
        if flat.rank == 0:
            folder.mkdir(exist_ok=True)
            np.save(folder / "x.npy", x)
            np.savez(folder / "x.npz", x=x)
            np.savez_compressed(folder / "packed.npz", x=x, y=x)
            np.savetxt(folder / "x.csv", np.c_[x.reshape(rows, 4), np.ones(rows)], delimiter=",", fmt="%.9g")
        classifier = NumpyNetwork([4, 3], seed=1)
        with MirroredTrainer(classifier, "native", flat) as trainer:
            outputs = trainer.predict(x) if rows else np.zeros((0, 3))
            given: list[Any] = [x, *(str(folder / name) for name in ("x.npy", "x.npz", "packed.npz", "x.csv"))]
            for each in given if rows else given[:4]:
                path = trainer.predict(each, folder / "out.csv")
                assert [row[1] for row in rows_of(path)] == [str(number) for number in outputs.argmax(axis=1)]
        with MirroredTrainer(NumpyNetwork([4, 2], loss="mean_squared_error"), "native", flat) as trainer:
            path = trainer.predict(x, folder / "out.jsonl")
            found = [list(json.loads(line).values())[1:] for line in Path(path).read_text().splitlines()]
            assert len(found) == rows
            if rows:
                np.testing.assert_allclose(found, trainer.predict(x), rtol=1e-4)


FAULTS: dict[str, tuple[bytes, str]] = {
    "a ragged row": (b"1,cook\n", r"line 202 has 2 cells"),
    "a number that is none": (b"x,cook,city 1,high\n", r"line 202, column 'age': 'x' is not a finite number"),
    "no UTF-8": (b"1,c\xf6ok,city 1,high\n", r"line 202 is not UTF-8"),
}


def test_a_fault_on_one_rank_is_raised_on_all_and_changes_no_file(
    table: str, folder: Path, flat: allreduce.Topology
) -> None:
    data = datasets.load(table, "income")
    world = flat.world
    with MirroredTrainer(network(data), "native", flat) as trainer:
        for content, text in FAULTS.values():
            if flat.rank == 0:
                (folder / "bad.csv").write_bytes(Path(table).read_bytes() + content)
                (folder / "old.csv").write_text("as it was")
            world.Barrier()
            with pytest.raises(DataError, match=text) as error:
                trainer.predict(str(folder / "bad.csv"), str(folder / "old.csv"))
            assert len(set(world.allgather(str(error.value)))) == 1
            assert (folder / "old.csv").read_text() == "as it was"
            assert sorted(path.name for path in folder.iterdir()) == ["bad.csv", "old.csv", "people.csv"]
            world.Barrier()  # before rank 0 writes them again
        if flat.rank == 0:
            (folder / "folder.csv").mkdir()
        world.Barrier()
        for given, out, text in (
            (str(folder / "no*.csv"), "new.csv", "no file matches"),
            (table, "new", "a file that ends in .csv or .jsonl"),
            (table, "folder.csv", "is no regular file"),
            (table, "nowhere/new.csv", "give a file in a folder that exists"),
            ([], "new.csv", "x must|no|empty"),
        ):
            with pytest.raises((ArgumentError, DataError), match=text):
                trainer.predict(given, str(folder / out))
        with pytest.raises(ArgumentError, match="say where the predictions go"):
            trainer.predict(table)


WRITTEN = {
    "rows": (DataError, "predict: the model returns 7 rows for 8"),
    "values": (ValueError, "Unknown format code 'g' for object of type 'str'"),
    "disk": (ArgumentError, r"out.csv.*No space left on device"),
}


@pytest.mark.parametrize("fault", WRITTEN)
def test_no_file_is_left_of_outputs_that_one_rank_can_not_write(
    fault: str, folder: Path, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few rows, values that are no numbers, and a disk that is full at the end."""
    monkeypatch.setattr(streams, "PIECE", 8)
    model, x = NumpyNetwork([4, 3]), np.zeros((16 * flat.size, 4), np.float32)
    real = model.predict
    folder.mkdir(exist_ok=True)

    def predict(part: np.ndarray) -> np.ndarray:
        outputs = real(part)
        if flat.rank < flat.size - 1 or fault == "disk":
            return outputs
        return outputs[:-1] if fault == "rows" else np.full(outputs.shape, "a", object)

    def refuse(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    kind, text = WRITTEN[fault]
    with MirroredTrainer(model, "native", flat) as trainer:
        monkeypatch.setattr(model, "predict", predict)
        if fault == "disk":
            monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(kind, match=text) as error:
            trainer.predict(x, folder / "out.csv")
    assert len(set(flat.world.allgather(str(error.value)))) == 1
    assert not os.listdir(folder)


def test_the_command_trains_on_a_table_and_predicts(table: str, folder: Path, flat: allreduce.Topology) -> None:
    model, out = str(folder / "model.npz"), str(folder / "out.csv")
    options = ["--label", "income", "--epochs", "1", "--hidden", "6", "--save", model]
    assert main(["--data", table, *options]) == 0
    assert main(["--data", table, "--load", model, "--epochs", "0"]) == 0
    assert main(["predict", "--load", model, "--data", table, "--out", out]) == 0
    replica = load_network(model)
    assert replica.columns is not None
    cells = list(zip(*people(200), strict=True))
    expected = replica.predict(replica.columns.encode(cells[:3], str)).argmax(axis=1)
    assert [row[1] for row in rows_of(out)] == [replica.columns.classes[number] for number in expected]
    assert main(["predict", "--load", model, "--data", "nowhere.csv", "--out", out]) == 2
    assert main(["--data", table, "--label", "incom"]) == 2

"""Exports on several ranks: with every trainer, in a callback, and with errors of one rank."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.conftest import lacking
from tests.ranks.together import raised_everywhere
from tests.ranks.training.fits import TRAINERS, Once, data, trainer_of
from tests.ranks.training.test_tables import rows_of
from tests.training.test_tables import people, write
from trainers import EMA, MirroredTrainer, NumpyNetwork, datasets, network_of
from trainers.apps.export.metadata import Exported
from trainers.cli.main import main
from trainers.errors import ArgumentError, ExportError

JOBS = "openmpi 1 2"

WORLD = MPI.COMM_WORLD
X, Y = data(40)


@pytest.fixture(autouse=True)
def onnx_is_there(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if not all(map(find_spec, ("onnx", "onnxruntime"))):
        lacking('onnx or onnxruntime is not installed: pip install ".[export]" in the checkout')


def answers(path: Path, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"x": x})[0]


@pytest.mark.parametrize("name", [*TRAINERS, "exact", "async", "local"])
def test_every_trainer_exports_its_model(name: str, flat: allreduce.Topology, folder: Path) -> None:
    path, other, found = folder / "a.onnx", folder / "callback.onnx", list[Exported]()
    calling = Once("on_epoch_end", lambda trainer: found.append(trainer.export(str(other))))  # after the last epoch
    calling.reads_batches = calling.reads_model = False
    network = NumpyNetwork([6, 5, 3], seed=1)
    network.scale_input(0.5, 2.0)
    averages = {} if name in ("async", "local") else {"transforms": [EMA(0.5)]}
    with trainer_of(name, flat, network) as trainer:
        trainer.fit(X, Y, epochs=2, batch_size=20, callbacks=[calling], progress=False, **averages)
        about = trainer.export(str(path))
        assert (about.rows, about.average) == (32, bool(averages))
        assert [each.rows for each in found] == [32]
        np.testing.assert_allclose(answers(path, X), trainer.predict(X), atol=1e-5)
        np.testing.assert_allclose(answers(other, X), trainer.predict(X), atol=1e-5)
        if averages:
            trainer.export(str(path), X, ema=False)
            np.testing.assert_allclose(answers(path, X), trainer.predict(X, ema=False), atol=1e-5)
    assert len(set(WORLD.allgather(str(about)))) == 1
    assert {each.name for each in folder.iterdir()} == {"a.onnx", "callback.onnx"}


def test_errors_are_raised_on_all_ranks(flat: allreduce.Topology, folder: Path) -> None:
    path, last = folder / "a.onnx", flat.rank == flat.size - 1
    network = NumpyNetwork([6, 5, 3], seed=1)
    with MirroredTrainer(network, topology=flat) as trainer:
        trainer.export(str(path), X)
        before = path.read_bytes()
        text = raised_everywhere(WORLD, ExportError, lambda: trainer.export(str(folder / "none" / "a.onnx"), X))
        assert "can't be written" in text
        raised_everywhere(WORLD, ArgumentError, lambda: trainer.export(str(path), X[:, :2] if last else X))
        if flat.size > 1:
            raised_everywhere(WORLD, DisagreementError, lambda: trainer.export(f"{path}{last}"))
            network.parameters[0] += last
            text = raised_everywhere(WORLD, DisagreementError, lambda: trainer.export(str(path)))
            assert text.count("parameters #") == flat.size
            network.parameters[0] -= last
        trainer.fit(X, Y, epochs=1, batch_size=20, progress=False)
    assert path.read_bytes() == before


def test_the_command_predicts_by_an_exported_file(flat: allreduce.Topology, folder: Path) -> None:
    """As the model that was exported, with the names of its classes, and for a table by its cells."""
    names, rows, table = ["κ", "b,c", "z"], str(folder / "x.npy"), str(folder / "people.csv")
    if WORLD.rank == 0:
        np.save(rows, X.reshape(-1, 2, 3))
        write(Path(table), people(40, cities=40))
    WORLD.Barrier()
    network = NumpyNetwork([6, 5, 3], seed=1)
    network.scale_input(0.5, 2.0)
    with MirroredTrainer(network, topology=flat) as trainer:
        trainer.export(str(folder / "a.onnx"), X, classes=names)
        expected = [names[number] for number in trainer.predict(X).argmax(axis=1)]
    options = ["--out", str(folder / "out.csv")]
    assert main(["predict", "--load", str(folder / "a.onnx"), "--data", rows, *options]) == 0
    found = rows_of(str(folder / "out.csv"))
    assert [row[:2] for row in found] == [[str(number), name] for number, name in enumerate(expected)]
    data = datasets.load(table, "income")
    with MirroredTrainer(network_of(data, (4,)), topology=flat) as trainer:
        trainer.predict(table, str(folder / "own.csv"))
        trainer.export(str(folder / "b.onnx"))
    assert main(["predict", "--load", str(folder / "b.onnx"), "--data", table, *options]) == 0
    for one, other in zip(rows_of(str(folder / "own.csv")), rows_of(str(folder / "out.csv")), strict=True):
        assert one[:2] == other[:2]
        assert float(one[2]) == pytest.approx(float(other[2]), abs=1e-5)
    assert main(["predict", "--load", str(folder / "b.onnx"), "--data", rows, *options]) == 2
    assert main(["predict", "--load", str(folder / "none.onnx"), "--data", rows, *options]) == 2

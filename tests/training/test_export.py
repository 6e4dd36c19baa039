"""Exported files (.onnx): the graph of each network, the columns of a table, errors, and metadata."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import lacking
from tests.training.test_tables import people, write
from trainers import EMA, MirroredTrainer, datasets
from trainers.apps.export import export, running
from trainers.apps.export.metadata import Exported
from trainers.apps.serving.versions import load_model
from trainers.cli.main import main
from trainers.datasets.columns import Category, Columns, Number
from trainers.errors import ArgumentError, ExportError, ModelFileError
from trainers.files import model_file
from trainers.replicas.numpy.categories import CategoryNetwork, network_of
from trainers.replicas.numpy.network import NumpyNetwork

COLUMNS = Columns([Number("age", 40.0, 0.1, True), Category("job", ("cook", "smith"))], "label", ["no", "yes"])


@pytest.fixture(autouse=True)
def onnx_is_there() -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime"))):
        lacking('onnx or onnxruntime is not installed: pip install ".[export]" in the checkout')


def session_of(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def answers(path: Path, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the outputs of onnxruntime alone."""
    session = session_of(path)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def properties(path: Path) -> Exported:
    return Exported.read(str(path), session_of(path).get_modelmeta().custom_metadata_map)


@pytest.mark.parametrize("name", sorted(Exported("x").as_properties()))
@pytest.mark.parametrize("text", [None, "", "[1]", "{", '{"classes": 1}', "[" * 100_000, "12", '"x"'])
def test_hostile_metadata_are_refused_or_read(name: str, text: str | None) -> None:
    held = Exported("NumpyNetwork", ("no",), True, COLUMNS).as_properties()
    held |= {} if text is None else {name: text}
    if text is None:
        del held[name]
    with suppress(ModelFileError):
        Exported.read("a.onnx", held).as_properties()


NETWORKS: dict[str, Callable[[], tuple[NumpyNetwork, np.ndarray]]] = {
    "relu": lambda: (NumpyNetwork([6, 5, 3]), np.random.default_rng(1).normal(5, 3, (9, 6))),
    "tanh": lambda: (NumpyNetwork([6, 5, 4, 3], activation="tanh"), np.ones((9, 2, 3), np.float32)),
    "one number": lambda: (NumpyNetwork([1, 5, 3]), np.linspace(0, 1, 9)),
    "regression": lambda: (NumpyNetwork([6, 2], loss="mean_squared_error"), np.ones((9, 6), np.uint8)),
    "categories": lambda: (
        CategoryNetwork([2 + 3 + 1, 3], embedded=[(5, 3), (2, 1)]),
        np.stack([[0.5, -1, number % 5, number % 2] for number in range(9)]),
    ),
    "only categories": lambda: (CategoryNetwork([3, 3], embedded=[(5, 3)]), np.arange(5)[:, None]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_answers_as_the_network_does(name: str, tmp_path: Path) -> None:
    network, x = NETWORKS[name]()
    if name in ("relu", "categories"):
        network.scale_input(np.arange(6), np.linspace(0, 2, 6))
    path = tmp_path / "a.onnx"
    with MirroredTrainer(network) as trainer:
        for rows in (None, x, x[:1]):
            about = trainer.export(str(path), rows, classes=None if name == "regression" else range(3))
            assert about.rows == (32 if rows is None else len(rows))
            assert about.kind == type(network).__name__
        expected = trainer.predict(x)
    feed = x.reshape(len(x), -1).astype(np.float32)
    for rows in (len(x), 1, 0):
        found = answers(path, {"x": feed[:rows]})
        scores = found["output" if name == "regression" else "probabilities"]
        assert scores.shape == (rows, network.sizes[-1])
        np.testing.assert_allclose(scores, expected[:rows], atol=1e-6)
        if name != "regression":
            assert found["label"].tolist() == [str(number) for number in expected[:rows].argmax(axis=1)]
    assert properties(path) == about
    assert os.listdir(tmp_path) == ["a.onnx"]


@pytest.mark.parametrize("cities", [12, 40])
def test_a_model_of_a_table_takes_its_cells_and_answers_in_words(cities: int, tmp_path: Path) -> None:
    data = datasets.load(write(tmp_path / "people.csv", people(400, cities=cities)), "income")
    assert data.columns is not None
    network, path = network_of(data, (16,)), tmp_path / "people.onnx"
    assert isinstance(network, CategoryNetwork) == (cities == 40)
    with MirroredTrainer(network) as trainer:
        assert trainer.export(str(path)).rows == 32, "random rows, which are the nearest rows of a table"
        trainer.fit(data.x_train, data.y_train, epochs=2, progress=False)
        about = trainer.export(str(path), data.x_train)
        assert (about.columns, about.classes, about.rows) == (data.columns, ("high", "low"), 256)
        rows = people(50, seed=1, cities=cities)
        new = [["1e9", "cook", "city 1"], ["33", "?", ""], ["NA", "pilot", "Atlantis"]]
        cells = [*map(list, zip(*[row[:3] for row in rows], *new[:0], strict=True))]
        cells = [[*column, *(row[place] for row in new)] for place, column in enumerate(cells)]
        x = data.columns.encode(cells, str)
        expected = trainer.predict(x)
    ages = [float(cell) if cell not in ("", "NA") else np.nan for cell in cells[0]]
    feeds = {"age": np.array(ages), "job": np.array(cells[1], object), "city": np.array(cells[2], object)}
    found = answers(path, feeds)
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)
    assert found["label"].tolist() == [data.classes[number] for number in expected.argmax(axis=1)]
    served = load_model(str(path))
    assert (served.columns, served.classes) == (data.columns, data.classes)
    served.check(x)
    np.testing.assert_allclose(served.predict(x), expected, atol=1e-5)


def test_features_become_the_cells_that_made_them() -> None:
    columns = Columns(
        [
            Number("a", 1e6, 3.0, True),
            Category("b", ("x", "y")),
            Number("c", -1.0, 0.5, False),
            Category("d", tuple(map(str, range(40)))),
            Category("e", ()),
        ],
        "label",
        ["no", "yes"],
    )
    cells = [["1000001.5", "", "999999"], ["y", "", "x"], ["3", "0", "-2"], ["17", "", "39"], ["", "", ""]]
    x = columns.encode(cells, str)
    np.testing.assert_array_equal(columns.features_of(columns.values_of(x), str), x)
    found = running.cells_of(columns, x)
    assert found["b"].tolist() == ["y", "", "x"]
    assert found["d"].tolist() == ["17", "", "39"]
    np.testing.assert_allclose(found["a"], [1000001.5, np.nan, 999999])


def test_a_model_above_2_gib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("older")
    monkeypatch.setattr(export, "LARGEST", 4000)
    with MirroredTrainer(NumpyNetwork([64, 32, 3])) as trainer:
        with pytest.raises(ExportError, match=r"the model has 8,\d\d\d bytes, and an ONNX file holds less than 2 GiB"):
            trainer.export(str(path))
        assert path.read_text() == "older"
        monkeypatch.setattr(export, "LARGEST", 9000)
        trainer.export(str(path))
    assert os.listdir(tmp_path) == ["a.onnx"]


def test_numbers_of_no_word_are_refused(tmp_path: Path) -> None:
    """ONNX takes -1 for the last one."""
    network, x = NETWORKS["only categories"]()
    with MirroredTrainer(network) as trainer:
        trainer.export(str(tmp_path / "a.onnx"), x)
    model = load_model(str(tmp_path / "a.onnx"))
    for number in (-1, 11):
        with pytest.raises(ArgumentError, match=r"can't compute .* out of data bounds"):
            model.predict(np.full_like(x[:1], number))
    model.dtype = np.dtype(np.int64)  # as of a file that takes words
    with pytest.raises(ArgumentError, match="whole numbers"):
        model.check(x + 0.5)
    model.check(x.astype(np.float32))


class Wrong(NumpyNetwork):
    """Predicts something else than its graph computes."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        return super().predict(x)[:, ::-1] if len(x) else super().predict(x)


def export_of(network: Any, path: str, *given: Any, **options: Any) -> Exported:
    with MirroredTrainer(network) as trainer:
        return trainer.export(path, *given, **options)


class Without(NumpyNetwork):
    to_onnx = None  # type: ignore[assignment]


def diverged() -> NumpyNetwork:
    network = NumpyNetwork([4, 3])
    network.parameters[:] = np.nan
    return network


X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("network", "given", "options", "error", "text"),
    [
        (lambda: Wrong([4, 3]), [X], {}, ExportError, "the exported model"),
        (lambda: Without([4, 3]), [X], {}, ExportError, "a Without has no export to ONNX"),
        (diverged, [X], {}, ExportError, "not finite"),
        (lambda: NumpyNetwork([4, 3]), [X[:0]], {}, ArgumentError, "no rows"),
        (lambda: NumpyNetwork([4, 3]), [X[:, :3]], {}, ArgumentError, "4 features"),
        (lambda: NumpyNetwork([4, 3]), [(X, X)], {}, ArgumentError, "takes one array"),
        (lambda: NumpyNetwork([4, 3]), [X], {"classes": ["a", "b"]}, ArgumentError, "3 different names"),
        (lambda: NumpyNetwork([4, 3]), [X], {"classes": ["a", "b", "a"]}, ArgumentError, "3 different names"),
        (lambda: NumpyNetwork([4, 3]), [X], {"classes": "abc"}, ArgumentError, "3 different names"),
        (lambda: NumpyNetwork([4, 3]), [X], {"logits": True}, ArgumentError, "are probabilities"),
        (lambda: NumpyNetwork([4, 3]), [X], {"logits": "yes"}, ArgumentError, "logits must be True or False"),
        (lambda: NumpyNetwork([4, 3]), [X], {"ema": True}, ArgumentError, "no average"),
    ],
)
def test_errors_leave_the_older_file(
    network: Callable[[], Any], given: list[Any], options: dict[str, Any], error: type[Exception], text: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = tmp_path / "a.onnx"
    path.write_text("older")
    with pytest.raises(error, match=text):
        export_of(network(), str(path), *given, **options)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["a.onnx"]


def test_the_command_exports_the_average_and_tells_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = [tmp_path, tmp_path / "none" / "a.onnx", "", 3, None]
    for path in given:
        with pytest.raises(ExportError, match="can't be written"):
            export_of(NumpyNetwork([4, 3]), path)
    assert main(["export", "--load", str(tmp_path / "none.npz"), "--out", str(tmp_path / "a.onnx")]) != 0
    data, run = datasets.load("iris"), tmp_path / "run"
    with MirroredTrainer(NumpyNetwork([4, 3])) as trainer:
        trainer.fit(data.x_train, data.y_train, 2, transforms=[EMA(0.9)], progress=False, checkpoint=str(run))
        expected, plain = (trainer.predict(X, ema=ema) for ema in (True, False))
    newest = str(max(run.glob("*.npz")))
    assert main(["export", "--load", newest, "--out", str(tmp_path / "a.onnx"), "--data", "iris"]) == 0
    about = properties(tmp_path / "a.onnx")
    assert (about.average, about.classes) == (True, data.classes)
    found = answers(tmp_path / "a.onnx", {"x": X})["probabilities"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not np.allclose(found, plain, atol=1e-3)
    model_file.write(str(tmp_path / "e.npz"), "Ensemble", {}, {})
    assert main(["export", "--load", str(tmp_path / "e.npz"), "--out", str(tmp_path / "a.onnx")]) != 0
    assert "e.npz holds: Ensemble. The command exports NumpyNetwork, " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ExportError, match=rf"{name}, which can't be imported .*\.\[export\]"):
        export_of(NumpyNetwork([4, 3]), str(tmp_path / "a.onnx"))


def test_names_of_columns_that_are_names_of_outputs_are_refused(tmp_path: Path) -> None:
    network = NumpyNetwork([1, 2])
    network.columns = Columns([Number("label", 0.0, 1.0, False)], "answer", ["no", "yes"])
    with pytest.raises(ExportError, match="must be different"):
        export_of(network, str(tmp_path / "a.onnx"))

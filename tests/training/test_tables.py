"""Tables of named columns: what is learned of them, the network that embeds categories, the model file, bad tables."""

import csv
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers import datasets
from trainers.datasets import learning
from trainers.datasets.columns import Category, Columns, Number
from trainers.datasets.rows import TableFile
from trainers.errors import ArgumentError, DataError, ModelFileError
from trainers.files import model_file
from trainers.replica import saved_columns
from trainers.replicas.numpy.categories import CategoryNetwork, load_network, network_of
from trainers.replicas.numpy.network import NumpyNetwork

HEADER = ["age", "job", "city", "income"]
JOBS = ("clerk", "nurse, night", "cook")


def people(count: int, seed: int = 0, cities: int = 40) -> list[list[str]]:
    """Return rows of a table in which the income follows from the other columns."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        age, job, city = random.integers(18, 80), random.integers(3), random.integers(cities)
        income = "high" if age / 40 + job - city % 4 > 0.5 else "low"
        rows.append(["" if random.random() < 0.1 else str(age), JOBS[job], f"city {city}", income])
    return rows


def write(path: Path, rows: list[list[str]], header: list[str] = HEADER) -> str:
    delimiter = "\t" if ".tsv" in path.name else ","
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return str(path)


@pytest.mark.parametrize("name", ["people.csv", "people.tsv", "people.csv.gz"])
def test_a_table_becomes_numbers(name: str, tmp_path: Path) -> None:
    rows = people(300, cities=20)
    data = datasets.load(write(tmp_path / name, rows), "income")
    assert (data.classes, data.features, len(data.y_train)) == (("high", "low"), 2 + 3 + 20, 240)
    assert data.columns is not None
    age, job, city = data.columns.columns
    trained = data.x_train[:, 1] == 0
    assert isinstance(age, Number)
    assert isinstance(city, Category)
    assert age.missing
    assert abs(float(data.x_train[trained, 0].mean())) < 1e-6
    assert abs(float(data.x_train[trained, 0].std()) - 1) < 1e-6
    assert not data.x_train[~trained, 0].any()
    assert job == Category("job", tuple(sorted(JOBS)))
    assert (data.x_train[:, 2:].sum(axis=1) == 2).all()


def test_the_columns_come_from_the_training_rows_alone(tmp_path: Path) -> None:
    rows = people(100, cities=5)
    before = datasets.load(write(tmp_path / "a.csv", rows), "income")
    tested = datasets.dataset.split(np.array([row[3] == "low" for row in rows], np.int64))
    for row in np.flatnonzero(tested):
        rows[row][:3] = ["1e6", "judge", "elsewhere"]
    after = datasets.load(write(tmp_path / "a.csv", rows), "income")
    assert after.columns == before.columns
    assert np.array_equal(after.x_train, before.x_train)
    assert not after.x_test[:, 2:].any(), "values that training has not met have no feature"


def test_numbers_can_be_categories_and_columns_left_out(tmp_path: Path) -> None:
    rows = [[str(number % 3), str(number), "5", f"{number % 2}"] for number in range(40)]
    path = write(tmp_path / "a.csv", rows, ["code", "id", "same", "label"])
    data = datasets.load(path, "label", ignore=["id", "id"], categories=["code"])
    assert data.columns is not None
    assert Columns.from_dict(data.columns.as_dict()) == data.columns
    assert data.columns.columns[0] == Category("code", ("0", "1", "2"))
    assert (data.features, data.classes) == (4, ("0", "1"))
    assert not data.x_train[:, 3].any(), "a number that never changes"


def trained(tmp_path: Path, cities: int) -> tuple[datasets.Dataset, NumpyNetwork]:
    data = datasets.load(write(tmp_path / "people.csv", people(400, cities=cities)), "income")
    network = network_of(data, (8,), seed=1, lr=0.02)
    network.bind(None, np.empty(network.gradient_length, np.float32))
    for _ in range(60):
        network.gradients(data.x_train, data.y_train, 1.0)
        network.update()
    return data, network


@pytest.mark.parametrize("cities", [20, 40])
def test_a_model_file_has_the_columns(cities: int, tmp_path: Path) -> None:
    data, network = trained(tmp_path, cities)
    assert isinstance(network, CategoryNetwork) == (cities > 32)
    accuracy = float(network.evaluate(data.x_test, data.y_test)[1]) / len(data.y_test)
    assert accuracy > 0.85
    path = str(tmp_path / "model.npz")
    network.save(path)
    with np.load(path, allow_pickle=False) as file:
        assert "columns" in json.loads(str(file["model"]))["config"]
    again = load_network(path)
    assert again.columns == data.columns == saved_columns(path)
    assert np.array_equal(again.predict(data.x_test), network.predict(data.x_test))
    other = datasets.load(str(tmp_path / "people.csv"), columns=again.columns)
    assert np.array_equal(other.x_train, data.x_train)
    assert np.array_equal(other.y_test, data.y_test)
    plain = network_of(data, (8,))
    plain.columns = None
    plain.restore(path)
    assert plain.columns == data.columns


def test_gradients_of_embedded_categories_are_right() -> None:
    random = np.random.default_rng(3)
    network = CategoryNetwork([7, 5, 3], embedded=[(4, 2), (6, 3)], activation="tanh", seed=2)
    network.scale_input(random.normal(size=7), random.normal(size=7))
    x = np.column_stack([random.normal(size=(9, 2)), random.integers(0, 4, 9), random.integers(0, 6, 9)])
    x, y = x.astype(np.float32), random.integers(0, 3, 9)
    gradients = np.empty(network.gradient_length, np.float32)
    network.bind(None, gradients)
    network.gradients(x, y, 1.0)
    found, step = gradients.copy(), 1e-2
    for place in range(network.gradient_length):
        losses = []
        for sign in (1, -1):
            network.parameters[place] += sign * step
            losses.append(float(network.gradients(x, y, 1.0)[0]))
            network.parameters[place] -= sign * step
        assert abs((losses[0] - losses[1]) / (2 * step) - found[place]) < 2e-3, place


def test_a_model_without_columns_loads_as_before(tmp_path: Path) -> None:
    network = NumpyNetwork([4, 3])
    path = str(tmp_path / "old.npz")
    model_file.write(path, "NumpyNetwork", network.config, network.state())  # as versions without columns wrote it
    assert load_network(path).columns is None
    assert NumpyNetwork.load(path).sizes == [4, 3]
    with pytest.raises(ModelFileError, match=r"another kind \(NumpyNetwork\); expected CategoryNetwork"):
        CategoryNetwork.load(path)


COLUMNS = Columns([Number("a", 0.0, 1.0, False)], "b", ["x", "y"]).as_dict()
DAMAGED: list[tuple[str, Any]] = [
    *(("columns", COLUMNS | change) for change in ({"classes": "ab"}, {"columns": [{"name": "a"}]}, {"label": 3})),
    ("columns", COLUMNS | {"ignored": None}),
    *(("embedded", value) for value in ([[1]], [[5, 2, 3]], "ab", {"a": 1}, [[5, -2]], None)),
]


@pytest.mark.parametrize(("name", "value"), DAMAGED)
def test_a_damaged_model_file_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    embeds, path = name == "embedded", str(tmp_path / "model.npz")
    network = CategoryNetwork([6, 2], embedded=[(5, 2)]) if embeds else NumpyNetwork([1, 2])
    model_file.write(path, type(network).__name__, {**network.config, name: value}, network.state())
    with pytest.raises(ModelFileError, match="describes no network" if embeds else "damaged"):
        load_network(path)


BAD: dict[str, tuple[bytes, str]] = {
    "ragged": (b"age,job,income\n1,cook,high\n2,cook\n", r"line 3 has 2 cells, and the first line has 3"),
    "latin-1": ("age,job,income\n1,cook,high\n2,coöp,low\n".encode("latin-1"), r"line 3 is not UTF-8 .*0xf6"),
    "utf-16": ("age,job,income\n1,cook,high\n".encode("utf-16"), "line 1 is not UTF-8"),
    "no rows": (b"age,job,income\n", "there are no rows"),
    "no text": (b"", "is empty"),
    "no header": (b"1,2,3\n4,5,6\n", "expected the names of the columns"),
    "semicolons": (b"age;job;income\n1;2;3\n", "separated by ';'"),
    "twice": (b"age,age,income\n1,2,3\n", "the column 'age' more than once"),
    "no name": (b"age,,income\n1,2,3\n", "column 2 has no name"),
    "no label": (b"age,job,income\n1,2,\n2,3,a\n", "line 2 has no label in the column 'income'"),
    "an open quote": (b'age,job,income\n1,"cook,high\n2,b,low\n', "line 2: a quotation mark is not closed"),
    "infinite": (b"age,job,income\n1,2,a\n,inf,b\n", "line 3, column 'job': 'inf' is not a finite number"),
    "a real label": (b"age,income\n1,2.5\n2,3.5\n", "2 different numbers, such as 2.5; expected classes"),
    "other label": (b"age,job\n1,2\n", "has no column 'income'; its columns are age, job"),
    "a number in two ways": (b"age,income\n1,0\n2,1\n3,0.0\n", "'income' has the number 0 also as 0.0"),
    "a line of one space": ("age,income\n1,a\n\xa0\n".encode(), "line 3 has 1 cell, and"),
    "one row": (b"age,income\n1,a\n", "has 0 rows to train and 1 to test"),
    "label alone": (b"id,income\n1,2\n", "no column is left"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_tables(fault: str, tmp_path: Path) -> None:
    content, text = BAD[fault]
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text) as error:
        datasets.load(str(path), "income", ignore="id" if b"id" in content else ())
    assert "bad.csv" in str(error.value)


ONES = [["1"] * 5]
OTHERS: dict[str, tuple[list[str], list[list[str]], str]] = {
    "moved": (["job", "age", "city", "income"], ONES, "are 'job', 'age', 'city', and .* on 'age', 'job', 'city'"),
    "renamed": (["age", "jobs", "city", "income"], ONES, "its columns are 'age', 'jobs', 'city', and"),
    "more": (["age", "job", "city", "income", "sex"], ONES, "its columns are 'age', 'job', 'city', 'sex', and"),
    "missing": (["age", "city", "income"], ONES, "its columns are 'age', 'city', and"),
    "a label": (
        HEADER, [*people(1), ["1", "a", "b", "medium"]], "line 3: .* the label 'medium'; its labels are 'high', 'low'",
    ),
    "a large number": (
        HEADER, [*people(3), ["1e60", "cook", "city 1", "high"]], r"line 5, column 'age': 1e\+60 is too large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_a_table_with_other_columns_or_cells_is_refused(change: str, tmp_path: Path) -> None:
    columns = datasets.load(write(tmp_path / "a.csv", people(50)), "income").columns
    header, rows, text = OTHERS[change]
    with pytest.raises(DataError, match=rf"b\.csv.*{text}"):
        datasets.load(write(tmp_path / "b.csv", [row[: len(header)] for row in rows], header), columns=columns)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", people(50))
    columns = datasets.load(path, "income").columns
    for source, options in (("iris", {"label": "a"}), (path, {"ignore": "age"}), ("iris", {"columns": columns})):
        with pytest.raises(ArgumentError):
            datasets.load(source, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="the model has its columns already"):
        datasets.load(path, "job", columns=columns)
    with pytest.raises(DataError, match="name the label"):
        datasets.load(write(tmp_path / "b.csv", [["1", "cook", "a", "high"]]))
    with pytest.raises(DataError, match="name the column of the label"):
        datasets.load(write(tmp_path / "a.tsv", people(5)))


def test_parts_of_a_table_have_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = people(60)
    for name in ("a.csv", "a.csv.gz"):
        path = tmp_path / name
        write(path, rows)
        text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        text = b"\xef\xbb\xbf" + text.replace(b"\r\n", b"\n\n", 3).rstrip(b"\n")  # blank lines, and no last one
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        for size in (1, 37, 1 << 20):
            monkeypatch.setattr("trainers.datasets.rows.BLOCK", size)
            blocks = TableFile(str(path)).blocks()
            found = [row for block in blocks for row in zip(block.lines, *block.columns, strict=True)]
            assert [list(row[1:]) for row in found] == rows
            assert [row[0] for row in found[:3] + found[-1:]] == [3, 5, 7, 64]


def test_a_line_of_tabs_is_a_row(tmp_path: Path) -> None:
    for number, header in enumerate((b"\xef\xbb\xbfage\tjob\n", b"\xef\xbb\xbf")):  # the second has numbers alone
        path = tmp_path / f"{number}.tsv"
        path.write_bytes(header + b"1\t2\r\n \r\n\t\n3\t4")
        table = TableFile(str(path), (lambda _: False) if number else None)
        (block,) = table.blocks()
        assert [list(each) for each in block.columns] == [["1", "", "3"], ["2", "", "4"]]


def test_the_categories_of_all_shards_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_VALUES", 30)
    paths = [
        write(tmp_path / f"{shard}.csv", [[f"{shard} {row}", f"{row % 2}"] for row in range(25)], ["town", "label"])
        for shard in range(2)
    ]
    with pytest.raises(DataError, match=r"2 files: the column 'town' has more than 30 .* --ignore town"):
        datasets.Shards("2 files", paths, learning.Choices("label"))


def test_columns_agree_apart_from_rounding() -> None:
    number, job = Number("age", 40.0, 0.1, False), Category("job", ("cook", "nurse"))
    columns = Columns([number, job], "income", ["high", "low"])
    near = dataclasses.replace(number, mean=number.mean + 1e-8)
    assert columns.agrees_with(Columns([near, job], "income", ["high", "low"]))
    far = dataclasses.replace(number, mean=41.0)
    turned = Category("job", ("nurse", "cook"))
    for other in ([far, job], [number, turned], [job, number], [number]):
        assert not columns.agrees_with(Columns(other, "income", ["high", "low"]))
    assert not columns.agrees_with(Columns([number, job], "income", ["low", "high"]))

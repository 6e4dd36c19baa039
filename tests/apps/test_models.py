"""The parts of the server: saved models of each kind, bodies of requests, versions in folders, and batches."""

import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers import EMA, MirroredTrainer
from trainers.apps.export.export import write
from trainers.apps.serving import models, versions
from trainers.apps.serving.batches import Batch, Request, Waiting
from trainers.apps.serving.instances import answer_of, requested
from trainers.apps.serving.models import NetworkModel
from trainers.apps.serving.versions import (
    AVAILABLE,
    END,
    LOADING,
    UNLOADING,
    Version,
    Versions,
    Watcher,
    checked_canary,
    load_alike,
    load_model,
    load_whole,
    scan,
)
from trainers.apps.serving.web import RefusedError
from trainers.datasets.columns import Category, Columns, Number
from trainers.errors import ArgumentError, DataError, ModelFileError, TrainerError
from trainers.replicas.numpy.categories import CategoryNetwork
from trainers.replicas.numpy.network import NumpyNetwork

COLUMNS = Columns(
    [Number("age", 40.0, 0.1, True), Category("town", ("Ulm", "Rom"))], label="kind", classes=["no", "yes", "maybe"]
)


def saved(network: NumpyNetwork, path: Path) -> str:
    network.save(str(path))
    return str(path)


def test_a_network(tmp_path: Path) -> None:
    network, x = NumpyNetwork([4, 5, 3]), np.random.default_rng(1).standard_normal((7, 4), np.float32)
    model = load_model(saved(network, tmp_path / "m.npz"))
    assert (model.kind, model.shape, model.dtype, model.members) == ("NumpyNetwork", (4,), np.float32, 1)
    assert (model.columns, model.classes) == (None, ())
    model.check(x)
    assert np.array_equal(model.predict(x), network.predict(x))
    with pytest.raises(ArgumentError, match="4 features"):
        model.check(x[:, :3])
    with pytest.raises(ArgumentError, match="not trained on a table"):
        model.rows_of([["1"] * 4])


def test_the_moving_average_answers(tmp_path: Path) -> None:
    x, network = np.eye(4, dtype=np.float32), NumpyNetwork([4, 3], lr=0.5)
    with MirroredTrainer(network) as trainer:
        trainer.fit(x, np.array([0, 1, 2, 0]), 2, progress=False, transforms=[EMA(0.9)])
        trainer.save(str(tmp_path / "m.npz"))
        expected = trainer.predict(x)
    assert not np.array_equal(network.predict(x), expected)
    np.testing.assert_array_equal(load_model(str(tmp_path / "m.npz")).predict(x), expected)


def test_a_table(tmp_path: Path) -> None:
    network = NumpyNetwork([4, 3])
    network.columns = COLUMNS
    model = load_model(saved(network, tmp_path / "m.npz"))
    assert model.classes == ("no", "yes", "maybe")
    rows = model.rows_of([["50", "Rom"], ["", "Bonn"]])
    assert rows.tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]
    assert model.rows_of([]).shape == (0, 4)
    with pytest.raises(DataError, match=r"row 1.*'age'.*'old' is not a finite number"):
        model.rows_of([["1", "Rom"], ["old", "Rom"]])


def test_categories(tmp_path: Path) -> None:
    model = load_model(saved(CategoryNetwork([5, 2], embedded=[(40, 3)]), tmp_path / "c.npz"))
    assert (model.kind, model.shape) == ("CategoryNetwork", (3,))
    with pytest.raises(ArgumentError, match="0 to 39"):
        model.check(np.array([[1, 2, 40]], np.float32))


def write_onnx(path: Path, metadata: dict[str, str]) -> np.ndarray:
    """Write a network without a hidden layer, with one more output, and return its weights."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    weights = np.random.default_rng(2).standard_normal((4, 3), np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["z"]),
            onnx.helper.make_node("ReduceSum", ["z"], ["sum"], keepdims=0),
            onnx.helper.make_node("Softmax", ["z"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 4])],
        [
            onnx.helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, []),
            onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 3]),
        ],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.helper.set_model_props(model, metadata)
    path.write_bytes(model.SerializeToString())
    return weights


def test_an_onnx_file(tmp_path: Path) -> None:
    weights = write_onnx(tmp_path / "m.onnx", {"classes": "of another program"})
    model, x = load_model(str(tmp_path / "m.onnx")), np.eye(4, dtype=np.float32)[:2]
    assert (model.kind, model.shape, model.dtype, model.classes) == ("onnx", (4,), np.float32, ())
    model.check(x)
    wanted = np.exp(x @ weights) / np.exp(x @ weights).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict(x), wanted, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"shape \(rows, 4\)"):
        model.check(x[:, :2])
    for wrong in ({"trainers.format": "9"}, {"trainers.format": "1"}):
        write_onnx(tmp_path / "m.onnx", wrong)
        with pytest.raises(ModelFileError, match="metadata"):
            load_model(str(tmp_path / "m.onnx"))


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 1), (0, 1, 1)])
def test_rows_of_one_number_have_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pytest.importorskip("onnxruntime")
    network = NumpyNetwork([1, 4, 2], seed=4)
    write(str(tmp_path / "m.onnx"), network, None)
    model, x = load_model(str(tmp_path / "m.onnx")), np.linspace(0, 1, shape[0], dtype=np.float32).reshape(shape)
    model.check(x)
    np.testing.assert_allclose(model.predict(x), network.predict(x), atol=1e-5)


@pytest.mark.parametrize("of_a_table", [False, True])
def test_an_exported_file(tmp_path: Path, of_a_table: bool) -> None:
    pytest.importorskip("onnxruntime")
    network = NumpyNetwork([4, 5, 3], seed=4)
    network.columns = COLUMNS if of_a_table else None
    write(str(tmp_path / "m.onnx"), network, None)
    model, plain = load_model(str(tmp_path / "m.onnx")), load_model(saved(network, tmp_path / "m.npz"))
    assert (model.kind, model.shape, model.dtype) == ("onnx", plain.shape, plain.dtype)
    assert (model.classes, model.columns, model.outputs) == (plain.classes, plain.columns, 3)
    x = model.rows_of([["50", "Rom"], ["", "Bonn"]]) if of_a_table else np.eye(4, dtype=np.float32)[:2]
    model.check(x)
    np.testing.assert_allclose(model.predict(x), plain.predict(x), atol=1e-5)


def test_equal_stamps_are_of_equal_content(tmp_path: Path) -> None:
    """Copies on several hosts have other times; other models may have the same size and time."""
    paths = [
        saved(NumpyNetwork([4, 3], seed=seed), tmp_path / f"{number}.npz") for number, seed in enumerate((1, 2, 1))
    ]
    for path, seconds in zip(paths, (1, 1, 2), strict=True):
        os.utime(path, (seconds, seconds))
    assert os.path.getsize(paths[0]) == os.path.getsize(paths[1])
    first, other, copy = (load_whole(path).stamp for path in paths)
    assert first == copy != other


def export_two_files(path: Path, network: NumpyNetwork) -> Path:
    """Write a network as an .onnx file; return its second file, which has the constants."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    write(str(path), network, None)
    second = path.with_suffix(".data")
    options = {"save_as_external_data": True, "location": second.name, "size_threshold": 1024}
    onnx.save_model(onnx.load(str(path)), str(path), **options)
    return second


def test_the_stamp_of_an_onnx_file_is_of_its_constants_too(tmp_path: Path) -> None:
    path = str(tmp_path / "m.onnx")
    constants = export_two_files(Path(path), NumpyNetwork([64, 64, 3], seed=4))
    before = load_whole(path).stamp
    content = bytearray(constants.read_bytes())
    content[5] ^= 1
    constants.write_bytes(content)
    assert load_whole(path).stamp != before


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be replaced by one of the same size and time."""
    path, other = saved(NumpyNetwork([4, 3], seed=1), tmp_path / "m.npz"), str(tmp_path / "other.npz")
    load = versions.load_model

    def replaced(path: str) -> models.Model:
        saved(NumpyNetwork([4, 3], seed=2), Path(other))
        os.utime(other, ns=(0, os.stat(path).st_mtime_ns))
        os.replace(other, path)
        return load(path)

    monkeypatch.setattr(versions, "load_model", replaced)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        load_whole(path)


def test_damaged_files(tmp_path: Path) -> None:
    for name in ("absent.npz", "absent.onnx"):
        with pytest.raises(ModelFileError, match="No such file"):
            load_model(str(tmp_path / name))
    if write_onnx(tmp_path / "m.onnx", {}).size:
        (tmp_path / "m.onnx").write_bytes((tmp_path / "m.onnx").read_bytes()[:-9])
        with pytest.raises(ModelFileError, match="not an ONNX file"):
            load_model(str(tmp_path / "m.onnx"))


# Bodies of requests


MODEL = NetworkModel(NumpyNetwork([4, 3]))
WORDS = NetworkModel(NumpyNetwork([2, 3]))
WORDS.shape, WORDS.dtype = (None,), np.dtype(np.int64)  # as an ONNX file of words has them
ROW = [1, 2.5, -3, 0]


def table() -> NetworkModel:
    network = NumpyNetwork([4, 3])
    network.columns = COLUMNS
    return NetworkModel(network)


def body(instances: Any) -> bytes:
    return json.dumps({"instances": instances}).encode()


def test_rows_of_numbers() -> None:
    rows = requested(body([ROW, ROW]), MODEL, 2)
    assert rows.dtype == np.float32
    assert rows.tolist() == [ROW, ROW]
    assert requested(body([[[1, 2], [3, 4]]]), MODEL, 1).shape == (1, 2, 2)
    assert requested(body([[2**70, 1, 1, 1]]), MODEL, 1)[0, 0] == np.float32(2.0**70)
    assert requested(body([[1, 8]]), WORDS, 1).tolist() == [[1, 8]]
    text = r'{"signature_name": "serving_default", "instances": [[1, 2, 3, 4]]}'
    assert requested(text.encode(), MODEL, 1).shape == (1, 4)


def test_rows_of_a_table() -> None:
    rows = requested(body([[50, "Rom"], {"town": "true [{", "age": None, "kind": "no"}]), table(), 2)
    assert rows.tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]


REFUSED = [
    (MODEL, b"", "must be JSON"),
    (MODEL, b"[1]", 'no "instances"'),
    (MODEL, b'{"instances": 5}', "must be a list"),
    (MODEL, b'{"instances": []}', "at least one row"),
    (MODEL, b'{"inputs": [[1, 2, 3, 4]], "instances": [[1, 2, 3, 4]]}', "has 'inputs'"),
    (MODEL, b'{"instances": [[1, 2, 3, 4]], "signature_name": "x"}', "serving_default"),
    (MODEL, b'{"instances": [[NaN, 1, 1, 1]]}', "must be JSON"),
    (MODEL, b'{"instances": [[1e39, 1, 1, 1]]}', "too large for float32"),
    (MODEL, b'{"instances": [[true, 1, 1, 1]]}', "texts or objects, true"),
    (MODEL, b'{"instances": [["1", 1, 1, 1]]}', "texts or objects"),
    (MODEL, b'{"instances": [[{"x": 1}]]}', "texts or objects"),
    (MODEL, b'{"instances": [[1, 2, 3, 4], [1, 2, 3, [["x"]]]]}', "texts or objects"),
    (MODEL, b'{"instances": [[1, 2, 3, 4], [1]]}', "ragged"),
    (MODEL, b'{"instances": [[1, 2, 3]]}', "4 features"),
    (MODEL, b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "must be JSON"),
    (MODEL, b'{"instances": [[1,2,3,4],[1,2,3,4],[1,2,3,4],[1,2,3,4]]}', "the most are 3"),
    (WORDS, [[1.0]], "integers from"),
    (WORDS, [[2**63]], "integers from"),
    (table(), [[1]], "a list of 1"),
    (table(), [[1, True]], "true or false"),
    (table(), [[1, ["Rom"]]], "a list"),
    (table(), [{"age": 1, "town": {"x": 1}}], "an object is neither"),
    (table(), [{"age": 1}], "lacks 'town'"),
    (table(), [{"age": 1, "town": "Ulm", "sex": 1}], "has 'sex'"),
    (table(), [["old", "Ulm"]], "not a finite number"),
    (table(), [[1e308, "Ulm"]], "too large"),
    (table(), ["old"], "a text"),
]


@pytest.mark.parametrize(("model", "given", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refused_bodies(model: NetworkModel, given: Any, text: str) -> None:
    with pytest.raises(TrainerError, match=text):
        requested(given if isinstance(given, bytes) else body(given), model, 3)


def test_a_long_text_takes_no_memory_for_other_texts() -> None:
    given = body([["x" * 300_000, *["y"] * 1000]])
    tracemalloc.start()
    try:
        with pytest.raises(TrainerError, match="texts or objects"):
            requested(given, MODEL, 1)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(given)
    finally:
        tracemalloc.stop()


def test_answers_are_json() -> None:
    assert json.loads(answer_of(np.array([[0.1, 2]], np.float32))) == {"predictions": [[0.1, 2.0]]}
    assert json.loads(answer_of(np.array([[np.nan, 1, -np.inf]]))) == {"predictions": [[None, 1.0, None]]}
    assert json.loads(answer_of(np.array([3, 4]))) == {"predictions": [3, 4]}
    assert answer_of(np.array([[0.1, 0], [3, 0]], np.float32)[:, 0]) == b'{"predictions":[0.1,3.0]}'


# Versions in folders, and batches of requests


class World:
    """A folder of versions, and a watcher whose `look` the test calls."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.versions = folder, Versions("m", {7: 0.5})
        self.loaded: list[int] = []
        self.gone: list[int] = []
        self.watcher = Watcher(str(folder), self.versions, keep, 1, self._serve)

    def _serve(self) -> None:
        """Do what the server does."""
        for version in self.versions.listed():
            if version.state == LOADING:
                version.state = AVAILABLE
                self.loaded.append(version.number)
            elif version.state == UNLOADING:
                self.gone.append(version.number)
                self.versions.drop(version.number)

    def write(self, number: int, size: int = 4, part: float = 1.0) -> None:
        own = self.folder / f"{number:04}"
        own.mkdir(exist_ok=True)
        NumpyNetwork([size, 3], seed=number).save(str(self.folder / "m.npz"))
        content = (self.folder / "m.npz").read_bytes()
        (own / "m.npz").write_bytes(content[: int(part * len(content))])

    def look(self, times: int = 2) -> dict[int, str]:
        for _ in range(times):
            self.watcher.look()
        return {version.number: version.state for version in self.versions.listed()}


def test_a_new_version_is_loaded_when_it_is_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(1)
    assert world.look(1) == {}  # seen once
    assert world.look(1) == {1: AVAILABLE}
    world.write(2, part=0.5)
    assert world.look() == {2: END, 1: AVAILABLE}
    assert "damaged" in world.versions.listed()[0].error
    world.write(2)
    assert world.look(3) == {2: AVAILABLE, 1: AVAILABLE}
    world.write(3)
    assert world.look() == {3: AVAILABLE, 2: AVAILABLE, 1: AVAILABLE}
    assert world.look() == {3: AVAILABLE, 2: AVAILABLE}
    shutil.rmtree(tmp_path / "0003")
    assert world.look(3) == {2: AVAILABLE, 1: AVAILABLE}
    assert world.gone == [2, 1, 3]  # the half one when its file changes


def test_a_version_is_loaded_again_when_its_second_file_is_whole(tmp_path: Path) -> None:
    """As an .onnx file above 2 GiB has one, with its constants."""
    (tmp_path / "0001").mkdir()
    second = export_two_files(tmp_path / "0001" / "m.onnx", NumpyNetwork([400, 3]))
    content, world = second.read_bytes(), World(tmp_path)
    second.write_bytes(content[:100])
    assert world.look() == {1: END}
    second.write_bytes(content)
    assert world.look(3) == {1: AVAILABLE}


def test_what_is_no_version(tmp_path: Path) -> None:
    for name in ("x", "0001", "0002", "1000000000", ".3"):
        (tmp_path / name).mkdir()
    (tmp_path / "0001" / ".m.npz").write_text("a temporary file")
    (tmp_path / "0002" / "a.npz").write_text("")
    (tmp_path / "0002" / "b.npz").write_text("two files")
    (tmp_path / "0004").write_text("no folder")
    assert scan(str(tmp_path)) == {}
    (tmp_path / "0001" / "m.npz").write_text("")
    assert set(found := scan(str(tmp_path))) == {1}
    (tmp_path / "0001" / "notes.txt").write_text("its version goes on to answer")
    assert scan(str(tmp_path)) == found


def test_a_state_changes_only_from_those_that_are_named() -> None:
    versions, version = Versions("m"), Version(1, "")
    assert versions.move(version, [LOADING], AVAILABLE)
    assert versions.move(version, [LOADING, AVAILABLE], UNLOADING)
    assert not versions.move(version, [LOADING], END, "rank 1: damaged")
    assert (version.state, version.error) == (UNLOADING, "")
    assert versions.move(other := Version(2, ""), [LOADING], END, "rank 1: damaged")
    assert (other.state, other.error) == (END, "rank 1: damaged")


def test_a_canary_gets_its_share() -> None:
    versions = Versions("m", checked_canary(["2=0.1"]), draws=random.Random(1))
    assert versions.choose(None) is None
    versions.add(Version(1, "", AVAILABLE))
    versions.add(Version(2, "", AVAILABLE))
    versions.add(Version(3, "", LOADING))
    chosen = [version.number for _ in range(1000) if (version := versions.choose(None))]
    assert 50 < chosen.count(2) < 150
    assert chosen.count(1) == 1000 - chosen.count(2)
    assert versions.choose(3) is None
    assert (versions.choose(2) or versions.known[1]).number == 2
    versions.drop(1)
    assert (versions.choose(None) or versions.known[3]).number == 2


def test_what_another_rank_refuses_is_not_loaded_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(1)
    world.look()
    world.versions.known[1].state = END
    assert world.look(3) == {1: END}
    assert world.loaded == [1]
    world.write(1, size=6)
    assert world.look(3) == {1: AVAILABLE}


def test_unknown_outputs_are_not_compared(tmp_path: Path) -> None:
    path, other = str(tmp_path / "m.npz"), NetworkModel(NumpyNetwork([4, 2]))
    NumpyNetwork([4, 3]).save(path)
    with pytest.raises(ModelFileError, match=r"3 outputs, .* 2 outputs"):
        load_alike(path, [other])
    other.outputs = None
    assert load_alike(path, [other]).outputs == 3
    with pytest.raises(ModelFileError, match=r"takes rows of 4 float32 .* takes rows of 5 float32"):
        load_alike(path, [NetworkModel(NumpyNetwork([5, 3]))])


@pytest.mark.parametrize("given", ["2", "2=x", "x=0.1", "2=0", "2=1", "2=nan"])
def test_wrong_canaries(given: str) -> None:
    with pytest.raises(ArgumentError, match="--canary"):
        checked_canary([given])


def request(rows: int, version: int = 1, features: int = 4) -> Request:
    return Request(Version(version, ""), np.zeros((rows, features)))


def taken(batch: Batch | None) -> list[Request]:
    """Return the requests of a batch, which has some; [] if there is none."""
    assert batch is None or batch.requests
    return [] if batch is None else batch.requests


def test_batches_are_full_or_old() -> None:
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: None)
    requests = [request(3), request(3), request(3), request(1, 2)]
    for each in requests[:2]:
        waiting.put(each)
    now = requests[0].since
    assert taken(waiting.take(now + 1, lambda _: True)) == []
    for each in requests[2:]:
        waiting.put(each)
    assert taken(waiting.take(now + 1, lambda _: True)) == requests[:2]
    assert waiting.rows == 4
    assert taken(waiting.take(now + 10, lambda request: request.version.number == 3)) == []
    assert taken(waiting.take(now + 10, lambda request: request.version.number == 2)) == requests[3:]
    assert waiting.has(1)
    assert not waiting.has(2)
    assert taken(waiting.take(now, lambda _: True, at_once=True)) == requests[2:3]
    waiting.again(requests[:2])
    assert taken(waiting.take(now, lambda _: True)) == requests[:1]


def test_a_busy_rank_gets_full_batches_of_new_requests_alone() -> None:
    woken: list[int] = []
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: woken.append(waiting.rows))
    requests = [request(3), request(3), request(3)]
    for each in requests[:2]:
        waiting.put(each)
    assert woken == [3]  # at the first request: it has a deadline
    assert taken(waiting.take_full(lambda _: True)) == []
    waiting.put(requests[2])
    assert woken == [3, 9]
    assert taken(waiting.take_full(lambda _: False)) == []
    again = request(1)
    waiting.again([again])
    assert taken(waiting.take_full(lambda _: True)) == []  # or no rank would ever be without work, and take it
    assert taken(waiting.take(0, lambda _: True)) == [again]
    assert taken(waiting.take_full(lambda _: True)) == requests[:2]


def test_requests_without_a_client_are_not_computed() -> None:
    waiting = Waiting(most_rows=20, max_batch=8, seconds=5, wake=lambda: None)
    requests = [request(1) for _ in range(5)]
    for each in requests[:4]:
        waiting.put(each)
    waiting.again(requests[4:])
    for each in (requests[0], requests[2], requests[4]):
        each.future.cancel()
    assert taken(waiting.take(requests[0].since + 10, lambda _: True)) == [requests[1], requests[3]]
    assert waiting.rows == 0
    waiting.put(each := request(1))
    each.future.cancel()
    assert taken(waiting.take(each.since + 10, lambda _: True)) == []
    assert waiting.rows == 0


def test_overload() -> None:
    waiting = Waiting(most_rows=4, max_batch=8, seconds=5, wake=lambda: None)
    waiting.put(request(9))  # nothing else waits
    with pytest.raises(RefusedError, match="9 rows wait already") as caught:
        waiting.put(request(1))
    assert (caught.value.code, caught.value.headers) == (429, {"Retry-After": "1"})

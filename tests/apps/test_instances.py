"""Bodies of requests: what becomes rows, and what is refused."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.apps.test_models import COLUMNS
from trainers.apps.serving.instances import answer_of, requested
from trainers.apps.serving.models import NetworkModel
from trainers.errors import TrainerError
from trainers.replicas.numpy.embedding import EmbeddingNetwork
from trainers.replicas.numpy.network import NumpyNetwork

MODEL = NetworkModel(NumpyNetwork([4, 3]))
WORDS = NetworkModel(EmbeddingNetwork([3, 2], words=9))
ROW = [1, 2.5, -3, 0]


def table() -> NetworkModel:
    network = NumpyNetwork([4, 3])
    network.columns = COLUMNS
    return NetworkModel(network)


def body(instances: Any) -> bytes:
    return json.dumps({"instances": instances}).encode()


def rows_of(given: bytes, model: NetworkModel, most: int) -> np.ndarray:
    return requested(given, model, most).rows


def test_rows_of_numbers() -> None:
    rows = rows_of(body([ROW, ROW]), MODEL, 2)
    assert rows.dtype == np.float32
    assert rows.tolist() == [ROW, ROW]
    assert rows_of(body([[[1, 2], [3, 4]]]), MODEL, 1).shape == (1, 2, 2)
    assert rows_of(body([[2**70, 1, 1, 1]]), MODEL, 1)[0, 0] == np.float32(2.0**70)
    assert rows_of(body([[1, 8]]), WORDS, 1).tolist() == [[1, 8]]
    text = r'{"signature_name": "serving_default", "instances": [[1, 2, 3, 4]]}'
    assert rows_of(text.encode(), MODEL, 1).shape == (1, 4)


def test_rows_of_a_table() -> None:
    rows = rows_of(body([[50, "Rom"], {"town": "true [{", "age": None, "kind": "no"}]), table(), 2)
    assert rows.tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]


def test_columns_of_a_table() -> None:
    """TensorFlow Serving's columnar form: each column once, with the values of all rows."""
    given = json.dumps({"inputs": {"town": ["Rom", "Ulm"], "age": [50, None]}}).encode()
    columns, rows = requested(given, table(), 2), rows_of(body([[50, "Rom"], [None, "Ulm"]]), table(), 2)
    assert (columns.rows.tolist(), columns.answer) == (rows.tolist(), "outputs")
    for wrong, text in (
        ({"town": ["Rom"]}, "lacks 'age'"),
        ({"town": ["Rom"], "age": [1, 2]}, "as many values"),
        ({"town": "Rom", "age": [1]}, "'town' is a text"),
        ([[50, "Rom"]], "an object of the columns"),
        ({}, "lacks"),
        ({"town": [], "age": []}, "at least one row"),
        ({"town": [["Rom"]], "age": [1]}, "a list"),
        ({"town": [{"a": 1}], "age": [1]}, "inside of a row"),
        ({"town": ["a"] * 3, "age": [1] * 3}, "the most are 2"),
    ):
        with pytest.raises(TrainerError, match=text):
            requested(json.dumps({"inputs": wrong}).encode(), table(), 2)


REFUSED = [
    (b"", "must be JSON"),
    (b"\xff\xfe", "must be JSON"),
    (b"[1]", 'no "instances"'),
    (b'{"instances": 5}', "must be a list"),
    (b'{"instances": []}', "at least one row"),
    (b'{"inputs": [[1]]}', "4 features"),
    (b'{"inputs": {"x": [[1, 2, 3, 4]]}}', '"instances"'),
    (b'{"inputs": [[1, 2, 3, 4]], "instances": [[1, 2, 3, 4]]}', "both"),
    (b'{"inputs": {"instances": [[1, 2, 3, 4]], "instances": [[1, 2, 3, 4]]}}', "twice"),
    (b'{"instances": [[1]], "more": 1}', "'more'"),
    (b'{"instances": [[1, 2, 3, 4]], "instances": [[1, 2, 3, 4]]}', "twice"),
    (b'{"instances": [[1, 2, 3, 4]], "signature_name": "x"}', "serving_default"),
    (b'{"instances": [[NaN, 1, 1, 1]]}', "NaN"),
    (b'{"instances": [[-Infinity, 1, 1, 1]]}', "Infinity"),
    (b'{"instances": [[1e999, 1, 1, 1]]}', "must be JSON"),
    (b'{"instances": [[1e39, 1, 1, 1]]}', "too large for float32"),
    (b'{"instances": [[true, 1, 1, 1]]}', "it has true"),
    (b'{"instances": [[null, 1, 1, 1]]}', "it has null"),
    (b'{"instances": [["1", 1, 1, 1]]}', "texts or objects"),
    (b'{"instances": [{"x": 1}]}', "texts or objects"),
    (b'{"instances": [{"x": 1, "x": 2}]}', "twice"),
    (b'{"instances": [[{"x": 1}]]}', "inside of a row"),
    (b'{"instances": [["\\ud800"]]}', "must be JSON"),
    (b'{"instances": [[1, 2, 3, 4], [1, 2, 3, [["x"]]]]}', "texts or objects"),
    (b'{"instances": [[1, 2, 3, 4], [1]]}', "ragged"),
    (b'{"instances": [[1, 2, 3]]}', "4 features"),
    (b'{"instances": [[' + b"9" * 5000 + b", 1, 1, 1]]}", "must be JSON"),
    (b'{"instances": [[' + b"9" * 400 + b", 1, 1, 1]]}", "must be JSON"),
    (b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"instances": ' + b'{"a":' * 100_000, "nested"),
    (b'{"instances": "' + b'\\"' * 100_000, "must be JSON"),
    (b'{"instances": "\\\\", ' + b"[" * 100_000, "nested"),
    (b'{"instances": [[1,2,3,4],[1,2,3,4],[1,2,3,4],[1,2,3,4]]}', "the most are 3"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refused_bodies(given: bytes, text: str) -> None:
    with pytest.raises(TrainerError, match=text):
        rows_of(given, MODEL, 3)


def test_a_long_text_takes_no_memory_for_other_texts() -> None:
    given = body([["x" * 300_000, *["y"] * 1000]])
    tracemalloc.start()
    try:
        with pytest.raises(TrainerError, match="texts or objects"):
            rows_of(given, MODEL, 1)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(given)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("model", "instances", "text"),
    [
        (WORDS, [[1.0]], "integers from"),
        (WORDS, [[2**63]], "integers from"),
        (WORDS, [[9]], "0 to 8"),
        (WORDS, [[]], "integers from"),
        (table(), [[1]], "a list of 1"),
        (table(), [[1, True]], "true or false"),
        (table(), [[1, ["Rom"]]], "a list"),
        (table(), [{"age": 1, "town": {"x": 1}}], "inside of a row"),
        (table(), [{"age": 1}], "lacks 'town'"),
        (table(), [{"age": 1, "town": "Ulm", "sex": 1}], "has 'sex'"),
        (table(), [["old", "Ulm"]], "not a finite number"),
        (table(), [[10**400, "Ulm"]], "must be JSON"),
        (table(), [[1e308, "Ulm"]], "too large"),
        (table(), ["old"], "a text"),
    ],
)
def test_refused_rows(model: NetworkModel, instances: Any, text: str) -> None:
    with pytest.raises(TrainerError, match=text):
        rows_of(body(instances), model, 3)


def test_answers_are_json() -> None:
    assert json.loads(answer_of("predictions", np.array([[0.1, 2]], np.float32))) == {"predictions": [[0.1, 2.0]]}
    assert json.loads(answer_of("predictions", np.array([[np.nan, 1, -np.inf]]))) == {
        "predictions": [[None, 1.0, None]]
    }
    assert json.loads(answer_of("predictions", np.array([3, 4]))) == {"predictions": [3, 4]}
    assert answer_of("predictions", np.array([[0.1, 0], [3, 0]], np.float32)[:, 0]) == b'{"predictions":[0.1,3.0]}'

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
from trainers.replicas.numpy.network import NumpyNetwork

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

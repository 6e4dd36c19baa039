"""Values as JSON text without pickle: they come back as they were, and hostile text does no harm."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from tests import launch
from trainers.files import values

VALUES: list[Any] = [
    None, True, 7, 2**200, -1.5, float("inf"), "text", b"\x00\xff", [], (), {}, [1, (2, [None])],
    {"a": {1: (b"",)}, (1, 2): 3},
    {1, "a"}, frozenset(), 1 - 2j,
    OrderedDict(a=1), np.float32(2.5), np.bool_(True), np.int64(-3), np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
    np.empty((0, 3)), np.array(["a", "bc"]), np.random.default_rng(1).bit_generator.state, [["list", 1], ["array"]],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back(value: Any) -> None:
    found = values.decode(values.encode(value))
    np.testing.assert_equal(found, value)
    assert type(found) is (dict if isinstance(value, OrderedDict) else type(value))
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.flags.writeable) == (value.dtype, True)


def test_tensors_come_back() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8):
        for tensor in (torch.zeros((), dtype=dtype), torch.ones(2, 3, dtype=dtype).T, torch.empty(0, 2, dtype=dtype)):
            found = values.decode(values.encode({"a": tensor}))["a"]
            assert found.dtype == dtype
            assert torch.equal(found, tensor)
    for view in (torch.arange(6.0)[::6], torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag):
        with torch.device("meta"):  # a program's default device
            content = values.encode(view)
        assert torch.equal(values.decode(content), view)


def test_a_tensor_comes_back_in_a_program_that_has_not_imported_pytorch() -> None:
    torch = pytest.importorskip("torch")
    text = values.encode(torch.arange(3)).tobytes()
    code = f"from trainers.files import values; print(values.decode(list({text!r})).tolist())"
    assert launch.child(code).stdout == "[0, 1, 2]\n"


@pytest.mark.parametrize(
    "value",
    [object(), {"a": [{1: {object()}}]}, np.array([object()]), np.datetime64("2020-01-01"), values, np.ma.array([1])],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="no pickle"):
        values.encode(value)


HOSTILE = [
    "", "{}", "{", '["what"]', "[[]]", "[1]", '["bytes"]', '["bytes", "%"]', '["array", "O", [1], ""]',
    '["scalar", "<f8", ""]', '["tensor", "torch.int8", [1000000000000], ""]', '["tensor", "no", [], "AA=="]',
    '["array", "<f8", [-1], "AAAAAAAAAAA="]', '["array", "<f8", [1000000000000], "AAAAAAAAAAA="]',
    '["dict", [["list"], 1]]', '["tensor", "load", [1], "AAAA"]',
    '["tensor", "torch.float32", [9], "AAAA"]', '["array", "<f8,<f8", [1], ""]',
    "[" * 100_000, '["list", ' * 5000 + "1" + "]" * 5000, '["scalar", "<U9999999999", ""]',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="it holds no values"):
        values.decode(np.frombuffer(text.encode(), np.uint8))

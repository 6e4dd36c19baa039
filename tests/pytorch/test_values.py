"""Values with tensors as bytes."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trainers.replicas.pytorch import values  # noqa: E402

STRIDED = {
    "every other": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.ones(1).expand(4),
    "negated view": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
    "scalar": lambda: torch.tensor(3.0, dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
    "last": lambda: torch.arange(4)[3:4],
}


@pytest.mark.parametrize("name", STRIDED)
def test_tensors_of_any_layout_are_packed(name: str) -> None:
    tensor = STRIDED[name]()
    value, _ = values.unpack(values.pack({"of": [tensor, 1]}))
    unpacked, number = value["of"]
    assert torch.equal(unpacked, tensor)
    assert unpacked.dtype == tensor.dtype
    assert number == 1


def test_arrays_whose_dtype_would_be_lost_are_refused() -> None:
    with pytest.raises(TypeError, match="can't be sent"):
        values.pack(np.ones(3, ml_dtypes.bfloat16))

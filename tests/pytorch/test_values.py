"""Values with tensors as bytes."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")
from trainers import checks  # noqa: E402
from trainers.pytorch.state import comparable  # noqa: E402
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


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "complex64", "int16"])
def test_a_state_of_any_dtype_is_compared(dtype: str) -> None:
    """Also if NumPy has no such dtype, or no conjugate views."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    held = []
    for value in (1, 2):
        array = torch.full((3,), value).to(getattr(torch, dtype))
        optimizer.state[model.weight]["moment"] = array.conj()
        held.append(comparable(optimizer, {"weight": model.weight}, {"weight": model.weight}))
        assert checks.compare(MPI.COMM_SELF, held[-1]) == ""
    name = "the state of weight, moment"
    assert not np.array_equal(held[0][name], held[1][name])

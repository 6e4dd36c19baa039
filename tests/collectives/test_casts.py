"""Casts and sums by way of the accumulator's dtype, with the C library and without it."""

import numpy as np
import pytest

from allreduce import kernels
from allreduce.arrays import casts, dtypes, ops
from allreduce.arrays.workspace import Workspace

DTYPES = [dtypes.FLOAT16, dtypes.BFLOAT16, np.dtype(np.float32), np.dtype(np.int32)]


@pytest.fixture(params=["C", "NumPy"], autouse=True)
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "NumPy":
        monkeypatch.setattr(kernels, "_loaded", lambda: None)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [dtypes.FLOAT16, dtypes.BFLOAT16], ids=str)
def test_sums_of_every_16_bit_float(dtype: np.dtype, op: str, ranks: int) -> None:
    """All numbers with others; arrays of subnormal, small, finite and all numbers. The last piece is shorter."""
    every = np.tile(np.arange(2**16, dtype=np.uint16), 3)[:-5]
    terms = [every, *(np.roll(every * (2 * each + 3) + each, each) for each in range(1, ranks))]
    for bits in (0x83FF, 0x8FFF, 0xFBFF, 0xFFFF):
        parts = [(each & bits).astype(np.uint16).view(dtype) for each in terms]
        resolved = ops.resolve(op, dtype, ranks)
        with np.errstate(all="ignore"):
            wide = parts[0].astype(np.float32)
            for part in parts[1:]:
                resolved.combine(wide, part.astype(np.float32), out=wide)
            resolved.finish(wide)
            wanted = wide.astype(dtype)
            casts.combine(parts, parts[1], resolved, Workspace())
        np.testing.assert_array_equal(parts[1].view(np.uint16), wanted.view(np.uint16))


def test_subnormal_numbers_stay_where_a_thread_flushes_them() -> None:
    torch = pytest.importorskip("torch")
    given = np.array([1e-5, -3e-5, 6e-5, -0.0, 1e-3], np.float32)
    wanted, small, wide = given.astype(np.float16), np.empty(5, np.float16), np.empty(5, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        casts.cast(given, small)
        casts.cast(wanted, wide)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(small.view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_array_equal(wide, wanted.astype(np.float32))


@pytest.mark.parametrize("given", ["float64", "int32", "float32", "float16"])
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("writeable", [True, False])
def test_casts(given: str, wanted: np.dtype, writeable: bool) -> None:
    values = np.arange(-500, 500).astype(given)
    values.flags.writeable = writeable
    found = np.full(values.size, 7, wanted)
    casts.cast(values, found)
    np.testing.assert_array_equal(found, values.astype(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "mean", "prod"])
def test_combine(dtype: np.dtype, op: str) -> None:
    if op == "mean" and dtype.kind == "i":
        return
    parts = [(np.random.default_rng(seed).normal(size=5000) * 10).astype(dtype) for seed in range(3)]
    resolved = ops.resolve(op, dtype, 3)
    wide = [part.astype(dtypes.TYPES[dtype].accumulator) for part in parts]
    total = resolved.combine(resolved.combine(wide[0], wide[1]), wide[2])
    resolved.finish(total)
    casts.combine(iter(parts), parts[1], resolved, Workspace())
    np.testing.assert_array_equal(parts[1], total.astype(dtype))

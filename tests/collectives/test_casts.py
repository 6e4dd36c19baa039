"""Casts of 16-bit floats: the bits of NumPy's and ml_dtypes' casts, with PyTorch and without it."""

import sys

import ml_dtypes
import numpy as np
import pytest

from allreduce.arrays import casts, dtypes, ops
from allreduce.arrays.workspace import Workspace

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
BITS = {2: np.uint16, 4: np.uint32}
EVERY_HALF = np.arange(2**16, dtype=np.uint16)


def every_upper(lower):
    """float32 of all upper 16 bits, with some lower ones: all exponents, ties, the numbers next to them, NaNs."""
    return (np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(lower)).view(np.float32)


@pytest.fixture(params=["PyTorch", "PyTorch with threads", "without PyTorch"], autouse=True)
def by(request, monkeypatch):
    if request.param == "without PyTorch":
        monkeypatch.setattr(casts, "imported_torch", lambda: None)
        yield
        return
    torch = pytest.importorskip("torch")
    assert casts.imported_torch() is torch
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "threads" in request.param else 1)
    yield
    torch.set_num_threads(before)


def check(source, dtype):
    found = np.full(source.size, 7, dtype)
    with np.errstate(all="ignore"):
        casts.cast(source, found)
        wanted = source.astype(dtype)
    bits = BITS[found.itemsize]
    np.testing.assert_array_equal(found.view(bits), wanted.view(bits))


@pytest.mark.parametrize("half", HALVES)
def test_every_16_bit_float(half):
    values = EVERY_HALF.view(half)
    check(values, np.float32)  # NaNs and infinities among them
    magnitudes = EVERY_HALF & 0x7FFF
    finite = magnitudes < np.array(np.inf, half).view(np.uint16)
    check(values[finite], np.float32)
    check(values[~finite], np.float32)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("lower", [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32(half, lower):
    """All at once; those without NaN; and those that are numbers in float16, without NumPy's help for the others."""
    values = every_upper(lower)
    check(values, half)
    check(values[~np.isnan(values)], half)
    check(values[np.abs(values) < 65520], half)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("length", [0, 1, 2, casts.SERIAL_BLOCK + 1, casts.BLOCK, 3 * casts.BLOCK + 5])
def test_lengths(half, length):
    values = np.random.default_rng(length).normal(size=length).astype(np.float32)
    values[length // 2 : length // 2 + 1] = np.nan
    check(values, half)
    check(values.astype(half), np.float32)
    values.flags.writeable = False
    check(values, half)


@pytest.mark.parametrize("dtype", ["float64", "int32", "float32"])
def test_other_casts(dtype):
    values = np.arange(-500, 500).astype(dtype)
    check(values, np.float32)
    check(values, HALVES[1])


@pytest.mark.parametrize("dtype", [*HALVES, np.dtype(np.float32), np.dtype(np.int32)])
@pytest.mark.parametrize("op", ["sum", "max", "mean"])
def test_combine(dtype, op):
    if op == "mean" and dtype.kind == "i":
        return
    parts = [(np.random.default_rng(seed).normal(size=5000) * 100).astype(dtype) for seed in range(3)]
    resolved = ops.resolve(op, dtype, 3)
    wide = [part.astype(dtypes.TYPES[dtype].accumulator) for part in parts]
    total = resolved.combine(resolved.combine(wide[0], wide[1]), wide[2])
    resolved.finish(total)
    casts.combine(iter(parts), parts[1], resolved, Workspace())
    np.testing.assert_array_equal(parts[1], total.astype(dtype))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_pairs(half, op):
    """Every pair of exponents and signs, with several fractions: cancellation, subnormals, overflow, NaN."""
    every = EVERY_HALF.view(half)
    resolved = ops.resolve(op, half, 2)
    for shift in (0, 1, 3, 0x0401, 0x3C80, 0x7FFF, 0x8000, 0x8003, 0xBC01):
        parts = [every, every[(EVERY_HALF.astype(np.int64) * 5 + shift) % 2**16]]
        with np.errstate(all="ignore"):
            total = parts[0].astype(np.float32) + parts[1].astype(np.float32)
            resolved.finish(total)
            wanted = total.astype(half)
            overflows = ~np.isfinite((parts[0].astype(np.float32) + parts[1].astype(np.float32)).astype(half))
        finite = [np.ascontiguousarray(part[~overflows]) for part in parts]
        out = finite[0].copy()
        done = casts.add_pair([out, finite[1]], out, resolved, Workspace())
        assert done == (casts.imported_torch() is not None)
        if done:
            np.testing.assert_array_equal(out.view(np.uint16), wanted[~overflows].view(np.uint16))
        out = parts[0].copy()
        assert not casts.add_pair([out, parts[1]], out, resolved, Workspace())
        np.testing.assert_array_equal(out.view(np.uint16), EVERY_HALF)


def test_an_import_that_has_not_ended_does_not_count(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert casts.imported_torch() is None

"""Sums of float16 by integer operations: the same bits as by NumPy's casts, for every float16 there is."""

import numpy as np
import pytest

from allreduce.arrays import casts, dtypes, ops
from allreduce.arrays.workspace import Workspace

EVERY_FINITE = np.concatenate([np.arange(0x7C00), np.arange(0x8000, 0xFC00)]).astype(np.uint16).view(np.float16)
OPS = ["sum", "mean", "max", "min"]


def expected(parts, op):
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        op.combine(total, part, out=total)
    op.finish(total)
    with np.errstate(over="ignore"):
        return total.astype(np.float16)


def combine(parts, op):
    out = np.full_like(parts[0], 7)
    return casts.combine_float16(parts, out, op, Workspace()), out


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("name", OPS)
def test_every_value_has_the_bits_of_the_casts(name, ranks):
    op = ops.resolve(name, dtypes.FLOAT16, ranks)
    shuffle = np.random.default_rng(ranks)
    for scale in (1, 1 / 8):  # with an eighth of the largest values, no sum overflows
        parts = [shuffle.permutation(EVERY_FINITE) * np.float16(scale) for _ in range(ranks)]
        parts = [np.clip(part, -13000, 13000) for part in parts]
        done, out = combine(parts, op)
        assert done
        np.testing.assert_array_equal(out.view(np.uint16), expected(parts, op).view(np.uint16))


@pytest.mark.parametrize("name", OPS)
def test_neighbouring_and_tiny_values(name):
    """Ties, where rounding decides, and subnormals, whose sums are exact."""
    op = ops.resolve(name, dtypes.FLOAT16, 2)
    for gap in (1, 2, 3, 512, 1024, 1025, 5000):
        parts = [EVERY_FINITE[np.abs(EVERY_FINITE) < 3e4], np.roll(EVERY_FINITE[np.abs(EVERY_FINITE) < 3e4], gap)]
        done, out = combine(parts, op)
        assert done
        np.testing.assert_array_equal(out.view(np.uint16), expected(parts, op).view(np.uint16))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 65504])
def test_what_it_can_not_do_is_left_alone(bad):
    parts = [np.ones(64, np.float16), np.ones(64, np.float16)]
    parts[0][33] = bad
    parts[1][33] = 65504
    done, out = combine(parts, ops.resolve("sum", dtypes.FLOAT16, 2))
    assert not done
    assert (out == 7).all()


def test_products_are_left_alone():
    parts = [np.ones(64, np.float16)] * 2
    assert not combine(parts, ops.resolve("prod", dtypes.FLOAT16, 2))[0]


@pytest.mark.parametrize(("begin", "length"), [(0, 7), (1, 7), (1, 8), (1, 1), (0, 1), (1, 2)])
def test_any_length_at_any_address(begin, length):
    parts = [np.arange(40, dtype=np.float16)[start : start + length] for start in (0, begin)]
    done, out = combine(parts, ops.resolve("sum", dtypes.FLOAT16, 2))
    assert done
    np.testing.assert_array_equal(out, parts[0] + parts[1])

"""Sums of outer products of float32 rows whose bits depend on nothing but the rows: not on their order or division.

A pair of factors is two arrays: left (k, inputs) and right (k, outputs). Its sum is left.T @ right, (inputs, outputs):
the gradients of a dense layer's weights, if left holds the layer's inputs and right the errors of its outputs, a row
for each sample. The rows are divided among the ranks in any way; `count` is the number of all rows, or more.

For each column of left and of right, the largest exponent of all rows of all ranks decides a quantum, a power of two:

    |element| < 2^e for all elements of the column    (e: the column's exponent)
    quantum = 2^max(e - bits, -149), bits = (53 - ceil(log2 count)) // 2    (2^-149: the smallest subnormal)

Each element is rounded once to a multiple of its column's quantum: to at most 2^bits quanta. So a sum of at most
`count` products is at most 2^53 times the product of the two quanta, and float64 holds all multiples of it in this
range. Hence all float64 additions are exact, in any order: one matrix product, by any BLAS, of any part of the rows,
and the sum of the ranks' results. It is rounded once to float32; a mean is divided in float64 first.

Error of an element: at most count * 2^(1 - bits) * (largest |left| of its column) * (largest |right| of its column) and
a little more, and one rounding. With 128 rows bits is 23: an element has the error that float32 has for the largest one
of its column. With MOST_ROWS rows bits is 19. So rows lose bits that are tiny beside the largest row of the column.

If a column has infinities or NaN, all its sums are infinite or NaN, as IEEE 754 has them: NaN if a NaN, infinities of
both signs, or an infinity and a zero meet. A sum beyond float32's range is infinite. Sums of zeros are +0. NaN has one
bit pattern.

K. Ozaki, T. Ogita, S. Oishi, S. M. Rump: Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication and its applications, Numerical Algorithms 59, 2012. They split each matrix into several such
slices, for all bits of the product; here the first slice is enough, and all ranks' rows decide its exponents.
"""

from collections.abc import Sequence

import numpy as np

from allreduce.arrays.fixed_point import PIECE, SINGLE
from allreduce.arrays.workspace import Workspace

MOST_ROWS = 2**15  # beyond, the quanta would be too coarse
DIGITS = 53  # of float64
Pair = tuple[np.ndarray, np.ndarray]
_DOUBLE = np.dtype(np.float64)


def bits_of(count: int) -> int:
    """Return how many bits elements keep if `count` products are summed."""
    return (DIGITS - (count - 1).bit_length()) // 2


def exponents(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the largest exponent bits of each column: of the first left, the first right, the second left ... (uint8).

    The other functions take the maximum over all ranks.
    """
    found = []
    for array in (each for pair in pairs for each in pair):
        words = array.view(SINGLE.word) & SINGLE.magnitude
        found.append((words.max(axis=0, initial=0) >> SINGLE.fraction).astype(SINGLE.exponents))
    return np.concatenate(found)


def multiply(pairs: Sequence[Pair], largest: np.ndarray, count: int, scratch: Workspace, out: np.ndarray) -> None:
    """Write the exact sums of these rows' rounded products to `out`. Infinities and NaN count as zeros.

    largest: the exponent bits of all columns, of all ranks. count: the number of all rows. out: 1-D float64, gets the
        sums of one pair after the other.
    """
    start = column = 0
    for pair in pairs:
        size = pair[0].shape[1] * pair[1].shape[1]
        into, rounded = out[start : start + size], []
        for name, array in zip(("left", "right"), pair, strict=True):
            columns = array.shape[1]
            room = scratch.array(name, array.size, _DOUBLE).reshape(array.shape)
            rounded.append(_round(array, largest[column : column + columns], count, room))
            column += columns
        if len(pair[0]):
            np.dot(rounded[0].T, rounded[1], out=into.reshape(pair[0].shape[1], pair[1].shape[1]))
        else:
            into[:] = 0
        start += size


def _round(array: np.ndarray, largest: np.ndarray, count: int, out: np.ndarray) -> np.ndarray:
    """Write the elements, rounded to multiples of their columns' quanta, to `out`; return it."""
    exponent = np.maximum(largest.astype(np.int32) - (SINGLE.bias + bits_of(count)), SINGLE.least)
    # Numbers near 1.5 * 2^52 quanta are spaced by a quantum, so adding this rounds, and subtracting it is exact.
    shift = np.ldexp(1.5, exponent + (DIGITS - 1))
    np.copyto(out, array)
    if (largest == SINGLE.not_finite).any():
        out[~np.isfinite(out)] = 0
    out += shift
    out -= shift
    return out


def finish(sums: np.ndarray, divisor: int, out: np.ndarray, part: slice) -> None:
    """Round sums divided by `divisor` to the elements `part` of `out`. sums: float64, overwritten."""
    with np.errstate(all="ignore"):
        for start in range(part.start, part.stop, PIECE):
            piece = slice(start, min(start + PIECE, part.stop))
            if divisor > 1:
                sums[piece] /= divisor
            np.copyto(out[piece], sums[piece], casting="same_kind")
            out[piece] += 0  # -0.0 becomes 0.0


def special(pairs: Sequence[Pair], largest: np.ndarray, length: int) -> np.ndarray | None:
    """Return which sums have infinite or NaN products, (2, length) uint8; None if all elements of all ranks are finite.

    The first row marks the sums with a product that is +infinity or NaN, the second row those with one that is
    -infinity or NaN. largest: of all ranks. The ranks then take the maximum of the results.
    """
    if not (largest == SINGLE.not_finite).any():
        return None
    found = np.zeros((2, length), np.uint8)
    start = 0
    for left, right in pairs:
        stop = start + left.shape[1] * right.shape[1]
        for sign, own in zip((1, -1), found[:, start:stop], strict=True):
            own[:] = _met(left, right, sign).reshape(-1)
        start = stop
    return found


def _met(left: np.ndarray, right: np.ndarray, sign: int) -> np.ndarray:
    """Return which sums have a NaN, or an infinite product of this sign from an infinite element."""
    # a sum of products of zeros and ones counts the rows in which both are ones
    infinite, other = np.isinf(left), np.isinf(right)
    above, below = (sign * right > 0), (sign * right < 0)
    cases = [
        (np.isnan(left), np.ones_like(other)),
        (np.ones_like(infinite), np.isnan(right)),
        (infinite, right == 0),
        (left == 0, other),
        (infinite & (left > 0), above),
        (infinite & (left < 0), below),
        (left > 0, other & above),
        (left < 0, other & below),
    ]
    pair = (np.concatenate([each[side] for each in cases]).astype(np.float32) for side in (0, 1))
    first, second = pair
    return first.T @ second > 0

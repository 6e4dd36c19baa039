"""Quantises float32 arrays to 8 bits with a scale for each block of elements: by the C library, or by NumPy.

Int8: the scale of a block is its largest magnitude / 127; values are rounded stochastically, so their expected value is
exact (T. Dettmers: 8-bit approximations for parallelism in deep learning, 2016; block scales as in G. Wang et al.:
ZeRO++, 2023). Differences: evenly spaced codes, not Dettmers' exponent and fraction; random numbers come from a table.

Float8: float8_e4m3fn of value / scale, rounded to nearest, ties to even. The scale is the least power of two with which
the block's largest magnitude is at most 448, the dtype's largest number, so scaling rounds nothing. (B. D. Rouhani et
al.: Microscaling data formats for deep learning, 2023, which has blocks of 32 and scales of 8 bits.)

A message is one uint8 array: the float32 scale of every block, in this machine's byte order, then one code for each
element. An element's value is code * scale. The last block may be shorter. A block that holds a NaN or a magnitude
above 2^127 has an infinite or NaN scale: all its elements are decoded as infinities or NaNs.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

import ml_dtypes
import numpy as np

from allreduce import kernels
from allreduce.arrays.workspace import Workspace

PIECE = 32 * 1024  # elements with numbers from one place of the table of random numbers
CACHED = 64 * 1024  # elements that NumPy works on at a time
BLOCK = 256  # elements with one scale
FLOAT = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BITS = np.dtype(np.int32)
SCALE_BYTES = FLOAT.itemsize
LARGEST = np.float32(2.0**127)  # a larger magnitude could be rounded to infinity
LARGEST_RANDOM = 2**15  # random numbers are odd multiples of 2^-16: a code plus one is below the next one
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Quantizer(ABC):
    """Encodes float32 arrays as messages, and decodes them.

    Infinities, NaNs and overflows may cause NumPy's floating-point warnings: callers ignore them by np.errstate.

    block: how many elements have one scale, 1 to PIECE.
    """

    kind: ClassVar[str]  # the name of the codes
    dtype: ClassVar[np.dtype]

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._state, self._workspace = 0, Workspace()

    def blocks(self, length: int) -> int:
        """Return how many scales `length` elements have."""
        return -(-length // self.block)

    def nbytes(self, length: int) -> int:
        """Return the bytes of a message of `length` elements."""
        return self.blocks(length) * SCALE_BYTES + length

    def seed(self, *numbers: int) -> None:
        """Start a sequence of random numbers that depends on `numbers`, for the quantisers that draw some."""
        self._state = 0
        for number in numbers:
            self._state = _mixed(self._state ^ (number & MASK))

    def encode(
        self, values: np.ndarray, message: np.ndarray, error: np.ndarray | None = None, factor: float = 1.0
    ) -> None:
        """Write the message of `values`, to be decoded as `factor` times the values.

        values: 1-D, float32, contiguous. message: uint8, `nbytes(values.size)` long, 4-byte aligned.
        error: float32 array of the same length, may be `values` itself: overwritten with `values` minus what the codes
            stand for, without `factor`; with zeros in blocks of which that is not finite.
        """
        scales, codes = self._parts(message, values.size)
        if not kernels.block_magnitudes(values, self.block, scales):
            for blocks, span in self._pieces(values.size):
                magnitudes = np.abs(values[span], out=self._scratch(span)).view(BITS)  # NaN is the largest integer
                starts = np.arange(0, magnitudes.size, self.block)
                np.maximum.reduceat(magnitudes, starts, out=scales.view(BITS)[blocks])
        np.copyto(scales, np.inf, where=scales > LARGEST)
        self._encode(values, scales, codes, error)
        if factor != 1.0:
            np.multiply(scales, factor, out=scales)
        if error is not None and not np.isfinite(scales).all():
            for bad in np.flatnonzero(~np.isfinite(scales)):
                error[bad * self.block : (bad + 1) * self.block] = 0

    def decode(self, message: np.ndarray, out: np.ndarray) -> None:
        """Write the values of a message to `out`: 1-D, contiguous, float32 or float64."""
        scales, codes = self._parts(message, out.size)
        into = out if out.dtype == FLOAT else self._workspace.array("decoded", out.size, FLOAT)
        if not kernels.decode(self.kind, codes, self.block, scales, into):
            for blocks, span in self._pieces(out.size):
                self._values(codes[span], scales[blocks], into[span])
        if into is not out:
            out[:] = into

    def add(self, message: np.ndarray, total: np.ndarray) -> None:
        """Add the values of a message to `total`: 1-D, contiguous, float32."""
        scales, codes = self._parts(message, total.size)
        if not kernels.decode(self.kind, codes, self.block, scales, total, adds=True):
            for blocks, span in self._pieces(total.size):
                total[span] += self._values(codes[span], scales[blocks], self._scratch(span))

    @abstractmethod
    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        """Replace the magnitudes in `scales` by scales, and write `codes` and `error`."""

    def _values(self, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the values of codes to `out`, and return it."""
        if self.kind == "int8":
            np.copyto(out, codes)
        else:
            np.copyto(out, codes.view(E4M3))
        return self._times(out, scales, out)

    def _times(self, values: np.ndarray, factors: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the product of every block and its factor to `out`, and return it."""
        whole = values.size // self.block * self.block
        rows, last = values[:whole].reshape(-1, self.block), factors[whole // self.block :]
        np.multiply(rows, factors[: len(rows), None], out[:whole].reshape(rows.shape))
        if last.size:
            np.multiply(values[whole:], last, out[whole:])
        return out

    def _scratch(self, span: slice) -> np.ndarray:
        """Return scratch memory for the elements of `span`."""
        return self._workspace.array("values", span.stop - span.start, FLOAT)

    def _pieces(self, length: int) -> Iterator[tuple[slice, slice]]:
        """Yield the blocks and the elements of pieces for which NumPy's temporary arrays stay in the cache."""
        step = max(CACHED // self.block, 1)
        for first in range(0, self.blocks(length), step):
            span = slice(first * self.block, min((first + step) * self.block, length))
            yield slice(first, self.blocks(span.stop)), span

    def _parts(self, message: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and the codes of a message: views."""
        start = self.blocks(length) * SCALE_BYTES
        return message[:start].view(FLOAT), message[start : start + length].view(kernels.CODES[self.kind])


class Int8(Quantizer):
    """Signed integers of 8 bits, -127 to 127, rounded stochastically: up with the probability of the fraction.

    `seed` must differ between ranks and calls; every value's expectation over all seeds is exact to 2^-16 of a scale.
    """

    kind, dtype = "int8", np.dtype(np.int8)
    LARGEST = np.float32(127)
    LEAST = np.float32(2.0**-119)  # a smaller magnitude would have an infinite inverse

    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        np.maximum(scales, self.LEAST, out=scales)
        inverses = np.divide(self.LARGEST, scales)
        np.divide(scales, self.LARGEST, out=scales)
        table, whole = _random_numbers(), values.size // self.block * self.block
        step = PIECE // self.block * self.block
        edges = [*range(0, whole, step), *([whole] if whole < values.size else []), values.size]
        for begin, end in pairwise(edges):
            self._state = (self._state + GOLDEN) & MASK
            blocks, start = slice(begin // self.block, self.blocks(end)), _mixed(self._state) % LARGEST_RANDOM
            part, written, random = values[begin:end], codes[begin:end], table[start : start + end - begin]
            own, inverse, left = scales[blocks], inverses[blocks], None if error is None else error[begin:end]
            if not kernels.encode(self.kind, part, self.block, own, inverse, random, written, left):
                rounded = self._times(part, inverse, self._scratch(slice(begin, end)))
                np.add(rounded, random, out=rounded)
                np.floor(rounded, out=rounded)
                np.copyto(written, rounded, casting="unsafe")
                if left is not None:
                    np.subtract(part, self._times(rounded, own, rounded), out=left)


class Float8(Quantizer):
    """float8_e4m3fn, rounded to nearest: the codes of ml_dtypes' cast of values / scales."""

    kind, dtype = "float8", E4M3
    LARGEST = np.float32(448)
    INFINITY, FRACTION = map(np.int32, (0x7F800000, 0x7FFFFF))

    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        np.divide(scales, self.LARGEST, out=scales)
        bits = scales.view(BITS)
        np.minimum(bits, self.INFINITY, out=bits)  # no NaN
        np.add(bits, self.FRACTION, out=bits)  # to the next power of two; 0 stays
        np.bitwise_and(bits, ~self.FRACTION, out=bits)
        np.maximum(scales, np.finfo(FLOAT).tiny, out=scales)
        inverses = np.divide(1, scales, dtype=FLOAT)
        if kernels.encode(self.kind, values, self.block, scales, inverses, None, codes, error):
            return
        for blocks, span in self._pieces(values.size):
            scaled = self._times(values[span], inverses[blocks], self._scratch(span))
            np.copyto(codes[span].view(E4M3), scaled, casting="unsafe")
            if error is not None:
                np.subtract(values[span], self._values(codes[span], scales[blocks], scaled), out=error[span])


KINDS: dict[str, type[Quantizer]] = {"int8": Int8, "float8": Float8}


@functools.cache
def _random_numbers() -> np.ndarray:
    """Return numbers between 0 and 1 in random order, from any place on each of LARGEST_RANDOM numbers once."""
    order = np.random.default_rng(0).permutation(LARGEST_RANDOM)
    numbers = ((order + 0.5) / LARGEST_RANDOM).astype(FLOAT)
    return np.concatenate([numbers, numbers[np.arange(PIECE) % LARGEST_RANDOM]])


def _mixed(number: int) -> int:
    """Return a hash of 64 bits (G. Steele et al.: fast splittable pseudorandom number generators, 2014)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)

"""Quantises float32 arrays to int8 with a scale for each block of elements.

The scale of a block is its largest magnitude / 127; values are rounded stochastically, so their expected value is
exact (T. Dettmers: 8-bit approximations for parallelism in deep learning, 2016; block scales as in G. Wang et al.:
ZeRO++, 2023). Differences: evenly spaced codes, not Dettmers' exponent and fraction; random numbers come from a table.

A message is one uint8 array: the float32 scale of every block, in this machine's byte order, then one code for each
element, an integer from -127 to 127. An element's value is code * scale. The last block may be shorter. A block that
holds a NaN or a magnitude above 2^127 has an infinite or NaN scale: all its elements are decoded as infinities or NaNs.
"""

import functools
from itertools import pairwise

import numpy as np

from allreduce import kernels
from allreduce.arrays.workspace import Workspace

PIECE = 32 * 1024  # elements with numbers from one place of the table of random numbers
BLOCK = 256  # elements with one scale
FLOAT = np.dtype(np.float32)
SCALE_BYTES = FLOAT.itemsize
LARGEST_CODE = np.float32(127)
LEAST = np.float32(2.0**-119)  # a smaller magnitude would have an infinite inverse
LARGEST = np.float32(2.0**127)  # a larger magnitude could be rounded to infinity
LARGEST_RANDOM = 2**15  # random numbers are odd multiples of 2^-16: a code plus one is below the next one
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Quantizer:
    """Encodes float32 arrays as messages, and decodes them.

    Values are rounded up with the probability of the fraction. The expectation over all seeds is exact to 2^-16 of a
    scale.

    Infinities, NaNs and overflows may cause NumPy's floating-point warnings: callers ignore them by np.errstate.

    block: how many elements have one scale, 1 to PIECE.
    """

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
        """Start a sequence of random numbers that depends on `numbers`, which must differ between ranks and calls."""
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
        kernels.block_magnitudes(values, self.block, scales)
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
        kernels.decode(codes, self.block, scales, into)
        if into is not out:
            out[:] = into

    def add(self, message: np.ndarray, total: np.ndarray) -> None:
        """Add the values of a message to `total`: 1-D, contiguous, float32."""
        scales, codes = self._parts(message, total.size)
        kernels.decode(codes, self.block, scales, total, adds=True)

    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        """Replace the magnitudes in `scales` by scales, and write `codes` and `error`."""
        np.maximum(scales, LEAST, out=scales)
        inverses = np.divide(LARGEST_CODE, scales)
        np.divide(scales, LARGEST_CODE, out=scales)
        table, whole = _random_numbers(), values.size // self.block * self.block
        step = PIECE // self.block * self.block
        edges = [*range(0, whole, step), *([whole] if whole < values.size else []), values.size]
        for begin, end in pairwise(edges):
            self._state = (self._state + GOLDEN) & MASK
            blocks, start = slice(begin // self.block, self.blocks(end)), _mixed(self._state) % LARGEST_RANDOM
            part, written, random = values[begin:end], codes[begin:end], table[start : start + end - begin]
            own, inverse, left = scales[blocks], inverses[blocks], None if error is None else error[begin:end]
            kernels.encode(part, self.block, own, inverse, random, written, left)

    def _parts(self, message: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and the codes of a message: views."""
        start = self.blocks(length) * SCALE_BYTES
        return message[:start].view(FLOAT), message[start : start + length].view(np.int8)


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

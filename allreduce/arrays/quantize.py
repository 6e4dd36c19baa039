"""Quantises float32 arrays to 8 bits with a scale for each block of elements, in pieces that stay in the cache.

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
from typing import ClassVar, NamedTuple

import numpy as np

from allreduce import kernels

PIECE = 32 * 1024  # elements: with scratch memory and random numbers half of a cache of 1 MiB
BLOCK = 256  # elements with one scale
FLOAT = np.dtype(np.float32)
BITS = np.dtype(np.int32)
SCALE_BYTES = FLOAT.itemsize
LARGEST = np.float32(2.0**127)  # a larger magnitude could be rounded to infinity
LARGEST_RANDOM = 2**15  # random numbers are odd multiples of 2^-16: a code plus one is below the next one
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Piece(NamedTuple):
    """Whole blocks of a message that are worked on together; `width` elements have one scale."""

    elements: slice
    blocks: slice
    width: int


class Quantizer(ABC):
    """Encodes float32 arrays as messages, and decodes them. Calls allocate no more than one float for each block.

    Infinities, NaNs and overflows may cause NumPy's floating-point warnings: callers ignore them by np.errstate.

    block: how many elements have one scale, 1 to PIECE.
    """

    dtype: ClassVar[str]  # the name of the codes' dtype

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._floats = np.empty(PIECE, FLOAT)
        self._state = 0

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
        if not kernels.call("block_magnitudes", values, values.size, self.block, scales):
            for piece in self._pieces(values.size):
                magnitudes = np.abs(values[piece.elements], out=self._scratch(piece))
                rows = magnitudes.view(BITS).reshape(-1, piece.width)  # as integers, NaN is the largest
                np.maximum.reduce(rows, axis=1, out=scales[piece.blocks].view(BITS))
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
        factors = self._factors(scales)
        for piece in self._pieces(out.size):
            part = out[piece.elements]
            into = part if out.dtype == FLOAT else self._scratch(piece)
            self._decode(codes[piece.elements], factors, piece, into)
            if into is not part:
                np.copyto(part, into)

    def add(self, message: np.ndarray, total: np.ndarray) -> None:
        """Add the values of a message to `total`: 1-D, contiguous, float32."""
        scales, codes = self._parts(message, total.size)
        factors = self._factors(scales)
        for piece in self._pieces(total.size):
            part = total[piece.elements]
            values = self._scratch(piece)
            self._decode(codes[piece.elements], factors, piece, values)
            np.add(part, values, out=part)

    @abstractmethod
    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        """Replace the magnitudes in `scales` by scales, and write `codes` and `error`."""

    @abstractmethod
    def _factors(self, scales: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the factors of every block by which `_decode` multiplies, one after the other."""

    @abstractmethod
    def _decode(self, codes: np.ndarray, factors: tuple[np.ndarray, ...], piece: Piece, out: np.ndarray) -> None:
        """Write the values of a piece's codes to `out`, float32."""

    def _parts(self, message: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and the codes (uint8) of a message: views."""
        start = self.blocks(length) * SCALE_BYTES
        return message[:start].view(FLOAT), message[start : start + length]

    def _pieces(self, length: int) -> Iterator[Piece]:
        """Yield the pieces of `length` elements; the last block, if it is shorter, is one of its own."""
        block, whole = self.block, length // self.block
        step = PIECE // block
        for first in range(0, whole, step):
            stop = min(first + step, whole)
            yield Piece(slice(first * block, stop * block), slice(first, stop), block)
        if whole * block < length:
            yield Piece(slice(whole * block, length), slice(whole, whole + 1), length - whole * block)

    def _scratch(self, piece: Piece) -> np.ndarray:
        return self._floats[: piece.elements.stop - piece.elements.start]


class Int8(Quantizer):
    """Signed integers of 8 bits, -127 to 127, rounded stochastically: up with the probability of the fraction.

    `seed` must differ between ranks and calls; every value's expectation over all seeds is exact to 2^-16 of a scale.
    """

    dtype = "int8"
    LARGEST = np.float32(127)
    LEAST = np.float32(2.0**-119)  # a smaller magnitude would have an infinite inverse

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__(block)
        self._random = _random_numbers()

    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        np.maximum(scales, self.LEAST, out=scales)
        inverses = np.divide(self.LARGEST, scales)
        np.divide(scales, self.LARGEST, out=scales)
        for piece in self._pieces(values.size):
            part, blocks, start = values[piece.elements], piece.blocks, self._draw()
            random, written = self._random[start : start + part.size], codes[piece.elements].view(np.int8)
            left = None if error is None else error[piece.elements]
            sizes = part.size, piece.width
            if kernels.call("encode_int8", part, *sizes, scales[blocks], inverses[blocks], random, written, left):
                continue
            scaled = self._scratch(piece)
            _multiply(part, inverses, piece, scaled)
            np.add(scaled, random, out=scaled)
            np.floor(scaled, out=scaled)
            np.copyto(written, scaled, casting="unsafe")
            if left is not None:
                _multiply(scaled, scales, piece, scaled)
                np.subtract(part, scaled, out=left)

    def add(self, message: np.ndarray, total: np.ndarray) -> None:
        scales, codes = self._parts(message, total.size)
        if not kernels.call("add_int8", codes, total.size, self.block, scales, total):
            super().add(message, total)

    def _draw(self) -> int:
        """Return the next place in the table of random numbers."""
        self._state = (self._state + GOLDEN) & MASK
        return _mixed(self._state) % LARGEST_RANDOM

    def _factors(self, scales: np.ndarray) -> tuple[np.ndarray, ...]:
        return (scales,)

    def _decode(self, codes: np.ndarray, factors: tuple[np.ndarray, ...], piece: Piece, out: np.ndarray) -> None:
        if not kernels.call("decode_int8", codes, out.size, piece.width, factors[0][piece.blocks], out):
            np.copyto(out, codes.view(np.int8))
            _multiply(out, factors[0], piece, out)


class Float8(Quantizer):
    """float8_e4m3fn by integer operations: the codes of ml_dtypes' cast, several times as fast.

    A float32 times 2^-120 has e4m3's exponent in its exponent's lower bits, also for subnormals: rounding to 3 bits of
    fraction is integer arithmetic. (A process that flushes subnormals flushes them here, too. Values below 2^-7 scales
    are first rounded to multiples of 2^-29, so what lies that close to a tie may get the code next to it.)
    """

    dtype = "float8_e4m3fn"
    LARGEST = np.float32(448)
    DOWN, UP = np.float32(2.0**-120), np.float32(2.0**120)
    MODERATE = 64.0  # of smaller scales, scale * UP and DOWN / scale are normal numbers
    DROPPED = 20  # bits of float32's fraction that e4m3 has not
    INFINITY, FRACTION, KEPT, CODE = map(np.int32, (0x7F800000, 0x7FFFFF, -(2**20), -0x78100000))

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__(block)
        self._spare, self._signs = np.empty(PIECE, BITS), np.empty(PIECE, np.uint8)

    def _encode(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray, error: np.ndarray | None) -> None:
        np.divide(scales, self.LARGEST, out=scales)
        bits = scales.view(BITS)
        np.minimum(bits, self.INFINITY, out=bits)  # no NaN
        np.add(bits, self.FRACTION, out=bits)  # to the next power of two; 0 stays
        np.bitwise_and(bits, ~self.FRACTION, out=bits)
        np.maximum(scales, np.finfo(FLOAT).tiny, out=scales)
        inverses = np.divide(1, scales, dtype=FLOAT)
        ups = self._factors(scales)
        downs = (np.multiply(inverses, self.DOWN),) if len(ups) == 1 else (inverses, self.DOWN)
        for piece in self._pieces(values.size):
            part, scaled = values[piece.elements], self._scratch(piece)
            _multiply(part, downs[0], piece, scaled)
            for down in downs[1:]:
                np.multiply(scaled, down, out=scaled)
            bits = scaled.view(BITS)
            spare, signs = self._spare[: bits.size], self._signs[: bits.size]
            _narrow(bits, codes[piece.elements], self.DROPPED, spare, signs)
            if error is not None:
                np.bitwise_and(bits, self.KEPT, out=bits)
                self._scale_up(scaled, ups, piece)
                np.subtract(part, scaled, out=error[piece.elements])

    def _factors(self, scales: np.ndarray) -> tuple[np.ndarray, ...]:
        if scales.max(initial=0) < self.MODERATE:
            return (np.multiply(scales, self.UP),)
        return (scales, self.UP)

    def _scale_up(self, scaled: np.ndarray, factors: tuple[np.ndarray, ...], piece: Piece) -> None:
        for up in factors[1:]:  # first: there the product is exact
            np.multiply(scaled, up, out=scaled)
        _multiply(scaled, factors[0], piece, scaled)

    def _decode(self, codes: np.ndarray, factors: tuple[np.ndarray, ...], piece: Piece, out: np.ndarray) -> None:
        _widen(codes.view(np.int8), out.view(BITS), self.DROPPED, self.CODE)
        self._scale_up(out, factors, piece)


KINDS: dict[str, type[Quantizer]] = {"int8": Int8, "float8": Float8}


def _multiply(values: np.ndarray, factors: np.ndarray, piece: Piece, out: np.ndarray) -> None:
    """Multiply every block of a piece by its factor."""
    width = piece.width
    np.multiply(values.reshape(-1, width), factors[piece.blocks, None], out=out.reshape(-1, width))


def _widen(codes: np.ndarray, bits: np.ndarray, dropped: int, moved: np.int32) -> None:
    """Write to `bits` the bits of short floats, moved to the places of float32's. Local.

    codes: signed integers. dropped: the bits of float32's fraction that the short floats have not. moved: the bits of
    float32 that remain.
    """
    np.copyto(bits, codes)  # the sign fills the upper bits
    np.left_shift(bits, dropped, out=bits)
    np.bitwise_and(bits, moved, out=bits)


def _narrow(bits: np.ndarray, codes: np.ndarray, dropped: int, spare: np.ndarray, signs: np.ndarray) -> None:
    """Do the inverse of `_widen`, rounded to nearest, ties to even. Local.

    bits: overwritten by the rounded ones, which must fit the codes' exponents. codes: unsigned integers. spare: like
    `bits`, signs: like `codes`; both are overwritten.
    """
    sign = 8 * codes.itemsize - 1
    np.right_shift(bits, dropped, out=spare)  # add half a unit, less the smallest bit where the last one is even
    np.bitwise_and(spare, 1, out=spare)
    np.add(bits, spare, out=bits)
    np.add(bits, (1 << (dropped - 1)) - 1, out=bits)
    np.right_shift(bits, dropped, out=spare)  # exponent and fraction; the sign is in the upper bits
    np.copyto(codes, spare, casting="unsafe")
    np.right_shift(bits, 31 - sign, out=spare)
    np.copyto(signs, spare, casting="unsafe")
    np.bitwise_and(signs, 1 << sign, out=signs)
    np.bitwise_or(codes, signs, out=codes)


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

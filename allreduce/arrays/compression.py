"""The values of `compress=`: the names "float16", "int8", "powersgd:4" ..., and the options that they stand for."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.arrays.arguments import is_integer, is_number
from allreduce.arrays.quantize import PIECE
from allreduce.errors import OptionError

LONG = (np.dtype(np.float32), np.dtype(np.float64))  # the dtypes that are compressed


class Compression:
    """Base class of the options of a compression.

    between_nodes: on several nodes, only the messages between them are compressed, by the backends that reduce inside
        a node first.
    """

    between_nodes: ClassVar[bool] = True

    def error(self) -> str:
        """Return the text of an error in the options, or "". Local."""
        return ""

    def sent(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype whose range limits the values of arrays of `dtype`. Local."""
        return dtype


@dataclass(frozen=True)
class Half(Compression):
    """float32 and float64 are sent as 16-bit floats, and summed in float32.

    dtype: "bfloat16", with the range of float32 and 8 binary digits, or "float16", with 11 binary digits; values or
    sums above 65504 become infinity.
    """

    dtype: str = "bfloat16"

    NAMES: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def error(self) -> str:
        return "" if self.dtype in self.NAMES else f"dtype={self.dtype!r} is unknown; use one of {self.NAMES}"

    def sent(self, dtype: np.dtype) -> np.dtype:
        return dtypes.parse(self.dtype) if dtype in LONG else dtype

    def __str__(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class Quantized(Compression):
    """float32 and float64 are sent with 8 bits an element and one float32 scale a block, and summed in float32.

    An element is sent in steps of 1/127 of the largest magnitude of its block, rounded at random so that the mean is
    right.

    block_size: elements that share a scale. error_feedback: add to an array the error of its last call first, for
        arrays from `allocate`. seed: of the random rounding.
    """

    block_size: int = 256
    error_feedback: bool = True
    seed: int = 0

    def error(self) -> str:
        return _integer_error(self, "block_size", 8, PIECE) or _integer_error(self, "seed", 0, 2**63 - 1)

    def __str__(self) -> str:
        return "int8" if self == Quantized() else repr(self)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Matrices are sent as products of two thin matrices of `matrix_approximation_rank` columns (Vogels et al. 2019).

    The names are those of PyTorch's PowerSGDState where they mean the same. start_powerSGD_iter: calls in full
    precision before the first compressed one. min_compression_rate: a matrix is compressed only if that divides its
    elements by at least this number. use_error_feedback: add to an array the error of its last call first.
    random_seed: of the first Q.
    """

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 10  # noqa: N815, PyTorch's name
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    random_seed: int = 0

    between_nodes: ClassVar[bool] = False

    def error(self) -> str:
        for name, least in (("matrix_approximation_rank", 1), ("start_powerSGD_iter", 0), ("random_seed", 0)):
            if wrong := _integer_error(self, name, least, 2**31):
                return wrong
        rate = self.min_compression_rate
        return "" if is_number(rate) and rate >= 0 else f"min_compression_rate must be a number >= 0, got {rate!r}"

    def __str__(self) -> str:
        rank = self.matrix_approximation_rank
        return f"powersgd:{rank}" if self == PowerSGD(rank) else repr(self)


NAMES = (*Half.NAMES, "int8", "powersgd:4")

Given = str | Compression | None  # the type of `compress=`


def parse(compress: Given) -> Compression | None:
    """Return the options that `compress` stands for. Local. Raises OptionError."""
    if compress is None:
        return None
    if isinstance(compress, Compression) and type(compress) in (Half, Quantized, PowerSGD):
        if wrong := compress.error():
            raise OptionError(f"compress={type(compress).__name__}(...): {wrong}")
        return compress
    if isinstance(compress, str):
        if compress in Half.NAMES:
            return Half(compress)
        if compress == "int8":
            return Quantized()
        kind, colon, rank = compress.partition(":")
        if kind == "powersgd" and rank.isascii() and (rank.isdigit() or not colon):
            return parse(PowerSGD(int(rank or 1)))
    known = ", ".join(f'"{name}"' for name in NAMES)
    hint = notices.near(str(compress), NAMES) or ";"
    raise OptionError(
        f"compress={compress!r} is unknown{hint} use {known} (any rank), None, or an object of options: "
        "allreduce.Half, allreduce.Quantized, allreduce.PowerSGD"
    )


def shown(compress: Given) -> str:
    """Return `compress` as text that is equal on all ranks that mean the same. Local."""
    return _quoted(parse(compress))


def check(compression: Compression | None, name: str, sums: bool, sums_half: bool) -> None:
    """Raise OptionError if the backend `name` can't be compressed so. Local.

    sums, sums_half: attributes of the backend (see AllReduce).
    """
    given = f"compress={_quoted(compression)}"
    if isinstance(compression, Half):
        if not sums_half:
            text = 'sums no 16-bit floats; use "auto", "ring" or another backend that does'
            raise OptionError(f"{given}: {name!r} {text}")
    elif compression is not None and not sums:
        raise OptionError(f'{given}: {name!r} does not sum; use "auto" or another backend')


def _quoted(compression: Compression | None) -> str:
    if compression is None:
        return "None"
    text = str(compression)
    return text if text.endswith(")") else f"'{text}'"


def _integer_error(options: Compression, name: str, least: int, most: int) -> str:
    value = getattr(options, name)
    return "" if is_integer(value, least, most) else f"{name} must be an integer from {least} to {most}, got {value!r}"

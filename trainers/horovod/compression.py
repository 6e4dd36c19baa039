"""The values of `compression=`: casts of tensors, as Horovod has them, and compressions by the backend."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch

from allreduce import notices
from allreduce.arrays import compression as compressions
from allreduce.arrays.compression import Given, Half, PowerSGD, Quantized
from allreduce.errors import OptionError
from trainers.horovod.errors import ArgumentError


class Compressor:
    """`compress` and its inverse `decompress`, up to rounding. dtype: in which floats are sent; None: unchanged.

    options: what the backend does when it sends a tensor (a value of `compress=`); None: it sends the tensor as it is.

    Backends sum 16-bit floats in float32 and round once. Integers are not compressed.
    """

    dtype: ClassVar[torch.dtype | None] = None
    options: Given = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> "tuple[torch.Tensor, torch.dtype | None]":
        """Return the tensor to send, and the context for `decompress`."""
        if cls.dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: "torch.dtype | None") -> torch.Tensor:
        """Return the tensor in the dtype that it had before `compress`."""
        return tensor if context is None else tensor.to(context)


class NoneCompressor(Compressor):
    """No compression."""


class FP16Compressor(Compressor):
    """float16: more digits, and nothing above 65504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """bfloat16: fewer digits, and the range of float32."""

    dtype = torch.bfloat16


class BackendCompressor(Compressor):
    """The backend compresses: sums and averages of float32 and float64 tensors. All else is sent as it is.

    options: a value of `compress=` of allreduce.create. Raises ArgumentError; unknown names name the nearest.
    """

    def __init__(self, options: Given) -> None:
        try:
            compressions.parse(options)
        except OptionError as error:
            raise ArgumentError(str(error)) from None
        self.options = options


class Int8Compressor(BackendCompressor):
    """8-bit integers, scaled by blocks and rounded at random. settings: block_size ... of allreduce.Quantized."""

    options: Given = Quantized("int8")

    def __init__(self, **settings: Any) -> None:
        super().__init__(_options(Quantized, "int8", settings))


class Float8Compressor(BackendCompressor):
    """8-bit floats, scaled by blocks. settings: block_size ... of allreduce.Quantized."""

    options: Given = Quantized("float8")

    def __init__(self, **settings: Any) -> None:
        super().__init__(_options(Quantized, "float8", settings))


class PowerSGDCompressor(BackendCompressor):
    """Matrices as products of two thin ones with `rank` columns. settings: start_powerSGD_iter ... of
    allreduce.PowerSGD.
    """

    options: Given = PowerSGD(4)

    def __init__(self, rank: int = 4, **settings: Any) -> None:
        super().__init__(_options(PowerSGD, rank, settings))


class Compression:
    """The values of `compression=`. `int8`, `float8` and `powersgd` may be called with settings: `powersgd(rank=8)`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    float8 = Float8Compressor
    powersgd = PowerSGDCompressor


def by_backend(compression: Any) -> Given:
    """Return what the backend does for a compressor; None for one that does all itself, as those of other libraries."""
    kind = compression if isinstance(compression, type) else type(compression)
    return compression.options if issubclass(kind, Compressor) else None


def compressor(given: Any) -> Any:
    """Return the compressor that `compression=given` selects: a Compressor, its class, or another object with its
    methods; or a value of `compress=` of allreduce.create. Raises ArgumentError.
    """
    if callable(getattr(given, "compress", None)) and callable(getattr(given, "decompress", None)):
        return given
    if given is None:
        return NoneCompressor
    found = BackendCompressor(given)
    if isinstance(options := compressions.parse(given), Half):  # one way to send 16-bit floats
        return {"float16": FP16Compressor, "bfloat16": BF16Compressor}[options.dtype]
    return found


def _options(kind: Callable[..., Given], first: Any, settings: dict[str, Any]) -> Given:
    _, *known = (each.name for each in fields(kind))  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            hint = notices.near(name, known) or "."
            raise ArgumentError(f"Compression has no setting {name!r} here{hint} There are: {', '.join(known)}")
    return kind(first, **settings)

"""The values of `compression=`: casts of tensors, as Horovod has them."""

from typing import Any, ClassVar

import torch

from allreduce.errors import OptionError


class Compressor:
    """`compress` and its inverse `decompress`, up to rounding. dtype: in which floats are sent; None: unchanged.

    Backends sum 16-bit floats in float32 and round once. Integers are not compressed.
    """

    dtype: ClassVar[torch.dtype | None] = None

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


class Compression:
    """The values of `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compressor(given: Any) -> None:
    """Raise OptionError unless `compression=given` is a Compressor, or another object with its methods."""
    if not (callable(getattr(given, "compress", None)) and callable(getattr(given, "decompress", None))):
        raise OptionError(
            f"compression={given!r}: give hvd.Compression.none, fp16 or bf16; trainers.pytorch.MirroredOptimizer("
            'compress="int8") sends fewer bits'
        )

"""Compression: what travels instead of a tensor, and how it becomes one of the tensor's dtype again."""

from typing import ClassVar

import torch


class Compressor:
    """Two functions that undo one another, up to rounding. dtype: of floats that travel; None: they stay as they are.

    Sums of 16-bit floats are made in float32 and rounded once, by our backends. Integers stay as they are.
    """

    dtype: ClassVar[torch.dtype | None] = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> "tuple[torch.Tensor, torch.dtype | None]":
        """What travels, and what `decompress` needs to know."""
        if cls.dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: "torch.dtype | None") -> torch.Tensor:
        """A tensor of the dtype that `compress` was given."""
        return tensor if context is None else tensor.to(context)


class NoneCompressor(Compressor):
    """Everything travels as it is."""


class FP16Compressor(Compressor):
    """float16: more digits, and nothing above 65504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """bfloat16: fewer digits, and the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """What `compression=` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

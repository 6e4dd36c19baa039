"""Compression of tensors before they are sent, and its inverse."""

from typing import ClassVar

import torch


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

"""Compression: what travels instead of a tensor, and how it becomes one of the tensor's dtype again."""

from typing import ClassVar, Protocol

import torch


class Compressor(Protocol):
    """Two functions that undo one another, up to rounding."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> "tuple[torch.Tensor, torch.dtype | None]":
        """What travels, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, context: "torch.dtype | None") -> torch.Tensor:
        """A tensor of the dtype that `compress` was given."""


class NoneCompressor:
    """Everything travels as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> "tuple[torch.Tensor, torch.dtype | None]":
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: "torch.dtype | None") -> torch.Tensor:
        return tensor


class _Short:
    """Floats travel with 16 bits; sums are made in float32 and rounded once, by our backends. Integers stay."""

    dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> "tuple[torch.Tensor, torch.dtype | None]":
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: "torch.dtype | None") -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_Short):
    """float16: more digits, and nothing above 65504."""

    dtype = torch.float16


class BF16Compressor(_Short):
    """bfloat16: fewer digits, and the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """What `compression=` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

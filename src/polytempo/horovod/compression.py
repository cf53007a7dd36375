"""Compression of floating point tensors for a message: cast before it, cast back after it."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """The interface of a compressor; a class of your own works too."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and the context for `decompress`."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor that `compress` was given, to rounding."""


class NoneCompressor:
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class _Cast:
    """Casts floating point tensors to a narrower dtype; integers stay as they are."""

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast to the narrow dtype."""
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cast back."""
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """float16: three decimal digits, up to 65504."""

    narrow = torch.float16


class BF16Compressor(_Cast):
    """bfloat16: two decimal digits, the range of float32."""

    narrow = torch.bfloat16


class Compression:
    """The values of `compression=`: `none`, `fp16`, `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

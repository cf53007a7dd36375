"""Numbers are made smaller on their way, and are what they were at the end."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """Bring your own: two functions, and whatever the second needs to undo the first."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What is sent, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """What `compress` was given, or nearly."""


class NoneCompressor:
    """Sends what it is given."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class _Cast:
    """Sends floating point numbers as narrower ones; whole numbers stay as they are."""

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast to the narrow form."""
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cast back."""
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """16 bits: three digits, numbers up to 65504."""

    narrow = torch.float16


class BF16Compressor(_Cast):
    """16 bits: two digits, numbers as large as those of 32 bits."""

    narrow = torch.bfloat16


class Compression:
    """What can be given as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

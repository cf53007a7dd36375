"""From the tensors a caller has to flat ones that plans can work on, and back: on the CPU, or where they are (`stays`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from polytempo.collectives.chunking import cuts
from polytempo.errors import UsageError

Back = Callable[[], object]
#: Tensors of a list that a description names.
SHOWN = 4


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse what has no flat form."""
    if tensor.layout != torch.strided:
        raise UsageError(f"expected a dense tensor, got one with layout {tensor.layout}; use .to_dense()")


def flat(tensor: torch.Tensor, stays: bool = False) -> tuple[torch.Tensor, Back | None]:
    """A flat tensor with the same numbers, in the same memory if possible; else what brings changes back."""
    check_dense(tensor)
    whole = tensor.detach()
    if whole.is_inference() and not torch.is_inference_mode_enabled():
        whole = torch.from_dlpack(whole)  # the mode is the caller's thread's, and this may be another
    if (stays or whole.device.type == "cpu") and whole.is_contiguous() and not whole.is_conj() and not whole.is_neg():
        return _real(whole), None
    copy = (whole if stays else whole.to("cpu")).resolve_conj().resolve_neg().contiguous()
    if copy.data_ptr() == whole.data_ptr():
        copy = copy.clone()
    return _real(copy), lambda: whole.copy_(copy)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor).view(-1)


class Fused:
    """Several tensors of one dtype as one: where there is but one, without a copy."""

    def __init__(self, tensors: Sequence[torch.Tensor], stays: bool = False) -> None:
        self._flats = [flat(tensor, stays) for tensor in tensors]
        alone = len(tensors) == 1
        self.whole = self._flats[0][0] if alone else torch.cat([piece for piece, _ in self._flats])
        self._alone = alone

    def scatter(self) -> None:
        """Bring changes back."""
        start = 0
        for piece, back in self._flats:
            if not self._alone:
                piece.copy_(self.whole[start : start + piece.numel()])
                start += piece.numel()
            if back is not None:
                back()


def fuse(tensors: Sequence[torch.Tensor], stays: bool = False) -> list[Fused]:
    """One for each dtype, in the order in which dtypes first appear."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [Fused(members, stays) for members in by_dtype.values()]


def split(tensor: torch.Tensor, count: int, grain: int = 1) -> list[torch.Tensor]:
    """A flat tensor in parts that differ by at most a grain."""
    return [tensor[part] for part in cuts(tensor.numel(), count, grain)]


def shapes_of(tensors: Sequence[torch.Tensor]) -> str:
    """All of a list: some in words, the rest as a number that differs where they do."""
    names = [shape_of(tensor) for tensor in tensors]
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])}, ... {len(names)} tensors, {zlib.crc32(','.join(names).encode()):08x}"


def shape_of(tensor: torch.Tensor) -> str:
    """For descriptions of calls."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""From the tensors a caller has to flat ones that plans can work on, and back: on the CPU, or where they are (`stays`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from polytempo.collectives.steps import cuts
from polytempo.device.copy_stream import CopyMark, CopyStream, copy_stream
from polytempo.errors import UsageError

Back = Callable[[], object]
#: Tensors of a list that a description names.
SHOWN = 4

# A flat tensor of a GPU in pinned host memory, where collectives between hosts work on it: it arrives chunk by chunk.
#
# All chunks are copied in order, on a stream of their own; the host waits for a chunk when it is sent or combined, so while
# one is on the wire the next ones are copied. Back, the whole is copied behind the call's last step, and the host does not
# wait: the caller's stream does (`device_call.py`).

#: Bytes of a chunk.
CHUNK = 4 << 20


class StagedCopy:
    """One tensor's copy.

    Args:
        source: A flat tensor on a GPU.
        copies: From it; a stream of its own by default.
        chunk: Bytes that are copied at once.
    """

    def __init__(self, source: torch.Tensor, copies: CopyStream | None = None, chunk: int = CHUNK) -> None:
        self._source = source  # until all of it is here
        self.whole = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        copies = copies or copy_stream(source.device)
        copies.follow()
        self._marks: list[tuple[int, CopyMark]] = []  # the end of a chunk in bytes, and when it is here
        for part in cuts(source.numel(), max(1, -(-source.nbytes // chunk))):
            copies.copy(self.whole[part], source[part])
            self._marks.append((part.stop * source.element_size(), copies.mark()))
        self._next = 0  # chunks before are here

    def need(self, part: torch.Tensor) -> None:
        """Wait until a part of it is here; any other tensor is."""
        end = part.data_ptr() - self.whole.data_ptr() + part.nbytes
        if 0 <= part.data_ptr() - self.whole.data_ptr() < self.whole.nbytes:
            self._wait(end)

    def all(self) -> None:
        """Wait for all of it."""
        self._wait(self.whole.nbytes)

    def _wait(self, end: int) -> None:
        needed = self._next
        while needed < len(self._marks) and (self._marks[needed - 1][0] if needed else 0) < end:
            needed += 1
        if needed > self._next:
            self._marks[needed - 1][1].wait()  # they are reached in order
            self._next = needed


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse what has no flat form."""
    if tensor.layout != torch.strided:
        raise UsageError(f"expected a dense tensor, got one with layout {tensor.layout}; use .to_dense()")


def flat(tensor: torch.Tensor, stays: bool = False, reads: bool = True) -> tuple[torch.Tensor, Back | None]:
    """A flat tensor with the same numbers, in the same memory if possible; else what brings changes back. What comes from a
    GPU is in pinned memory, and is brought back in the order of the current stream.

    Args:
        tensor: Any dense one.
        stays: Leave it on its device.
        reads: Its numbers matter; not where all of them will be written.
    """
    check_dense(tensor)
    whole = tensor.detach()
    if whole.is_inference() and not torch.is_inference_mode_enabled():
        whole = torch.from_dlpack(whole)  # the mode is the caller's thread's, and this may be another
    if (stays or whole.device.type == "cpu") and whole.is_contiguous() and not whole.is_conj() and not whole.is_neg():
        return _real(whole), None
    if whole.is_cuda and not stays:
        here = _from_gpu(whole, reads)
        return _real(here), lambda: whole.copy_(here, non_blocking=True)
    copy = (whole if stays else whole.to("cpu")).resolve_conj().resolve_neg().contiguous()
    if copy.data_ptr() == whole.data_ptr():
        copy = copy.clone()
    return _real(copy), lambda: whole.copy_(copy)


def _from_gpu(whole: torch.Tensor, reads: bool) -> torch.Tensor:
    here = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
    if reads:
        here.copy_(whole.resolve_conj().resolve_neg().contiguous(), non_blocking=True)
        torch.cuda.current_stream(whole.device).synchronize()
    return here


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor).view(-1)


def on_one_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Are all on the same GPU?"""
    return all(tensor.is_cuda and tensor.device == tensors[0].device for tensor in tensors)


class Fused:
    """Several tensors of one dtype as one: where there is but one, without a copy. Those of one GPU become one there, which
    is copied to the host while the call begins (`arriving`).

    Args:
        tensors: Of one dtype.
        stays: Leave them on their device.
        reads: Their numbers matter.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], stays: bool = False, reads: bool = True) -> None:
        self.arriving: StagedCopy | None = None
        self._alone = len(tensors) == 1
        staged = not stays and reads and on_one_gpu(tensors)
        self._flats = [flat(tensor, stays or staged, reads) for tensor in tensors]
        together = self._flats[0][0] if self._alone else torch.cat([piece for piece, _ in self._flats])
        self.whole, self._there = together, together
        if staged:
            self.arriving = StagedCopy(together)
            self.whole = self.arriving.whole

    def arrived(self) -> torch.Tensor:
        """All of it, when it is here."""
        if self.arriving is not None:
            self.arriving.all()
        return self.whole

    def scatter(self) -> None:
        """Bring changes back."""
        start = 0
        if self.whole is not self._there:
            self._there.copy_(self.arrived(), non_blocking=True)
        for piece, back in self._flats:
            if not self._alone:
                piece.copy_(self._there[start : start + piece.numel()])
                start += piece.numel()
            if back is not None:
                back()


def fuse(tensors: Sequence[torch.Tensor], stays: bool = False, reads: bool = True) -> list[Fused]:
    """One for each dtype, in the order in which dtypes first appear."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [Fused(members, stays, reads) for members in by_dtype.values()]


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

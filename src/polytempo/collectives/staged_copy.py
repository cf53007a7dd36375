"""A flat tensor of a GPU in pinned host memory, where collectives between hosts work on it: it arrives chunk by chunk.

All chunks are copied in order, on a stream of their own; the host waits for a chunk when it is sent or combined, so while
one is on the wire the next ones are copied. Back, the whole is copied behind the call's last step, and the host does not
wait: the caller's stream does (`device_call.py`).
"""

from __future__ import annotations

import torch

from polytempo.collectives.chunking import cuts
from polytempo.device.copy_stream import CopyMark, CopyStream, copy_stream

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

"""A whole model as one message between workers: the values of all parameters, and their push-sum weight.

    values of each dtype, one flat tensor after another | weight and mark (float64)

The mark says what the message is for, where its tag does not.

A cast ("bf16", "fp16") sends wider values in two bytes each. A sender knows what its neighbours got: the message itself. It
takes exactly that away from its own values (`mixing.py`), so that rounding moves no mass.
"""

from __future__ import annotations

import torch

from polytempo.compression.chain import CASTS
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.server.optimizer_state import as_bytes
from polytempo.server.pull_compression import Flats
from polytempo.transport.channel import Bytes

#: Flat tensors of different dtypes start at multiples of this.
ALIGNMENT = 64
#: Bytes behind the values: a weight, and a mark.
TRAILER = 16


class ModelMessage:
    """Memory for one message, used again and again. `cast`: a name of `CASTS`, or empty."""

    def __init__(self, layout: Layout, cast: str = "") -> None:
        kinds = {dtype: _wire_dtype(dtype, cast) for dtype in layout.sizes}
        starts, size = {}, 0
        for dtype, length in layout.sizes.items():
            starts[dtype] = size = -(-size // ALIGNMENT) * ALIGNMENT
            size += length * kinds[dtype].itemsize
        size = -(-size // TRAILER) * TRAILER
        self.data = torch.zeros(size + TRAILER, dtype=torch.uint8)  #: what is sent
        self.flats: Flats = {
            dtype: self.data[start : start + layout.sizes[dtype] * kinds[dtype].itemsize].view(kinds[dtype])
            for dtype, start in starts.items()
        }
        self._trailer = self.data[size:].view(torch.float64)

    @property
    def weight(self) -> float:
        """The push-sum weight of these values."""
        return float(self._trailer[0])

    @property
    def mark(self) -> int:
        """What the message is for."""
        return int(self._trailer[1])

    @mark.setter
    def mark(self, mark: int) -> None:
        self._trailer[1] = mark

    def fill(self, values: Flats, weight: float, mark: int = 0) -> None:
        """Take these values, cast where that is to be."""
        for dtype, flat in self.flats.items():
            if flat.data_ptr() != values[dtype].data_ptr():  # else they lie in here
                flat.copy_(values[dtype])
        self._trailer[0], self._trailer[1] = weight, mark

    def add(self, other: ModelMessage) -> None:
        """Add values and weight of another."""
        for dtype, flat in self.flats.items():
            flat.add_(other.flats[dtype])
        self._trailer[0] += other.weight


class MessageAllocator:
    """Lets a flat buffer lie where plain tensors of the same layout do. For `FlatBuffer`, which asks dtype by dtype."""

    pins = False

    def __init__(self, flats: Flats) -> None:
        self._left = list(flats.values())

    def allocate(self, size: int) -> Bytes:
        """The next flat tensor's memory."""
        return as_bytes(self._left.pop(0))


def _wire_dtype(dtype: str, cast: str) -> torch.dtype:
    own: torch.dtype = getattr(torch, dtype)
    return CASTS[cast] if cast and ITEM_SIZES[dtype] > CASTS[cast].itemsize else own

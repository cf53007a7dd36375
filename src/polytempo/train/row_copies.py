"""Rows of tables between the host's memory and a GPU: through pinned memory, on a stream beside the one that computes.

Rows that come are copied when they come, and the stream that computes waits for them where they are used. RowGradients of
several forwards are added up on the GPU, in the order of the forwards, so that one copy brings them to the host: ids are
unique within a forward, so the sums do not depend on the order in which a kernel adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.device.side_stream import FetchedTensor, SideStream

#: Ids (in the host's memory) and gradients of their rows.
RowGradients = tuple[torch.Tensor, torch.Tensor]


class RowCopies:
    """The copies of one table. A table may be moved to another device between steps."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}

    def stream(self, place: torch.device) -> SideStream:
        """The copying stream of a device."""
        if place not in self._streams:
            self._streams[place] = SideStream(place)
        return self._streams[place]

    def placed(self, tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        """A host tensor on a device, where the current stream may use it; no host waits for the copy."""
        if place.type != "cuda":
            return tensor.to(place)
        moved = self.stream(place).brought(tensor)
        self.stream(place).join(moved)
        return moved

    def fetched(self, gradients: Sequence[RowGradients]) -> tuple[torch.Tensor, FetchedTensor]:
        """The sums of gradients on a device, each id once and ascending, on their way to the host."""
        place = gradients[0][1].device
        if len(gradients) == 1:
            return gradients[0][0], self.stream(place).fetched(gradients[0][1])
        ids, places = torch.unique(torch.cat([ids for ids, _ in gradients]), return_inverse=True)
        total = gradients[0][1].new_zeros((ids.numel(), gradients[0][1].shape[1]))
        index = self.placed(places, place)
        for part, (_, values) in zip(index.split([ids.numel() for ids, _ in gradients]), gradients, strict=True):
            total.index_add_(0, part, values)
        return ids, self.stream(place).fetched(total)

"""`SideStream`: a CUDA stream beside the one that computes, for copies; on the CPU, where copies are done at once, nothing.

Memory of torch's allocator belongs to the stream on which it was allocated. A tensor that is made on one stream and used on
another is therefore named to both: `behind_current` and `join` do that (`Tensor.record_stream`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """One stream of a device.

    Args:
        place: The device; on the CPU all methods do nothing.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream: Any = torch.cuda.Stream(place) if place.type == "cuda" else None

    def __reduce__(self) -> tuple[type[SideStream], tuple[torch.device]]:
        return SideStream, (self._place,)  # a copy has a stream of its own

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is given inside runs on this stream, whatever the current one has to do."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def behind_current(self, *tensors: torch.Tensor) -> Iterator[None]:
        """What is given inside runs on this stream, when the current one has done what it was given so far.

        Args:
            *tensors: Tensors of the current stream that are read inside: their memory is kept until then.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._place))
        with self.apart():
            yield
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self, *tensors: torch.Tensor) -> None:
        """What the current stream is given from now on waits for this one.

        Args:
            *tensors: Tensors made on this stream that the current one will use.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._place)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def brought(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, by way of pinned memory, without waiting; `join` comes before its use."""
        if self._stream is None or not tensor.numel():
            return tensor.to(self._place)
        with self.apart():
            return tensor.pin_memory().to(self._place, non_blocking=True)

    def fetched(self, tensor: torch.Tensor) -> FetchedTensor:
        """A tensor of the device on its way to pinned host memory, behind what the current stream was given so far."""
        if self._stream is None:
            return FetchedTensor(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self.behind_current(tensor):
            host.copy_(tensor, non_blocking=True)
        return FetchedTensor(host, self._stream.record_event())


class FetchedTensor:
    """A tensor on its way to the host."""

    def __init__(self, host: torch.Tensor, event: Any) -> None:
        self._host, self._event = host, event

    def wait(self) -> torch.Tensor:
        """The tensor in host memory, when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

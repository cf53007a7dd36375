"""A GPU's stream (`stream.py`): torch's, of high priority, so that other ranks wait for it no longer than they must."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from polytempo.device.stream import DeviceStream, StreamPoint


class CudaPoint(StreamPoint):
    """An event that was recorded in a stream.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event, self._device = torch.cuda.Event(), stream.device
        self._event.record(stream)

    def reached(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:  # the device has failed: whatever is given to it next says how
            return True

    def order(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for it."""
        self._event.wait(stream)


class CudaStream(DeviceStream):
    """A stream of one GPU.

    Args:
        place: torch's name for the GPU.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream = torch.cuda.Stream(place, priority=-1)

    def here(self) -> StreamPoint:
        return CudaPoint(torch.cuda.current_stream(self._place))

    def after(self, point: StreamPoint) -> None:
        if isinstance(point, CudaPoint):
            point.hold(self._stream)

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> StreamPoint:
        return CudaPoint(self._stream)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

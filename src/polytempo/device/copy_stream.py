"""Copies between a device and host memory, on a stream of their own: beside the kernels of the script, and in their order
where that matters. The host waits for a copy that it needs (`CopyMark.wait`), never for the whole device.

    copies.follow()              what the current stream was given so far comes first
    copies.copy(host, device)    as many as there are; host memory is pinned, or the host waits for each
    mark = copies.mark()         behind them
    mark.wait(), mark.hold()     the host, or the current stream, waits for what was copied by then

    CudaCopyStream   a GPU
    HostCopyStream   its stand-in: a copy is made at once
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class CopyMark(ABC):
    """A place in the order of copies."""

    @abstractmethod
    def reached(self) -> bool:
        """Whether the copies before it are made."""

    @abstractmethod
    def wait(self) -> None:
        """The host waits for it."""

    @abstractmethod
    def hold(self) -> None:
        """What the current stream is given from now on waits for it."""


class CopyStream(ABC):
    """Copies of one process to and from one device, in their order."""

    @abstractmethod
    def follow(self) -> None:
        """Copies from now on wait for what the current stream has been given."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy. Both tensors must stay as they are until a mark behind it is reached."""

    @abstractmethod
    def mark(self) -> CopyMark:
        """A mark behind the copies so far."""


class CudaMark(CopyMark):
    """An event of the stream."""

    def __init__(self, stream: torch.cuda.Stream, place: torch.device) -> None:
        self._event, self._place = torch.cuda.Event(), place
        self._event.record(stream)

    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self._place).wait_event(self._event)


class CudaCopyStream(CopyStream):
    """Copies to and from a GPU."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream = torch.cuda.Stream(place)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._place))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> CopyMark:
        return CudaMark(self._stream, self._place)


class HostMark(CopyMark):
    """All copies are made."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold(self) -> None:
        pass


class HostCopyStream(CopyStream):
    """The stand-in: tensors on the CPU, copied at once."""

    def follow(self) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CopyMark:
        return HostMark()


def copy_stream(place: torch.device) -> CopyStream:
    """One for this device."""
    return CudaCopyStream(place) if place.type == "cuda" else HostCopyStream()

"""A stream of this library's own on a device: work in order, beside the script's.

    point = stream.here()        in the caller's thread: what the caller has given its current stream so far
    stream.after(point)          what the stream is given from now on waits for that
    with stream.current(): ...   torch's calls inside are given to the stream
    stream.give(work)            so is `work`, inside of that
    done = stream.mark()         done.reached(): has the stream come this far? done.order(): the current stream waits for it

These classes are those of a device that runs what it is given at once: the stand-in. `cuda_device.py` has a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class StreamPoint:
    """A place in a stream."""

    def reached(self) -> bool:
        """Whether all before it is complete. Never waits."""
        return True

    def order(self) -> None:
        """What the current stream is given from now on waits for it; the host does not."""


class DeviceStream:
    """Work in order on one device."""

    def here(self) -> StreamPoint:
        """The end of what the caller's current stream was given so far."""
        return StreamPoint()

    def after(self, point: StreamPoint) -> None:
        """What the stream is given from now on waits for a point of another."""

    def current(self) -> AbstractContextManager[object]:
        """Inside, it is torch's current stream in this thread."""
        return nullcontext()

    def give(self, work: Callable[[], object]) -> None:
        """Let it do some work, which reads and writes tensors of its device. Inside of `current`."""
        work()

    def mark(self) -> StreamPoint:
        """The end of what it was given so far."""
        return StreamPoint()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of these tensors, which other streams made, is not used for others before it has come this far."""

    def finish(self) -> None:
        """Wait until it has done all it was given."""

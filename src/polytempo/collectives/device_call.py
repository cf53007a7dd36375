"""A call on tensors of a device: in order with the caller's stream, and without the host waiting for the device.

The caller's stream is marked when the call is made; the engine's stream of that device waits for the mark, does what the
call does to tensors there, and is marked at the end of the call: `Task.wait` lets the caller's stream wait for that. So the
call sees tensors as they were at the first mark, and a result is there for all that the caller does next.

A call goes by device memory first (`device_buffer.py`) where that is possible here. Whether it is on all ranks shows at its
first barrier; if not, all ranks repeat it through host memory (`NotOnDevice`), and nothing was changed by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from polytempo.collectives.tasks import Steps, Wait
from polytempo.device.device import Device, Devices, DeviceStream, StreamPoint


class NotOnDevice(Exception):
    """Not all ranks have their tensors on devices that reach each other. All ranks learn it at the same barrier."""


@dataclass(slots=True, eq=False)
class DeviceCall:
    """One call on one rank.

    Attributes:
        device: Where its tensors are.
        stream: The engine's stream there.
        tensors: All of them.
        began: What the caller had given its stream.
        ended: The end of what the call gave the engine's stream.
    """

    device: Device
    stream: DeviceStream
    tensors: Sequence[torch.Tensor]
    began: StreamPoint
    ended: StreamPoint | None = None

    def run(self, on_device: Callable[[], Steps] | None, on_host: Callable[[], Steps]) -> Steps:
        """Carry it out: on the device, where that is possible, or through the host."""
        stream = self.stream
        try:
            with stream.current():
                stream.after(self.began)
                stream.keep(self.tensors)
            result = yield from self._run(on_device, on_host)
        except BaseException:  # also where it is given up: no later call may find the stream at what it did
            with suppress(RuntimeError):
                stream.finish()
            raise
        self.ended = stream.mark()
        return result

    def _run(self, on_device: Callable[[], Steps] | None, on_host: Callable[[], Steps]) -> Steps:
        if on_device is not None:
            with suppress(NotOnDevice):
                return (yield from self._inside(on_device()))
        yield from until(self.began)
        return (yield from self._inside(on_host()))

    def _inside(self, steps: Steps) -> Steps:
        """Each stretch of steps with the stream as torch's current one."""
        try:
            while True:
                with self.stream.current():
                    try:
                        wait = next(steps)
                    except StopIteration as end:
                        return end.value
                yield wait
        finally:
            steps.close()

    def order_stream(self) -> None:
        """Let the current stream wait for its end."""
        if self.ended is not None:
            self.ended.order()


def until(point: StreamPoint) -> Steps:
    """Wait on the host, without holding up other calls."""
    if not point.reached():
        yield Wait(point.reached, list, polls=True)


class Streams:
    """The streams of a progress engine, one for each device."""

    def __init__(self) -> None:
        self.devices = Devices()
        self._streams: dict[str, DeviceStream] = {}

    def call(self, tensors: Sequence[torch.Tensor]) -> DeviceCall | None:
        """A call on these tensors, made now by the caller; None where they are not all on one device."""
        places = {tensor.device for tensor in tensors}
        if len(places) != 1:
            return None
        device = self.devices.of(places.pop())
        if device is None:
            return None
        stream = self._streams.get(device.identity)
        if stream is None:
            stream = self._streams.setdefault(device.identity, device.stream())
        return DeviceCall(device, stream, tensors, stream.here())

    @property
    def has_stand_in(self) -> bool:
        """Whether tensors on the CPU are to be treated as a device's."""
        return self.devices.stand_in is not None

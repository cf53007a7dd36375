"""How gradients on a device reach servers through device memory on one host; else they pass through the host (`pushes.py`).

Exchanges through device memory (`docs/design/0013`), the worker's side of one optimizer:
The flat gradient, and the landing for new values, are memory that each server maps. In exchange k the worker's stream sets
PUSHED = k behind the gradient, and waits for ANSWERED = k before it copies the landing. The host sends a `Push` that names
k, and goes on. Its answer is **deferred**: it is taken before the next push, or when something needs it (`should_stop()`,
`stats`, a read). Values are not deferred, since the stream waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from polytempo.client.client import Client
from polytempo.client.requests import Question
from polytempo.device.device import FENCE_BYTES, Device, Devices
from polytempo.device.exchange_fences import ANSWERED, PUSHED
from polytempo.protocol.messages import ShareDevice
from polytempo.protocol.values import DeviceRange, OptimizerSpec
from polytempo.reducer.copier import Copier
from polytempo.reducer.device_moves import device_of_all
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.sync.compatibility import Feature, conflict
from polytempo.sync.spec import Spec
from polytempo.transport.deadline import Deadline

#: In a server's refusal: it is where `--server-device` says, or the server itself has said why it is not on a device.
IN_HOST_MEMORY = "in the memory of the CPU"
#: Seconds between two looks at a fence, where the host waits for one.
POLL = 50e-6


def device_of(
    devices: Devices, client: Client, sync: Spec, spec: OptimizerSpec, params: Sequence[torch.Tensor]
) -> Device | None:
    """The device on which an optimizer's values can be exchanged; None where they pass through the host: with servers on
    other hosts, compression, tables, pushes that overlap, rounds that are not waited for, rounds with deadlines (a thread
    takes their answers while the script's stream computes), local steps whose pushes bring no values back, and parameters on
    several devices."""
    through_host = spec.push_filter or spec.pull_filter or spec.tables or conflict(sync, Feature.GPU_MEMORY)
    return None if client.pool.registry is None or through_host else device_of_all(devices, params)


class DeviceExchange:
    """The exchanges of one optimizer.

    Args:
        client: The connections to the servers, all on this host.
        name: The optimizer's name in the job.
        device: Where the flat buffers lie.
        copier: Has them.
    """

    def __init__(self, client: Client, name: str, device: Device, copier: Copier) -> None:
        self._client, self._name, self._device, self._copier = client, name, device, copier
        self._fences = [device.fences(client.pool.allocate(FENCE_BYTES)) for _ in range(client.shards)]
        self._number = 0  # of the last exchange

    def share(self) -> str:
        """Have all servers map the memory; empty, or why one does not."""
        message = ShareDevice(
            optimizer_id=self._name,
            identity=self._device.identity,
            gradients=_ranges(self._copier.next_buffer()),
            values=_ranges(self._copier.landing),
        )
        # Not asked again: on a host nothing is lost.
        question = Question(message, [[fences.words] for fences in self._fences], repeated=False)
        told = self._client.ask(question, "the servers to map its device memory").in_order()
        refusal: str = next((answer.refusal for answer, _ in told if answer.refusal), "")
        if not refusal:
            fences = self._fences  # `release` holds these, and not the optimizer that the script may have dropped

            def release() -> None:
                for one in fences:
                    one.release(ANSWERED)

            connections = [channel.pollable() for channel in self._client.connections.channels]
            self._client.stream_waits.add(release, connections)
        return refusal

    def pushed(self) -> int:
        """The number of a new exchange: what the stream was given so far is its gradient."""
        self._number += 1
        for fences in self._fences:
            fences.signal(PUSHED, self._number)
        return self._number

    def wait(self) -> None:
        """What the stream is given from now on comes behind the answers of all servers."""
        for fences in self._fences:
            fences.wait(ANSWERED, self._number)

    def complete(self) -> None:
        """Wait, on the host, until the answers are in the landing."""
        deadline = Deadline(self._client.rank, self._client.timeout)
        while not all(fences.reached(ANSWERED, self._number) for fences in self._fences):
            time.sleep(POLL)
            self._client.check_wait(deadline, "the servers' device to answer a push")


def _ranges(buffer: FlatBuffer) -> tuple[DeviceRange, ...]:
    return tuple(DeviceRange(memory.handle, memory.nbytes) for memory in buffer.ranges.values())

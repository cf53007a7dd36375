"""How gradients on a device reach servers: through device memory on one host, else bucket by bucket through the host's.

Exchanges through device memory (`docs/design/0013`), the worker's side of one optimizer:
The flat gradient, and the landing for new values, are memory that each server maps. In exchange k the worker's stream sets
PUSHED = k behind the gradient, and waits for ANSWERED = k before it copies the landing. The host sends a `Push` that names
k, and goes on. Its answer is **deferred**: it is taken before the next push, or when something needs it (`should_stop()`,
`stats`, a read). Values are not deferred, since the stream waits for them.

Buckets, copied to the host while backward runs. A hook says that a gradient is complete as soon as its kernels are in the
stream's queue, long before they have run. So when a bucket is complete its gradients are gathered by one call behind these
kernels, and copied to the host's flat buffer on a side stream; the hook waits for nothing. At `step()` the host waits for
the first bucket and sends it, waits for the next, and so on: one is on the wire while the next is copied, and later ones are
still computed.

    stage     in a hook: gather and copy
    arrived   at step(): bucket by bucket, those that the script has not changed since, as far as torch knows
    settle    all gradients as they are at step(), compared with the buckets on the GPU, bit for bit; what differs, and what
              never left, is copied again, and travels with the push
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from polytempo.client.client import Client
from polytempo.client.requests import Question
from polytempo.device.copy_stream import CopyMark
from polytempo.device.device import FENCE_BYTES, Device, Devices
from polytempo.device.exchange_fences import ANSWERED, PUSHED
from polytempo.protocol.messages import ShareDevice
from polytempo.protocol.values import DeviceRange, OptimizerSpec
from polytempo.reducer.device_moves import HostStaging, copy_together, device_of_all, largest, runs_of
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.sync.compatibility import Feature, conflict
from polytempo.sync.spec import Spec
from polytempo.transport.deadline import Deadline

#: In a server's refusal: it is where `--server-device` says, or the server itself has said why it is not on a device.
IN_HOST_MEMORY = "in the memory of the CPU"
#: Seconds between two looks at a fence, where the host waits for one.
POLL = 50e-6
#: By which elements are compared bit for bit, by their bytes.
WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


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


class GpuBuckets:
    """The buckets of one optimizer, whose parameters are all on one GPU.

    Args:
        staging: Its twin holds the gradients at `step()`.
        params: All parameters.
        buffer: Where gradients go on the host.
    """

    def __init__(self, staging: HostStaging, params: Sequence[torch.Tensor], buffer: FlatBuffer) -> None:
        self._staging, self._params, self._buffer = staging, params, buffer
        self._flats = {dtype: torch.zeros_like(flat) for dtype, flat in staging.twin.items()}
        self._staged: dict[int, tuple[Sequence[int], list[object], CopyMark]] = {}  # by bucket: what was copied, and when
        self.changed: set[int] = set()  #: buckets that differ from what was copied, after `settle`

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in it."""
        return sum(flat.nbytes for flat in self._flats.values())

    def stage(self, bucket: int, members: Sequence[int]) -> None:
        """Gather a bucket that is complete, and start to copy it; not if some are sparse, or in a graph's capture."""
        before = self._staged.pop(bucket, None)
        grads = [self._params[index].grad for index in members]
        dense = [grad for grad in grads if grad is not None and grad.layout == torch.strided]
        captured = self._staging.place.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if len(dense) < len(grads) or captured:
            return
        if before is not None:
            before[2].hold()  # it may still be copied
        with torch.no_grad():
            views = [self._staging.view(index, self._flats) for index in members]
            copy_together(zip(views, dense, strict=True))
        copies = self._staging.copies
        copies.follow()
        for run in runs_of(self._staging.places, members):
            copies.copy(self._buffer.tensors[run.dtype][run.start : run.stop], self._flats[run.dtype][run.start : run.stop])
        self._staged[bucket] = members, self._stamps(members), copies.mark()

    def arrived(self) -> Iterator[int]:
        """Buckets that can be sent, each when it is here."""
        for bucket, (members, stamps, mark) in list(self._staged.items()):
            if self._stamps(members) == stamps:
                mark.wait()
                yield bucket

    def settle(self) -> tuple[int, ...]:
        """Make the flat buffer what the gradients are now; the parameters that have none."""
        staging = self._staging
        absent = staging.collect(lambda param: param.grad)
        same = {bucket: self._differs(members) for bucket, (members, _, _) in self._staged.items()}
        most = [largest(flat).float() for flat in staging.twin.values()]
        found = torch.stack([*most, *same.values()]).tolist()  # the host waits for the end of backward
        finite = all(number - number == 0 for number in found[: len(most)])
        self.changed = {bucket for bucket, differs in zip(same, found[len(most) :], strict=True) if differs}
        known = {index for b, (members, _, _) in self._staged.items() if b not in self.changed for index in members}
        for _, _, mark in self._staged.values():
            mark.wait()
        for run in runs_of(staging.places, [index for index in staging.staged if index not in known]):
            staging.copies.copy(
                self._buffer.tensors[run.dtype][run.start : run.stop], staging.twin[run.dtype][run.start : run.stop]
            )
        staging.copies.mark().wait()
        self._buffer.filled(staging.staged, finite)
        return absent

    def start_over(self) -> None:
        """The next step."""
        for _, _, mark in self._staged.values():
            mark.wait()
        self._staged.clear()
        self.changed = set()

    def _differs(self, members: Sequence[int]) -> torch.Tensor:
        """1.0 where a bucket's gradients are not what was copied, on the GPU."""
        pairs = []
        for run in runs_of(self._staging.places, members):
            whole, part = WHOLE[self._flats[run.dtype].element_size()], slice(run.start, run.stop)
            pairs.append((self._flats[run.dtype][part].view(whole) != self._staging.twin[run.dtype][part].view(whole)).any())
        return torch.stack(pairs).any().float() if pairs else torch.zeros((), device=self._staging.place)

    def _stamps(self, members: Sequence[int]) -> list[object]:
        """Differ once torch has changed a gradient, or it is another tensor."""
        grads = [self._params[index].grad for index in members]
        return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]

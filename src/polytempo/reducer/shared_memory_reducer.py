"""BSP on one host: workers average their gradients in shared memory.

Each worker's flat buffer is its slot of a shared buffer (`collectives/shared_buffer.py`). A step is a push without data, by
which the sequencer decides as always which workers are in the round; its answer means that all their gradients are there.
Then each worker adds up its part of the mean, and runs the wrapped optimizer on the whole. All make the same change, so all
replicas stay the same.

Where all workers have their parameters on GPUs that reach each other, flat buffers and the mean stay there
(`collectives/device_mean.py`): a push waits until the GPU has filled the flat buffer, and each worker makes the whole mean.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.device_mean import DeviceMeanBuffer
from polytempo.collectives.shared_buffer import SharedMeanBuffer, all_on_device, mean_in_place
from polytempo.device.device import FENCE_BYTES
from polytempo.errors import PeerError
from polytempo.profile_ranges import profiled
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, number_of, number_of_part
from polytempo.reducer.device_moves import device_of_all
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.reducer.reducer import GradientMean, GroupValues, Reducer, SequencerClient
from polytempo.session.session import Session
from polytempo.transport.channel import Bytes

#: Flat buffers of different dtypes start at multiples of this in a slot.
ALIGNMENT = 64


#: Shared buffers of optimizers in groups are numbered from here on: some for each optimizer.
OF_GROUPS, PARTS = 1 << 20, 1 << 10
#: What workers share in host memory where their gradients are on devices has a number of its own.
OF_DEVICES = 1 << 27


class SlotAllocator:
    """Hands out parts of a slot, one after another."""

    pins = False

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._used = 0

    def allocate(self, size: int) -> Bytes:
        """The next part."""
        start = self._used
        self._used = aligned(start + size)
        return self._data[start : start + size]


def aligned(size: int) -> int:
    """The next offset at which a flat buffer may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer_number(session: Session, name: str, spec: OptimizerSpec) -> int:
    """Of an optimizer's shared buffer, the same on all members; a rank may be in groups that others are not in."""
    return OF_GROUPS + number_of(name) * PARTS + number_of_part(name) if spec.members else session.next_buffer()


class SharedMemoryReducer(Reducer):
    """The workers of one host, with a sequencer."""

    mean: GradientMean

    def __init__(
        self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor], hooked: bool = True
    ) -> None:
        super().__init__(session, name, spec)
        session.local_peers()  # it listens before the sequencer tells other workers of this one
        self._clock = SequencerClient(session, spec, self.client_state)
        self._agreement: SequencerClient | None = None  # the clock of `agree`, once it was called
        self.step = self._clock.step
        self._device = device_of_all(session.devices, params) if hooked else None
        self._on_device: DeviceMeanBuffer | None = None  # where gradients and their mean stay on devices
        self._members = self.answer.members
        self._open(params)
        self._start_from(self.answer.shares[0].worker)
        own_memory = hooked and self._on_device is None
        self.hooks = GradientHooks(params, self.copier.next_buffer()) if own_memory else None
        self.digests = self.copier.watch.digests  #: of what must be alike on all workers after a write by the script
        self._averages = True  # the round under way makes the mean; else `agree` has made it
        self._took = 0.0  # by the round under way so far
        self._handed = 0

    def _open(self, params: Sequence[torch.Tensor]) -> None:
        """Flat buffers in memory that all members have: on their devices, or the host's."""
        peers, number = self.session.local_peers(), buffer_number(self.session, self.name, self.spec)
        also = self._clock.client.watched()
        peers.meet(self._members)
        if all_on_device(peers, self._members, number, self._device is not None, also):
            self._open_on_device(params, number)
        if self._on_device is not None:
            return
        size = sum(aligned(length * ITEM_SIZES[dtype]) for dtype, length in self.layout.sizes.items())
        self._shared = SharedMeanBuffer(peers, self._members, number, max(size, 1), also)
        self.copier = Copier(params, self.layout, SlotAllocator(self._shared.slot_bytes(self.session.rank)))
        result = FlatBuffer(self.layout, SlotAllocator(self._shared.result_bytes()), pinned=False)
        self.mean = GradientMean(self.copier, result)

    def _open_on_device(self, params: Sequence[torch.Tensor], number: int) -> None:
        assert self._device is not None
        peers, also = self.session.local_peers(), self._clock.client.watched()
        self._shared = SharedMeanBuffer(peers, self._members, number + OF_DEVICES, FENCE_BYTES, also)
        self.copier = Copier(params, self.layout, self._device)
        slot, result = self.copier.next_buffer(), self.copier.landing
        form = slot.order_as(params)
        result.order_as(params)
        self.copier.find_places()
        buffer = DeviceMeanBuffer(self._shared, self._device, slot.ranges, form)
        if buffer.usable:
            self._on_device, self.mean = buffer, GradientMean(self.copier, result)

    def buffer_of(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[FlatBuffer, tuple[int, ...]]:
        if self._on_device is not None:
            self._on_device.wait_until_read()
        return super().buffer_of(of)

    def _start_from(self, root: int) -> None:
        rank, members = self.session.rank, self._shared.members
        self._shared.round += 1
        if rank == root:
            self.copier.gather(self.copier.next_buffer(), lambda param: param.detach())
            if self._on_device is not None:
                self._on_device.wait_until_filled()
        if root in self._shared.meet("put", members):
            raise PeerError(f"worker {root} ended before the other workers had its initial parameters")
        if rank != root and self._on_device is not None:
            for dtype, flat in self.copier.landing.tensors.items():
                flat.copy_(self._on_device.slot(root)[dtype][: flat.numel()])
            self.copier.land()
            self._on_device.wait_until_filled()  # and the other's slot is read
        elif rank != root:
            values = FlatBuffer(self.layout, SlotAllocator(self._shared.slot_bytes(root)))
            self.copier.scatter({0: values.parts[0]})
        self._shared.meet("taken", members)

    # A step.

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        self._report(self._clock, StepReport(hyper=hyper, absent=tuple(absent), skip=buffer is None), measures)

    def finish(self) -> None:
        self._take_part(self._clock, self._averages)
        self._averages = True
        self.step, self.waited = self._clock.step, self._clock.waited

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        if self._agreement is None:
            self._agreement = SequencerClient(self.session, self.spec, ClientState(f"{self.name}/mean"))
        absent = () if skip else self.gradients()[1]
        self._report(self._agreement, StepReport(absent=absent, skip=skip), Measures(samples=samples))
        self._take_part(self._agreement, True)
        self._averages = False
        if not self.mean.skipped:
            self.mean.assign()
        return self.mean.skipped

    def _report(self, clock: SequencerClient, report: StepReport, measures: Measures) -> None:
        """Begin a round of a clock: this worker's slot is filled."""
        began = time.perf_counter()
        if self._on_device is not None and not report.skip:
            self._on_device.wait_until_filled()
        report.touched = self.copier.watch.touched
        clock.push(report, measures, self.traffic())
        self._took = time.perf_counter() - began

    def _take_part(self, clock: SequencerClient, average: bool) -> None:
        began = time.perf_counter()
        with self.session.lock:
            clock.wait_for(clock.step + 1)
            answer, self.copier.watch.touched = clock.state.answer, ""
            members = [share.worker for share in answer.shares]
            if answer.touched:  # a script has written to parameters: the replicas must still be the same
                digest = hashlib.blake2b(self.digests(), digest_size=8).digest()
                self.copier.watch.check_alike(self._shared.compare(digest, members), answer.touched)
            self.mean.skipped, self.mean.absent = clock.state.skipped, answer.absent
            if average and not self.mean.skipped:
                with profiled("all_reduce in shared memory"):
                    self._average(members, [share.weight for share in answer.shares])
        clock.step = clock.state.released
        clock.waited = self._took + time.perf_counter() - began

    def _average(self, members: list[int], weights: list[float]) -> None:
        if self._on_device is not None:
            self._on_device.mean(members, weights, self.mean.buffer.tensors)
        offset = 0
        for dtype, length in self.layout.sizes.items():
            nbytes = length * ITEM_SIZES[dtype]
            if self._on_device is None:
                self._shared.round += 1
                mean_in_place(self._shared, members, weights, getattr(torch, dtype), length, offset)
                offset += aligned(nbytes)
            self._clock.client.connections.count(nbytes)
            self._handed += nbytes

    def traffic(self) -> tuple[int, int]:
        return self._clock.client.bytes_sent, self._clock.client.bytes_received

    def handed(self) -> int:
        return self._handed

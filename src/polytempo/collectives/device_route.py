"""How the calls of a group on tensors of GPUs go: in device memory of their ranks ("cuda-ipc"), or through the host.

Device memory is tried where all ranks of a group are on one host. Whether the other ranks have their tensors on GPUs, too,
and all reach each other's, shows at the first barrier of a call (`executor.py`): a rank notifies the others of what lies in
device memory by another kind of note than of what lies in the host's. Where not all notes are of that kind, ranks that have
tensors on GPUs put them into host memory, and all pass one more barrier. So ranks that agree need no further message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_buffer import DeviceSlotBuffers
from polytempo.collectives.device_call import DeviceCall
from polytempo.collectives.device_choice import Network
from polytempo.collectives.device_facts import facts_of
from polytempo.collectives.executor import ExecutionStage, nbytes
from polytempo.collectives.plans import CUDA_IPC
from polytempo.collectives.steps import Place
from polytempo.collectives.tasks import Settled, Steps
from polytempo.errors import UsageError

if TYPE_CHECKING:
    from polytempo.collectives.progress_engine import ProgressEngine

#: Tensors on a GPU with fewer bytes than this pass through host memory.
DEVICE_FLOOR = 0

StagedSteps = Callable[[ExecutionStage], Steps]


class DeviceRoute:
    """Of one group, on one rank.

    Args:
        engine: This rank's.
        queue: The group's calls.
        ranks: Its ranks in the job.
        place: This rank's among them.
        network: That between them.
    """

    def __init__(
        self, engine: ProgressEngine, queue: CallQueue, ranks: Sequence[int], place: Place, network: Network
    ) -> None:
        self._engine, self._queue, self._ranks, self._place = engine, queue, ranks, place
        self._may = len(place.hosts) == 1 and not network.emulated
        self.slots: DeviceSlotBuffers | None = None  #: on the device of the first call with tensors on one
        self.floor = DEVICE_FLOOR

    def call(self, tensors: Sequence[torch.Tensor], algorithm: str) -> DeviceCall | None:
        """Where all tensors are on one device: the call, as of now."""
        on = None
        if tensors and (tensors[0].device.type != "cpu" or self._engine.streams.has_stand_in):
            on = self._engine.streams.call(tensors)
        if on is None and algorithm == CUDA_IPC:
            raise UsageError(f"{CUDA_IPC} needs all tensors on one GPU, got {tensors[0].device}; use algorithm='auto'")
        if algorithm == CUDA_IPC and not self._may:
            raise UsageError(f"{CUDA_IPC} needs all ranks on one host, without an emulated network; use algorithm='auto'")
        return on

    def ways(self, steps: StagedSteps, algorithm: str, on: DeviceCall | None) -> StagedSteps:
        """The steps of a call as they are, or in the order of a device's stream: in its memory where that is possible."""
        if on is None:
            return steps

        def ordered(stage: ExecutionStage) -> Steps:
            slots = self._slots(on) if self._suits(on, algorithm) else None
            on_device = replace(stage, on=on, slots=slots) if slots is not None else None

            def refused() -> Steps:
                if algorithm == CUDA_IPC:
                    reach = f"not all ranks of {list(self._ranks)} have GPUs that reach each other"
                    raise Settled(UsageError(f"{CUDA_IPC}: {reach}; use algorithm='auto'"))
                return (yield from steps(stage))

            return (yield from on.run((lambda: steps(on_device)) if on_device is not None else None, refused))

        return ordered

    def _suits(self, on: DeviceCall, algorithm: str) -> bool:
        if algorithm == CUDA_IPC:
            return True
        return algorithm == "auto" and self._may and max(map(nbytes, on.tensors)) >= self.floor

    def _slots(self, on: DeviceCall) -> DeviceSlotBuffers | None:
        """A group has buffers on one device; tensors of another, and of one that others do not reach, go by the host."""
        if self.slots is None:
            facts = facts_of(self._engine.rank, self._place, on.device)
            self.slots = DeviceSlotBuffers(self._engine.messages, self._queue, self._ranks, facts, on.device)
        return self.slots if self.slots.device is on.device and not self.slots.refused else None

    def start_over(self) -> None:
        """After a failure all ranks begin with the same slots again."""
        if self.slots is not None:
            self.slots.start_over()

"""How the calls of a group on tensors of GPUs go: by NCCL, in device memory of its ranks ("cuda-ipc"), or through the host.

Which it is follows from the facts of all ranks (`device_choice.py`). On one host they come with handles of device memory:
they are known to all ranks from the first barrier of such a call on, and what can go by NCCL (see below) does so from
the next call on. Between hosts, where NCCL may be taken, the first call gathers them.

Device memory is tried where all ranks of a group are on one host. Whether the other ranks have their tensors on GPUs, too,
and all reach each other's, shows at the first barrier of a call (`executor.py`): a rank notifies the others of what lies in
device memory by another kind of note than of what lies in the host's. Where not all notes are of that kind, ranks that have
tensors on GPUs put them into host memory, and all pass one more barrier. So ranks that agree need no further message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_buffer import DeviceSlotBuffers, facts_of, gather_facts
from polytempo.collectives.device_call import DeviceCall
from polytempo.collectives.device_choice import CPU, NCCL, DeviceWay, Network, choose_way
from polytempo.collectives.executor import ExecutionStage, nbytes
from polytempo.collectives.flattening import fuse
from polytempo.collectives.plans import CUDA_IPC
from polytempo.collectives.reduce_ops import before_mean, divide
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
        within: Makes the group within one of its calls.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        queue: CallQueue,
        ranks: Sequence[int],
        place: Place,
        network: Network,
        within: Callable[[ExecutionStage], Any],
    ) -> None:
        self.within = within
        self._engine, self._queue, self._ranks, self._place, self._network = engine, queue, ranks, place, network
        self._may = len(place.hosts) == 1 and not network.emulated
        self.across = len(place.hosts) > 1 and network.insecure and not network.emulated  #: NCCL may go between hosts
        self._across_way: DeviceWay | None = None
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

    @property
    def way(self) -> DeviceWay | None:
        """What was chosen; None before it is known to all ranks."""
        if self.across:
            return self._across_way
        if self.slots is None:
            return None
        if self.slots.refused:  # ranks learn that at different calls, so that none can take another way alone
            return DeviceWay(
                CPU, "not all ranks reach the others' GPUs; where each has one of its own, algorithm='native' is NCCL"
            )
        return choose_way(self.slots.settled, self._network) if self.slots.settled else None

    def name(self, call: str, on: DeviceCall | None, by_nccl: StagedSteps | None) -> str:
        """A rank whose tensors are elsewhere must not be waited for: calls by NCCL have another name."""
        if on is not None and self.across:
            return f"{call}, on a GPU"
        return f"{call} by NCCL" if on is not None and by_nccl is not None and self._is_nccl() else call

    def _is_nccl(self) -> bool:
        return self.way is not None and self.way.name == NCCL

    def ways(
        self, steps: StagedSteps, algorithm: str, on: DeviceCall | None, by_nccl: StagedSteps | None = None
    ) -> StagedSteps:
        """The steps of a call as they are, or in the order of a device's stream: by NCCL, where that was chosen and can do
        it, or in device memory where that is possible."""
        if on is None:
            return steps

        def ordered(stage: ExecutionStage) -> Steps:
            if by_nccl is not None and (yield from self._takes_nccl(stage, on)):
                told = replace(stage, on=on)
                return (yield from on.run(lambda: by_nccl(told), lambda: by_nccl(told)))
            slots = self._slots(on, algorithm)
            on_device = replace(stage, on=on, slots=slots) if slots is not None else None

            def refused() -> Steps:
                if algorithm == CUDA_IPC:
                    reach = f"not all ranks of {list(self._ranks)} have GPUs that reach each other"
                    raise Settled(UsageError(f"{CUDA_IPC}: {reach}; use algorithm='auto'"))
                return (yield from steps(stage))

            return (yield from on.run((lambda: steps(on_device)) if on_device is not None else None, refused))

        return ordered

    def _takes_nccl(self, stage: ExecutionStage, on: DeviceCall) -> Steps:
        if self.across and self._across_way is None:
            facts = yield from gather_facts(self.within(stage), facts_of(self._engine.rank, self._place, on.device))
            self._across_way = choose_way(facts, self._network)
        return self._is_nccl()

    def _slots(self, on: DeviceCall, algorithm: str) -> DeviceSlotBuffers | None:
        """A group has buffers on one device; tensors of another, and of one that others do not reach, go by the host."""
        suits = algorithm == "auto" and self._may and max(map(nbytes, on.tensors)) >= self.floor
        if algorithm != CUDA_IPC and not suits:
            return None
        if self.slots is None:
            facts = facts_of(self._engine.rank, self._place, on.device)
            self.slots = DeviceSlotBuffers(self._engine.messages, self._queue, self._ranks, facts, on.device)
        return self.slots if self.slots.device is on.device and not self.slots.refused else None

    def start_over(self) -> None:
        """After a failure all ranks begin with the same slots again, and learn of each other's devices again."""
        self._across_way = None
        if self.slots is not None:
            self.slots.start_over()


# Calls of a group on tensors of GPUs that NCCL carries out: `all_reduce` and `broadcast`, of what NCCL has dtypes for.
#
# Gradients and parameters go by these. The other collectives go by CUDA IPC or the host, as they do without NCCL.

WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, *WHOLE})
OPERATIONS = {"sum": "SUM", "mean": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


def nccl_takes(tensors: Sequence[torch.Tensor], how: Sequence[object]) -> bool:
    """Whether NCCL can: the same on all ranks, which have the same dtypes and operation. `how`: an operation, or a root."""
    return all(tensor.dtype in DTYPES for tensor in tensors) and all(
        isinstance(one, int) or one in OPERATIONS for one in how
    )


def all_reduce(native: Any, stage: ExecutionStage, tensors: Sequence[torch.Tensor], op: str) -> Steps:
    """Make each tensor the sum (or another combination) over all ranks."""
    size = len(stage.ranks)
    for fused in fuse(tensors, stays=True):
        whole, options = fused.whole, dist.AllreduceOptions()
        apart = op == "mean" and not whole.is_cuda  # gloo, in tests, has no mean
        options.reduceOp = getattr(dist.ReduceOp, OPERATIONS["sum" if apart else op])
        if apart:
            before_mean(op, whole, size)
        yield from native.within(stage, whole, lambda made, whole=whole, options=options: [made.allreduce([whole], options)])
        if apart:
            divide(op, whole, size)
        fused.scatter()


def broadcast(native: Any, stage: ExecutionStage, tensors: Sequence[torch.Tensor], root: int) -> Steps:
    """Make each tensor the root's."""
    for fused in fuse(tensors, stays=True):
        whole, options = fused.whole, dist.BroadcastOptions()
        options.rootRank = root
        yield from native.within(stage, whole, lambda made, whole=whole, options=options: [made.broadcast([whole], options)])
        fused.scatter()


NCCL_CALLS: dict[str, Callable[..., Steps]] = {"all_reduce": all_reduce, "broadcast": broadcast}

"""`algorithm="native"`: gloo for CPU tensors, NCCL for CUDA tensors, through torch.distributed.

NCCL is how NVLink, PCIe peer-to-peer and GPUDirect are reached. A process group of torch's is made beside ours, for the same
ranks, on first use; torch's default group is not touched. Neither gloo nor NCCL encrypts: between hosts that is refused
unless the job is insecure anyway.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.flattening import shape_of
from polytempo.collectives.group import RankGroup
from polytempo.collectives.reduce_ops import before_mean, divide, operation
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.errors import UsageError

NativeTensors = Sequence[torch.Tensor]
OPERATIONS = {"sum": "SUM", "mean": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
OPERATIONS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}
PATH = 4096


class Native:
    """torch's own collectives for the ranks of a group: the same methods, the same meanings."""

    def __init__(self, group: RankGroup, insecure: bool = False) -> None:
        if len(group.place.hosts) > 1 and not insecure:
            raise UsageError("algorithm='native' does not encrypt what goes between hosts; say insecure, or use 'auto'")
        self._group = group
        self._made: dict[str, Any] = {}

    def all_reduce(self, tensors: NativeTensors, op: object = "sum", algorithm: str = "", background: bool = False) -> Task:
        """As `RankGroup.all_reduce`."""
        name = operation(op)
        divided = name == "mean" and not tensors[0].is_cuda  # gloo has no mean

        def start(made: Any) -> list[Any]:
            options = dist.AllreduceOptions()
            options.reduceOp = _reduce_op("sum" if divided else name)
            for tensor in tensors if divided else ():
                before_mean(name, tensor, self._group.size)
            return [made.allreduce([tensor], options) for tensor in tensors]

        return self._task("all_reduce", tensors[0], start, background, tensors if divided else ())

    def reduce(
        self, tensor: torch.Tensor, root: int, op: object = "sum", algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.reduce`."""
        name = operation(op)
        divided = name == "mean" and not tensor.is_cuda
        mine = tensor if self._group.rank == root else tensor.clone()

        def start(made: Any) -> list[Any]:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = _reduce_op("sum" if divided else name), root
            if divided:
                before_mean(name, mine, self._group.size)
            return [made.reduce([mine], options)]

        return self._task("reduce", tensor, start, background, [mine] if divided else ())

    def broadcast(self, tensors: NativeTensors, root: int, algorithm: str = "", background: bool = False) -> Task:
        """As `RankGroup.broadcast`."""

        def start(made: Any) -> list[Any]:
            options = dist.BroadcastOptions()
            options.rootRank = root
            return [made.broadcast([tensor], options) for tensor in tensors]

        return self._task("broadcast", tensors[0], start, background)

    def all_gather(
        self, outputs: NativeTensors, tensor: torch.Tensor, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.all_gather`."""
        return self._task("all_gather", tensor, lambda made: [made.allgather([list(outputs)], [tensor])], background)

    def gather(
        self, outputs: NativeTensors | None, tensor: torch.Tensor, root: int, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.gather`."""

        def start(made: Any) -> list[Any]:
            options = dist.GatherOptions()
            options.rootRank = root
            lists = [list(outputs or ())] if self._group.rank == root else []
            return [made.gather(lists, [tensor], options)]

        return self._task("gather", tensor, start, background)

    def scatter(
        self, output: torch.Tensor, inputs: NativeTensors | None, root: int, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.scatter`."""

        def start(made: Any) -> list[Any]:
            options = dist.ScatterOptions()
            options.rootRank = root
            lists = [list(inputs or ())] if self._group.rank == root else []
            return [made.scatter([output], lists, options)]

        return self._task("scatter", output, start, background)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: NativeTensors, op: object = "sum", algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.reduce_scatter`."""
        name = operation(op)
        divided = name == "mean" and not output.is_cuda

        def start(made: Any) -> list[Any]:
            options = dist.ReduceScatterOptions()
            options.reduceOp = _reduce_op("sum" if divided else name)
            pieces = [piece.clone() if divided else piece for piece in inputs]
            for piece in pieces if divided else ():
                before_mean(name, piece, self._group.size)
            return [made.reduce_scatter([output], [pieces], options)]

        return self._task("reduce_scatter", output, start, background, [output] if divided else ())

    def all_to_all(
        self,
        outputs: NativeTensors,
        inputs: NativeTensors,
        algorithm: str = "",
        background: bool = False,
        even: bool = False,
    ) -> Task:
        """As `RankGroup.all_to_all`."""
        return self._task("all_to_all", inputs[0], lambda made: [made.alltoall(list(outputs), list(inputs))], background)

    def close(self) -> None:
        """NCCL waits for ever if it is dropped without this."""
        for made in self._made.values():
            made.shutdown()
        self._made.clear()

    # From a call to a task.

    def _task(
        self,
        name: str,
        like: torch.Tensor,
        start: Callable[[Any], list[Any]],
        background: bool,
        divided: NativeTensors = (),
    ) -> Task:
        made = self._process_group(like.device.type)
        engine = self._group.engine

        def steps() -> Steps:
            works, ended = start(made), list[int]()

            def note() -> None:
                ended.append(1)
                engine.wake()

            for work in works:
                _when_done(work, note)
            yield Wait(lambda: len(ended) == len(works), list)
            for work in works:
                work.wait()
            for tensor in divided:
                divide("mean", tensor, self._group.size)

        return engine.start(CallQueue(-1, self._group.ranks), f"{name}({shape_of(like)}, by native)", steps(), background)

    def _process_group(self, device: str) -> Any:
        if device not in self._made:
            if device == "cuda" and not dist.is_nccl_available():
                raise UsageError("this build of torch has no NCCL; move the tensor to the CPU, or use algorithm='auto'")
            self._made[device] = self._open(device)
        return self._made[device]

    def _open(self, device: str) -> Any:
        """Ranks of one host meet in a directory of the first one's. It stays: NCCL comes back to it with the first call."""
        group, timeout = self._group, timedelta(seconds=self._group.timeout or 1800)
        directory = tempfile.mkdtemp(prefix="polytempo-") if group.rank == 0 else ""
        text = torch.zeros(PATH, dtype=torch.uint8)
        if group.rank == 0:
            path = os.path.join(directory, "store").encode()
            text[: len(path)] = torch.frombuffer(bytearray(path), dtype=torch.uint8)
        group.broadcast([text], 0).wait()
        store = dist.FileStore(bytes(text.tolist()).rstrip(b"\0").decode(), group.size)
        if device == "cuda":
            made = dist.ProcessGroupNCCL(store, group.rank, group.size, timeout)
        else:
            made = dist.ProcessGroupGloo(store, group.rank, group.size, timeout)
        if directory:
            weakref.finalize(self, _remove, directory, os.getpid())
        return made


def _remove(directory: str, maker: int) -> None:
    """Not in a child that was forked meanwhile: the others come back to it."""
    if os.getpid() == maker:
        shutil.rmtree(directory, ignore_errors=True)


def _when_done(work: Any, tell: Callable[[], object]) -> None:
    try:
        work.get_future().add_done_callback(lambda _: tell())
    except RuntimeError:  # gloo's reduce_scatter has none
        work.wait()
        tell()


def _reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, OPERATIONS[name])

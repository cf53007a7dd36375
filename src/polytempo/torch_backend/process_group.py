"""A process group of torch that is made in Python: its links, its names, how its calls are started, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch.distributed import ProcessGroup

from polytempo.collectives.flattening import shape_of
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.shutdown import at_exit
from polytempo.collectives.tasks import Steps, Task
from polytempo.collectives.world import World
from polytempo.errors import PeerError, PolytempoError, UsageError
from polytempo.torch_backend.errors import as_torch_error
from polytempo.torch_backend.register import DEVICES, NAME
from polytempo.torch_backend.work import TaskWork


class BaseGroup(ProcessGroup):  # type: ignore[misc]
    """What does not depend on the operation. Torch asks a group for its back end: that is the group itself."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, store: Any, world: World, ranks: Sequence[int]) -> None:
        super().__init__(world.rank, world.size)
        self._store, self._name, self._description = store, "", ""
        self.world, self.group, self.ranks = world, world.all_ranks, ranks
        self._forget_exit = at_exit(world.close)

    # What torch asks.

    # ruff: noqa: N802  torch's names for them

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend_name(self) -> str:
        return NAME

    def _get_backend(self, _: Any) -> BaseGroup:
        return self

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES if device == "cpu" or torch.cuda.is_available()]

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    # Time and the end.

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls from now on."""
        self.group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave: what the others still need of this rank has been sent."""
        self._forget_exit()
        self.world.close()

    def abort(self) -> None:
        """Leave at once: whoever still needs this rank learns that it is gone."""
        self._forget_exit()
        self.world.close(politely=False)

    # Calls.

    def _start(self, results: list[Any], touched: Sequence[Any], opts: Any, start: Callable[[], Task | list[Task]]) -> Any:
        """Start tasks that touch these tensors; their handle."""
        try:
            _check_dense(touched)
            started = start()
        except PolytempoError as error:
            raise as_torch_error(error, self.ranks) from None
        tasks = started if isinstance(started, list) else [started]
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout > timedelta(0):  # torch's "not given" is less
            for task in tasks:
                task.timeout = timeout.total_seconds()
        return TaskWork(tasks, results, self.ranks)


def _check_dense(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise UsageError(f"expected dense tensors, got layout {tensor.layout}; use .to_dense() (DDP: sparse=False)")


# Single messages between two ranks, and a barrier made of them that names who has not come.

#: Tags of the barrier's own messages go down from here, one for each barrier: who comes too late finds its answer.
BARRIERS = -1000


class MessagingGroup(BaseGroup):
    """What is not a collective."""

    def __init__(self, store: Any, world: World, ranks: Sequence[int]) -> None:
        super().__init__(store, world, ranks)
        self._barriers = count()

    def send(self, tensors: list[Any], to: int, tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: send(self.group, tensor, to, tag, background=True))

    def recv(self, tensors: list[Any], source: int, tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: receive(self.group, tensor, source, tag, background=True))

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: receive(self.group, tensor, None, tag, background=True))

    def _ready(self, tensors: list[Any]) -> Any:
        """Messages are in no queue: nothing but the caller can wait for what the GPU still does."""
        if len(tensors) != 1:
            raise as_torch_error(UsageError(f"expected one tensor in a message, got {len(tensors)}"), self.ranks)
        if tensors[0].device.type == "cuda":
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return tensors[0]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here. On those who are, all who are not are named, in the words that gloo uses."""
        tag, seconds = BARRIERS - next(self._barriers), self.group.timeout
        if timeout is not None and timeout >= timedelta(0):  # torch's "not given" is less
            seconds = timeout.total_seconds()
        try:
            missing = self._count_heads(tag, seconds) if self.rank() == 0 else self._report(tag, seconds)
            if missing:
                raise PeerError(f"{self._plaint(seconds)}: {_named(missing, wait_all_ranks)}")
        except PolytempoError as error:
            raise as_torch_error(error, self.ranks) from None

    def _plaint(self, seconds: float | None) -> str:
        if self.rank() == 0:
            return "Rank 0 timed out in monitoredBarrier" + ("" if seconds is None else f" after {1000 * seconds:.0f} ms")
        here = f"Rank {self.rank()} successfully reached monitoredBarrier"
        return f"{here}, but received errors while waiting for send/recv from rank 0"

    def _count_heads(self, tag: int, seconds: float | None) -> list[int]:
        """Rank 0 hears from everybody, and tells those who came who did not."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        others = range(1, self.size())
        tasks = [receive(self.group, torch.empty(1, dtype=torch.uint8), rank, tag, background=True) for rank in others]
        absent = torch.zeros(self.size(), dtype=torch.uint8)
        for rank, task in zip(others, tasks, strict=True):
            try:
                task.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except PeerError:
                absent[rank] = 1
        for rank in others:
            send(self.group, absent, rank, tag, background=True)
        return [int(rank) for rank in absent.nonzero().flatten()]

    def _report(self, tag: int, seconds: float | None) -> list[int]:
        send(self.group, torch.ones(1, dtype=torch.uint8), 0, tag, background=True).wait(seconds)
        absent = torch.zeros(self.size(), dtype=torch.uint8)
        # Rank 0 gives up after the same time, counted from when it came: its answer is waited for a little longer.
        receive(self.group, absent, 0, tag, background=True).wait(None if seconds is None else seconds + 1.0)
        return [int(rank) for rank in absent.nonzero().flatten()]


def _named(missing: list[int], together: bool) -> str:
    """Those who are missing; without `together`, in a sentence that begins with the first."""
    others = ", ".join(map(str, missing[1:]))
    if not others:
        return f"Rank {missing[0]} failed to pass monitoredBarrier"
    if together:
        return f"Ranks {missing[0]}, {others} failed to pass monitoredBarrier"
    return f"Rank {missing[0]} failed to pass monitoredBarrier, and so did {others}"


# The collectives of torch's process groups, as those of `polytempo.collectives`. Roots are numbered within the group.

TorchTensors = Sequence[Any]


class TorchGroup(MessagingGroup):
    """One process group of torch. Its methods are those of `torch.distributed.ProcessGroup`."""

    # From all to all.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(tensors, tensors, opts, lambda: self.group.all_reduce(tensors, _op(opts), background=True))

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        self._one_each("all_gather", outputs, inputs)
        touched = [*outputs[0], inputs[0]]
        return self._call(outputs[0], touched, opts, lambda: self.group.all_gather(outputs[0], inputs[0], background=True))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(self._parts("all_gather", output, tensor), tensor) for output, tensor in _pairs(outputs, inputs)]

        def start() -> list[Task]:
            return [self.group.all_gather(parts, tensor, background=True) for parts, tensor in pairs]

        return self._call(outputs, [*outputs, *inputs], opts, start)

    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        """`outputs[rank]` is a list like `inputs`."""
        lists = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]

        def start() -> list[Task]:
            return [self.group.all_gather(*pair, background=True) for pair in zip(lists, inputs, strict=True)]

        flat = [tensor for of_rank in outputs for tensor in of_rank]
        return self._call(flat, [*flat, *inputs], opts, start)

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None) -> Any:
        self._one_each("reduce_scatter", inputs, outputs)
        output, pieces = outputs[0], inputs[0]
        return self._call(
            outputs,
            [*pieces, output],
            opts,
            lambda: self.group.reduce_scatter(output, pieces, _op(opts), background=True),
        )

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(output, self._parts("reduce_scatter", tensor, output)) for output, tensor in _pairs(outputs, inputs)]

        def start() -> list[Task]:
            return [self.group.reduce_scatter(output, parts, _op(opts), background=True) for output, parts in pairs]

        return self._call(outputs, [*outputs, *inputs], opts, start)

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        return self._call(
            outputs, [*outputs, *inputs], opts, lambda: self.group.all_to_all(outputs, inputs, background=True)
        )

    def all_to_all_single(
        self, output: Any, tensor: Any, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Rows go to each rank: so many, or, if no numbers are given on any rank, the same to each."""
        even = not output_sizes and not input_sizes
        outputs, inputs = self._rows(output, output_sizes), self._rows(tensor, input_sizes)
        return self._call(
            [output], [output, tensor], opts, lambda: self.group.all_to_all(outputs, inputs, background=True, even=even)
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._call([], [], opts, lambda: self.group.barrier(background=True))

    # From or to one rank.

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(tensors, tensors, opts, lambda: self.group.broadcast(tensors, _root(opts), background=True))

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(
            tensors,
            tensors,
            opts,
            lambda: self.group.reduce(tensors[0], _root(opts), _op(opts if op is None else op), background=True),
        )

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> Any:
        parts = outputs[0] if outputs else None
        return self._call(
            parts or [],
            [*(parts or ()), *inputs],
            opts,
            lambda: self.group.gather(parts, inputs[0], _root(opts), background=True),
        )

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        parts = inputs[0] if inputs else None
        return self._call(
            outputs,
            [*(parts or ()), *outputs],
            opts,
            lambda: self.group.scatter(outputs[0], parts, _root(opts), background=True),
        )

    # Names of torch before 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Parts of one tensor.

    def _parts(self, call: str, whole: Any, part: Any) -> list[Any]:
        """A tensor as one part for each rank."""
        if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
            wanted = f"{self.size()} times {shape_of(part)}"
            raise self._wrong(f"{call}: expected a tensor of {wanted}, got {shape_of(whole)}")
        return self._cut(whole, [part.numel()] * self.size())

    def _rows(self, tensor: Any, rows: Sequence[int]) -> list[Any]:
        count = tensor.shape[0] if tensor.dim() else 0
        if not rows and count % self.size():
            raise self._wrong(f"expected a number of rows that {self.size()} ranks can share, got {shape_of(tensor)}")
        rows = rows or [count // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != count:
            raise self._wrong(f"expected {self.size()} numbers of rows that add up to {count}, got {list(rows)}")
        each = tensor.numel() // count if count else 0
        return self._cut(tensor, [number * each for number in rows])

    def _cut(self, tensor: Any, sizes: Sequence[int]) -> list[Any]:
        if not tensor.is_contiguous():
            raise self._wrong(f"expected a contiguous tensor, got strides {list(tensor.stride())}; use .contiguous()")
        return list(tensor.detach().view(-1).split(sizes))

    def _one_each(self, call: str, lists: Sequence[TorchTensors], single: TorchTensors) -> None:
        if len(lists) != 1 or len(single) != 1:
            raise self._wrong(f"{call}: expected one tensor on this rank, got {len(single)}, and {len(lists)} lists")

    def _wrong(self, text: str) -> Exception:
        return as_torch_error(UsageError(text), self.ranks)

    # Calls.

    def _call(self, results: list[Any], touched: TorchTensors, opts: Any, start: Callable[[], Task | list[Task]]) -> Any:
        """The progress thread reads tensors in a stream of its own: not before the caller's kernels have made them."""
        for device in {tensor.device for tensor in touched if tensor.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.group.before_next("the GPU", _until(event))
        return self._start(results, touched, opts, start)


def _until(event: Any) -> Steps:
    event.synchronize()
    yield from ()


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _pairs(outputs: list[Any], inputs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(outputs, inputs, strict=True))


def _op(opts: Any) -> Any:
    """The operation, of options or alone. Torch wraps it, and the wrapper says nothing in words."""
    op = getattr(opts, "reduceOp", opts)
    return "sum" if op is None or isinstance(op, int) else getattr(op, "op", op)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))

"""A process group of torch, in Python: torch's calls as tasks of a `World` of its own.

    open_group        torch's store -> rendezvous -> a World with links and a progress engine for this group alone
    TorchGroup        the methods of `torch.distributed.ProcessGroup`: each starts a task and returns its `Work`
    monitored_barrier a barrier over point-to-point messages that names the ranks that are missing

Roots and peers are numbered within the group, as torch hands them over.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from polytempo.client.key_value_store import TorchStore
from polytempo.collectives.flattening import shape_of
from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.shutdown import at_exit
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World, open_by_store
from polytempo.errors import PeerError, PolytempoError, UsageError
from polytempo.launcher.job_facts import way_of
from polytempo.session.session import watching_job
from polytempo.torch_backend.device_backends import hands_over, make_beside, others_asked_for, register_devices
from polytempo.torch_backend.register import NAME
from polytempo.torch_backend.work import KEPT, TaskWork, as_torch_error
from polytempo.transport.deadline import RankWatch

#: Tags of the messages of monitored barriers count down from here, one for each barrier: a late rank finds its own answer.
BARRIER_TAGS = -1000

TorchTensors = Sequence[Any]


@hands_over
class TorchGroup(ProcessGroup):  # type: ignore[misc]
    """One process group of torch. Torch asks a group for its back end: that is the group itself, but for devices of another
    back end beside it.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(
        self, store: Any, world: World, ranks: Sequence[int], beside: Mapping[str, ProcessGroup] | None = None
    ) -> None:
        super().__init__(world.rank, world.size)
        register_devices(self, beside or {})
        self._store, self._name, self._description = store, "", ""
        self.beside = beside or {}  #: groups of other back ends, by the type of their device
        self.world, self.group, self.ranks = world, world.all_ranks, ranks
        self._splits: list[TorchGroup] = []  #: groups made of this one, which end with it
        self._barrier_tags = count(BARRIER_TAGS, -1)
        self._dropped: deque[TaskWork] = deque(maxlen=KEPT)  #: works that only C++ may wait for yet
        self._forget_exit = at_exit(world.close)

    # Names and properties that torch asks for.

    # ruff: noqa: N802  torch's names

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        for group in self.beside.values():
            group._set_group_name(name)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: Any) -> Any:
        beside = self.beside.get(torch.device(device).type)
        return self if beside is None else beside._get_backend(device)

    get_backend = _get_backend

    def get_group_store(self) -> Any:
        return self._store

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    # Time-out and shutdown.

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls from now on."""
        self.group.timeout = timeout.total_seconds()
        for device, group in self.beside.items():
            group._get_backend(torch.device(device)).set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group after everything that other ranks still need has been sent."""
        self._forget_exit()
        for group in (*self._splits, *self.beside.values()):
            group.shutdown()
        self.world.close()

    def abort(self) -> None:
        """Leave at once: ranks that still need this one get an error that names it."""
        self._forget_exit()
        for group in (*self._splits, *self.beside.values()):
            group.abort()
        self.world.close(politely=False)

    # Other groups. Torch's own methods look for a store in C++ that a group made in Python has not, and end the process.

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> TorchGroup | None:
        """A group of some ranks of this one, whose numbers are meant; None on the other ranks, which need not call it."""
        chosen = sorted(new_ranks)
        if not chosen or len(set(chosen)) < len(chosen) or chosen[0] < 0 or chosen[-1] >= self.size():
            wanted = f"some of the ranks 0 to {self.size() - 1}, each once"
            raise self._refusal(f"split_group: expected {wanted}, got {list(new_ranks)}")
        if opts is not None or device_types is not None:
            raise self._refusal("split_group: expected neither opts nor device_types for the back end polytempo")
        if self.rank() not in chosen:
            return None
        options = torch._C._distributed_c10d._DistributedBackendOptions()
        options.group_id = f"{self._name}:split:{'_'.join(map(str, chosen))}"
        options.store = torch.distributed.PrefixStore(f"{options.group_id}/", self._store)
        options.group_rank, options.group_size = chosen.index(self.rank()), len(chosen)
        assert self.group.timeout is not None  # torch gives each group one
        options.timeout = timedelta(seconds=self.group.timeout) if timeout is None else timeout
        options.global_ranks_in_group = [self.ranks[rank] for rank in chosen]
        group = _open(options, {device: other.name() for device, other in self.beside.items()})
        group.setGroupName(group_name or options.group_id)
        group.setGroupDesc(group_desc or f"{self._description}:split")
        self._splits.append(group)
        return group

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise self._refusal("merge_remote_group is not offered by the back end polytempo; use torch.distributed.new_group")

    splitGroup = split_group  # noqa: N815  C++ calls it so

    def _register_backend(self, device: Any, kind: Any, backend: Any = None) -> None:
        if backend is None:
            raise self._refusal(f"expected a back end to register for {device}, got None")
        super()._register_backend(device, kind, backend)

    # Point to point.

    def send(self, tensors: list[Any], to: int, tag: int = 0) -> Any:
        return self._message(tensors, lambda tensor: send(self.group, tensor, to, tag, background=True))

    def recv(self, tensors: list[Any], source: int, tag: int = 0) -> Any:
        return self._message(tensors, lambda tensor: receive(self.group, tensor, source, tag, background=True))

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Any:
        return self._message(tensors, lambda tensor: receive(self.group, tensor, None, tag, background=True))

    def _message(self, tensors: list[Any], start: Callable[[Any], Task]) -> Any:
        """Messages are in no call queue, so that only the caller can wait for kernels of the GPU that are still running."""
        if len(tensors) != 1:
            raise self._refusal(f"expected one tensor in a message, got {len(tensors)}")
        if tensors[0].device.type == "cuda":
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return self._call(tensors, tensors, None, lambda: start(tensors[0]))

    # Collectives among all ranks.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(tensors, tensors, opts, lambda: self.group.all_reduce(tensors, _op(opts), background=True))

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        self._check_single("all_gather", outputs, inputs)
        touched = [*outputs[0], inputs[0]]
        return self._call(outputs[0], touched, opts, lambda: self.group.all_gather(outputs[0], inputs[0], background=True))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(self._split_like("all_gather", output, tensor), tensor) for output, tensor in _pairs(outputs, inputs)]

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
        self._check_single("reduce_scatter", inputs, outputs)
        output, parts = outputs[0], inputs[0]
        return self._call(
            outputs,
            [*parts, output],
            opts,
            lambda: self.group.reduce_scatter(output, parts, _op(opts), background=True),
        )

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(output, self._split_like("reduce_scatter", tensor, output)) for output, tensor in _pairs(outputs, inputs)]

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
        """Rows go to each rank: the given numbers, or, if no rank gives numbers, the same number to each."""
        even = not output_sizes and not input_sizes
        outputs, inputs = self._split_rows(output, output_sizes), self._split_rows(tensor, input_sizes)
        return self._call(
            [output], [output, tensor], opts, lambda: self.group.all_to_all(outputs, inputs, background=True, even=even)
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._call([], [], opts, lambda: self.group.barrier(background=True))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here; the error names all ranks that are missing, in gloo's words."""
        seconds = self.group.timeout
        if timeout is not None and timeout >= timedelta(0):  # torch's "not given" is less
            seconds = timeout.total_seconds()
        try:
            monitored_barrier(self.group, next(self._barrier_tags), seconds, wait_all_ranks)
        except PolytempoError as error:
            raise as_torch_error(error, self.ranks) from None

    # Collectives from or to one rank.

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

    def gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        """On ranks other than the root, `output` is empty."""
        parts = self._split_like("gather", output, tensor) if self.group.rank == _root(opts) else None
        return self._call(
            [output],
            [output, tensor],
            opts,
            lambda: self.group.gather(parts, tensor, _root(opts), background=True),
        )

    gather_into_tensor = gather_single

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

    # Starting a call.

    def _call(self, results: list[Any], touched: TorchTensors, opts: Any, start: Callable[[], Task | list[Task]]) -> Any:
        """Start tasks that read or write the `touched` tensors, behind the caller's stream; returns their `Work`."""
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
        return TaskWork(tasks, results, self.ranks, self._dropped)

    # Checks and parts of tensors.

    def _split_like(self, call: str, whole: Any, part: Any) -> list[Any]:
        """A tensor as one part for each rank, each as large as `part`."""
        if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
            wanted = f"{self.size()} times {shape_of(part)}"
            raise self._refusal(f"{call}: expected a tensor of {wanted}, got {shape_of(whole)}")
        return self._split(whole, [part.numel()] * self.size())

    def _split_rows(self, tensor: Any, rows: Sequence[int]) -> list[Any]:
        """A tensor as its rows for each rank."""
        total = tensor.shape[0] if tensor.dim() else 0
        if not rows and total % self.size():
            raise self._refusal(f"expected a number of rows that {self.size()} ranks can share, got {shape_of(tensor)}")
        rows = rows or [total // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != total:
            raise self._refusal(f"expected {self.size()} numbers of rows that add up to {total}, got {list(rows)}")
        each = tensor.numel() // total if total else 0
        return self._split(tensor, [number * each for number in rows])

    def _split(self, tensor: Any, sizes: Sequence[int]) -> list[Any]:
        if not tensor.is_contiguous():
            raise self._refusal(f"expected a contiguous tensor, got strides {list(tensor.stride())}; use .contiguous()")
        return list(tensor.detach().view(-1).split(sizes))

    def _check_single(self, call: str, lists: Sequence[TorchTensors], single: TorchTensors) -> None:
        if len(lists) != 1 or len(single) != 1:
            raise self._refusal(f"{call}: expected one tensor on this rank, got {len(single)}, and {len(lists)} lists")

    def _refusal(self, text: str) -> Exception:
        return as_torch_error(UsageError(text), self.ranks)


def _check_dense(tensors: TorchTensors) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise UsageError(f"expected dense tensors, got layout {tensor.layout}; use .to_dense() (DDP: sparse=False)")


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _pairs(outputs: list[Any], inputs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(outputs, inputs, strict=True))


def _op(opts: Any) -> Any:
    """The operation, of options or alone. Torch wraps it, and the wrapper has no readable name."""
    op = getattr(opts, "reduceOp", opts)
    return "sum" if op is None or isinstance(op, int) else getattr(op, "op", op)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


# The monitored barrier.


def monitored_barrier(group: RankGroup, tag: int, seconds: float | None, wait_all_ranks: bool) -> None:
    """Rank 0 receives a message from every rank, and answers those that came with the list of those that did not.

    Args:
        group: The group.
        tag: Of its messages, a new one for each barrier.
        seconds: The time-out, counted on each rank from its call.
        wait_all_ranks: Whether the error lists all missing ranks at once, or begins with the first, as gloo's does.

    Raises:
        PeerError: Ranks are missing, or rank 0 does not answer.
    """
    missing = _collect_arrivals(group, tag, seconds) if group.rank == 0 else _report_arrival(group, tag, seconds)
    if missing:
        raise PeerError(f"{_position(group, seconds)}: {_listing(missing, wait_all_ranks)}")


def _collect_arrivals(group: RankGroup, tag: int, seconds: float | None) -> list[int]:
    deadline = time.monotonic() + seconds if seconds is not None else None
    others = range(1, group.size)
    tasks = [receive(group, torch.empty(1, dtype=torch.uint8), rank, tag, background=True) for rank in others]
    absent = torch.zeros(group.size, dtype=torch.uint8)
    for rank, task in zip(others, tasks, strict=True):
        try:
            task.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except PeerError:
            absent[rank] = 1
    for rank in others:
        send(group, absent, rank, tag, background=True)
    return [int(rank) for rank in absent.nonzero().flatten()]


def _report_arrival(group: RankGroup, tag: int, seconds: float | None) -> list[int]:
    send(group, torch.ones(1, dtype=torch.uint8), 0, tag, background=True).wait(seconds)
    absent = torch.zeros(group.size, dtype=torch.uint8)
    # Rank 0 gives up after the same time, counted from its own call: its answer is waited for a little longer.
    receive(group, absent, 0, tag, background=True).wait(None if seconds is None else seconds + 1.0)
    return [int(rank) for rank in absent.nonzero().flatten()]


def _position(group: RankGroup, seconds: float | None) -> str:
    if group.rank == 0:
        return "Rank 0 timed out in monitoredBarrier" + ("" if seconds is None else f" after {1000 * seconds:.0f} ms")
    here = f"Rank {group.rank} successfully reached monitoredBarrier"
    return f"{here}, but received errors while waiting for send/recv from rank 0"


def _listing(missing: list[int], together: bool) -> str:
    others = ", ".join(map(str, missing[1:]))
    if not others:
        return f"Rank {missing[0]} failed to pass monitoredBarrier"
    if together:
        return f"Ranks {missing[0]}, {others} failed to pass monitoredBarrier"
    return f"Rank {missing[0]} failed to pass monitoredBarrier, and so did {others}"


# Opening a group.

_opened: Counter[str] = Counter()  # groups made so far, by name


def open_group(options: Any, group_options: Any) -> TorchGroup:
    """Make a group; torch calls this on each of its ranks."""
    if group_options is not None:
        refusal = UsageError(f"expected no pg_options for the back end polytempo, got {type(group_options).__name__}")
        raise as_torch_error(refusal, range(options.group_size))
    return _open(options, others_asked_for())


def _open(options: Any, asked: dict[str, str]) -> TorchGroup:
    """A group, and those of other back ends beside it: their names by device."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    try:
        world = _open_world(options, ranks)
        try:
            beside = make_beside(options, ranks, asked)
        except BaseException:
            world.close(politely=False)
            raise
    except PolytempoError as error:
        raise as_torch_error(error, ranks) from None
    return TorchGroup(options.store, world, ranks, beside)


def _open_world(options: Any, ranks: Sequence[int]) -> World:
    """The prefix of keys counts groups of this name: one that is made again must not read the keys of the old one."""
    _opened[options.group_id] += 1
    store = TorchStore(torch.distributed.PrefixStore(f"polytempo-{_opened[options.group_id]}", options.store))
    way, seconds = way_of(None, None), options.timeout.total_seconds()
    with watching_job() as job:
        world = open_by_store(
            store,
            options.group_rank,
            options.group_size,
            way.address or _store_address(options.store),
            way.keys,
            way.insecure,
            join_timeout=seconds,
            timeout=seconds,
            emulated=way.emulated,
            watch=GroupWatch(ranks, job),
            call="a new group",
        )
    if absent := [rank for rank in range(world.size) if rank in world.engine.messages.left]:
        world.close(politely=False)
        raise world.engine.messages.loss(absent, "a new group")
    return world


class GroupWatch(RankWatch):
    """The ranks that the job or the default group has lost, numbered as in a new group of `ranks`."""

    def __init__(self, ranks: Sequence[int], job: RankWatch) -> None:
        super().__init__()
        self._ranks, self._job = ranks, job

    def look(self, call: str, ranks: Sequence[int]) -> None:
        self._job.look(call, [self._ranks[rank] for rank in ranks])
        default, lost = torch.distributed.group.WORLD, dict(self._job.ended)
        if isinstance(default, TorchGroup):  # else it is another back end's, or this is the first
            default.world.engine.look()
            lost |= default.world.engine.messages.left
        self.ended = {number: lost[rank] for number, rank in enumerate(self._ranks) if rank in lost}


def _store_address(store: Any) -> str:
    """The address of torch's store, which all ranks reach; empty for a file or memory store, which serves one host."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, torch.distributed.TCPStore):
        return ""
    return f"[{store.host}]:{store.port}" if ":" in store.host else f"{store.host}:{store.port}"

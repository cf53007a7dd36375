"""`algorithm="native"`: gloo for CPU tensors, NCCL for CUDA tensors, through torch.distributed.

NCCL is how NVLink, PCIe peer-to-peer and GPUDirect are reached. A process group of torch's is made beside ours, for the same
ranks, inside the first call (`Meeting`); torch's default group is not touched. Neither gloo nor NCCL encrypts:
between hosts that is refused unless the job is insecure anyway.

A call is one of the group's: it has its place in their order, and is compared with those of the other ranks. It ends when
its result is there, on the GPU, too: NCCL would wait for ever for a rank that has died, so the links are watched meanwhile,
and the communicator is aborted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polytempo.collectives.device_choice import Network
from polytempo.collectives.executor import ExecutionStage
from polytempo.collectives.flattening import shape_of, shapes_of
from polytempo.collectives.group import Nested, RankGroup
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.reduce_ops import before_mean, divide, operation
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.errors import PeerError, UsageError
from polytempo.transport.host_addresses import own_address, own_host
from polytempo.transport.peer_link import CALL, LinkMessage

NativeTensors = Sequence[torch.Tensor]
OPERATIONS = {"sum": "SUM", "mean": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
OPERATIONS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}
#: Seconds in which the links tell of a rank whose end has made torch's own call fail.
GRACE = 1.0
#: Seconds of a call where the group has no time-out.
LONGEST = 1800.0


class Native:
    """torch's own collectives for the ranks of a group: the same methods, the same meanings."""

    def __init__(self, group: RankGroup) -> None:
        if len(group.place.hosts) > 1 and not group.network.insecure:
            raise UsageError("algorithm='native' does not encrypt what goes between hosts; say insecure, or use 'auto'")
        self._group = group
        self._made: dict[str, tuple[Any, Meeting]] = {}

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

        return self._task(
            "all_reduce", f"{name}, {shapes_of(tensors)}", tensors[0], start, background, tensors if divided else ()
        )

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

        return self._task(
            "reduce", f"{name}, {shape_of(tensor)}, to {root}", tensor, start, background, [mine] if divided else ()
        )

    def broadcast(self, tensors: NativeTensors, root: int, algorithm: str = "", background: bool = False) -> Task:
        """As `RankGroup.broadcast`."""

        def start(made: Any) -> list[Any]:
            options = dist.BroadcastOptions()
            options.rootRank = root
            return [made.broadcast([tensor], options) for tensor in tensors]

        return self._task("broadcast", f"{shapes_of(tensors)}, from {root}", tensors[0], start, background)

    def all_gather(
        self, outputs: NativeTensors, tensor: torch.Tensor, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.all_gather`."""

        def start(made: Any) -> list[Any]:
            return [made.allgather([list(outputs)], [tensor])]

        return self._task("all_gather", shape_of(tensor), tensor, start, background)

    def gather(
        self, outputs: NativeTensors | None, tensor: torch.Tensor, root: int, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.gather`."""

        def start(made: Any) -> list[Any]:
            options = dist.GatherOptions()
            options.rootRank = root
            lists = [list(outputs or ())] if self._group.rank == root else []
            return [made.gather(lists, [tensor], options)]

        return self._task("gather", f"{shape_of(tensor)}, to {root}", tensor, start, background)

    def scatter(
        self, output: torch.Tensor, inputs: NativeTensors | None, root: int, algorithm: str = "", background: bool = False
    ) -> Task:
        """As `RankGroup.scatter`."""

        def start(made: Any) -> list[Any]:
            options = dist.ScatterOptions()
            options.rootRank = root
            lists = [list(inputs or ())] if self._group.rank == root else []
            return [made.scatter([output], lists, options)]

        return self._task("scatter", f"{shape_of(output)}, from {root}", output, start, background)

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

        return self._task(
            "reduce_scatter", f"{name}, {shape_of(output)}", output, start, background, [output] if divided else ()
        )

    def all_to_all(
        self,
        outputs: NativeTensors,
        inputs: NativeTensors,
        algorithm: str = "",
        background: bool = False,
        even: bool = False,
    ) -> Task:
        """As `RankGroup.all_to_all`."""

        def start(made: Any) -> list[Any]:
            return [made.alltoall(list(outputs), list(inputs))]

        return self._task("all_to_all", str(inputs[0].dtype).removeprefix("torch."), inputs[0], start, background)

    def close(self, politely: bool = True) -> None:
        """NCCL waits for ever if it is dropped without this, and with it for a rank that has crashed: then it is aborted."""
        lost = any(rank in self._group.engine.messages.crashed for rank in self._group.ranks)
        for device in list(self._made):
            if politely and not lost:
                self._made.pop(device)[0].shutdown()
            else:
                self._abort(device)

    def within(self, stage: ExecutionStage, like: torch.Tensor, start: Callable[[Any], list[Any]]) -> Steps:
        """Steps of a call under way whose stream is the current one: NCCL's kernels are behind what it was given before.

        Args:
            stage: Of the call.
            like: One of its tensors.
            start: Starts the calls of torch's process group.
        """
        assert stage.on is not None
        made = yield from self._opened(stage, like.device)
        self._announce(stage)
        try:
            for work in start(made):
                work.wait()
            point = stage.on.stream.mark()
            if not point.reached():
                yield Wait(point.reached, self._needed, polls=True)
        except RuntimeError as error:
            raise (yield from self._cause(like.device.type, error)) from None
        except BaseException:  # as in `_task`
            self._abort(like.device.type)
            raise

    # From a call to a task.

    def _task(
        self,
        name: str,
        about: str,
        like: torch.Tensor,
        start: Callable[[Any], list[Any]],
        background: bool,
        divided: NativeTensors = (),
    ) -> Task:
        device = like.device
        if device.type == "cuda" and not dist.is_nccl_available():
            raise UsageError("this build of torch has no NCCL; move the tensor to the CPU, or use algorithm='auto'")
        filled = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def steps(stage: ExecutionStage) -> Steps:
            made = yield from self._opened(stage, device)
            self._announce(stage)
            try:
                if filled is None:
                    works = start(made)
                    yield from in_thread(self._group.engine, self._needed, lambda: [work.wait() for work in works])
                else:
                    yield from self._on_stream(device, filled, lambda: start(made))
            except RuntimeError as error:
                raise (yield from self._cause(device.type, error)) from None
            except BaseException:  # a rank is lost, or the time is over: none can use it any more
                self._abort(device.type)
                raise
            for tensor in divided:
                divide("mean", tensor, self._group.size)

        return self._group.start(name, about, "native", steps, background)

    def _on_stream(self, device: torch.device, filled: Any, start: Callable[[], list[Any]]) -> Steps:
        """NCCL's kernels run behind the caller's, and the call ends when they have."""
        stream, done = torch.cuda.Stream(device), torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            stream.wait_event(filled)
            for work in start():
                work.wait()
            done.record(stream)
        yield from in_thread(self._group.engine, self._needed, done.synchronize)

    def _needed(self) -> list[int]:
        """Other ranks that the call needs; those that have done their part and left are not among them."""
        messages = self._group.engine.messages
        others = (rank for rank in self._group.ranks if rank != messages.rank)
        return [rank for rank in others if rank not in messages.left or rank in messages.crashed]

    def _cause(self, device: str, error: RuntimeError) -> Steps:
        """The loss of a rank behind an error of torch's, which may come first; or what torch says."""
        self._abort(device)
        messages, until = self._group.engine.messages, time.monotonic() + GRACE

        def lost() -> list[int]:
            return [rank for rank in self._group.ranks if rank in messages.crashed]

        yield Wait(lambda: bool(lost()) or time.monotonic() > until, list, polls=True)
        if lost():
            return messages.loss(lost())
        return PeerError(f"rank {messages.rank} failed in torch's own call: {str(error).partition(chr(10))[0]}")

    def _announce(self, stage: ExecutionStage) -> None:
        """What is called here, for the next rank to compare."""
        group = self._group
        link = group.engine.messages.links.get(group.ranks[(group.rank + 1) % group.size])
        if link is not None:
            link.send(LinkMessage(CALL, group.context, stage.tag, stage.meta))

    # The process group of torch's.

    def _opened(self, stage: ExecutionStage, device: torch.device) -> Steps:
        if device.type not in self._made:
            group = self._group
            meeting = Meeting(len(group.place.hosts), group.network, group.ranks, group.engine.rank)
            text = yield from tell(Nested(group, stage), meeting.serve() if group.rank == 0 else "")
            made = yield from in_thread(group.engine, self._needed, lambda: self._open(device, meeting.join(text)))
            self._made[device.type] = made, meeting
        return self._made[device.type][0]

    def _open(self, device: torch.device, store: Any) -> Any:
        """In a thread: torch waits for all ranks here."""
        group, timeout = self._group, timedelta(seconds=self._group.timeout or LONGEST)
        store.set_timeout(timedelta(seconds=PATIENCE))
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                return dist.ProcessGroupNCCL(store, group.rank, group.size, timeout)
            if len(group.place.hosts) == 1:
                return dist.ProcessGroupGloo(store, group.rank, group.size, timeout)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(group.network.route))]
            return dist.ProcessGroupGloo(store, group.rank, group.size, options)
        except RuntimeError as error:
            kind, first = "NCCL" if device.type == "cuda" else "gloo", str(error).partition("\n")[0]
            others = ", ".join(str(rank) for rank in group.ranks if rank != group.engine.rank)
            raise PeerError(f"rank {group.engine.rank} cannot meet ranks {others} for {kind}: {first}") from None

    def _abort(self, device: str) -> None:
        """End what waits for other ranks. In a thread: NCCL may take its time over it."""
        made, meeting = self._made.pop(device, (None, None))
        if made is not None:
            threading.Thread(target=_abort, args=(made, meeting), name="polytempo-abort", daemon=True).start()


def _abort(made: Any, _: Meeting | None) -> None:
    """The store is kept meanwhile."""
    with suppress(RuntimeError):  # gloo has nothing to abort
        made.abort()


def _reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, OPERATIONS[name])


# How the ranks of a group meet for a process group of torch's (gloo, NCCL): a TCPStore of torch's, which rank 0 serves.
#
# It listens where the other ranks reach it and nowhere else: on one host at the loopback address, between hosts at the
# address by which they reach this one. Nothing remains of it when its process ends, however that ends.
#
# Rank 0 tells the others where inside a call of the group. The process group is then made in a thread: torch waits there for
# all ranks, while the links are driven and a rank that is lost ends the call.

#: Seconds in which torch has to make a process group, once all ranks are there.
PATIENCE = 120.0
#: Bytes of the text that says where the store is.
TEXT = 512
LOOPBACK = "127.0.0.1"


class Meeting:
    """The store of one process group, on one rank. Kept for as long as the process group: NCCL comes back to it.

    Args:
        hosts: The number of hosts.
        network: That between the ranks.
        ranks: Those of the group, in the job; the first keeps the store.
        rank: This one.
    """

    def __init__(self, hosts: int, network: Network, ranks: Sequence[int], rank: int) -> None:
        self._several, self._network, self._ranks, self._rank = hosts > 1, network, ranks, rank
        self.store: Any = None

    def serve(self) -> str:
        """On rank 0: open the store, and say where the others find it: the port, and the host if it is known."""
        host, known = own_host(self._network.route) if self._several else (LOOPBACK, True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host if known else "", 0), family=family, backlog=len(self._ranks) + 8)
        port = int(listener.getsockname()[1])
        reached_as = host if known else ("::1" if family == socket.AF_INET6 else LOOPBACK)
        patience, descriptor = timedelta(seconds=PATIENCE), listener.detach()
        self.store = dist.TCPStore(
            reached_as, port, None, True, timeout=patience, wait_for_workers=False, master_listen_fd=descriptor
        )
        return f"{port} {host if known else ''}"

    def join(self, text: str) -> Any:
        """The store, on any rank. Blocks.

        Raises:
            PeerError: It cannot be reached; the message names the rank that keeps it.
        """
        if self.store is None:
            port, _, host = text.partition(" ")
            host = host or self._network.route.rpartition(":")[0].strip("[]")
            try:
                self.store = dist.TCPStore(host, int(port), None, False, timeout=timedelta(seconds=PATIENCE))
            except (RuntimeError, ValueError) as error:
                why = str(error).partition("\n")[0]
                where = f"the store of rank {self._ranks[0]} at {host}:{port}"
                raise PeerError(f"rank {self._rank} cannot open {where}: {why}") from None
        return self.store


def tell(inside: Any, text: str) -> Steps:
    """Steps of a call by which all ranks get the text of the group's rank 0."""
    record = torch.zeros(TEXT, dtype=torch.uint8)
    data = text.encode()
    record[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else record[:0]
    yield from inside.broadcast([record], 0)
    return bytes(record.tolist()).rstrip(b"\0").decode()


def in_thread(engine: ProgressEngine, needed: Callable[[], list[int]], action: Callable[[], Any]) -> Steps:
    """Steps that wait for an action in a thread of its own, and have its result. The call fails if a needed rank is lost.

    The thread of a call that failed is left alone: the time-outs of torch end it.
    """
    ended: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            ended.append((action(), None))
        except Exception as error:  # noqa: BLE001  the call raises it
            ended.append((None, error))
        engine.wake()

    threading.Thread(target=run, name="polytempo-native", daemon=True).start()
    yield Wait(lambda: bool(ended), needed)
    result, error = ended[0]
    if error is not None:
        raise error
    return result

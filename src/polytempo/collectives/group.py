"""A group of ranks: every collective, by any algorithm that can do it.

Each method starts a task and returns its handle; `wait()` gives the result. Tensors are changed in place, and ranks are
numbered within the group. All ranks of the group must make the same calls in the same order.

Where a group spans hosts, its first rank measures latency and bandwidth to another host once, by ping-pong, and sends the
result to all ranks, so that they choose the same algorithms.

    exchange(group, record, then)    a call of several parts: `then` gets the records of all ranks, and a group whose
                                     collectives are steps of this call; `Settled` ends it with an error that all ranks share
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import sqrt
from typing import Any

import numpy
import torch

from polytempo.collectives.call_queues import Recovery
from polytempo.collectives.cost import Choice, Speeds, choose
from polytempo.collectives.device_call import DeviceCall, until
from polytempo.collectives.device_choice import Network
from polytempo.collectives.device_route import NCCL_CALLS, DeviceRoute, StagedSteps, nccl_takes
from polytempo.collectives.executor import NOTHING, ExecutionStage, nbytes, perform
from polytempo.collectives.flattening import check_dense, flat, fuse, shape_of, shapes_of, split
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.plans import CUDA_IPC, algorithms_for, find_plan, plan_for
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.reduce_ops import before_mean, check_dtype, divide, operation
from polytempo.collectives.shared_buffer import SlotBuffers
from polytempo.collectives.steps import GRAIN, Place, Step, cuts
from polytempo.collectives.tasks import Steps, Task
from polytempo.errors import UsageError
from polytempo.profile_ranges import profiled
from polytempo.transport.channel import Bytes
from polytempo.transport.deadline import listed
from polytempo.transport.peer_link import CALL, DATA, LinkMessage

#: Messages of a pipelined plan are not smaller than this, and a part is cut into at most `PIECES`.
MESSAGE = 32 << 10
PIECES = 128
#: What needs no shared memory, for each collective: the choice where there is nothing to choose.
PLAIN = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "tree", "reduce": "tree"}
PLAIN |= {"gather": "linear", "scatter": "linear", "all_to_all": "linear", "barrier": "tree"}
IN_SHARED_MEMORY = ("shared-memory", "hierarchical", CUDA_IPC)

#: Bytes of the messages by which speed is measured, rounds of the small one, and the result: latency, seconds a byte.
SMALL, LARGE = 64, 512 << 10
ROUNDS = 5
SPEEDS = struct.Struct("<dd")

Tensors = Sequence[torch.Tensor]
Then = Callable[[list[torch.Tensor], Any], Steps]


class RankGroup:
    """Some ranks of a world, this process among them."""

    def __init__(
        self,
        engine: ProgressEngine,
        ranks: Sequence[int],
        hosts: Sequence[Sequence[int]],
        context: int,
        timeout: float | None = None,
        network: Network = Network(),  # noqa: B008  it is frozen
        name: str = "",
    ) -> None:
        self.engine, self.ranks, self.timeout, self.network = engine, tuple(ranks), timeout, network
        self.name = name or f"group of ranks {listed(self.ranks)}"  #: for messages
        self.rank, self.size = self.ranks.index(engine.rank), len(self.ranks)
        local = [tuple(self.ranks.index(rank) for rank in host if rank in self.ranks) for host in hosts]
        self.place = Place(self.rank, tuple(host for host in local if host))
        self.context = 2 * context  #: of collectives; the next number is that of single messages
        self.queue = engine.queues.open(self.context, self.ranks)
        self.buffers = SlotBuffers(engine.messages, self.queue, [self.ranks[member] for member in self.place.neighbours])
        self._native: Any = None
        #: of calls on tensors of GPUs
        self.route = DeviceRoute(engine, self.queue, self.ranks, self.place, network, _weakly(self._nested))
        self.speeds: Speeds | None = None
        self.last_choice: Choice | None = None  #: what `auto` chose last, and why
        self._calls = 0
        self._lock = threading.Lock()
        self._recovery = Recovery(engine.messages, engine.queues, self.queue, self._start_over)
        self.queue.when_failed = _weakly(self._recover)  # the engine keeps the queue for ever, but not the group

    # The collectives.

    def all_reduce(self, tensors: Tensors, op: object = "sum", algorithm: str = "auto", background: bool = False) -> Task:
        """Make each tensor the sum (or another combination) over all ranks."""
        name = self._check("all_reduce", tensors, algorithm, op)

        def steps(stage: ExecutionStage) -> Steps:
            for fused in fuse(tensors, stage.on is not None):
                stage.arriving = fused.arriving
                self._before(stage, name, fused.whole)
                yield from self._reduce(stage, "all_reduce", algorithm, fused.whole)
                self._after(stage, name, fused.arrived())
                stage.do(fused.scatter)

        about = f"{name}, {shapes_of(tensors)}"
        by_nccl = self._by_nccl("all_reduce", tensors, name)
        return self.start("all_reduce", about, algorithm, steps, background, name, tensors, by_nccl)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: object = "sum", algorithm: str = "auto", background: bool = False
    ) -> Task:
        """Make the root's tensor the sum over all ranks. Other ranks' tensors stay as they are."""
        name = self._check("reduce", [tensor], algorithm, op, root)

        def steps(stage: ExecutionStage) -> Steps:
            mine, back = flat(tensor, stage.on is not None)
            work = mine if self.rank == root or stage.on is not None else mine.clone()
            self._before(stage, name, work)
            yield from self._reduce(stage, "reduce", algorithm, work, root)
            if self.rank == root:
                self._after(stage, name, work)
                stage.do(back)

        about = f"{name}, {shape_of(tensor)}, to {root}"
        return self.start("reduce", about, algorithm, steps, background, name, [tensor])

    def broadcast(self, tensors: Tensors, root: int, algorithm: str = "auto", background: bool = False) -> Task:
        """Make each tensor the root's."""
        self._check("broadcast", tensors, algorithm, root=root)

        def steps(stage: ExecutionStage) -> Steps:
            for fused in fuse(tensors, stage.on is not None, reads=self.rank == root):
                stage.arriving = fused.arriving
                yield from self._reduce(stage, "broadcast", algorithm, fused.whole, root)
                if self.rank != root:
                    stage.do(fused.scatter)

        about = f"{shapes_of(tensors)}, from {root}"
        by_nccl = self._by_nccl("broadcast", tensors, root)
        return self.start("broadcast", about, algorithm, steps, background, tensors=tensors, by_nccl=by_nccl)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, algorithm: str = "auto", background: bool = False) -> Task:
        """Make `outputs[q]` the tensor of rank q. Sizes may differ, if all ranks know them."""
        self._check("all_gather", [*outputs, tensor], algorithm)
        self._check_list("all_gather", outputs, tensor)
        even = len({output.numel() for output in outputs}) == 1
        wanted = algorithm if even or algorithm != "auto" else "ring"

        def steps(stage: ExecutionStage) -> Steps:
            parts = [flat(output, stage.on is not None, reads=False) for output in outputs]
            own, mine = parts[self.rank][0], flat(tensor, stage.on is not None)[0]
            stage.do(lambda: own.copy_(mine))
            yield from self._move(stage, "all_gather", wanted, [part for part, _ in parts])
            for _, back in parts:
                stage.do(back)

        about = shape_of(tensor) if even else str(tensor.dtype).removeprefix("torch.")
        return self.start("all_gather", about, wanted, steps, background, tensors=[*outputs, tensor])

    def gather(
        self, outputs: Tensors | None, tensor: torch.Tensor, root: int, algorithm: str = "auto", background: bool = False
    ) -> Task:
        """Make the root's `outputs[q]` the tensor of rank q."""
        self._check("gather", [*(outputs or ()), tensor], algorithm, root=root)
        if self.rank == root:
            self._check_list("gather", outputs or (), tensor, even=True)

        def steps(stage: ExecutionStage) -> Steps:
            stays = stage.on is not None
            mine, chunks = flat(tensor, stays)[0], [NOTHING] * self.size
            parts = [flat(output, stays, reads=False) for output in outputs or ()] if self.rank == root else []
            if parts:
                chunks = [part for part, _ in parts]
                stage.do(lambda: chunks[root].copy_(mine))
            else:
                chunks[self.rank] = mine
            yield from self._move(stage, "gather", algorithm, chunks, root)
            for _, back in parts:
                stage.do(back)

        about, tensors = f"{shape_of(tensor)}, to {root}", [*(outputs or ()), tensor]
        return self.start("gather", about, algorithm, steps, background, tensors=tensors)

    def scatter(
        self, output: torch.Tensor, inputs: Tensors | None, root: int, algorithm: str = "auto", background: bool = False
    ) -> Task:
        """Make `output` the root's `inputs[own rank]`."""
        self._check("scatter", [*(inputs or ()), output], algorithm, root=root)
        if self.rank == root:
            self._check_list("scatter", inputs or (), output, even=True)

        def steps(stage: ExecutionStage) -> Steps:
            stays = stage.on is not None
            mine, back = flat(output, stays, reads=False)
            chunks = [NOTHING] * self.size
            if self.rank == root:
                chunks = [flat(piece, stays)[0] for piece in inputs or ()]
                stage.do(lambda: mine.copy_(chunks[root]))
            else:
                chunks[self.rank] = mine
            yield from self._move(stage, "scatter", algorithm, chunks, root, beside=True)
            stage.do(back)

        about, tensors = f"{shape_of(output)}, from {root}", [*(inputs or ()), output]
        return self.start("scatter", about, algorithm, steps, background, tensors=tensors)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Tensors, op: object = "sum", algorithm: str = "auto", background: bool = False
    ) -> Task:
        """Make `output` the sum over all ranks of their `inputs[own rank]`. Inputs stay as they are."""
        name = self._check("reduce_scatter", [output, *inputs], algorithm, op)
        self._check_list("reduce_scatter", inputs, output)
        even = len({piece.numel() for piece in inputs}) == 1
        wanted = algorithm if even or algorithm != "auto" else "ring"

        def steps(stage: ExecutionStage) -> Steps:
            stays = stage.on is not None
            mine, back = flat(output, stays, reads=False)
            chunks = [flat(piece, stays)[0] for piece in inputs]
            shared = stays or self._resolve("reduce_scatter", nbytes(mine) * self.size, wanted) in IN_SHARED_MEMORY
            if not shared or (name == "mean" and mine.dtype == torch.float16 and not stays):
                chunks = [piece.clone() for piece in chunks]  # they are written to
            own = chunks[self.rank]
            stage.do(lambda: mine.copy_(own))
            chunks[self.rank] = mine
            for chunk in chunks:
                self._before(stage, name, chunk)
            yield from self._move(stage, "reduce_scatter", wanted, chunks, beside=True)
            self._after(stage, name, mine)
            stage.do(back)

        about = shape_of(output) if even else str(output.dtype).removeprefix("torch.")
        return self.start("reduce_scatter", f"{name}, {about}", wanted, steps, background, name, [output, *inputs])

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, algorithm: str = "auto", background: bool = False, even: bool = False
    ) -> Task:
        """Make `outputs[q]` what rank q has in `inputs[own rank]`. `even`: all are of one size, on all ranks."""
        self._check("all_to_all", [*outputs, *inputs], algorithm)
        if len(outputs) != self.size or len(inputs) != self.size:
            raise UsageError(f"all_to_all needs {self.size} tensors on each side, got {len(outputs)} and {len(inputs)}")
        if algorithm == "shared-memory":
            even = len({tensor.numel() for tensor in (*outputs, *inputs)}) == 1
            if not even:
                raise UsageError("all_to_all through shared memory needs tensors of one size; use algorithm='auto'")
        wanted = algorithm if even or algorithm != "auto" else "linear"

        def steps(stage: ExecutionStage) -> Steps:
            stays = stage.on is not None
            parts = [flat(output, stays, reads=False) for output in outputs]
            chunks = [*(flat(piece, stays)[0] for piece in inputs), *(part for part, _ in parts)]
            yield from self._move(stage, "all_to_all", wanted, chunks, beside=True)
            for _, back in parts:
                stage.do(back)

        about = shape_of(inputs[0]) if even else str(inputs[0].dtype).removeprefix("torch.")
        return self.start("all_to_all", about, wanted, steps, background, tensors=[*outputs, *inputs])

    def barrier(self, background: bool = False) -> Task:
        """Wait until all ranks are here."""

        def steps(stage: ExecutionStage) -> Steps:
            yield from self._move(stage, "barrier", "auto", [torch.empty(0, dtype=torch.uint8)] * self.size)

        return self.start("barrier", "", "auto", steps, background)

    def choice(self, collective: str, size: int) -> Choice:
        """The algorithm that `auto` takes for a size in bytes, and why."""
        return choose(collective, size, self.place.hosts, self.speeds or Speeds())

    # From a call to a task.

    def start(
        self,
        collective: str,
        about: str,
        algorithm: str,
        steps: StagedSteps,
        background: bool,
        op: str = "sum",
        tensors: Tensors = (),
        by_nccl: StagedSteps | None = None,
    ) -> Task:
        """Start a call, which has its place among the group's calls.

        Args:
            collective: Its name.
            about: What must be the same on all ranks, in words.
            algorithm: By which it goes.
            steps: What is done.
            background: Return at once, and let the progress thread go on with it.
            op: How tensors are combined.
            tensors: All that it reads or writes.
            by_nccl: The steps where NCCL carries it out.
        """
        by = f", by {algorithm}" if algorithm != "auto" else ""
        on, by_nccl = self.route.call(tensors, algorithm), by_nccl if algorithm == "auto" else None
        call = f"{collective}({about}{by})"
        with self._lock, profiled(collective):
            self._recovery.open_again(self._calls)
            self._calls += 1
            number = self._calls
            run = self._run(
                number, lambda: self.route.name(call, on, by_nccl), op, self.route.ways(steps, algorithm, on, by_nccl)
            )
            name = f"{call} #{number} in {self.name}"
            return self.engine.start(self.queue, name, run, background, self.timeout, number, on, collective)

    @property
    def native(self) -> Any:
        """torch's own collectives for these ranks (`native.py`), made on first use."""
        if self._native is None:
            from polytempo.collectives.native import Native

            self._native = Native(self)
            self.engine.natives.append(self._native)
        return self._native

    def _by_nccl(self, collective: str, tensors: Tensors, *how: object) -> StagedSteps | None:
        on_the_host = tensors[0].device.type == "cpu" and not self.engine.streams.has_stand_in
        if on_the_host or not nccl_takes(tensors, how):
            return None
        return lambda stage: NCCL_CALLS[collective](self.native, stage, tensors, *how)

    def _before(self, stage: ExecutionStage, op: str, term: torch.Tensor) -> None:
        if stage.on is None:
            if stage.arriving is not None and term.dtype == torch.float16:
                stage.arriving.all()  # it may be written to
            before_mean(op, term, self.size)

    def _after(self, stage: ExecutionStage, op: str, result: torch.Tensor) -> None:
        """On a device the sum was made a mean with the same pass."""
        if stage.on is None:
            divide(op, result, self.size)

    def _run(self, number: int, name: Callable[[], str], op: str, steps: StagedSteps) -> Steps:
        yield from self._recovery.clear(number)
        call = name()  # as all ranks know it now that the calls before have ended
        self.engine.queues.declare(self.queue, number, call)
        if len(self.place.hosts) > 1 and self.speeds is None:
            self.speeds = yield from _measure(self.engine.messages, self.context, number, self.ranks, self.place.hosts)
        meta = f"{number} {call}".encode()
        messages, barriers = self.engine.messages, self._recovery.barriers
        return (yield from steps(ExecutionStage(messages, self.context, number, self.ranks, meta, op, barriers=barriers)))

    def _nested(self, stage: ExecutionStage) -> Nested:
        return Nested(self, stage)

    def _recover(self) -> None:
        with self._lock:  # so a call is counted and handed over, or neither
            self.queue.told |= self.engine.has_submitted(self.queue)
            self._recovery.open_again(self._calls)
            self.engine.start(self.queue, "going on after a failure", self._recovery.agree(), True)

    def _start_over(self) -> None:
        self.speeds = None  # some ranks may have measured them, and others not
        self.buffers.start_over()
        self.route.start_over()
        if self._native is not None:
            self._native.close(politely=False)  # some ranks may have opened it, and others not

    def _resolve(self, collective: str, size: int, algorithm: str) -> str:
        if algorithm != "auto":
            return algorithm
        if self.size == 1:
            return PLAIN[collective]
        if len(self.place.hosts) == 1:
            return "shared-memory"
        assert self.speeds is not None
        self.last_choice = choose(collective, size, self.place.hosts, self.speeds)
        return self.last_choice.algorithm

    # Carrying out.

    def _reduce(self, stage: ExecutionStage, collective: str, algorithm: str, whole: torch.Tensor, root: int = 0) -> Steps:
        """One flat tensor, which plans may cut as they like."""
        algorithm = self._resolve(collective, nbytes(whole), algorithm) if stage.slots is None else CUDA_IPC
        if algorithm not in IN_SHARED_MEMORY:
            yield from self._plain(stage, collective, algorithm, root, lambda parts: split(whole, parts), nbytes(whole))
            return
        stage.buffer = (stage.slots or self.buffers).of(nbytes(whole))
        item = whole.element_size()
        step = stage.buffer.capacity // item
        for start in range(0, max(1, whole.numel()), step):
            length = min(step, whole.numel() - start)
            parts = len(self.place.hosts) if algorithm == "hierarchical" else 1
            pieces = self._pieces(length * item // parts) if algorithm == "hierarchical" else 1
            cut, stage.offsets, plan = _in_slots(collective, algorithm, self.place, pieces, root, length, item)
            piece = whole[start : start + length] if length < whole.numel() else whole
            stage.plan_of = self._plan_of(collective, algorithm, pieces, root)
            yield from stage.buffer.open(stage.tag)
            yield from perform(stage, plan, [piece[part] for part in cut])

    def _move(
        self,
        stage: ExecutionStage,
        collective: str,
        algorithm: str,
        chunks: Tensors,
        root: int = 0,
        beside: bool = False,
    ) -> Steps:
        """A tensor for each rank, which plans do not cut. `beside`: they lie side by side in a slot, and not one alone."""
        own = max(nbytes(chunk) for chunk in chunks)
        algorithm = self._resolve(collective, own * self.size, algorithm) if stage.slots is None else CUDA_IPC
        if algorithm not in IN_SHARED_MEMORY:
            yield from self._plain(stage, collective, algorithm, root, lambda _: chunks, own * self.size)
            return
        share = self.size if beside else 1
        stage.buffer = (stage.slots or self.buffers).of(own * share)
        _, plan = plan_for(collective, algorithm, self.place, 1, root)
        stage.plan_of = self._plan_of(collective, algorithm, 1, root)
        length, item = max(chunk.numel() for chunk in chunks), chunks[self.rank].element_size()
        step = stage.buffer.capacity // share // item // GRAIN * GRAIN
        for start in range(0, max(1, length), step):
            pieces = [chunk[start : start + step] for chunk in chunks]
            apart = min(step, length - start) * item if beside else 0
            stage.offsets = [index * apart for index in range(len(chunks))]
            yield from stage.buffer.open(stage.tag)
            yield from perform(stage, plan, pieces)

    def _plan_of(self, collective: str, algorithm: str, pieces: int, root: int) -> Callable[[int], Sequence[Step]]:
        return lambda rank: plan_for(collective, algorithm, replace(self.place, rank=rank), pieces, root)[1]

    def _plain(
        self, stage: ExecutionStage, collective: str, algorithm: str, root: int, parts: Callable[[int], Tensors], size: int
    ) -> Steps:
        ahead = self.engine.messages.links.get(self.ranks[(self.rank + 1) % self.size])
        if ahead is not None:  # a rank that has done its part and left need not know
            ahead.send(LinkMessage(CALL, self.context, stage.tag, stage.meta))
        chunk_count = find_plan(collective, algorithm).chunk_count
        outer = chunk_count(self.place, 1)
        pieces = self._pieces(size // outer) if chunk_count(self.place, 2) > outer else 1
        chunks = [cut for part in parts(outer) for cut in split(part, pieces)]
        yield from perform(stage, plan_for(collective, algorithm, self.place, pieces, root)[1], chunks)

    def _pieces(self, size: int) -> int:
        speeds = self.speeds or Speeds()
        inside = len(self.place.hosts) == 1
        return _pieces(size, speeds.alpha_inside if inside else speeds.alpha, speeds.beta_inside if inside else speeds.beta)

    # Mistakes, before anything starts.

    def _check(self, collective: str, tensors: Tensors, algorithm: str, op: object = "sum", root: int | None = None) -> str:
        name = operation(op)
        known = algorithms_for(collective)
        if algorithm not in ("auto", CUDA_IPC, *known):
            raise UsageError(f"{collective} can go by {', '.join(known)} or auto, not by {algorithm!r}")
        if algorithm == CUDA_IPC and (len(self.place.hosts) > 1 or self.network.emulated):
            raise UsageError(f"{CUDA_IPC} needs all ranks on one host, without an emulated network; use algorithm='auto'")
        if algorithm == "shared-memory" and len(self.place.hosts) > 1:
            raise UsageError("ranks of several hosts have no memory in common; use algorithm='hierarchical' or 'auto'")
        if root is not None and not 0 <= root < self.size:
            raise UsageError(f"expected a rank from 0 to {self.size - 1}, got {root}")
        if not tensors:
            raise UsageError(f"{collective} needs at least one tensor, got none")
        for tensor in tensors:
            check_dense(tensor)
            check_dtype(name, tensor)
        return name

    def _check_list(self, collective: str, tensors: Tensors, own: torch.Tensor, even: bool = False) -> None:
        if len(tensors) != self.size:
            raise UsageError(f"{collective} needs a list of {self.size} tensors, one for each rank, got {len(tensors)}")
        for rank, tensor in enumerate(tensors):
            alike = tensor.numel() == own.numel() or not (even or rank == self.rank)
            if not alike or tensor.dtype != own.dtype:
                got = f"{shape_of(tensor)} for rank {rank}"
                raise UsageError(f"{collective}: expected {shape_of(own)} in the list of tensors, got {got}")


# A call of several parts.


class Nested(RankGroup):
    """A group within one of its calls: a collective returns steps, to be taken with `yield from`."""

    def __init__(self, group: RankGroup, stage: ExecutionStage, by_host: bool = False) -> None:
        self.__dict__.update(vars(group))
        self._stage, self._by_host = stage, by_host

    def start(
        self,
        collective: str,
        about: str,
        algorithm: str,
        steps: StagedSteps,
        background: bool,
        op: str = "sum",
        tensors: Tensors = (),
        by_nccl: StagedSteps | None = None,
    ) -> Any:
        on = self.route.call(tensors, algorithm)
        way = "host" if self._by_host else algorithm
        taken = self.route.ways(steps, way, on)(replace(self._stage, op=op, buffer=None))
        return taken if on is None else _to_the_end(taken, on)


def _to_the_end(steps: Steps, on: DeviceCall) -> Steps:
    """Steps on a device, and until it is done with them: the handle of the call around them knows nothing of its stream."""
    result = yield from steps
    if on.ended is not None:
        yield from until(on.ended)
    return result


def exchange(group: RankGroup, record: torch.Tensor, then: Then, background: bool) -> Task:
    """Gather the records of all ranks, which have one size, and go on with them; the result is that of `then`."""

    def steps(stage: ExecutionStage) -> Steps:
        inside: Any = Nested(group, stage, by_host=True)  # whether ranks are on devices is agreed once for a call
        rows = [torch.empty_like(record) for _ in range(group.size)]
        yield from inside.all_gather(rows, record)
        return (yield from then(rows, inside))

    return group.start("exchange", shape_of(record), "auto", steps, background)


# The speed of links between hosts.


def _measure(messages: Messaging, context: int, number: int, ranks: Sequence[int], hosts: Sequence[Sequence[int]]) -> Steps:
    first, second = ranks[hosts[0][0]], ranks[hosts[1][0]]
    tag, found = -number, numpy.zeros(SPEEDS.size, dtype=numpy.uint8)
    if messages.rank == first:
        yield from _ping(messages, context, tag, second, found)
        for rank in ranks:
            if rank != first:
                messages.send(rank, LinkMessage(DATA, context, tag), found.copy())
    else:
        if messages.rank == second:
            yield from _pong(messages, context, tag, first)
        receipt = messages.expect(context, tag, first, SPEEDS.size, found)
        yield messages.until(receipt)
    alpha, beta = SPEEDS.unpack(found.tobytes())
    return Speeds(alpha=alpha, beta=beta)


def _ping(messages: Messaging, context: int, tag: int, other: int, found: Bytes) -> Steps:
    best = {}
    for size in (SMALL, LARGE):
        times = []
        for _ in range(ROUNDS if size == SMALL else 2):
            began = time.perf_counter()
            messages.send(other, LinkMessage(DATA, context, tag), numpy.zeros(size, dtype=numpy.uint8))
            yield messages.until(messages.expect(context, tag, other, size))
            times.append(time.perf_counter() - began)
        best[size] = min(times) / 2
    beta = max(1e-12, (best[LARGE] - best[SMALL]) / (LARGE - SMALL))
    found[:] = numpy.frombuffer(SPEEDS.pack(best[SMALL], beta), dtype=numpy.uint8)


def _pong(messages: Messaging, context: int, tag: int, other: int) -> Steps:
    for size in (SMALL,) * ROUNDS + (LARGE,) * 2:
        receipt = messages.expect(context, tag, other, size)
        yield messages.until(receipt)
        messages.send(other, LinkMessage(DATA, context, tag), receipt.buffer)


# How tensors are cut.


@lru_cache(maxsize=256)
def _in_slots(
    collective: str, algorithm: str, place: Place, pieces: int, root: int, length: int, item: int
) -> tuple[list[slice], list[int], tuple[Step, ...]]:
    """How a flat tensor is cut, where the chunks lie in a slot, and the steps: the same again and again."""
    count, plan = plan_for(collective, algorithm, place, pieces, root)
    outer = cuts(length, count // pieces, GRAIN if algorithm == "shared-memory" else 1)
    chunks = [
        slice(part.start + cut.start, part.start + cut.stop)
        for part in outer
        for cut in cuts(part.stop - part.start, pieces, 1)
    ]
    offsets = list(accumulate(((chunk.stop - chunk.start) * item for chunk in chunks[:-1]), initial=0))
    return chunks, offsets, plan


def _pieces(size: int, alpha: float, beta: float) -> int:
    """Into how many messages to cut a part: filling the pipeline costs one of them, and each costs its latency."""
    message = max(MESSAGE, sqrt(size * alpha / beta))
    return max(1, min(PIECES, round(size / message)))


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method if its object is still there, as it is while one of its calls is under way."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        there = reference()
        return None if there is None else there(*arguments)

    return call

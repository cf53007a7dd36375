"""Parameter servers: gradients (or changes of values) are pushed, and the servers' new values are pulled.

The servers hold the values and, with apply="server", the optimizer's state. A push goes through the push compression, and
may have been sent in part while backward ran (`pushes.py`); its answer has the new values, maybe as compressed
differences. `agree` needs a clock of its own, beside that of the steps: a second exchange that only averages gradients.

Push compression: what is sent of a push goes through a chain with its residual for each segment of each shard. Chains lie
where gradients are when they are pushed: for parameters on a GPU there, in the twin of the flat buffer (`device_moves.py`).
Then only the encoded bytes are copied to the host, together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec
import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.client.row_traffic import RowTraffic, WorkerTable
from polytempo.compression.chain import CPU, ChainSpec, CompressionChain, parse_chain
from polytempo.device.device import Device
from polytempo.device.pinned_memory import pinned_bytes
from polytempo.errors import UsageError
from polytempo.optim.worker_momentum import GradientMomentum, dense
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.messages import Keep, Push, ReadAnswer
from polytempo.protocol.push import FirstValues, Measures, NewState, NewValues, PushedChange, PushedGradient, PushedValues
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.copier import Copier
from polytempo.reducer.device_exchange import IN_HOST_MEMORY, DeviceExchange, device_of
from polytempo.reducer.device_moves import HostStaging
from polytempo.reducer.exchange import Exchange, GroupValues, Traffic
from polytempo.reducer.flat_buffer import FlatBuffer, GradientHooks, tell_completion
from polytempo.reducer.pushes import GpuBuckets, OwnPushes, PartialPushes
from polytempo.server.optimizer_state import SegmentState, as_tensor, digest_of_bytes, is_whole, pack, unpack
from polytempo.server.pull_compression import Shadow
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.sync.capabilities import PushedWork
from polytempo.transport.channel import Bytes


@dataclass
class ValueTaker:
    """Takes what answers bring. The client holds on to it, and not by it to an exchange that the script has dropped."""

    install: Callable[[dict[int, list[Bytes]], Sequence[int]], None]  #: where values go; the parameters without a gradient
    land: Callable[[], None]  #: where they go from the device's landing

    def __call__(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        self.install(parts, absent)


#: Encoded tensors start at multiples of this in host memory.
ALIGNMENT = 64


class PushFilters:
    """The chains of one optimizer.

    Args:
        spec: What to do.
        layout: The segments of each shard.
        staging: Of parameters on a GPU, which has all of them; None where gradients are pushed from the CPU.
    """

    def __init__(self, spec: ChainSpec, layout: Layout, staging: HostStaging | None = None) -> None:
        self._layout, self._staging = layout, staging
        self._chains: list[list[CompressionChain]] = []
        place = CPU if staging is None else staging.place
        if not spec.is_lossless:
            self._chains = [[spec.new(s.size, getattr(torch, s.dtype), place) for s in shard] for shard in layout.shards]

    @property
    def on_device(self) -> bool:
        """Are gradients needed on the GPU, and not on the host?"""
        return bool(self._chains) and self._staging is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of residuals on the GPU."""
        return sum(chain.residual_bytes for chains in self._chains for chain in chains) if self.on_device else 0

    def of(self, buffer: FlatBuffer) -> list[list[Bytes]]:
        """What is sent of a push, for each shard."""
        if not self._chains:
            return buffer.parts
        inputs = (self._inputs(shard, buffer) for shard in range(len(buffer.parts)))
        if self._staging is None:
            return [[data for chain, values in of_shard for data in chain.encode(values)] for of_shard in inputs]
        encoded = [[part for chain, values in of_shard for part in chain.encode_tensors(values)] for of_shard in inputs]
        return fetched(encoded, self._staging)

    def _inputs(self, shard: int, buffer: FlatBuffer) -> list[tuple[CompressionChain, torch.Tensor]]:
        inputs = []
        for chain, data, s in zip(self._chains[shard], buffer.parts[shard], self._layout.shards[shard], strict=True):
            if self._staging is not None and buffer.in_twin:
                inputs.append((chain, self._staging.twin[s.dtype][s.start : s.stop]))
                continue
            values = as_tensor(data, s.dtype)
            inputs.append((chain, values if self._staging is None else values.to(self._staging.place)))
        return inputs

    # The residual of the whole model, in its flat order, so that any number of servers can go on with it.

    def state(self) -> dict[str, torch.Tensor]:
        """What was produced and not sent yet, by dtype; empty without a lossy filter."""
        if not self._chains:
            return {}
        whole = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in self._layout.sizes.items()}
        for shard, stretches in enumerate(self._layout.shards):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                residual = chain.residual
                whole[s.dtype] = whole[s.dtype].to(residual.dtype)
                whole[s.dtype][s.start : s.stop] = residual
        return whole

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        for shard, stretches in enumerate(self._layout.shards if self._chains and state else ()):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                chain.load({"residual": state[s.dtype][s.start : s.stop].to(chain.form.wide)})


def fetched(encoded: Sequence[Sequence[torch.Tensor]], staging: HostStaging) -> list[list[Bytes]]:
    """The bytes of tensors on a GPU, in one block of pinned memory that is theirs."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for parts in encoded for part in parts]
    block: Bytes = torch.empty(sum(sizes), dtype=torch.uint8).numpy() if staging.pins is None else pinned_bytes(sum(sizes))
    result: list[list[Bytes]] = []
    start = 0
    staging.copies.follow()
    for parts in encoded:
        result.append([])
        for part in parts:
            data = block[start : start + part.nbytes]
            start += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
            result[-1].append(data)
            if part.nbytes:
                staging.copies.copy(torch.from_numpy(data), part.view(torch.uint8))
    staging.copies.mark().wait()
    return result


class HeldByServers:
    """What servers hold of one optimizer: read, or replaced, beside the steps of this worker."""

    def __init__(self, session: Session, client: Client, state: ClientState, rows: RowTraffic) -> None:
        self._session, self._client, self._state, self._rows = session, client, state, rows
        self._pushes = -1  # numbers of pushes beside the steps

    def newest(self) -> dict[int, list[Bytes]] | None:
        """The values of now, one list of buffers for each shard; pushes that are not answered stay so.

        Returns:
            None where newer values have come meanwhile, with an answer.
        """
        with self._session.lock:
            answers = self._client.read(self._state.name, "params")
        version, state = answers[0][0].version, self._state
        if version < state.version:
            return None
        state.version = version
        return {shard: buffers for shard, (_, buffers) in enumerate(answers)}

    def values(self) -> dict[int, list[Bytes]]:
        """The values when all pushes are answered."""
        answers = self._read("params")
        self._state.version = answers[0][0].version
        return {shard: buffers for shard, (_, buffers) in enumerate(answers)}

    def _read(self, what: str) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """From all shards, at one place of the log."""
        with self._session.lock:
            self._client.settle(self._state.name)
            return self._client.read(self._state.name, what)

    def segments(self, what: str = "state") -> list[SegmentState]:
        """State of the optimizer on the servers; "saved state": of the script's optimizer, that servers kept in the job of
        the checkpoint, and workers go on with; "filters": what push compression had held back in that job."""
        return [segment for answer, buffers in self._read(what) for segment in unpack(answer.state, buffers)]

    def load_state(self, state: Sequence[SegmentState]) -> None:
        """Replace the optimizer's state on the servers."""
        packed, buffers = pack(state)
        body = NewState(state=packed, digest=digest_of_bytes(buffers, packed))
        self.push_beside(body, [buffers] * self._client.shards)

    def push_beside(self, body: NewState | NewValues, parts: list[list[Bytes]]) -> None:
        """A push beside the steps, and its answer."""
        self._pushes -= 1
        push = Push(id=PushId(self._state.name, self._client.rank, self._client.incarnation, self._pushes), body=body)
        with self._session.lock:
            self._client.settle(self._state.name)
            self._client.push(Outstanding(push, parts))
            self._client.settle(self._state.name)

    def row_source(self, table: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that reads rows of a table."""

        def pull(ids: torch.Tensor) -> torch.Tensor:
            with self._session.lock, self._client.together():
                return self._rows.pulled(table, *self._rows.ask(table, ids))

        return pull


@dataclass(frozen=True)
class PushedParts:
    """What belongs to the pushes of an optimizer beside its parameters."""

    hooked: bool = False  #: gradients are copied into the flat buffer by hooks, while backward runs
    state: Sequence[SegmentState] = ()  #: the optimizer's, that the job starts from, if this worker is asked
    tables: Sequence[WorkerTable] = ()  #: their rows travel with the pushes
    mean: tuple[OptimizerSpec, Sequence[torch.Tensor]] | None = None  #: what `agree` averages: tables' parameters, too
    momentum: GradientMomentum | None = None  #: of this worker: pushes are made of it and the gradients, which stay


#: Where values are pushed.
VALUES = PushedParts()


class ServerExchange(Exchange):
    """Reduces the gradients of one optimizer on parameter servers.

    Args:
        session: The job.
        name: The optimizer's name in the job.
        spec: What the servers must know of it.
        params: The parameters whose values travel densely.
        parts: What belongs to its pushes beside these.
        beside: The exchange for whose `agree` this one averages.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        spec: OptimizerSpec,
        params: Sequence[torch.Tensor],
        parts: PushedParts = VALUES,
        beside: ServerExchange | None = None,
    ) -> None:
        assert session.client is not None
        self.client: Client = session.client
        sync, mode, hooked, momentum = spec.parsed, spec.parsed.capabilities, parts.hooked, parts.momentum
        device = device_of(session.devices, self.client, sync, spec, params)
        spec = spec if device is None else msgspec.structs.replace(spec, device="cuda")
        layout = lay_out(spec.tensors, self.client.shards, is_whole(spec.optimizer))
        super().__init__(session, spec, ClientState(name, ahead=mode.ahead), layout)
        self._ahead = self.client_state.ahead  # pushes of this worker that may be under way while it computes the next
        self._fetches = mode.fetches  # values are this worker's own between two fetches
        self._common = mode.common
        averages = spec.apply == "mean"
        self._next_is_told = averages or mode.averages or mode.by_speed  # the answer says what follows
        # Where models are averaged, what servers keep is the state of the outer step, and not of the script's optimizer.
        self.holds_state = spec.apply == "server" and momentum is None and not mode.averages
        self._pulls = True  # shall answers bring the dense values?
        self.own = 0  #: pushes of this worker since the version that the next one is made on
        changes, replaces = spec.apply == "delta", mode.rounds or mode.averages
        self._content = PushedGradient if not changes else PushedValues if replaces else PushedChange
        self._momentum = momentum
        shares_memory = hooked and momentum is None  # gradients live in the flat buffer
        self._compares = not averages and not mode.averages  # what is written inside a block is this worker's own progress
        self._exchange: DeviceExchange | None = None  # where values stay on a device
        self.copier = self._new_copier(params, device, beside)
        self._taker = ValueTaker(self.copier.scatter_gradients if averages else self.copier.scatter, self.copier.land)
        self._own: OwnPushes | None = None
        if self._ahead and sync.worker_momentum:
            members, departed = spec.members or range(session.size), self.client.departed
            self._own = OwnPushes(self.copier, self.layout, sync, members, departed, self.client_state, changes)
            self.deliver_to(self._own.install)
        machine = sync.machine(session.rank)
        if self._ahead or machine.parts > 1 or machine.overlaps or (mode.averages and not mode.rounds):
            self.client.memory.overlap()
        elif not shares_memory and mode.work is not PushedWork.DEADLINE:  # else values pass through while an answer comes
            self.client.memory.lend(self.copier.next_buffer().parts)
        self._before_read: Callable[[], None] = lambda: None  # pushes what the values read must contain
        self.rows = RowTraffic(self.client, name, parts.tables)
        self._travels = self.client.pool.registry is None  # bytes must, and do not lie where the servers read them
        staging = self.copier.staging
        self.filters = PushFilters(
            parse_chain(spec.push_filter), self.layout, None if staging is None or staging.others else staging
        )
        if staging is not None and staging.pins is not None and self._travels:
            self.client.pool.make = pinned_bytes  # answers are received into memory that the GPU reads
        self._shadow = Shadow(parse_chain(spec.pull_filter), self.layout.shards, overlap=bool(self._ahead))
        self.held = HeldByServers(session, self.client, self.client_state, self.rows)
        self._sent: FlatBuffer | None = None  # values that replace the servers', once there were some
        self._mean_of = parts.mean
        self._agreement: ServerExchange | None = None  # averages for `agree`, once that was called
        #: Do all workers stand at the same place between two steps, so that a change of values has one meaning?
        one_place = mode.common or (session.size == 1 and not self._ahead and not mode.fetches)
        self._carries = one_place and not spec.pull_filter
        self._initial_state = parts.state
        self.client_state.take_rows = self.rows.take
        self.client_state.take = self._take_difference if spec.pull_filter else self._taker
        with session.lock:
            self.client.register(name, spec, self._seed, self.client_state)
        self.step = self.client_state.released - self._ahead
        if self.step and spec.push_filter:  # the job may continue from a checkpoint
            self.filters.load({segment.dtype: segment.state["residual"] for segment in self.held.segments("filters")})
        if device is not None:
            self._share(device, params)
        self.hooks = None
        fills = momentum is None or (self._travels and not self.copier.on_gpu)
        if hooked and not self._ahead and self._exchange is None and fills:
            # Gradients live in what is pushed itself, or in memory of their own, where something else is made of them.
            lives = self.copier.next_buffer() if momentum is None else FlatBuffer(self.layout, self.client.pool)
            self.hooks = GradientHooks(params, lives, self.complete if self._travels and staging is None else None)
        self._partial = self._partial_pushes()

    def _new_copier(
        self, params: Sequence[torch.Tensor], device: Device | None, beside: ServerExchange | None = None
    ) -> Copier:
        memory = self.client.pool if device is None else device
        other = None if beside is None else beside.copier
        return Copier(params, self.layout, memory, self._ahead + 1, self._compares, other)

    def _share(self, device: Device, params: Sequence[torch.Tensor]) -> None:
        """Exchange through device memory, if the servers can; else through the host."""
        exchange = DeviceExchange(self.client, self.name, device, self.copier)
        with self.session.lock:
            refusal = exchange.share()
        if not refusal:
            self._exchange = exchange
            self.session.on_leave(LeavingStep.FLUSH, self.settle_values)
            return
        if refusal not in self.session.told and IN_HOST_MEMORY not in refusal:
            self.session.told.add(refusal)
            sys.stderr.write(f"polytempo: rank {self.session.rank} exchanges through the CPU: {refusal}\n")
        self.copier = self._new_copier(params, None)
        self.deliver_to(
            self.copier.scatter_gradients if self.spec.apply == "mean" else self.copier.scatter, self.copier.land
        )

    def deliver_to(
        self, install: Callable[[dict[int, list[Bytes]], Sequence[int]], None], land: Callable[[], None] | None = None
    ) -> None:
        """Have answers bring their values elsewhere than to the parameters.

        Args:
            install: Takes the buffers of each shard, and the parameters without a gradient.
            land: Takes what has come into the landing on a device.
        """
        self._taker.install, self._taker.land = install, land or self._taker.land

    def fetch_apart(self, flush: Callable[[], None]) -> None:
        """From now on answers bring no values: these are read apart. `flush` pushes what they must contain by then."""
        self._pulls, self._before_read = False, flush
        self.deliver_to(lambda parts, absent: None)

    def _seed(self) -> tuple[FirstValues, list[list[Bytes]]]:
        """What the job starts from, when this worker is asked: its values, and the optimizer's state if it has some."""
        buffer = FlatBuffer(self.layout, self.client.pool) if self.copier.on_device else self.copier.next_buffer()
        self.copier.gather(buffer, lambda param: param.detach())
        state, buffers = pack(self._initial_state) if self._initial_state else (b"", [])
        rows, of_rows = self.rows.seed()
        parts = [[*part, *buffers, *own] for part, own in zip(buffer.parts, of_rows, strict=True)]
        return FirstValues(state=state, rows=rows), parts

    def _partial_pushes(self) -> PartialPushes | None:
        """Where bytes must travel, buckets are sent while backward runs."""
        if self.hooks is None or not self._travels:
            return None
        buffer, staging = self.copier.next_buffer(), self.copier.staging
        if staging is None:
            return PartialPushes(self.client, self.layout, buffer, self.hooks.indices, self._identity)
        if staging.others or self.filters.on_device or self._momentum is not None:
            return None
        indices = [index for index, param in enumerate(self.copier.params) if param.requires_grad]
        tell_completion(self.copier.params, indices, self)
        buckets = GpuBuckets(staging, self.copier.params, buffer)
        return PartialPushes(self.client, self.layout, buffer, indices, self._identity, buckets)

    def complete(self, index: int) -> None:
        """A gradient is in the flat buffer, or on the GPU."""
        if self.sending and self._partial is not None:
            if self._momentum is not None:
                self._look_ahead(self._momentum, self.copier.next_buffer(), index, keeps=False)
            with self.session.lock:
                self._partial.complete(index)

    def _identity(self) -> PushId:
        return PushId(self.name, self.client.rank, self.client.incarnation, self.step)

    # A step.

    def gradients(self) -> tuple[FlatBuffer, tuple[int, ...]]:
        if self._partial is not None and self._partial.on_gpu:
            with self.session.lock:
                return self.copier.next_buffer(), self._partial.gather()
        if self._momentum is not None and not self.copier.on_gpu:
            buffer, absent = self.copier.next_buffer(), []
            for index, param in enumerate(self.copier.params):
                if param.grad is None:
                    absent.append(index)
                    buffer.view(index).zero_()
                else:
                    self._look_ahead(self._momentum, buffer, index)
            return buffer, tuple(absent)
        pushed = None if self._momentum is None else self._momentum.pushes(self.copier.params)
        if pushed is None and not self.filters.on_device:
            return super().gradients()
        buffer = self.copier.next_buffer()
        take = self.copier.collect if self.filters.on_device else self.copier.gather
        return buffer, take(buffer, lambda param: param.grad if pushed is None else pushed.get(id(param)))

    def _look_ahead(self, momentum: GradientMomentum, buffer: FlatBuffer, index: int, keeps: bool = True) -> None:
        param = self.copier.params[index]
        with torch.no_grad():
            buffer.found_finite(index, momentum.push(param, dense(param.grad), buffer.view(index), keeps))

    def push(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        with self.session.lock, self.client.together() if self._exchange is None else nullcontext():
            super().push(buffer, hyper, measures, absent)

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        self.take_answer()
        began = time.perf_counter()
        skip = buffer is None
        if measures.exchanged is None:
            measures.exchanged = self.waited
        push = Push(
            id=self._identity(),
            version=self.client_state.version,
            own=self.own,
            sent=self.client.bytes_sent,
            received=self.client.bytes_received,
            measures=measures,
            body=self._content(
                hyper=hyper,
                absent=tuple(absent),
                skip=skip,
                values=self._pulls,
                fence=self._exchange.pushed() if self._exchange is not None else 0,
            ),
        )
        empty = buffer is None or self._exchange is not None
        parts = [[] for _ in range(self.client.shards)] if buffer is None or empty else self.filters.of(buffer)
        waiting = self.rows.fill(Outstanding(push, parts))
        own = self._own.taken(buffer) if self._own is not None and buffer is not None else None
        with self.session.lock:
            if skip and self._partial is not None:
                self._partial.start_over()
            self.client.push(waiting, self._partial.commit() if self._partial is not None and not skip else None)
            if self._own is not None and own is not None:
                self._own.sent(self.step, own, hyper)
        self.waited = time.perf_counter() - began

    def finish(self) -> None:
        if self._exchange is None:
            self._hear()
            return
        self.client_state.deferred = True
        if self._next_is_told:
            self.take_answer()
        self._exchange.wait()
        if self.spec.apply == "mean":
            self.copier.assign_gradients(self.copier.landing.views, self.client_state.answer.absent)
        else:
            self._taker.land()

    def take_answer(self) -> None:
        """Take the answer to the last push, where that was deferred (`device_exchange.py`)."""
        if self.client_state.deferred:
            self._hear()
            self.client_state.deferred = False

    def _hear(self) -> None:
        """Wait for the answer to the last push."""
        began = time.perf_counter()
        with self.session.lock:
            self.client.wait_for_release(self.name, self.step + 1)
        self.answered()
        self.waited += time.perf_counter() - began

    def answered(self) -> None:
        """The answer to the last push is here."""
        if self.client_state.checkpoint and self.spec.push_filter:
            with self.session.lock:  # a checkpoint is being made: what compression holds back belongs to it
                name, self.client_state.checkpoint = self.client_state.checkpoint, ""
                residuals = self.filters.state().items()
                kept = [SegmentState(dtype, 0, flat.numel(), {"residual": flat}) for dtype, flat in residuals]
                state, buffers = pack(kept)
                self.client.send(0, Keep(optimizer_id=self.name, checkpoint=name, state=state), buffers)
        self.step = self.step + 1 if self._ahead else self.client_state.released

    def settle_values(self) -> None:
        """Wait, on the host, until the values of the last answer are in this worker's memory: then servers may go."""
        self.take_answer()
        if self._exchange is not None:
            self._exchange.complete()

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        if self._agreement is None:
            assert self._mean_of is not None
            spec, params = self._mean_of
            hooked = self.spec.apply == "delta"  # else the gradients live in this exchange's buffer
            self._agreement = ServerExchange(
                self.session, f"{self.name}/mean", spec, params, PushedParts(hooked), beside=self
            )
            self._agreement.set_sending(self.sending)
        mean = self._agreement
        mean.renew()
        buffer, absent = (None, ()) if skip else mean.gradients()
        mean.push(buffer, (), Measures(samples=samples), absent)
        return mean.client_state.skipped

    def _take_difference(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        answer = self.client_state.answer
        self._taker.install(self._shadow.hear(parts, answer.filtered, answer.exchange), absent)

    def set_sending(self, sending: bool) -> None:
        super().set_sending(sending)
        if self._agreement is not None:
            self._agreement.set_sending(sending)

    def traffic(self) -> Traffic:
        sent, received, agreement = self.client.bytes_sent, self.client.bytes_received, self._agreement
        on_device = (
            self.copier.device_bytes + self.filters.device_bytes + (self._partial.device_bytes if self._partial else 0)
        )
        if agreement is not None and agreement.copier.landing is not self.copier.landing:  # else the memory serves both
            on_device += agreement.traffic().device_bytes
        return Traffic(sent, received, sent + received, on_device)

    # Values that the script has changed.

    def take_writes(self, declared: bool = False) -> None:
        """Send them to the servers where all workers stand at one place; refuse them where their meaning is not defined."""
        watch = self.copier.watch
        if not (declared or watch.touched):
            return
        why = "answers are compressed: differences to what each worker was sent" if self.spec.pull_filter else ""
        if self._fetches:
            why = "values are this worker's own between fetches"
        if declared and why:
            raise UsageError(
                f"push_parameters() is not possible in this job: {why}; change values before DistributedOptimizer()"
            )
        if declared or self._carries:
            self._send_values()
            return
        same = False  # are the values the servers' after all?
        if not (self._ahead or self._fetches):  # answers to pushes under way may have hidden a change
            with self.session.lock:
                same = self.copier.holds(self.held.values())
        if not same:
            alone = "a change by one worker is not the job's"
            how = "" if why else "call optimizer.push_parameters() after it to make it the job's, or "
            raise UsageError(
                f"{watch.touched} was changed in place since the last step(), and in {self.spec.sync} {why or alone}; {how}"
                "call optimizer.consolidate() to take the job's values again"
            )
        watch.touched = ""

    def _send_values(self) -> None:
        if self._sent is None:
            self._sent = FlatBuffer(self.layout, self.client.pool, pinned=False)
        self.copier.gather(self._sent, lambda param: param.detach())
        digest = digest_of_bytes(data for part in self._sent.parts for data in part)
        self.held.push_beside(NewValues(touched=self.copier.watch.touched, digest=digest), self._sent.parts)
        self.copier.watch.touched = ""
        self.copier.watch.record()
        self.take_answer()
        if not self._common:  # the job's may be newer: of answers that came meanwhile, or were given before
            self.read_values()

    # What the servers hold.

    def read_values(self) -> None:
        self.renew(compare=self._carries)
        if self._carries:
            self.take_writes()
        self._before_read()
        if self.client.companion is not None:
            self.client.companion.release()  # reading values means that this worker pauses its steps
        with self.session.lock:
            self.client.settle(self.name)
            if not self._carries:
                self.copier.scatter(self.held.values())
            # Else they are here: the job's cannot move without this worker. What the servers have may be what another
            # worker's script made of them for the next step, before this one's script does the same.
            self.rows.read_mirrored()
        self.copier.watch.touched = ""

"""Parameter servers: gradients (or changes of values) are pushed, and the servers' new values are pulled.

The servers hold the values and, with apply="server", the optimizer's state. A push goes through the push compression, and
may have been sent in part while backward ran (`partial_push.py`); its answer has the new values, maybe as compressed
differences. `agree` needs a clock of its own, beside that of the steps: a second reducer that only averages gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import nullcontext

import msgspec
import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.client.row_traffic import RowTraffic, WorkerTable
from polytempo.compression.chain import parse_chain
from polytempo.device.device import Device
from polytempo.device.pinned_memory import pinned_bytes
from polytempo.errors import UsageError
from polytempo.optim.worker_momentum import GradientMomentum, dense
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.messages import Keep, Push, ReadAnswer
from polytempo.protocol.push import FirstValues, Measures, NewState, NewValues, PushedChange, PushedGradient, PushedValues
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.device_exchange import IN_HOST_MEMORY, DeviceExchange, GpuBuckets, device_of
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks, tell_completion
from polytempo.reducer.partial_push import PartialPushes
from polytempo.reducer.push_filters import PushFilters
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.server.optimizer_state import SegmentState, digest_of_bytes, is_whole, pack, unpack
from polytempo.server.pull_compression import Shadow
from polytempo.session.session import Session
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.spec import Spec
from polytempo.transport.channel import Bytes


class ValueTaker:
    """Takes the values of answers. The client holds on to it, and not by it to a reducer that the script has dropped."""

    def __init__(self, copier: Copier) -> None:
        self.install: Callable[[dict[int, list[Bytes]]], None] = copier.scatter  #: where they go
        self.land: Callable[[], None] = copier.land  #: and where they go from the device's landing

    def __call__(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        self.install(parts)


class OwnPushes:
    """A worker's own pushes that the values it has read lack, added to these values: `delay:k` with momentum at the worker.

    While several pushes are in flight, an answer has the values of some pushes ago. A worker that computed on them as they
    are would make the step that it has made already, once for each push in flight. So it computes on what it has read plus
    what is under way. It knows its own pushes; the other n - 1 workers have as many under way, which it takes to be like its
    own:

        answer to push 0 --> values --> + n times push 1 and push 2 --> gradient 3    (these are not answered yet)

    With 4 workers and 4 pushes of each really in flight, digits at the rate and momentum of bsp end at 11 % without this, at
    14 % with its own pushes alone, and at 97 % like this, as bsp does.

    Args:
        copier: Of its parameters; it has a flat buffer for each push in flight, and one for the next.
        layout: The group of each parameter.
        spec: The mode.
        members: The ranks that may push.
        departed: Those that are known not to, any more; it may grow.
        state: This worker's, of the optimizer: which pushes are unanswered.
        changes: Are changes pushed? Otherwise gradients are.
    """

    def __init__(
        self,
        copier: Copier,
        layout: Layout,
        spec: Spec,
        members: Collection[int],
        departed: Container[int],
        state: ClientState,
        changes: bool,
    ) -> None:
        self._copier, self._spec, self._state, self._changes = copier, spec, state, changes
        self._members, self._departed = members, departed
        self._groups = {place.index: place.info.group for place in layout.places}
        self._sent: dict[int, tuple[dict[int, torch.Tensor], list[float]]] = {}  # by step, with a factor for each group

    def taken(self, buffer: FlatBuffer) -> dict[int, torch.Tensor]:
        """What is about to be pushed, of each parameter, where it lies: in the flat buffer, which is this push's until it is
        answered, or a copy on the GPU, whose staging the next answer passes through."""
        staging = self._copier.staging
        staged = {} if staging is None else {index: staging.views[index].clone() for index in staging.staged}
        return buffer.views | staged

    def sent(self, step: int, push: dict[int, torch.Tensor], hyper: GroupValues) -> None:
        """This push was sent. If it is not answered yet, the values go on from it."""
        if step not in self._state.outstanding:
            return
        # Its rate, with the pushes of others that are under way beside it. Its staleness is not known yet; it is taken to be
        # that of the last push that was answered.
        workers = sum(rank not in self._departed for rank in self._members)
        rate = self._spec.own_push_rate(workers) * self._spec.corrections.verdict(self._state.staleness).rate
        factors = [rate if self._changes else -rate * float(group["lr"]) for group in hyper]
        self._sent[step] = push, factors
        self._add(push, factors)
        self._copier.watch.record()

    def install(self, parts: dict[int, list[Bytes]]) -> None:
        """New values have come, which have all pushes but those that are not answered."""
        self._copier.scatter(parts)
        self._sent = {step: push for step, push in self._sent.items() if step in self._state.outstanding}
        for _, (push, factors) in sorted(self._sent.items()):
            self._add(push, factors)
        self._copier.watch.record()

    def _add(self, push: dict[int, torch.Tensor], factors: list[float]) -> None:
        with torch.no_grad():
            for index, param in enumerate(self._copier.params):
                param.add_(push[index].to(param.device), alpha=factors[self._groups[index]])


class ServerReducer(Reducer):
    """Reduces the gradients of one optimizer on parameter servers.

    Args:
        session: The job.
        name: The optimizer's name in the job.
        spec: What the servers must know of it.
        params: The parameters whose values travel densely.
        state: The optimizer's state that the job starts from, if this worker is asked.
        hooked: Copy gradients into the flat buffer by hooks, while backward runs.
        tables: Tables whose rows travel with the pushes.
        mean: Spec and parameters of the reducer that averages for `agree`: all parameters, those of tables too.
        beside: The reducer for whose `agree` this one averages.
        momentum: Of this worker: what is pushed is made of it and the gradients, which stay what they are.
    """

    on_servers = True

    def __init__(
        self,
        session: Session,
        name: str,
        spec: OptimizerSpec,
        params: Sequence[torch.Tensor],
        state: Sequence[SegmentState] = (),
        hooked: bool = False,
        tables: Sequence[WorkerTable] = (),
        mean: tuple[OptimizerSpec, Sequence[torch.Tensor]] | None = None,
        beside: ServerReducer | None = None,
        momentum: GradientMomentum | None = None,
    ) -> None:
        assert session.client is not None
        self.client: Client = session.client
        sync, mode = spec.parsed, spec.parsed.capabilities
        device = device_of(session.devices, self.client, sync, spec, params)
        spec = spec if device is None else msgspec.structs.replace(spec, device="cuda")
        super().__init__(session, name, spec, lay_out(spec.tensors, self.client.shards, is_whole(spec.optimizer)))
        self._ahead = self.client_state.ahead  # pushes of this worker that may be under way while it computes the next
        self._fetches = mode.fetches  # values are this worker's own between two fetches
        self._common = mode.common
        averages = spec.apply == "mean"
        self._next_is_told = averages or mode.averages or mode.by_speed  # the answer says what follows
        # Where models are averaged, what servers keep is the state of the outer step, and not of the script's optimizer.
        self.holds_state = spec.apply == "server" and momentum is None and not mode.averages
        self.pulls = True  #: shall answers bring the dense values?
        self.own = 0  #: pushes of this worker since the version that the next one is made on
        changes, replaces = spec.apply == "delta", mode.rounds or mode.averages
        self._content = PushedGradient if not changes else PushedValues if replaces else PushedChange
        self._momentum = momentum
        shares_memory = hooked and momentum is None  # gradients live in the flat buffer
        self._compares = not averages and not mode.averages  # what is written inside a block is this worker's own progress
        self._exchange: DeviceExchange | None = None  # where values stay on a device
        self.copier = self._new_copier(params, device, beside)
        self.taker = ValueTaker(self.copier)
        self._own: OwnPushes | None = None
        if self._ahead and sync.worker_momentum:
            members, departed = spec.members or range(session.size), self.client.departed
            self._own = OwnPushes(self.copier, self.layout, sync, members, departed, self.client_state, changes)
            self.taker.install = self._own.install
        machine = sync.machine(session.rank)
        if self._ahead or machine.parts > 1 or machine.overlaps or (mode.averages and not mode.rounds):
            self.client.memory.overlap()
        elif not shares_memory and mode.work is not PushedWork.DEADLINE:  # else values pass through while an answer comes
            self.client.memory.lend(self.copier.next_buffer().parts)
        self.before_read: Callable[[], None] = lambda: None  #: pushes what the values read must contain
        self.rows = RowTraffic(self.client, name, tables)
        staging = self.copier.staging
        self.filters = PushFilters(
            parse_chain(spec.push_filter), self.layout, None if staging is None or staging.others else staging
        )
        if staging is not None and staging.pins is not None and self.client.pool.registry is None:
            self.client.pool.make = pinned_bytes  # answers are received into memory that the GPU reads
        self._shadow = Shadow(parse_chain(spec.pull_filter), self.layout.shards, overlap=bool(self._ahead))
        self._loads = -1  # numbers of pushes beside the steps
        self._sent: FlatBuffer | None = None  # values that replace the servers', once there were some
        self._mean_of = mean
        self._agreement: ServerReducer | None = None  # averages for `agree`, once that was called
        #: Do all workers stand at the same place between two steps, so that a change of values has one meaning?
        one_place = mode.common or (session.size == 1 and not self._ahead and not mode.fetches)
        self._carries = one_place and not spec.pull_filter
        self._initial_state = state
        self._register()
        if device is not None:
            self._share(device, params)
        self.hooks = None
        fills = momentum is None or (self.client.pool.registry is None and not self.copier.on_gpu)
        if hooked and not self._ahead and self._exchange is None and fills:
            # Gradients live in what is pushed itself, or in memory of their own, where something else is made of them.
            lives = self.copier.next_buffer() if momentum is None else FlatBuffer(self.layout, self.client.pool)
            self.hooks = GradientHooks(params, lives)
        self._partial = self._partial_pushes()

    def _new_copier(
        self, params: Sequence[torch.Tensor], device: Device | None, beside: ServerReducer | None = None
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
            self.session.flushing.append(self.settle_values)
            return
        if refusal not in self.session.told and IN_HOST_MEMORY not in refusal:
            self.session.told.add(refusal)
            sys.stderr.write(f"polytempo: rank {self.session.rank} exchanges through the CPU: {refusal}\n")
        self.copier = self._new_copier(params, None)
        self.taker = ValueTaker(self.copier)
        self._use_copier()

    def _use_copier(self) -> None:
        answered = self.client_state
        answered.take = self.copier.scatter_gradients if self.spec.apply == "mean" else self.taker
        if self.spec.pull_filter:
            answered.take = self._take_difference

    def _register(self) -> None:
        answered = self.client_state
        answered.take_rows = self.rows.take
        self._use_copier()
        with self.session.lock:
            self.client.register(self.name, self.spec, self._seed, answered)
        self.step = answered.released - self._ahead
        if self.step and self.spec.push_filter:  # the job may continue from a checkpoint
            self.filters.load({segment.dtype: segment.state["residual"] for segment in self._read_segments("filters")})

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
        if self.hooks is None or self.client.pool.registry is not None:
            return None
        buffer, staging = self.copier.next_buffer(), self.copier.staging
        if staging is None:
            self.hooks.on_complete = self.complete
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
                values=self.pulls,
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
            self.copier.assign_gradients(self.copier.landing.views, self.answer.absent)
        else:
            self.taker.land()

    def take_answer(self) -> None:
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

    @property
    def device_bytes(self) -> int:
        agreement = self._agreement
        shared = agreement is None or agreement.copier.landing is self.copier.landing
        own = super().device_bytes + self.filters.device_bytes + (self._partial.device_bytes if self._partial else 0)
        return own + (0 if shared or agreement is None else agreement.device_bytes)

    def settle_values(self) -> None:
        """Wait, on the host, until the values of the last answer are in this worker's memory: then servers may go."""
        self.take_answer()
        if self._exchange is not None:
            self._exchange.complete()

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        if self._agreement is None:
            assert self._mean_of is not None
            spec, params = self._mean_of
            hooked = self.spec.apply == "delta"  # else the gradients live in this reducer's buffer
            self._agreement = ServerReducer(self.session, f"{self.name}/mean", spec, params, hooked=hooked, beside=self)
            self._agreement.set_sending(self.sending)
        mean = self._agreement
        mean.renew()
        buffer, absent = (None, ()) if skip else mean.gradients()
        mean.push(buffer, (), Measures(samples=samples), absent)
        return mean.client_state.skipped

    def _take_difference(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        self.taker.install(self._shadow.hear(parts, self.answer.filtered, self.answer.exchange))

    def set_sending(self, sending: bool) -> None:
        super().set_sending(sending)
        if self._agreement is not None:
            self._agreement.set_sending(sending)

    def traffic(self) -> tuple[int, int]:
        return self.client.bytes_sent, self.client.bytes_received

    # Values that the script has changed.

    def carry_changes(self) -> None:
        """Send to the servers what the script has written since the last step, where all workers stand at one place; refuse
        it where its meaning is not defined."""
        watch = self.copier.watch
        if not watch.touched:
            return
        if self._carries:
            self._send_values()
            return
        same = False  # are the values the servers' after all?
        if not (self._ahead or self._fetches):  # answers to pushes under way may have hidden a change
            with self.session.lock:
                same = self.copier.holds(self._read_parts())
        if not same:
            why, alone = self._why_not_sent(), "a change by one worker is not the job's"
            how = "" if why else "call optimizer.push_parameters() after it to make it the job's, or "
            raise UsageError(
                f"{watch.touched} was changed in place since the last step(), and in {self.spec.sync} {why or alone}; {how}"
                "call optimizer.consolidate() to take the job's values again"
            )
        watch.touched = ""

    def _why_not_sent(self) -> str:
        if self._fetches:
            return "values are this worker's own between fetches"
        return "answers are compressed: differences to what each worker was sent" if self.spec.pull_filter else ""

    def push_values(self) -> None:
        why = self._why_not_sent()
        if why:
            raise UsageError(
                f"push_parameters() is not possible in this job: {why}; change values before DistributedOptimizer()"
            )
        self._send_values()

    def _send_values(self) -> None:
        if self._sent is None:
            self._sent = FlatBuffer(self.layout, self.client.pool, pinned=False)
        self.copier.gather(self._sent, lambda param: param.detach())
        digest = digest_of_bytes(data for part in self._sent.parts for data in part)
        self._push_beside(NewValues(touched=self.copier.watch.touched, digest=digest), self._sent.parts)
        self.copier.watch.touched = ""
        self.copier.watch.record()
        self.take_answer()
        if not self._common:  # the job's may be newer: of answers that came meanwhile, or were given before
            self.read_values()

    # What the servers hold.

    def read_values(self) -> None:
        self.renew(compare=self._carries)
        if self._carries:
            self.carry_changes()
        self.before_read()
        if self.client.companion is not None:
            self.client.companion.release()  # reading values means that this worker pauses its steps
        with self.session.lock:
            self.client.settle(self.name)
            if not self._carries:
                self.copier.scatter(self._read_parts())
            # Else they are here: the job's cannot move without this worker. What the servers have may be what another
            # worker's script made of them for the next step, before this one's script does the same.
            self.rows.read_mirrored()
        self.copier.watch.touched = ""

    def newest(self) -> dict[int, list[Bytes]] | None:
        """The servers' values of now, one list of buffers for each shard; pushes that are not answered stay so.

        Returns:
            None where newer values have come meanwhile, with an answer.
        """
        with self.session.lock:
            answers = self.client.read(self.name, "params")
        version, state = answers[0][0].version, self.client_state
        if version < state.version:
            return None
        state.version = version
        return {shard: buffers for shard, (_, buffers) in enumerate(answers)}

    def _read_parts(self) -> dict[int, list[Bytes]]:
        answers = self._read("params")
        self.client_state.version = answers[0][0].version
        return {shard: buffers for shard, (_, buffers) in enumerate(answers)}

    def _read(self, what: str) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """From all shards, at one place of the log."""
        with self.session.lock:
            self.client.settle(self.name)
            return self.client.read(self.name, what)

    def _read_segments(self, what: str) -> list[SegmentState]:
        return [segment for answer, buffers in self._read(what) for segment in unpack(answer.state, buffers)]

    def read_state(self) -> list[SegmentState]:
        return self._read_segments("state")

    def saved_state(self) -> list[SegmentState]:
        """State of the script's optimizer that servers kept in the job of the checkpoint, and workers go on with."""
        return self._read_segments("saved state")

    def load_state(self, state: Sequence[SegmentState]) -> None:
        packed, buffers = pack(state)
        self._push_beside(NewState(state=packed, digest=digest_of_bytes(buffers, packed)), [buffers] * self.client.shards)

    def _push_beside(self, body: NewState | NewValues, parts: list[list[Bytes]]) -> None:
        """A push beside the steps, and its answer."""
        self._loads -= 1
        push = Push(id=PushId(self.name, self.client.rank, self.client.incarnation, self._loads), body=body)
        with self.session.lock:
            self.client.settle(self.name)
            self.client.push(Outstanding(push, parts))
            self.client.settle(self.name)

    def residual(self) -> dict[str, torch.Tensor]:
        return self.filters.state()

    def load_residual(self, residual: dict[str, torch.Tensor]) -> None:
        self.filters.load(residual)

    def row_source(self, table: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def pull(ids: torch.Tensor) -> torch.Tensor:
            with self.session.lock, self.client.together():
                return self.rows.pulled(table, *self.rows.ask(table, ids))

        return pull

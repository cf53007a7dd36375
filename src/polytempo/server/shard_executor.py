"""What one shard holds, and the thread that carries out the log on it, entry by entry.

`ShardState` takes the entries one after another, with the pushes they name, and returns the answers and reports that they
cause. It knows no thread, no queue and no clock: the same log with the same pushes makes the same bits, whichever shard
carries it out and whenever. So a copy of a shard is a second one that is given the same
(`tests/threads/test_second_shard.py`).

`ShardExecutor` owns it. The I/O loop hands over each entry; what comes back are answers to send, and reports. Nothing is
shared but two queues, so nothing is locked, and a decision never waits behind a long optimizer step. An entry that takes
less time than handing it over (judged by the last update of the same optimizer) is carried out at once, in the I/O loop's
thread, if the executor is idle. So is an update that delays no worker: when the only one, or all of a barrier, wait for it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError

from polytempo.checkpoints import error_text
from polytempo.device.device import Device
from polytempo.errors import PeerError
from polytempo.protocol.log import Drop, ForgetWorker, LoadState, LogEntry, ReadHere, Reply, Save, Seed, Setup, Update
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Failed,
    Keep,
    Norm,
    NotSaved,
    Pull,
    PulledRows,
    Push,
    ReadAnswer,
    Refused,
    Saved,
)
from polytempo.protocol.push import Content, FirstValues, NewState, NewValues, row_buffers
from polytempo.protocol.values import OptimizerSpec, PushId, Share
from polytempo.server.checkpoint import SavedOptimizer, read_held, write_held, write_shard
from polytempo.server.device_share import DeviceShare
from polytempo.server.optimizer_state import OF_TABLES, SegmentState, as_bytes, as_tensor, pack, unpack
from polytempo.server.server_device import AUTO, CPU, gpu_of_shard
from polytempo.server.shard import PushBuffer, Shard, in_host
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes, OnSent
from polytempo.transport.memory import WakeUp

Pushes: TypeAlias = Mapping[PushId, tuple[Push, list[PushBuffer]]]
#: Gives this shard's part of an update's squared norm, and waits for that of all shards.
TotalNorm: TypeAlias = Callable[[Norm], float]


@dataclass
class WorkerReply:
    """An answer on its way out."""

    worker: int
    message: AnyMessage
    buffers: Sequence[Bytes] = ()
    done: OnSent | None = None


@dataclass
class PullHere:
    """Rows that a worker asks for, outside the log: it gets them as they are when its turn comes."""

    worker: int
    pull: Pull
    ids: Bytes | None = None


@dataclass
class KeepHere:
    """What a worker's filters hold back, to be kept with a checkpoint."""

    worker: int
    keep: Keep
    buffers: Sequence[Bytes]


@dataclass
class EndShares:
    """A worker's connection has ended: device memory that it shares is not used any more."""

    worker: int
    incarnation: int


Report: TypeAlias = WorkerReply | AnyMessage
Work: TypeAlias = LogEntry | PullHere | KeepHere | EndShares


class ShardPlacement:
    """Gives the device of one shard's optimizers.

    Args:
        option: The value of `--server-device`.
        shard: Which shard.
        device: Is given for every optimizer instead: the stand-in of tests.
    """

    def __init__(self, option: str = CPU, shard: int = 0, device: Device | None = None) -> None:
        self._option, self._shard = option, shard
        self._device, self._fixed = device, device is not None

    def device_for(self, spec: OptimizerSpec) -> Device | None:
        """Where the values of this optimizer are made; None: in the CPU's memory.

        Raises:
            PeerError: A GPU was asked for by name, and cannot be used.
        """
        if self._fixed or not spec.tensors or spec.apply == "peers" or self._option == CPU:
            return self._device if spec.tensors and spec.apply != "peers" else None
        wanted = spec.device == "cuda"
        if self._option == AUTO and not wanted:
            return None
        gpus = torch.cuda.device_count()
        if not gpus and self._option != AUTO:
            raise PeerError(f"server {self._shard}: --server-device {self._option}, and torch sees no GPU; use auto or cpu")
        index = gpu_of_shard(self._option, self._shard, gpus, wanted)
        if index is None:
            return None
        if self._device is None:
            from polytempo.device.cuda_device import CudaDevice

            try:
                self._device = CudaDevice(index)
            except (PeerError, RuntimeError) as error:  # torch raises the latter
                said = f"server {self._shard} cannot use cuda:{index}: {' '.join(str(error).split())}"
                if self._option != AUTO:
                    raise PeerError(f"{said}; use --server-device cpu") from None
                sys.stderr.write(f"polytempo: {said}; its values are in the memory of the CPU\n")
                sys.stderr.flush()
        return self._device


class ShardState:
    """All tensors of one shard: a `Shard` for each optimizer, and the device memory that workers share with it."""

    def __init__(
        self,
        shard: int,
        shards: int,
        pool: Pool,
        workers: int = 1,
        checkpoints: Path | None = None,
        resume: Path | None = None,
        placement: ShardPlacement | None = None,
    ) -> None:
        """`placement`: says for each optimizer where its values are; else in the CPU's memory."""
        self.shard = shard
        self.shards = shards
        self.pool = pool
        self.workers = workers
        self.optimizer_shards: dict[str, Shard] = {}
        self.shares: dict[tuple[str, int, int], DeviceShare] = {}  #: by optimizer, worker and incarnation
        self.device: Device | None = None  #: once there are values on it
        self._placement = placement or ShardPlacement()
        self._arena = Arena(pool)
        self._checkpoints, self._resume = checkpoints, resume
        self._for_workers: dict[str, list[SegmentState]] = {}  # state of a checkpoint that goes on at the workers
        self._reports: list[Report] = []  # of the entry that is being carried out

    def carry_out(self, entry: Work, pushes: Pushes, total_norm: TotalNorm) -> list[Report]:
        """The next entry of the log, or work outside it: the answers and reports that it causes."""
        with nullcontext() if self.device is None else self.device.own_stream():  # one stream, whichever thread this is
            match entry:
                case Update():
                    self._update(entry, pushes, total_norm)
                case Reply():
                    self._reply(entry)
                case PullHere():
                    self._pull(entry)
                case Drop(id=identity):
                    push, buffers = pushes[identity]
                    self.optimizer_shards[identity.optimizer_id].note([(push, 0.0, buffers)])
                case Setup():
                    self._set_up(entry)
                case Seed(id=identity):
                    self._seed(*pushes[identity])
                case ReadHere():
                    self._read(entry)
                case LoadState():
                    self._load(entry, pushes)
                case Save(name=name):
                    self._save(name)
                case KeepHere():
                    self._keep(entry.worker, entry.keep, entry.buffers)
                case ForgetWorker(worker=worker, incarnation=incarnation):
                    for shard in self.optimizer_shards.values():
                        shard.forget(worker)
                    self._end_shares(worker, incarnation)
                case EndShares():
                    self._end_shares(entry.worker, entry.incarnation)
        reports, self._reports = self._reports, []
        return reports

    # Entries of the log.

    def _set_up(self, entry: Setup) -> None:
        alone = (len(entry.optimizer_spec.members) or self.workers) == 1
        device = self._placement.device_for(entry.optimizer_spec)
        if self.device is None and device is not None:
            self.device = device
            if device.place.type == "cuda":
                sys.stderr.write(f"values on {device.place}\n")
                sys.stderr.flush()
        with nullcontext() if device is None else device.own_stream():
            shard = Shard(entry.optimizer_spec, self.shard, self.shards, self.pool, alone, self._arena, device)
            self.optimizer_shards[entry.optimizer_id] = shard
            if entry.resume and self._resume is not None:
                saved = SavedOptimizer(self._resume, entry.optimizer_id, entry.optimizer_spec)
                shard.seed(saved.values(shard))
                if saved.resumption.loads:
                    shard.load_state(saved.state())
                if saved.resumption.to_workers and self.shard == 0:
                    self._for_workers[entry.optimizer_id] = saved.state()
                shard.rows.load([one.rows for one in saved.shards], saved.shards[0].clocks)

    def _seed(self, push: Push, given: list[PushBuffer]) -> None:
        first = push.body
        assert isinstance(first, FirstValues)
        buffers = in_host(given)
        shard = self.optimizer_shards[push.id.optimizer_id]
        count = len(shard.stretches)
        shard.seed(buffers[:count])
        shard.shares = (Share(push.id.worker, 1.0),)
        rest = len(buffers) - row_buffers(first)
        shard.rows.seed(first.rows, buffers[rest:])
        if first.state:
            shard.load_state(unpack(first.state, buffers[count:rest]))

    def _load(self, entry: LoadState, pushes: Pushes) -> None:
        """Take what a worker gives beside its steps; when only the answer was lost, there is nothing to take."""
        identity, shard = entry.id, self.optimizer_shards[entry.id.optimizer_id]
        if not entry.again:
            given, buffers = pushes[identity][0].body, in_host(pushes[identity][1])
            if isinstance(given, NewValues):
                shard.take_values(identity.worker, given.touched, buffers)
            elif isinstance(given, NewState):
                shard.load_state(unpack(given.state, buffers))
        answer = Answer(
            optimizer_id=identity.optimizer_id,
            shard=self.shard,
            exchange=identity.step,
            place=entry.place,
            step=-1,
            version=shard.version,
            stop=False,
        )
        self._reports.append(WorkerReply(identity.worker, answer))

    def _update(self, entry: Update, pushes: Pushes, total_norm: TotalNorm) -> None:
        shard = self.optimizer_shards[entry.optimizer_id]
        parts = [(pushes[part.id][0], part.samples, pushes[part.id][1]) for part in entry.parts]
        if shard.in_place_changes is not None:
            reason = shard.in_place_changes.judge([part.id.worker for part in entry.parts])
            for part in entry.parts if reason else ():
                self._reports.append(WorkerReply(part.id.worker, Refused(reason=reason)))

        def total(square: float) -> float:
            norm = Norm(shard=self.shard, optimizer_id=entry.optimizer_id, version=entry.version, square=square)
            return square if self.shards == 1 else total_norm(norm)

        shard.update(parts, entry.rate, entry.barrier, total, entry.mean_staleness, entry.divisor)
        for push, buffers in pushes.values():
            for buffer in in_host(buffers):
                self.pool.give(buffer)
            fenced = isinstance(push.body, Content) and push.body.fence
            if fenced and (entry.optimizer_id, push.id.worker, push.id.incarnation) not in self.shares:
                self.finish()  # its worker is gone: the memory is unmapped behind this

    def _reply(self, entry: Reply) -> None:
        shard = self.optimizer_shards[entry.optimizer_id]
        empty = shard.averages and entry.version == 0
        if entry.worker in shard.rows.wishes:
            empty = empty or not shard.rows.wants_values(entry.worker, entry.exchange)
        said, filtered = None, shard.pull_compression
        if filtered is not None and not empty:
            said = filtered.say(entry.worker, entry.exchange, shard.values)
            if said is not None:
                shard.staleness_correction.given(entry.worker, shard.version, filtered.told(entry.worker))
        fence = self._land(entry, shard, empty)
        dense, done = ([], None) if empty or fence else shard.lend(entry.worker) if said is None else (said, None)
        rows, of_rows, blocks = shard.rows.answer(entry.worker, entry.exchange) if shard.rows.tables else ((), [], [])
        answer = Answer(
            optimizer_id=entry.optimizer_id,
            shard=self.shard,
            exchange=entry.exchange,
            place=entry.place,
            step=entry.step,
            version=entry.version,
            stop=entry.stop,
            waited=entry.waited,
            staleness=entry.staleness,
            skipped=shard.skipped,
            absent=tuple(sorted(shard.absent)) if shard.averages or entry.members else (),
            members=entry.members,
            shares=shard.shares if entry.members else (),
            rows=rows,
            filtered=said is not None,
            checkpoint=entry.checkpoint,
            touched=shard.touched if entry.members else "",
            spread=shard.divergence.mean,
            directive=entry.directive,
            fence=fence,
            certain=entry.certain,
            closed=entry.closed,
        )
        if of_rows:
            dense, done = [*dense, *of_rows], self._sent(done, blocks)
        self._reports.append(WorkerReply(entry.worker, answer, dense, done))

    def _land(self, entry: Reply, shard: Shard, empty: bool) -> int:
        """Where the push that is answered came with a fence: the values to the worker's device memory; the fence."""
        share = self.shares.get((entry.optimizer_id, entry.worker, entry.incarnation))
        fence = share.fence_of(entry.exchange) if share is not None else 0
        if share is not None and fence:
            if not empty:
                shard.staleness_correction.given(entry.worker, shard.version, shard.values)
            share.answer(fence, None if empty else shard.values)
        return fence

    def _sent(self, done: OnSent | None, blocks: list[Bytes]) -> OnSent:
        """What to do when an answer was sent: values were lent, and blocks taken."""

        def sent() -> None:
            if done is not None:
                done()
            self._arena.give(blocks)

        return sent

    def _pull(self, entry: PullHere) -> None:
        """Rows as they are now, or which steps have reached a span."""
        pull, shard = entry.pull, self.optimizer_shards[entry.pull.optimizer_id]
        table = shard.rows.tables[pull.table]
        answer = PulledRows(optimizer_id=pull.optimizer_id, shard=self.shard, request=pull.request, version=shard.version)
        if pull.what == "clock":
            span = pull.span or (0, table.info.rows)
            answer.clock, answer.version = table.clock(*span), table.version_of(*span)
            self._reports.append(WorkerReply(entry.worker, answer))
            return
        if entry.ids is None:
            rows = as_bytes(table.pull_range(*(pull.span or (0, 0))))
            self._reports.append(WorkerReply(entry.worker, answer, [rows]))
            return
        rows, blocks = shard.rows.pull(pull.table, as_tensor(entry.ids, "int64"))
        self._reports.append(WorkerReply(entry.worker, answer, [rows], self._sent(None, blocks)))

    def _read(self, entry: ReadHere) -> None:
        """Of values, the optimizer's state; or of a checkpoint, from the first server: what a worker's filters held back, or
        state that servers kept and workers go on with."""
        shard = self.optimizer_shards[entry.optimizer_id]
        answer = ReadAnswer(
            optimizer_id=entry.optimizer_id,
            shard=self.shard,
            request=entry.request,
            version=shard.version,
            exchange=entry.exchange,
        )
        if entry.what == "params":
            values, done = shard.lend(entry.worker)
            self._reports.append(WorkerReply(entry.worker, answer, values, done))
            return
        segments: list[SegmentState] = []
        if entry.what == "state":
            segments = [*shard.state(), SegmentState(OF_TABLES, 0, 0, shard.rows.saved_state())]
        elif entry.what == "saved state":
            segments = self._for_workers.get(entry.optimizer_id, [])
        elif self._resume is not None and self.shard == 0:
            segments = read_held(self._resume, entry.optimizer_id, entry.worker)
        answer.state, buffers = pack(segments)
        self._reports.append(WorkerReply(entry.worker, answer, [buffer.copy() for buffer in buffers]))

    def _save(self, name: str) -> None:
        if self._checkpoints is None:
            return
        try:
            file, digest, tensors = write_shard(self._checkpoints, name, self.shard, self.optimizer_shards)
        except (OSError, SafetensorError) as error:  # the disk's fault; what becomes of the job is the first server's to say
            self._reports.append(NotSaved(shard=self.shard, name=name, reason=error_text(error)))
            return
        self._reports.append(Saved(shard=self.shard, name=name, file=file, digest=digest, tensors=tensors))

    def _keep(self, worker: int, keep: Keep, buffers: Sequence[Bytes]) -> None:
        if self._checkpoints is None:
            return
        try:
            write_held(self._checkpoints, keep.checkpoint, keep.optimizer_id, worker, unpack(keep.state, buffers))
        except OSError as error:
            self._reports.append(NotSaved(shard=self.shard, name=keep.checkpoint, reason=error_text(error), worker=worker))

    # Memory that workers share.

    def finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device is not None:
            self.device.finish()

    def release(self, worker: int | None = None) -> None:
        """No further answer goes to this worker, or to any: a stream that waits for one goes on. Any thread may call it."""
        shares = [share for (_, rank, _), share in list(self.shares.items()) if worker in (None, rank)]
        if shares:
            self.finish()
        for share in shares:
            share.release()

    def _end_shares(self, worker: int, incarnation: int) -> None:
        """Unmap the memory of this incarnation of a worker and of those before it, but for pushes still to be applied."""
        ended = [key for key in list(self.shares) if key[1] == worker and key[2] <= incarnation]
        if ended:
            self.finish()
        for key in ended:
            self.shares.pop(key).release()

    # What it knows.

    def settled_divergence(self, optimizer_id: str) -> float:
        """How far the workers' gradients were apart, over the job."""
        shard = self.optimizer_shards.get(optimizer_id)
        if shard is None:
            return 0.0
        with nullcontext() if self.device is None else self.device.own_stream():
            shard.divergence.settle()
        return shard.divergence.mean

    def device_facts(self) -> dict[str, Any]:
        """Where the values are and how many bytes this server has allocated there; empty where they are with the CPU."""
        if self.device is None:
            return {}
        place = self.device.place
        own = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
        return {"values_on": str(place), "server_device_bytes": own + self.device.allocated}


#: Seconds that it takes to hand an entry to the thread and its answer back.
HAND_OVER = 300e-6
#: Seconds for which an update that all workers wait for may block the I/O loop.
PATIENCE = 50e-3
#: Rows whose pull takes about as long as handing it over.
FEW_ROWS = 8192


class ShardExecutor:
    """Owns what one shard holds. `put`, `take` and `norm_total` are the I/O loop's; the rest is the thread's."""

    def __init__(self, state: ShardState) -> None:
        self.state = state
        self.shard = state.shard
        self.shards = state.shards
        self.pool = state.pool
        self.wake_up = WakeUp()
        self._entries: SimpleQueue[tuple[Work, Pushes] | None] = SimpleQueue()
        self._totals: SimpleQueue[float | None] = SimpleQueue()
        self._out: deque[Report] = deque()
        self._given = self._finished = 0  # entries handed to the thread, and carried out by it
        self._took: dict[str, float] = {}  # seconds of the last update of each optimizer
        self._thread = threading.Thread(target=self._run, name=f"shard {state.shard}", daemon=True)
        self._thread.start()

    def put(self, entry: Work, pushes: Pushes) -> None:
        """Carry out the next entry of the log, here if it is a small thing, or hand it over."""
        if self._given == self._finished and self._is_small(entry):
            self._try(entry, pushes)
        else:
            self._given += 1
            self._entries.put((entry, pushes))

    def _is_small(self, entry: Work) -> bool:
        if isinstance(entry, KeepHere | EndShares):
            return False
        if isinstance(entry, PullHere):
            return entry.ids is not None and (entry.ids.nbytes <= 8 * FEW_ROWS or self.state.workers == 1)
        if isinstance(entry, Update):
            alone = self.shards == 1 or self.state.optimizer_shards[entry.optimizer_id].optimizer_spec.clip_norm is None
            allowed = PATIENCE if entry.barrier or self.state.workers == 1 else HAND_OVER
            return alone and self._took.get(entry.optimizer_id, 1.0) < allowed
        return isinstance(entry, Reply) or (isinstance(entry, ReadHere) and entry.what == "params")

    def take(self) -> list[Report]:
        """Answers and reports for the I/O loop."""
        return [self._out.popleft() for _ in range(len(self._out))]

    def norm_total(self, square: float) -> None:
        self._totals.put(square)

    def close(self) -> None:
        self._entries.put(None)
        self._totals.put(None)
        self._thread.join()
        self.wake_up.close()

    # The thread.

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._entries.get()) is not None:
            if not self._try(*item):
                return
            del item  # the memory of pushes
            self._finished += 1

    def _try(self, entry: Work, pushes: Pushes) -> bool:
        began = time.perf_counter()
        try:
            reports = self.state.carry_out(entry, pushes, self._total_norm)
        except torch.OutOfMemoryError as error:
            self._report(Failed(cause=self._out_of_memory(error)))
            return False
        except Exception as error:  # noqa: BLE001  whatever it is, the job must hear of it
            trace = traceback.format_exc(limit=-3)
            self._report(Failed(cause=f"server {self.shard} failed at {type(entry).__name__}: {error}\n{trace}"))
            return False
        if isinstance(entry, Update):
            self._took[entry.optimizer_id] = time.perf_counter() - began
        if reports:
            self._report(*reports)
        return True

    def _report(self, *reports: Report) -> None:
        self._out += reports
        if threading.current_thread() is self._thread:
            self.wake_up.ring()

    def _total_norm(self, norm: Norm) -> float:
        """The squared norm of a whole update, from the parts of all shards."""
        self._report(norm)
        answer = self._totals.get()
        if answer is None:  # the job is over: for this update, and for all that are still to come
            self._totals.put(None)
            return norm.square
        return answer

    def _out_of_memory(self, error: Exception) -> str:
        """One line: which server, what was asked for, what is free, what to do."""
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        where, there = "the GPU", ""
        if self.state.device is not None and self.state.device.place.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.state.device.place)
            where, there = str(self.state.device.place), f", {free} of {total} bytes are free"
        return (
            f"server {self.shard} is out of memory on {where}: {asked[1] if asked else 'memory'} was asked for{there}; use "
            "--server-device cpu, a smaller model or batch, or fewer processes on this GPU"
        )

"""The coordinator: the duties of server 0 for the whole job.

    messages of workers, servers, launcher, agents  ->  `handle`, by a table of (role, type of message)
    a push that has arrived at a shard              ->  the sequencer, which decides
    effects of all of them                          ->  `_carry_out`: the record, timers, checkpoints and what the user is
                                                        told; the rest is returned for the I/O loop to send

It owns all that the job is beyond its values: sequencer, record, checkpoints, remote hosts, the ends of workers, and the
store in which they find each other. These are reached through it alone, and return effects (`server/effects.py`), as
handlers do. So nothing here has sockets; a copy of the coordinator that is given the same inputs decides the same.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polytempo.errors import PeerError, counted, trained_alone
from polytempo.protocol.log import Save
from polytempo.protocol.messages import (
    AnyMessage,
    Arrived,
    AskWhere,
    Departed,
    Expecting,
    Failed,
    Finish,
    Finished,
    Gone,
    Heartbeat,
    Hello,
    LeaseSamples,
    Leave,
    MetricReport,
    Norm,
    NormTotal,
    Notice,
    NotSaved,
    Push,
    ReadRequest,
    RecallState,
    Register,
    Repeat,
    Saved,
    ScriptState,
    StatusRequest,
    Stop,
    Stopped,
    StoreGet,
    StoreSet,
)
from polytempo.protocol.training_troubles import DuplicateBatches, ends, goes_on
from polytempo.protocol.values import OptimizerSpec, PushId, TrainingProgress
from polytempo.records.files import RecordWriter, record_lost
from polytempo.records.lines import MAIN, RecordLine
from polytempo.server.checkpoint import JobCheckpoints
from polytempo.server.effects import (
    Checkpoint,
    Diverged,
    Effect,
    EndLoop,
    ShareNorm,
    StopJob,
    StopWorkers,
    Tell,
    ToLauncher,
    ToServers,
    ToShards,
    ToWorker,
    Unsaved,
    WakeAt,
    Write,
)
from polytempo.server.members import JobKeyValues, RemoteHosts, WorkerEnds
from polytempo.server.sequencer import Sequencer
from polytempo.server.validation import check_message, check_script_state, check_sender, describe
from polytempo.summation import in_order
from polytempo.transport.channel import Bytes

MessageHandler = Callable[[Hello, Any, float], list[Effect]]


class JobRecord:
    """The record of a job, if it has one. A record that cannot be written is cut short; the job goes on without it."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self._writer: RecordWriter | None = None
        self._lost = ""  # what the user is still to be told
        try:
            self._writer = RecordWriter(directory) if directory else None
        except OSError as error:
            self._lost = record_lost(error)

    @property
    def is_written(self) -> bool:
        return self._writer is not None

    def write(self, line: RecordLine) -> None:
        if self._writer is not None:
            self._try(self._writer.write, line)

    def flush(self) -> list[Effect]:
        """Let readers of the file see what was written so far. Where it was lost, the user is told, once."""
        if self._writer is not None:
            self._try(self._writer.flush)
        lost, self._lost = self._lost, ""
        return [Tell(lost, about="record")] if lost else []

    def close(self, meta: dict[str, Any]) -> list[Effect]:
        """Finish the record; as `flush`."""
        if self._writer is not None:
            self._try(self._writer.close, meta)
        self._writer = None
        return self.flush()

    def abandon(self) -> None:
        """Leave the record as it is."""
        if self._writer is not None:
            self._writer.abandon()

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self.abandon()
            self._writer, self._lost = None, record_lost(error)


class Coordinator:
    """Server 0's part in the job. What it returns is for the I/O loop to send, in order."""

    def __init__(
        self,
        sequencer: Sequencer,
        record: JobRecord | None = None,
        checkpoints: Path | None = None,
        facts: dict[str, Any] | None = None,
        hosts: RemoteHosts | None = None,
        go_on_unsaved: bool = False,
        resume: Path | None = None,
        ends_diverged: bool = False,
    ) -> None:
        """`facts`: what meta.json holds beside the figures. `go_on_unsaved`: the job outlives a checkpoint that cannot be
        written. `resume`: the checkpoint that the job goes on from. `ends_diverged`: the job ends when its training has
        diverged."""
        self._sequencer = sequencer
        self._record = JobRecord() if record is None else record
        self._facts, self._started = facts or {}, time.time()
        self._checkpoints = JobCheckpoints(checkpoints, sequencer.plan, resume)
        self._hosts = hosts or RemoteHosts()
        self._ends = WorkerEnds()
        self._key_values = JobKeyValues()
        self._go_on_unsaved = go_on_unsaved
        self._ends_diverged = ends_diverged
        self._has_launcher, self._awaits_launcher = False, True
        self._untold: list[Effect] = []  # until the launcher is there
        self._wakes: list[float] = []  # a heap: when the sequencer wants its ticks
        self._norms: dict[tuple[str, int], list[float]] = {}  # of single shards, by optimizer and version
        self._finish: Finish | None = None  # the launcher's, when all workers have ended
        self._progress: TrainingProgress | None = None  # of training without pushes, and since when
        self._progress_since = 0.0
        self._told_choices: set[str] = set()  # what was chosen for optimizers, and the user knows
        self._duplicates = DuplicateBatches()
        self._handlers: dict[tuple[str, type], MessageHandler] = {
            ("worker", Register): self._register,
            ("worker", Repeat): lambda sender, asked, now: sequencer.repeat(asked.id, asked.place),
            ("worker", ReadRequest): lambda sender, asked, now: sequencer.read(asked),
            ("worker", Leave): self._worker_left,
            ("worker", LeaseSamples): lambda sender, asked, now: sequencer.lease(sender.rank, sender.incarnation, asked),
            ("worker", MetricReport): self._metric,
            ("worker", RecallState): lambda sender, asked, now: self._checkpoints.recall(sender.rank, asked),
            ("worker", StoreSet): lambda sender, asked, now: self._key_values.set(asked.key, asked.value, sender.rank),
            ("worker", StoreGet): lambda sender, asked, now: self._key_values.get(asked.key, sender.rank),
            ("worker", AskWhere): lambda sender, asked, now: self._ends.where(sender.rank, asked, sequencer.statistics),
            ("server", Arrived): lambda sender, arrived, now: sequencer.arrived(arrived.shard, arrived.id, None, now),
            ("server", Norm): self._norm,
            ("server", Saved): lambda sender, part, now: self._checkpoints.add_part(part),
            ("server", NotSaved): lambda sender, part, now: self._checkpoints.add_part(part),
            ("server", Failed): lambda sender, failed, now: [StopJob(failed.cause)],
            ("launcher", StatusRequest): self._status,
            ("launcher", Gone): self._worker_ended,
            ("launcher", Expecting): lambda sender, expecting, now: self._hosts.expect(expecting),
            ("launcher", Stop): self._end_early,
            ("launcher", Finish): self._all_ended,
            ("agent", Heartbeat): lambda sender, message, now: self._hosts.heard(sender.rank, message, now),
            ("agent", Gone): lambda sender, message, now: self._hosts.heard(sender.rank, message, now),
        }

    def _carry_out(self, effects: Sequence[Effect]) -> list[Effect]:
        """Do what concerns the record, timers, checkpoints, the user and the job's end; the rest is the I/O loop's."""
        passed: list[Effect] = []
        for effect in effects:
            match effect:
                case ToShards() | ToWorker():  # most are
                    passed.append(effect)
                case Write():
                    self._record.write(effect.line)
                case WakeAt():
                    heapq.heappush(self._wakes, effect.at)
                case Checkpoint():
                    self._checkpoints.begin(effect)
                case Tell():
                    passed += self._told(Notice(text=effect.text, about=effect.about))
                case Unsaved(name, reason):
                    cause = f"the checkpoint {name} could not be written to {self._checkpoints.directory}: {reason}"
                    self._checkpoints.failure = cause
                    if self._go_on_unsaved:
                        passed += self._carry_out([Tell(f"warning: {cause}; going on without it")])
                    elif self._finish is None:
                        remedy = "make room and --resume, or use --checkpoint-errors continue"
                        passed += self._carry_out([StopJob(f"{cause}; {remedy}")])
                case Diverged():
                    latest = self._checkpoints.latest
                    self._checkpoints.spared = Path(latest) if latest else None
                    advice = f"{effect.advice}; the last checkpoint is {latest}" if latest else effect.advice
                    stops = StopJob(ends(effect.trouble, advice), over=False)
                    passed += self._carry_out([stops if self._ends_diverged else Tell(goes_on(effect.trouble, advice))])
                case StopJob(cause=cause):
                    passed += self._told(Notice(text=cause, fatal=True))
                    passed += [*self._hosts.stopped(cause), StopWorkers(cause)]
                    if effect.over or not self._has_launcher:  # else servers may still have to save
                        last: list[Effect] = [ToServers(Stopped(cause=cause)), EndLoop()]
                        # Workers may fail before the launcher has connected: it would only see that servers end.
                        (self._untold if self._awaits_launcher else passed).extend(last)
                case _:
                    passed.append(effect)
        return passed

    def _told(self, notice: Notice) -> list[Effect]:
        """A notice for the launcher's output; before the launcher is there, it is kept for it."""
        if not self._has_launcher:
            self._untold.append(ToLauncher(notice))
        return [ToLauncher(notice)] if self._has_launcher else []

    # Connections, as far as the job's decisions depend on them.

    def launcher_connected(self) -> list[Effect]:
        """The launcher is there: workers may have been sooner."""
        self._has_launcher, self._awaits_launcher = True, False
        untold, self._untold = self._untold, []
        return untold

    def launcher_gone(self, reason: str = "") -> list[Effect]:
        """The launcher has ended, maybe before it connected."""
        self._has_launcher = self._awaits_launcher = False
        return self._carry_out([StopJob(f"the launcher is gone{': ' + reason if reason else ''}")])

    def agent_connected(self, agent: int, count: int, now: float) -> list[Effect]:
        return self._carry_out(self._hosts.add(agent, count, now))

    def disconnected(self, sender: Hello | None, reason: str) -> list[Effect]:
        """A connection is closed; `reason` is empty when the other side closed it."""
        role = sender.role if sender is not None else ""
        if role == "launcher":
            return self.launcher_gone(reason)
        if role == "server" and self._finish is None:
            if reason:
                return self._carry_out([StopJob(f"{describe(sender)} was turned away: {reason}")])
            if self._has_launcher:
                return []  # the launcher reports its exit
            return self._carry_out([StopJob(f"{describe(sender)} is gone")])
        return self._carry_out([Tell(f"the connection of {describe(sender)} was closed: {reason}")]) if reason else []

    def given_up(self, worker: Hello, now: float) -> str:
        """A worker has sent a message: why the job goes on without it; empty when it does not."""
        if self._hosts.any:
            self._hosts.heard_worker(worker.rank, now)
        return self._ends.why_given_up(worker) if self._ends.given_up else ""

    # Messages and pushes.

    def handle(self, sender: Hello, message: AnyMessage, now: float) -> list[Effect]:
        handler = self._handlers.get((sender.role, type(message)))
        if handler is None:
            raise PeerError(f"unexpected {type(message).__name__} from {describe(sender)}")
        check_sender(sender, message)
        check_message(message, self._sequencer.plan.size)
        return self._carry_out(handler(sender, message, now))

    def script_state(self, sender: Hello, message: ScriptState, buffers: Sequence[Bytes]) -> list[Effect]:
        check_script_state(message, buffers)
        return self._carry_out(self._checkpoints.add_state(sender.rank, message, buffers))

    def push_arrived(self, push: Push, now: float) -> list[Effect]:
        """A push has arrived in full at this server's own shard."""
        effects = self._sequencer.arrived(0, push.id, push, now)
        if push.measures.gradient_digest and push.id.optimizer_id == MAIN and (warning := self._duplicates.look_at(push)):
            effects.append(Tell(warning))
        return self._carry_out([*effects, *map(Tell, self._sequencer.budget.warnings())])

    def report_hold(self, identity: PushId) -> list[Effect]:
        """A worker asks about a push that has arrived: if the policy holds it, for which ranks."""
        return self._carry_out(self._sequencer.ask(identity))

    def _register(self, sender: Hello, message: Register, now: float) -> list[Effect]:
        name, spec = message.optimizer_id, message.optimizer_spec
        is_new = name not in self._sequencer.clocks
        effects = self._sequencer.register(sender.rank, sender.incarnation, name, spec, now)
        if is_new and name in self._sequencer.clocks:
            effects += self._key_values.announce(f"manifest/{name}", manifest_of(spec))
            asked = spec.sync == self._sequencer.plan.sync and not spec.fallback
            line = "" if asked else spec.parsed.told(spec.inner, spec.fallback)
            if line and line not in self._told_choices:  # once, if several optimizers have it
                self._told_choices.add(line)
                effects.append(Tell(line))
        return effects

    def _metric(self, sender: Hello, message: MetricReport, now: float) -> list[Effect]:
        if message.progress is not None:
            self._progress_since = now if self._progress is None else self._progress_since
            self._progress = message.progress
        return self._sequencer.metric(message, now)

    def _norm(self, sender: Hello, message: Norm, now: float) -> list[Effect]:
        """Shards give the squares of their parts' norms; the sum goes back when all have."""
        key = message.optimizer_id, message.version
        squares = self._norms.setdefault(key, [])
        squares.append(message.square)
        if len(squares) < self._sequencer.plan.shards:
            return []
        del self._norms[key]
        return [ShareNorm(NormTotal(optimizer_id=message.optimizer_id, version=message.version, square=in_order(squares)))]

    def _status(self, sender: Hello, message: StatusRequest, now: float) -> list[Effect]:
        status = self._sequencer.figures.status(now)
        status.checkpoint, status.progress = self._checkpoints.latest, self._progress
        if self._progress is not None:  # time goes on, even if no step does
            status.seconds = max(status.seconds, now - self._progress_since)
        return [ToLauncher(status)]

    # Ends of workers.

    def _worker_left(self, sender: Hello, message: Leave, now: float) -> list[Effect]:
        """It says so itself."""
        stops = self._ends.left(sender.rank, message)
        effects = self._sequencer.left(sender.rank, sender.incarnation, message.reason, now)
        return [*effects, *self._checkpoints.left(sender.rank), *stops]

    def _worker_ended(self, sender: Hello, message: Gone, now: float) -> list[Effect]:
        """Its process has, says the launcher."""
        gone = self._ends.gone(message)
        effects: list[Effect] = []
        if message.reason != "finished":
            effects.append(Write({"t": now, "kind": "fault", "worker": message.worker, "cause": message.cause}))
        effects += self._sequencer.left(message.worker, message.incarnation, message.reason, now)
        effects += self._checkpoints.left(message.worker)
        # Others go on without it by this word only (`collectives/quorum.py`): one that has only left the servers may still
        # take part in their steps.
        others = [rank for rank in range(self._sequencer.plan.size) if rank not in gone]
        return [*effects, *(ToWorker(rank, Departed(worker=message.worker, ended=True)) for rank in others)]

    # Time.

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        host = self._hosts.next_deadline() if self._hosts.any else None
        return min((*self._wakes[:1], *(() if host is None else (host,))), default=None)

    def tick(self, now: float) -> list[Effect]:
        """All messages that have come were handled: timers that are due, hosts that are overdue."""
        due = False
        while self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            due = True
        effects = self._carry_out(self._sequencer.tick(now)) if due else []
        hosts = self._hosts.overdue(now) if self._hosts.any else []
        return effects + self._carry_out([*hosts, *self._record.flush()])

    # The end.

    def _end_early(self, sender: Hello, message: Stop, now: float) -> list[Effect]:
        self._sequencer.ends_early()
        return [StopJob(message.cause, over=False)]

    def _all_ended(self, sender: Hello, message: Finish, now: float) -> list[Effect]:
        """Save the values at the end, when the job ended well or a checkpoint is wanted all the same."""
        self._finish, self._checkpoints.failure = message, ""
        effects = self._checkpoints.end()
        held = any(clock.has_values for clock in self._sequencer.clocks.values())
        if self._checkpoints.directory is None or not held or (message.exit_status and not message.save):
            return effects
        last = self._sequencer.checkpoints.now() if message.save else self._sequencer.checkpoints.at_the_end()
        if last is None or not self._checkpoints.lacks(last):
            return effects
        return [*effects, ToShards(Save(name=last.name)), last]

    @property
    def is_done(self) -> bool:
        """Has the launcher ended the job, and is the last checkpoint written?"""
        return self._finish is not None and not self._checkpoints.pending

    def end(self, now: float, divergence: float, device: dict[str, Any] | None = None) -> list[Effect]:
        """The job is over: finish the record. `divergence`: of the workers' gradients, over the job; `device`: what this
        server has to say of the device that its values are on."""
        finish, unsaved = self._finish, self._checkpoints.failure
        assert finish is not None
        sequencer, alone = self._sequencer, self._ends.alone
        effects: list[Effect] = [Tell(text) for text in sequencer.budget.warnings(at_the_end=True)]
        if len(alone) > 1 and not sequencer.clocks:  # nothing was exchanged: a model each
            who = f"each of {counted(len(alone), 'worker')} has"
            effects.append(Tell(f"warning: {trained_alone(who, max(alone.values()))}"))
        exit_status, cause = finish.exit_status, finish.cause
        if unsaved and not self._go_on_unsaved:
            exit_status, cause = exit_status or 1, cause or unsaved
        progress = msgspec.structs.asdict(self._progress) if self._progress is not None else None
        summary = sequencer.figures.summary(now) | {"spread": divergence, "progress": progress, **(device or {})}
        if self._record.is_written:
            facts = self._facts
            if any(clock.optimizer_spec.apply not in ("peers", "mean") for clock in sequencer.clocks.values()):
                # A script may have asked for servers.
                facts = facts | ({"options": facts["options"] | {"via": "ps"}} if "options" in facts else {})
            ended = {"start": self._started, "end": time.time(), "exit_status": exit_status, "cause": cause}
            effects += self._record.close(meta_of({**facts, **ended}, summary))
        finished = Finished(
            summary=summary, checkpoint=self._checkpoints.latest, cause=unsaved, paces=sequencer.paces.as_rows()
        )
        return self._carry_out([*effects, ToServers(Stopped(cause="the job has ended")), ToLauncher(finished), EndLoop()])

    def close(self) -> None:
        self._record.abandon()


def meta_of(facts: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """The content of meta.json, in which the figures of single workers stand beside those of the job."""
    return {
        **facts,
        "throughput": summary["samples_per_second"],
        "efficiency": summary["efficiency"],
        "diverged": summary["diverged"],
        "workers": summary["workers"],
        "job": {name: value for name, value in summary.items() if name != "workers"},
    }


def manifest_of(spec: OptimizerSpec) -> str:
    """What a worker must know to build the model that the servers hold, as JSON."""
    described = msgspec.to_builtins(spec)
    described["tensors"] = [
        {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "group": info.group} for info in spec.tensors
    ]
    described["tables"] = [msgspec.structs.asdict(info) for info in spec.tables]
    return json.dumps(described)

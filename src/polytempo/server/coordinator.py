"""The coordinator: the duties of server 0 for the whole job.

    messages of workers, servers, launcher, agents  ->  `handle`, by a table of (role, type of message)
    a push that has arrived at a shard              ->  the sequencer, which decides
    what the sequencer decides                      ->  `CoordinatedJob.absorb` writes the record; the rest is returned

The handlers are in three classes, by the sender: `WorkerMessages`, `ServerMessages`, `LaunchMessages`. What they share is
the `CoordinatedJob`: sequencer, record, checkpoints, remote hosts. No sockets here: every method returns effects, which
the I/O loop carries out (`server/effects.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polytempo.errors import PeerError, counted, trained_alone
from polytempo.protocol.log import Save
from polytempo.protocol.messages import (
    GIVEN,
    NEWEST,
    OWN,
    AnyMessage,
    Arrived,
    AskWhere,
    Assigned,
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
    NotSaved,
    Push,
    ReadRequest,
    RecallState,
    Register,
    Repeat,
    Saved,
    ScriptState,
    StateRecalled,
    StatusRequest,
    Stop,
    Stopped,
    StoreGet,
    StoreSet,
    Whereabouts,
)
from polytempo.protocol.training_troubles import DuplicateBatches
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.records.files import RecordWriter
from polytempo.records.lines import MAIN
from polytempo.server.checkpoint import (
    JobCheckpoints,
    ScriptStates,
    mean_of_each,
    newest_of_each,
    read_states,
)
from polytempo.server.coordinated_job import (
    LAST_LIFE,
    CoordinatedJob,
    JobKeyValues,
    JobRecord,
    RemoteHosts,
    describe,
    told_late,
)
from polytempo.server.effects import (
    EndLoop,
    LoopEffect,
    ShareNorm,
    ToAgent,
    ToLauncher,
    ToServers,
    ToShards,
    ToWorker,
)
from polytempo.server.sequencer import Sequencer
from polytempo.server.validation import (
    check_end,
    check_expecting,
    check_lease,
    check_optimizer_spec,
    check_read,
    check_recall,
    check_script_state,
    check_where,
)
from polytempo.summation import in_order
from polytempo.transport.channel import Bytes
from polytempo.transport.keys import Credentials

#: A host is given up when nothing was heard of it for this many seconds (`--host-timeout`).
HOST_TIMEOUT = 5.0
#: A script that never asks `should_stop` is warned when each worker is this many steps beyond the budget, or at the end.
UNHEEDED_STEPS = 4

MessageHandler = Callable[[Hello, Any, float], list[LoopEffect]]
HandlerTable = dict[tuple[str, type], MessageHandler]  #: by the sender's role and the type of the message


class WorkerMessages:
    """Messages of workers: optimizers, reads, metrics, state of their scripts, their end, and keys by which they find each
    other. `resume`: the checkpoint that the job goes on from."""

    def __init__(self, job: CoordinatedJob, resume: Path | None) -> None:
        self._job, self._sequencer = job, job.sequencer
        self._resume = resume
        self._key_values = JobKeyValues()
        self._given = ScriptStates()
        self._told: set[str] = set()  # what was chosen for optimizers, and the user knows
        self.handlers: HandlerTable = {
            ("worker", Register): self._register,
            ("worker", Repeat): self._repeat,
            ("worker", ReadRequest): self._read,
            ("worker", Leave): self._leave,
            ("worker", LeaseSamples): self._lease,
            ("worker", MetricReport): self._metric,
            ("worker", RecallState): self._recall,
            ("worker", StoreSet): self._store_set,
            ("worker", StoreGet): self._store_get,
            ("worker", AskWhere): self._waiting,
        }

    def _register(self, sender: Hello, message: Register, now: float) -> list[LoopEffect]:
        check_optimizer_spec(message.optimizer_id, message.optimizer_spec)
        known = set(self._sequencer.clocks)
        effects = self._job.absorb(
            self._sequencer.register(sender.rank, sender.incarnation, message.optimizer_id, message.optimizer_spec, now)
        )
        for name in self._sequencer.clocks.keys() - known:
            key = f"manifest/{name}"
            effects += self._answer_store(key, self._key_values.announce(key, manifest_of(message.optimizer_spec)))
            spec = message.optimizer_spec
            asked = spec.sync == self._sequencer.plan.sync and not spec.fallback
            line = "" if asked else spec.parsed.told(spec.inner, spec.fallback)
            if line and line not in self._told:  # once, if several optimizers have it
                self._told.add(line)
                effects += self._job.tell(line)
        return effects

    def _repeat(self, sender: Hello, message: Repeat, now: float) -> list[LoopEffect]:
        if (message.id.worker, message.id.incarnation) != (sender.rank, sender.incarnation):
            raise PeerError(f"Repeat for a push of worker {message.id.worker} came from {describe(sender)}")
        return self._job.absorb(self._sequencer.repeat(message.id, message.place))

    def _read(self, sender: Hello, message: ReadRequest, now: float) -> list[LoopEffect]:
        _check_sender(sender, message, message.worker)
        check_read(message)
        return self._job.absorb(self._sequencer.read(message))

    def _leave(self, sender: Hello, message: Leave, now: float) -> list[LoopEffect]:
        check_end(message, self._sequencer.plan.size)
        self._job.ends.left(sender.rank, message.life, f"has {message.reason}")
        self._job.calls.pop(sender.rank, None)
        if message.alone > 0:
            self._job.alone[sender.rank] = message.alone
        effects = self._job.left(sender.rank, sender.incarnation, message.reason, now)
        return effects + (self._job.stop(message.fault) if message.fault else [])

    def _waiting(self, sender: Hello, message: AskWhere, now: float) -> list[LoopEffect]:
        check_where(message, self._sequencer.plan.size)
        if message.call is not None:
            self._job.calls[sender.rank] = message.call
        told, statistics = self._job.calls, self._sequencer.statistics
        calls = {rank: f"is in {told[rank]}" if told.get(rank) else statistics[rank].whereabouts for rank in message.ranks}
        return [ToWorker(sender.rank, Whereabouts(ended=self._job.ends.among(message.ranks, message.life), calls=calls))]

    def _lease(self, sender: Hello, message: LeaseSamples, now: float) -> list[LoopEffect]:
        check_lease(message)
        return self._job.absorb(self._sequencer.lease(sender.rank, sender.incarnation, message))

    def _metric(self, sender: Hello, message: MetricReport, now: float) -> list[LoopEffect]:
        _check_sender(sender, message, message.worker)
        if message.progress is not None:
            self._job.progress_since = now if self._job.progress is None else self._job.progress_since
            self._job.progress = message.progress
        return self._job.absorb(self._sequencer.metric(message, now))

    def report_state(self, sender: Hello, message: ScriptState, buffers: Sequence[Bytes]) -> list[LoopEffect]:
        check_script_state(message, buffers)
        if message.given:
            self._given.report(sender.rank, message, buffers)
            return []
        return self._job.report_unsaved(self._job.checkpoints.add_state(sender.rank, message, buffers))

    def _recall(self, sender: Hello, message: RecallState, now: float) -> list[LoopEffect]:
        check_recall(message)
        plan = self._sequencer.plan
        if message.which == GIVEN:
            found = newest_of_each(self._given.of)
        else:
            states = read_states(self._resume) if self._resume is not None else {}
            if message.which == OWN:
                found = states.get(sender.rank, {})
            else:
                found = newest_of_each(states) if message.which == NEWEST else mean_of_each(states)
        objects, parts = tuple(one for one, _ in found.values()), [part for _, held in found.values() for part in held]
        size, due = plan.resumed.get("size", plan.size), plan.resumed.get("clocks", {}).get(str(sender.rank), 0) - 1
        told = StateRecalled(which=message.which, objects=objects, step=plan.saved_push, size=size, due=due)
        return [ToWorker(sender.rank, told, parts)]

    def _store_set(self, sender: Hello, message: StoreSet, now: float) -> list[LoopEffect]:
        return self._answer_store(message.key, self._key_values.set(message.key, message.value, sender.rank))

    def _store_get(self, sender: Hello, message: StoreGet, now: float) -> list[LoopEffect]:
        found = self._key_values.get(message.key, sender.rank) is not None
        return self._answer_store(message.key, [sender.rank] if found else [])

    def _answer_store(self, key: str, workers: Sequence[int]) -> list[LoopEffect]:
        return [ToWorker(w, StoreSet(key=key, value=self._key_values.get(key, w) or "")) for w in workers]


class ServerMessages:
    """Messages of the shards: pushes that have arrived, norms to add up, parts of checkpoints, failures."""

    def __init__(self, job: CoordinatedJob) -> None:
        self._job, self._sequencer = job, job.sequencer
        self._norms: dict[tuple[str, int], list[float]] = {}
        self.handlers: HandlerTable = {
            ("server", Arrived): self._arrived,
            ("server", Norm): self._norm,
            ("server", Saved): self._saved,
            ("server", NotSaved): self._saved,
            ("server", Failed): self._failed,
        }

    def _arrived(self, sender: Hello, message: Arrived, now: float) -> list[LoopEffect]:
        _check_sender(sender, message, message.shard)
        return self._job.absorb(self._sequencer.arrived(message.shard, message.id, None, now))

    def _norm(self, sender: Hello, message: Norm, now: float) -> list[LoopEffect]:
        _check_sender(sender, message, message.shard)
        squares = self._norms.setdefault((message.optimizer_id, message.version), [])
        squares.append(message.square)
        if len(squares) < self._sequencer.plan.shards:
            return []
        del self._norms[message.optimizer_id, message.version]
        return [ShareNorm(NormTotal(optimizer_id=message.optimizer_id, version=message.version, square=in_order(squares)))]

    def _saved(self, sender: Hello, message: Saved | NotSaved, now: float) -> list[LoopEffect]:
        """A shard has written its part of a checkpoint, or could not, or not what a worker's filters hold back."""
        _check_sender(sender, message, message.shard)
        if isinstance(message, NotSaved) and message.worker >= 0:
            return self._job.report_unsaved([(message.name, f"what worker {message.worker} holds back: {message.reason}")])
        return self._job.report_unsaved(self._job.checkpoints.add_part(message))

    def _failed(self, sender: Hello, message: Failed, now: float) -> list[LoopEffect]:
        return self._job.stop(message.cause)


class LaunchMessages:
    """Messages of the launcher, and of the agents that start workers on other hosts."""

    def __init__(self, job: CoordinatedJob, credentials: Credentials | None) -> None:
        self._job, self._sequencer = job, job.sequencer
        self._credentials = credentials
        self._remote_facts: dict[str, Any] = {}  # what a worker on another host is started with
        self.handlers: HandlerTable = {
            ("launcher", StatusRequest): self._status,
            ("launcher", Gone): self._worker_gone,
            ("launcher", Expecting): self._expect,
            ("launcher", Stop): self._stop,
            ("launcher", Finish): self._finish,
            ("agent", Heartbeat): self._agent_alive,
            ("agent", Gone): self._agent_alive,
        }

    def _status(self, sender: Hello, message: StatusRequest, now: float) -> list[LoopEffect]:
        status = self._sequencer.figures.status(now)
        status.checkpoint, status.progress = self._job.checkpoints.latest, self._job.progress
        if self._job.progress is not None:  # time goes on, even if no step does
            status.seconds = max(status.seconds, now - self._job.progress_since)
        return [ToLauncher(status)]

    def _worker_gone(self, sender: Hello, message: Gone, now: float) -> list[LoopEffect]:
        check_end(message, self._sequencer.plan.size)
        self._job.ends.left(message.worker, LAST_LIFE, "has finished" if message.reason == "finished" else message.cause)
        if message.reason != "finished":
            self._job.given_up[message.worker] = message.incarnation, message.cause
            self._job.record.write({"t": now, "kind": "fault", "worker": message.worker, "cause": message.cause})
        effects = self._job.left(message.worker, message.incarnation, message.reason, now)
        # Others go on without it by this word only (`collectives/quorum.py`): one that has only left the servers may still
        # take part in their steps.
        gone = {message.worker, *self._job.given_up}
        others = [rank for rank in range(self._sequencer.plan.size) if rank not in gone]
        return [*effects, *(ToWorker(rank, Departed(worker=message.worker, ended=True)) for rank in others)]

    def _expect(self, sender: Hello, message: Expecting, now: float) -> list[LoopEffect]:
        check_expecting(message, self._sequencer.plan.size)
        self._remote_facts = message.job
        self._job.hosts.expect(message.ranks)
        return []

    def _stop(self, sender: Hello, message: Stop, now: float) -> list[LoopEffect]:
        self._sequencer.ends_early()
        return self._job.stop(message.cause, over=False)

    def _finish(self, sender: Hello, message: Finish, now: float) -> list[LoopEffect]:
        """Save the values at the end, when the job ended well or a checkpoint is wanted all the same."""
        self._job.finish = message
        self._job.checkpoints.failure = ""
        effects = self._job.report_unsaved(self._job.checkpoints.end())
        held = any(clock.has_values for clock in self._sequencer.clocks.values())
        if self._job.checkpoints.directory is None or not held or (message.exit_status and not message.save):
            return effects
        last = self._sequencer.checkpoints.now() if message.save else self._sequencer.checkpoints.at_the_end()
        if last is None or not self._job.checkpoints.lacks(last):
            return effects
        return effects + self._job.absorb([ToShards(Save(name=last.name)), last])

    def agent_connected(self, agent: int, count: int, now: float) -> list[LoopEffect]:
        """An agent brings workers from another host; `PeerError` where the job expects fewer."""
        host = self._job.hosts.add(agent, count, now)
        sign = self._credentials
        tokens = tuple(sign.token("worker", rank, 0) for rank in host.ranks) if sign is not None else ()
        text = f"{counted(count, 'worker')} joined from another host: rank {', '.join(map(str, host.ranks))}"
        return [ToAgent(agent, Assigned(job=self._remote_facts, ranks=host.ranks, tokens=tokens)), *self._job.tell(text)]

    def _agent_alive(self, sender: Hello, message: Heartbeat | Gone, now: float) -> list[LoopEffect]:
        """A heartbeat, or the end of a worker on the agent's host."""
        host = self._job.hosts.of_agent(sender.rank)
        if host is None:
            raise PeerError("unexpected message from an agent that has brought no workers")
        if host.cause:
            return [ToAgent(sender.rank, Stopped(cause=told_late(host.cause)))]
        self._job.hosts.heartbeat(host, now)
        if isinstance(message, Heartbeat):
            return [ToAgent(sender.rank, message)]  # so that the agent knows when this host is gone
        if message.worker not in host.ranks or not self._job.has_launcher:
            return []
        check_end(message, self._sequencer.plan.size)
        return [ToLauncher(message)]


class Coordinator:
    """Server 0's part in the job."""

    def __init__(
        self,
        sequencer: Sequencer,
        record: RecordWriter | None = None,
        checkpoints: Path | None = None,
        facts: dict[str, Any] | None = None,
        host_timeout: float = HOST_TIMEOUT,
        go_on_unsaved: bool = False,
        credentials: Credentials | None = None,
        record_lost: str = "",
        resume: Path | None = None,
        ends_diverged: bool = False,
    ) -> None:
        """`facts`: what meta.json holds beside the figures. `go_on_unsaved`: the job outlives a checkpoint that cannot be
        written. `record_lost`: why the record that was asked for could not be opened. `resume`: the checkpoint that the job
        goes on from. `ends_diverged`: the job ends when its training has diverged."""
        self._sequencer = sequencer
        self._job = CoordinatedJob(
            sequencer,
            JobRecord(record, record_lost),
            JobCheckpoints(checkpoints, sequencer.plan.shards),
            RemoteHosts(host_timeout),
            go_on_unsaved,
            ends_diverged,
        )
        launch, workers = LaunchMessages(self._job, credentials), WorkerMessages(self._job, resume)
        self._handlers: HandlerTable = {**workers.handlers, **ServerMessages(self._job).handlers, **launch.handlers}
        # What comes without a message that has a handler is theirs, too.
        self.launcher_connected, self.agent_connected = self._job.meet_launcher, launch.agent_connected
        self.script_state, self.stop = workers.report_state, self._job.stop
        self._facts = facts or {}
        self._duplicates = DuplicateBatches()
        self._budget_warned = self._samples_warned = False
        self._started = time.time()

    # Connections, as far as the job's decisions depend on them.

    def disconnected(self, sender: Hello | None, reason: str) -> list[LoopEffect]:
        """A connection is closed; `reason` is empty when the other side closed it."""
        role = sender.role if sender is not None else ""
        if role == "launcher":
            self._job.has_launcher = False
            return self._job.stop(f"the launcher is gone{': ' + reason if reason else ''}")
        if role == "server" and self._job.finish is None:
            if reason:
                return self._job.stop(f"{describe(sender)} was turned away: {reason}")
            if self._job.has_launcher:
                return []  # the launcher reports its exit
            return self._job.stop(f"{describe(sender)} is gone")
        return self._job.tell(f"the connection of {describe(sender)} was closed: {reason}") if reason else []

    def given_up(self, worker: Hello, now: float) -> str:
        """A worker has sent a message: why the job goes on without it; empty when it does not."""
        self._job.hosts.heard_worker(worker.rank, now)
        incarnation, cause = self._job.given_up.get(worker.rank, (-1, ""))
        return told_late(cause) if worker.incarnation <= incarnation else ""

    # Messages and pushes.

    def handle(self, sender: Hello, message: AnyMessage, now: float) -> list[LoopEffect]:
        handler = self._handlers.get((sender.role, type(message)))
        if handler is None:
            raise PeerError(f"unexpected {type(message).__name__} from {describe(sender)}")
        return handler(sender, message, now)

    def push_arrived(self, push: Push, now: float) -> list[LoopEffect]:
        """A push has arrived in full at this server's own shard."""
        effects = self._job.absorb(self._sequencer.arrived(0, push.id, push, now))
        if push.id.optimizer_id == MAIN and (warning := self._duplicates.look_at(push)):
            effects += self._job.tell(warning)
        return effects + self._watch_budget(UNHEEDED_STEPS * self._sequencer.plan.size)

    def report_hold(self, identity: PushId) -> list[LoopEffect]:
        """A worker asks about a push that has arrived: if the policy holds it, for which ranks."""
        return self._job.absorb(self._sequencer.ask(identity))

    def _watch_budget(self, allowed: int) -> list[LoopEffect]:
        """Warn, once each, that steps are counted as samples, and that the script goes on beyond the budget."""
        warnings: list[LoopEffect] = []
        if self._sequencer.budget.unknown and not self._samples_warned:
            self._samples_warned = True
            warnings += self._job.tell(
                "warning: --samples counts each step as one sample: step() was not told how many it had, and no sampler of "
                "polytempo drew them; call step(samples=len(x)), or use pt.DistributedSampler"
            )
        if self._budget_warned or self._sequencer.budget.unheeded() <= allowed:
            return warnings
        self._budget_warned = True
        return warnings + self._job.tell(
            "warning: the job's budget is used up and its workers go on: the script never asks pt.should_stop(); "
            "end its loop with `if pt.should_stop(): break`"
        )

    # Time.

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        host = self._job.hosts.next_deadline()
        return min((*self._job.wakes[:1], *(() if host is None else (host,))), default=None)

    def tick(self, now: float) -> list[LoopEffect]:
        """All messages that have come were handled: timers that are due, hosts that are overdue."""
        effects = self._job.wake(now)
        for host in self._job.hosts.overdue(now):
            for rank in host.ranks if self._job.has_launcher else ():
                effects.append(ToLauncher(Gone(worker=rank, incarnation=0, reason="lost", cause=host.cause)))
        self._job.record.flush()
        return effects + self._job.report_record_loss()

    # The end.

    @property
    def is_done(self) -> bool:
        """Has the launcher ended the job, and is the last checkpoint written?"""
        return self._job.finish is not None and not self._job.checkpoints.pending

    def end(self, now: float, divergence: float, device: dict[str, Any] | None = None) -> list[LoopEffect]:
        """The job is over: finish the record. `divergence`: of the workers' gradients, over the job; `device`: what this
        server has to say of the device that its values are on."""
        finish, unsaved = self._job.finish, self._job.checkpoints.failure
        assert finish is not None
        effects, alone = self._watch_budget(0), self._job.alone
        if len(alone) > 1 and not self._sequencer.clocks:  # nothing was exchanged: a model each
            who = f"each of {counted(len(alone), 'worker')} has"
            effects += self._job.tell(f"warning: {trained_alone(who, max(alone.values()))}")
        if unsaved and not self._job.go_on_unsaved:
            finish = Finish(exit_status=finish.exit_status or 1, cause=finish.cause or unsaved)
        progress = msgspec.structs.asdict(self._job.progress) if self._job.progress is not None else None
        summary = self._sequencer.figures.summary(now) | {"spread": divergence, "progress": progress, **(device or {})}
        if self._job.record:
            self._job.record.close(self._meta(finish, summary))
            effects += self._job.report_record_loss()
        effects.append(ToServers(Stopped(cause="the job has ended")))
        if self._job.has_launcher:
            latest, paces = self._job.checkpoints.latest, self._sequencer.paces.as_rows()
            effects.append(ToLauncher(Finished(summary=summary, checkpoint=latest, cause=unsaved, paces=paces)))
        return [*effects, EndLoop()]

    def _meta(self, finish: Finish, summary: dict[str, Any]) -> dict[str, Any]:
        """The content of meta.json, in which the figures of single workers stand beside those of the job."""
        meta = {
            **self._facts,
            "start": self._started,
            "end": time.time(),
            "exit_status": finish.exit_status,
            "cause": finish.cause,
            "throughput": summary["samples_per_second"],
            "efficiency": summary["efficiency"],
            "diverged": summary["diverged"],
            "workers": summary["workers"],
            "job": {name: value for name, value in summary.items() if name != "workers"},
        }
        if (
            any(clock.optimizer_spec.apply not in ("peers", "mean") for clock in self._sequencer.clocks.values())
            and "options" in meta
        ):
            meta["options"] = meta["options"] | {"via": "ps"}  # a script may have asked for servers
        return meta

    def close(self) -> None:
        self._job.record.abandon()


def manifest_of(spec: OptimizerSpec) -> str:
    """What a worker must know to build the model that the servers hold, as JSON."""
    described = msgspec.to_builtins(spec)
    described["tensors"] = [
        {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "group": info.group} for info in spec.tensors
    ]
    described["tables"] = [msgspec.structs.asdict(info) for info in spec.tables]
    return json.dumps(described)


def _check_sender(sender: Hello, message: AnyMessage, number: int) -> None:
    """A worker and a shard speak for themselves."""
    if number != sender.rank:
        who = "worker" if sender.role == "worker" else "shard"
        raise PeerError(f"{type(message).__name__} for {who} {number} came from {describe(sender)}")

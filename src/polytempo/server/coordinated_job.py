"""The job as server 0 knows it: what the coordinator and all its message handlers share.

    the sequencer's effects  ->  `absorb`: writes the record, sets timers, begins checkpoints; the rest is returned
    a notice for the user    ->  `tell`: to the launcher, where there is one
    an early end             ->  `stop`: the launcher, servers, agents and workers are told why

It knows neither the coordinator nor the handlers, which hold it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from polytempo.protocol.messages import Departed, Finish, Hello, Notice, Stopped
from polytempo.protocol.training_troubles import ends, goes_on
from polytempo.protocol.values import TrainingProgress
from polytempo.records.files import RecordWriter, record_lost
from polytempo.records.lines import RecordLine
from polytempo.server.checkpoint import JobCheckpoints
from polytempo.server.effects import (
    Diverged,
    Effect,
    EndLoop,
    LoopEffect,
    StopJob,
    StopWorkers,
    Tell,
    ToAgent,
    ToLauncher,
    ToServers,
    ToShards,
    ToWorker,
    WakeAt,
    Write,
)
from polytempo.server.membership import RemoteHosts, WorkerEnds
from polytempo.server.sequencer import Sequencer


class JobRecord:
    """The record of a job. A record that cannot be written is cut short; the job goes on without it."""

    def __init__(self, writer: RecordWriter | None, lost: str = "") -> None:
        self._writer = writer
        self.lost = lost  #: why there is no record, though one was asked for
        self.announced = False

    def __bool__(self) -> bool:
        return self._writer is not None

    def write(self, line: RecordLine) -> None:
        """Append a line."""
        self._try(RecordWriter.write, line)

    def flush(self) -> None:
        """Let readers of the file see what was written so far."""
        self._try(RecordWriter.flush)

    def close(self, meta: dict[str, Any]) -> None:
        """Finish the record with its meta.json."""
        self._try(RecordWriter.close, meta)

    def abandon(self) -> None:
        """Leave the record as it is."""
        if self._writer is not None:
            self._writer.abandon()

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        if self._writer is None:
            return
        try:
            act(self._writer, *arguments)
        except OSError as error:
            self._writer.abandon()
            self._writer = None
            self.lost = record_lost(error)


class CoordinatedJob:
    """The sequencer, the record, timers, checkpoints and remote hosts of one job, and whether it has ended."""

    def __init__(
        self,
        sequencer: Sequencer,
        record: JobRecord,
        checkpoints: JobCheckpoints,
        hosts: RemoteHosts,
        go_on_unsaved: bool = False,
        ends_diverged: bool = False,
    ) -> None:
        self.sequencer = sequencer
        self.record = record
        self.checkpoints = checkpoints
        self.hosts = hosts
        self.go_on_unsaved = go_on_unsaved  #: the job outlives a checkpoint that cannot be written
        self.ends_diverged = ends_diverged  #: the job ends when its training has diverged
        self.has_launcher = False
        self.given_up: dict[int, tuple[int, str]] = {}  #: workers that the job goes on without: incarnation and cause
        self.ends = WorkerEnds()
        self.calls: dict[int, str] = {}  #: in which workers wait, as far as they say so
        self.alone: dict[int, int] = {}  #: steps of workers that have trained, and exchanged nothing
        self.finish: Finish | None = None  #: the launcher's, when all workers have ended
        self.progress: TrainingProgress | None = None  #: of training without pushes, and since when
        self.progress_since = 0.0
        self._wakes: list[float] = []  # a heap
        self._untold: list[LoopEffect] = []  # until the launcher is there

    def absorb(self, effects: list[Effect]) -> list[LoopEffect]:
        """Carry out what concerns the record, timers and checkpoints; the rest is the I/O loop's."""
        passed: list[LoopEffect] = []
        for effect in effects:
            if isinstance(effect, ToShards | ToWorker):
                passed.append(effect)
            elif isinstance(effect, Write):
                self.record.write(effect.line)
            elif isinstance(effect, WakeAt):
                heapq.heappush(self._wakes, effect.at)
            elif isinstance(effect, Tell):
                passed += self.tell(effect.text)
            elif isinstance(effect, StopJob):
                passed += self.stop(effect.cause)
            elif isinstance(effect, Diverged):
                passed += self.report_divergence(effect)
            else:
                self.checkpoints.begin(effect)
        return passed

    def next_wake(self) -> float | None:
        """When the sequencer wants its next tick."""
        return self._wakes[0] if self._wakes else None

    def wake(self, now: float) -> list[LoopEffect]:
        """Give the sequencer its tick, if one is due."""
        due = False
        while self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            due = True
        return self.absorb(self.sequencer.tick(now)) if due else []

    def report_progress(self, progress: TrainingProgress, now: float) -> None:
        """How far training without pushes is."""
        self.progress_since = now if self.progress is None else self.progress_since
        self.progress = progress

    def tell(self, text: str, fatal: bool = False, about: str = "") -> list[LoopEffect]:
        """A notice for the launcher's output; before the launcher is there, it is kept for it."""
        notice = ToLauncher(Notice(text=text, fatal=fatal, about=about))
        if not self.has_launcher:
            self._untold.append(notice)
        return [notice] if self.has_launcher else []

    def meet_launcher(self) -> list[LoopEffect]:
        """The launcher is there: workers may have been sooner."""
        self.has_launcher = True
        untold, self._untold = self._untold, []
        return [*untold, *self.report_record_loss()]

    def announce_end(self, worker: int) -> list[LoopEffect]:
        """A worker's process has ended, or it was given up: others go on without it by this word only
        (`collectives/quorum.py`). One that has only left the servers may still take part in the steps of others."""
        others = [rank for rank in range(self.sequencer.plan.size) if rank != worker and rank not in self.given_up]
        return [ToWorker(rank, Departed(worker=worker, ended=True)) for rank in others]

    def report_unsaved(self, failed: Iterable[tuple[str, str]]) -> list[LoopEffect]:
        """Checkpoints could not be written, and why: go on without them, or end the job, as was asked for."""
        effects: list[LoopEffect] = []
        for name, reason in failed:
            cause = f"the checkpoint {name} could not be written to {self.checkpoints.directory}: {reason}"
            self.checkpoints.failure = cause
            if self.go_on_unsaved:
                effects += self.tell(f"warning: {cause}; going on without it")
            elif self.finish is None:
                effects += self.stop(f"{cause}; make room and --resume, or use --checkpoint-errors continue")
        return effects

    def report_divergence(self, found: Diverged) -> list[LoopEffect]:
        """The training has diverged: go on with it, or end the job, as was asked for."""
        latest = self.checkpoints.latest
        self.checkpoints.spared = Path(latest) if latest else None
        advice = f"{found.advice}; the last checkpoint is {latest}" if latest else found.advice
        if self.ends_diverged:
            return self.stop(ends(found.trouble, advice), over=False)
        return self.tell(goes_on(found.trouble, advice))

    def left(self, worker: int, incarnation: int, reason: str, now: float) -> list[LoopEffect]:
        """A worker is gone, for the sequencer and for checkpoints that wait for it."""
        effects = self.absorb(self.sequencer.left(worker, incarnation, reason, now))
        return effects + self.report_unsaved(self.checkpoints.left(worker))

    def report_record_loss(self) -> list[LoopEffect]:
        """Tell the launcher, once, that there is no record, though one was asked for."""
        if not self.record.lost or self.record.announced or not self.has_launcher:
            return []
        self.record.announced = True
        return self.tell(self.record.lost, about="record")

    def stop(self, cause: str, over: bool = True) -> list[LoopEffect]:
        """The job ends early. `over=False`: the launcher, where there is one, will send Finish after the last checkpoint."""
        over = over or not self.has_launcher
        effects = self.tell(cause, fatal=True)
        effects += [ToServers(Stopped(cause=cause))] if over else []  # else they may still have to save
        effects += [ToAgent(agent, Stopped(cause=cause)) for agent in self.hosts.agents()]
        return [*effects, StopWorkers(cause), *([EndLoop()] if over else [])]


def describe(sender: Hello | None) -> str:
    """The other side of a connection, for error messages."""
    if sender is None:
        return "a peer that has sent no Hello"
    return f"{sender.role} {sender.rank}" if sender.role in ("worker", "server") else f"the {sender.role}"


def told_late(cause: str) -> str:
    """The answer to workers and agents that send something after they were given up."""
    return f"the job goes on without it: {cause}"

"""The job as server 0 knows it: what the coordinator and all its message handlers share.

    the sequencer's effects  ->  `absorb`: writes the record, sets timers, begins checkpoints; the rest is returned
    a notice for the user    ->  `tell`: to the launcher, where there is one
    an early end             ->  `stop`: the launcher, servers, agents and workers are told why

It knows neither the coordinator nor the handlers, which hold it. Membership beyond the sequencer's is here, too: hosts that
bring workers, which workers have ended, and the key-value store in which workers find each other. An agent on another host
brings workers and sends heartbeats; a host whose heartbeats fail to come for `timeout` seconds is given up, for good. The
store holds addresses: a key that names a rank can be set by that rank alone.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.errors import PeerError, counted
from polytempo.protocol.messages import Finish, Hello, Notice, Stopped
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
from polytempo.server.sequencer import Sequencer

#: This share of a host's timeout must pass while the server itself is awake: after a pause of its own process, which may
#: have used up the timeouts of all hosts, the server first reads the heartbeats that arrived meanwhile.
AWAKE = 0.2


@dataclass
class RemoteHost:
    """An agent and its ranks."""

    agent: int
    ranks: tuple[int, ...]
    heard: float
    suspected: float | None = None  # since when the last share of its timeout runs
    cause: str = ""  # why it was given up


class RemoteHosts:
    """All hosts that bring workers, the ranks that are still free for them, and their heartbeats."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._free: deque[int] = deque()
        self._hosts: dict[int, RemoteHost] = {}  # by agent
        self._of_rank: dict[int, RemoteHost] = {}

    def expect(self, ranks: Sequence[int]) -> None:
        self._free = deque(ranks)

    def add(self, agent: int, count: int, now: float) -> RemoteHost:
        """Assign ranks to the workers that an agent brings; `PeerError` where the job expects fewer."""
        free = len(self._free)
        if not 0 < count <= free:
            raise PeerError(
                f"this job expects {counted(free, 'more worker')} from other hosts, this host brings {count}; use -n {free}"
            )
        ranks = tuple(self._free.popleft() for _ in range(count))
        host = self._hosts[agent] = RemoteHost(agent, ranks, now)
        self._of_rank.update(dict.fromkeys(ranks, host))
        return host

    def of_agent(self, agent: int) -> RemoteHost | None:
        return self._hosts.get(agent)

    def heartbeat(self, host: RemoteHost, now: float) -> None:
        host.heard, host.suspected = now, None

    def heard_worker(self, rank: int, now: float) -> None:
        """A message of a worker counts as a heartbeat of its host, whose own may queue behind what the workers send."""
        host = self._of_rank.get(rank)
        if host is not None and not host.cause:
            self.heartbeat(host, now)

    def agents(self) -> list[int]:
        """All agents; those that were given up may come back and listen."""
        return list(self._hosts)

    def next_deadline(self) -> float | None:
        """When `overdue` is to be called next."""
        return min((self._deadline(host) for host in self._hosts.values() if not host.cause), default=None)

    def _deadline(self, host: RemoteHost) -> float:
        last = AWAKE * self.timeout
        return host.heard + self.timeout - last if host.suspected is None else max(host.suspected, host.heard) + last

    def overdue(self, now: float) -> list[RemoteHost]:
        late = [host for host in self._hosts.values() if not host.cause and now >= self._deadline(host)]
        lost = [host for host in late if host.suspected is not None]
        for host in late:
            host.suspected = now
        for host in lost:
            host.cause = f"its host was not heard of for {self.timeout:g} s"
        return lost


#: Of a worker whose process has ended: it joins no later job of this one.
LAST_LIFE = 1 << 30


class WorkerEnds:
    """How workers have ended, for others that wait for them. A process may leave a job and join the next (`shutdown`,
    `init`): what it left counts for those that are still there."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, str]] = {}  # by worker: the last life that is over, and how it ended

    def left(self, worker: int, life: int, how: str) -> None:
        """A worker has left; `LAST_LIFE`: its process has ended."""
        before = self._ends.get(worker, (-1, ""))
        self._ends[worker] = max(life, before[0]), before[1] if before[0] >= life else how

    def among(self, workers: Iterable[int], life: int) -> dict[int, str]:
        """Which of these have ended, as seen from a life."""
        return {worker: self._ends[worker][1] for worker in workers if self._ends.get(worker, (-1, ""))[0] >= life}


#: More keys, or longer values, are refused: the store is for addresses.
KEY_LIMIT, LENGTH_LIMIT = 1 << 20, 1024
#: Keys that name the rank they belong to (`transport/rendezvous.py`).
RANK_KEY = re.compile(r"(?:host|link|token)-(\d+)(?:-|$)")


class JobKeyValues:
    """Texts by key, and the workers that wait for a key."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._owners: dict[str, int] = {}
        self._waiting: dict[str, set[int]] = {}

    def set(self, key: str, value: str, worker: int) -> list[int]:
        """A worker sets a key, which is its own from then on; the workers that have waited for it."""
        rank = RANK_KEY.match(key)
        if self._owners.setdefault(key, worker) != worker or (rank and int(rank[1]) != worker):
            raise PeerError(f"worker {worker} may not set the key {key[:40]!r}: it belongs to another worker")
        if len(key) + len(value) > LENGTH_LIMIT or len(self._values) >= KEY_LIMIT:
            raise PeerError(
                f"StoreSet refused: key and value have {len(key) + len(value)} characters, at most {LENGTH_LIMIT} are stored"
            )
        return self.announce(key, value)

    def announce(self, key: str, value: str) -> list[int]:
        """Set a key on behalf of the job, without a limit on its length; the workers that have waited for it."""
        self._values[key] = value
        return sorted(self._waiting.pop(key, ()))

    def get(self, key: str, worker: int) -> str | None:
        """The value of a key; where there is none yet, this worker is among those that `set` returns later."""
        if key not in self._values and len(key) <= LENGTH_LIMIT:
            self._waiting.setdefault(key, set()).add(worker)
        return self._values.get(key)


class JobRecord:
    """The record of a job. A record that cannot be written is cut short; the job goes on without it."""

    def __init__(self, writer: RecordWriter | None, lost: str = "") -> None:
        self._writer = writer
        self.lost = lost  #: why there is no record, though one was asked for
        self.announced = False

    def __bool__(self) -> bool:
        return self._writer is not None

    def write(self, line: RecordLine) -> None:
        self._try(RecordWriter.write, line)

    def flush(self) -> None:
        """Let readers of the file see what was written so far."""
        self._try(RecordWriter.flush)

    def close(self, meta: dict[str, Any]) -> None:
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
        self.wakes: list[float] = []  #: a heap: when the sequencer wants its ticks
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
                heapq.heappush(self.wakes, effect.at)
            elif isinstance(effect, Tell):
                passed += self.tell(effect.text)
            elif isinstance(effect, StopJob):
                passed += self.stop(effect.cause)
            elif isinstance(effect, Diverged):
                passed += self.report_divergence(effect)
            else:
                self.checkpoints.begin(effect)
        return passed

    def wake(self, now: float) -> list[LoopEffect]:
        """Give the sequencer its tick, if one is due."""
        due = False
        while self.wakes and self.wakes[0] <= now:
            heapq.heappop(self.wakes)
            due = True
        return self.absorb(self.sequencer.tick(now)) if due else []

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

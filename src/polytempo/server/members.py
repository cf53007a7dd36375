"""Who takes part in a job, as far as the sequencer need not know: hosts that bring workers, how workers have ended and what
the others are told of it, and the store in which they find each other.

An agent on another host brings workers and sends heartbeats; a host whose heartbeats fail to come for `timeout` seconds is
given up, for good. The store holds addresses: a key that names a rank can be set by that rank alone.

The coordinator owns one of each. They change nothing but themselves, and return what is to be sent (`server/effects.py`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polytempo.errors import PeerError, counted
from polytempo.protocol.messages import (
    AskWhere,
    Assigned,
    Expecting,
    Gone,
    Heartbeat,
    Hello,
    Leave,
    Stopped,
    StoreSet,
    Whereabouts,
)
from polytempo.server.effects import Effect, StopJob, Tell, ToAgent, ToLauncher, ToWorker
from polytempo.server.job_figures import WorkerStatistics
from polytempo.transport.keys import Credentials

#: A host is given up when nothing was heard of it for this many seconds (`--host-timeout`).
HOST_TIMEOUT = 5.0
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

    def heartbeat(self, now: float) -> None:
        self.heard, self.suspected = now, None


class RemoteHosts:
    """All hosts that bring workers, the ranks that are still free for them, and their heartbeats."""

    def __init__(self, timeout: float = HOST_TIMEOUT, credentials: Credentials | None = None) -> None:
        self.any = False  #: Has any host come? In most jobs none does, and nothing is asked here.
        self._timeout, self._credentials = timeout, credentials
        self._started_with: dict[str, Any] = {}  # what a worker on another host is started with
        self._free: deque[int] = deque()
        self._hosts: dict[int, RemoteHost] = {}  # by agent; those that were given up may come back and listen
        self._of_rank: dict[int, RemoteHost] = {}

    def expect(self, message: Expecting) -> list[Effect]:
        self._started_with = message.job
        self._free = deque(message.ranks)
        return []

    def add(self, agent: int, count: int, now: float) -> list[Effect]:
        """Assign ranks to the workers that an agent brings; `PeerError` where the job expects fewer."""
        free = len(self._free)
        if not 0 < count <= free:
            raise PeerError(
                f"this job expects {counted(free, 'more worker')} from other hosts, this host brings {count}; use -n {free}"
            )
        self.any = True
        ranks = tuple(self._free.popleft() for _ in range(count))
        self._of_rank |= dict.fromkeys(ranks, self._hosts.setdefault(agent, RemoteHost(agent, ranks, now)))
        sign = self._credentials
        tokens = tuple(sign.token("worker", rank, 0) for rank in ranks) if sign is not None else ()
        text = f"{counted(count, 'worker')} joined from another host: rank {', '.join(map(str, ranks))}"
        return [ToAgent(agent, Assigned(job=self._started_with, ranks=ranks, tokens=tokens)), Tell(text)]

    def heard(self, agent: int, message: Heartbeat | Gone, now: float) -> list[Effect]:
        """A heartbeat, or the end of a worker on the agent's host."""
        host = self._hosts.get(agent)
        if host is None:
            raise PeerError("unexpected message from an agent that has brought no workers")
        if host.cause:
            return [ToAgent(agent, Stopped(cause=told_late(host.cause)))]
        host.heartbeat(now)
        if isinstance(message, Heartbeat):
            return [ToAgent(agent, message)]  # so that the agent knows when this host is gone
        return [ToLauncher(message)] if message.worker in host.ranks else []

    def heard_worker(self, rank: int, now: float) -> None:
        """A message of a worker counts as a heartbeat of its host, whose own may queue behind what the workers send."""
        host = self._of_rank.get(rank)
        if host is not None and not host.cause:
            host.heartbeat(now)

    def stopped(self, cause: str) -> list[Effect]:
        """The job ends early."""
        return [ToAgent(agent, Stopped(cause=cause)) for agent in self._hosts]

    def next_deadline(self) -> float | None:
        """When `overdue` is to be called next."""
        return min((self._deadline(host) for host in self._hosts.values() if not host.cause), default=None)

    def _deadline(self, host: RemoteHost) -> float:
        last = AWAKE * self._timeout
        return host.heard + self._timeout - last if host.suspected is None else max(host.suspected, host.heard) + last

    def overdue(self, now: float) -> list[Effect]:
        """Hosts that were not heard of in time are given up, and the launcher is told of each worker."""
        effects: list[Effect] = []
        for host in [host for host in self._hosts.values() if not host.cause and now >= self._deadline(host)]:
            if host.suspected is not None:
                host.cause = f"its host was not heard of for {self._timeout:g} s"
                gone = [Gone(worker=rank, incarnation=0, reason="lost", cause=host.cause) for rank in host.ranks]
                effects += map(ToLauncher, gone)
            host.suspected = now
        return effects


#: Of a worker whose process has ended: it joins no later job of this one.
LAST_LIFE = 1 << 30


class WorkerEnds:
    """How workers have ended, and in which calls they wait, for others that wait for them. A process may leave a job and
    join the next (`shutdown`, `init`): what it left counts for those that are still there."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, str]] = {}  # by worker: the last life that is over, and how it ended
        self.given_up: dict[int, tuple[int, str]] = {}  #: workers that the job goes on without: incarnation and cause
        self._calls: dict[int, str] = {}  # as far as workers say so
        self.alone: dict[int, int] = {}  #: steps of workers that have trained, and exchanged nothing

    def left(self, worker: int, message: Leave) -> list[Effect]:
        """A worker says that it leaves, and may say that the job cannot go on."""
        self._note(worker, message.life, f"has {message.reason}")
        self._calls.pop(worker, None)
        if message.alone > 0:
            self.alone[worker] = message.alone
        return [StopJob(message.fault)] if message.fault else []

    def gone(self, message: Gone) -> set[int]:
        """A worker's process has ended; that worker, and all that the job goes on without."""
        finished = message.reason == "finished"
        self._note(message.worker, LAST_LIFE, "has finished" if finished else message.cause)
        if not finished:
            self.given_up[message.worker] = message.incarnation, message.cause
        return {message.worker, *self.given_up}

    def _note(self, worker: int, life: int, how: str) -> None:
        before = self._ends.get(worker, (-1, ""))
        self._ends[worker] = max(life, before[0]), before[1] if before[0] >= life else how

    def why_given_up(self, worker: Hello) -> str:
        """Why the job goes on without a worker that has sent a message; empty when it does not."""
        incarnation, cause = self.given_up.get(worker.rank, (-1, ""))
        return told_late(cause) if worker.incarnation <= incarnation else ""

    def where(self, asker: int, message: AskWhere, statistics: Sequence[WorkerStatistics]) -> list[Effect]:
        """Which of these ranks have ended, as seen from the asker's life, and what the others do."""
        if message.call is not None:
            self._calls[asker] = message.call
        told = self._calls
        calls = {rank: f"is in {told[rank]}" if told.get(rank) else statistics[rank].whereabouts for rank in message.ranks}
        ended = {rank: self._ends[rank][1] for rank in message.ranks if self._ends.get(rank, (-1, ""))[0] >= message.life}
        return [ToWorker(asker, Whereabouts(ended=ended, calls=calls))]


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

    def set(self, key: str, value: str, worker: int) -> list[Effect]:
        """A worker sets a key, which is its own from then on."""
        rank = RANK_KEY.match(key)
        if self._owners.setdefault(key, worker) != worker or (rank and int(rank[1]) != worker):
            raise PeerError(f"worker {worker} may not set the key {key[:40]!r}: it belongs to another worker")
        if len(key) + len(value) > LENGTH_LIMIT or len(self._values) >= KEY_LIMIT:
            raise PeerError(
                f"StoreSet refused: key and value have {len(key) + len(value)} characters, at most {LENGTH_LIMIT} are stored"
            )
        return self.announce(key, value)

    def announce(self, key: str, value: str) -> list[Effect]:
        """Set a key, on behalf of the job without a limit on its length; the workers that have waited for it get it."""
        self._values[key] = value
        return self._answers(key, sorted(self._waiting.pop(key, ())))

    def get(self, key: str, worker: int) -> list[Effect]:
        """The value of a key; where there is none yet, the worker gets it when it is set."""
        if key in self._values:
            return self._answers(key, [worker])
        if len(key) <= LENGTH_LIMIT:
            self._waiting.setdefault(key, set()).add(worker)
        return []

    def _answers(self, key: str, workers: Iterable[int]) -> list[Effect]:
        return [ToWorker(worker, StoreSet(key=key, value=self._values[key])) for worker in workers]


def told_late(cause: str) -> str:
    """The answer to workers and agents that send something after they were given up."""
    return f"the job goes on without it: {cause}"

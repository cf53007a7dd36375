"""Membership beyond the sequencer's: hosts that bring workers, which workers have ended, and the key-value store in which
workers find each other.

An agent on another host brings workers and sends heartbeats; a host whose heartbeats fail to come for `timeout` seconds is
given up, for good. The key-value store holds addresses: a key that names a rank can be set by that rank alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polytempo.errors import PeerError, counted

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
        """Workers of these ranks will come from other hosts."""
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
        """The host of an agent."""
        return self._hosts.get(agent)

    def heartbeat(self, host: RemoteHost, now: float) -> None:
        """The host is alive."""
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
        """The hosts that are given up now."""
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

"""The other hosts of a job: which ranks an agent has brought, when its host was last heard of, and which were given up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polytempo.transport.channel import Peer

#: The last part of a host's time is counted by a server that is awake for it: after a pause of its own, which has used up
#: everybody's time, it first reads what has come meanwhile.
AWAKE = 0.2


@dataclass
class RemoteHost:
    """An agent and its ranks."""

    peer: Peer
    ranks: tuple[int, ...]
    heard: float
    doubted: float | None = None  # since when the last part of its time runs
    cause: str = ""  # why it was given up


class RemoteHosts:
    """All agents of a job. A host that is not heard of for `patience` seconds is given up, once and for all."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._hosts: dict[int, RemoteHost] = {}  # by id() of the peer
        self._of_rank: dict[int, RemoteHost] = {}

    def add(self, peer: Peer, ranks: tuple[int, ...], now: float) -> None:
        """An agent has come."""
        host = self._hosts[id(peer)] = RemoteHost(peer, ranks, now)
        self._of_rank.update(dict.fromkeys(ranks, host))

    def of(self, peer: Peer) -> RemoteHost | None:
        """The host whose agent this is."""
        return self._hosts.get(id(peer))

    def heard(self, host: RemoteHost, now: float) -> None:
        """It is alive."""
        host.heard, host.doubted = now, None

    def heard_worker(self, rank: int, now: float) -> None:
        """One of its workers is alive, and so is it: its own beats may be held up by what the workers send."""
        host = self._of_rank.get(rank)
        if host is not None and not host.cause:
            self.heard(host, now)

    def peers(self) -> Iterator[Peer]:
        """All agents; those that were given up may come back and listen."""
        return (host.peer for host in self._hosts.values())

    def due(self) -> float | None:
        """When somebody must be looked at next."""
        moments = [self._due(host) for host in self._hosts.values() if not host.cause]
        return min(moments, default=None)

    def _due(self, host: RemoteHost) -> float:
        last = AWAKE * self.patience
        return host.heard + self.patience - last if host.doubted is None else max(host.doubted, host.heard) + last

    def overdue(self, now: float) -> list[RemoteHost]:
        """Those that are given up now."""
        late = [host for host in self._hosts.values() if not host.cause and now >= self._due(host)]
        lost = [host for host in late if host.doubted is not None]
        for host in late:
            host.doubted = now
        for host in lost:
            host.cause = f"its host was not heard of for {self.patience:g} s"
        return lost

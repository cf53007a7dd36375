"""Links: how long pushes and answers take.

A route answers two questions: when does a push sent now arrive, and when do answers decided now arrive? Bytes pass a link
one message after another, in the order they were sent (so a saturated server queues its workers), at the pace of the
slower end; answers decided in one moment share the link and arrive together. The latency comes on top. Shards are cut
evenly and joined alike, so they advance together: S of them are one server with S times the bandwidth and S times the
update rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.collective_cost import all_reduce_seconds


class Route(Protocol):
    """The way of updates between workers and servers, or among workers."""

    def push(self, worker: int, now: float) -> float:
        """When a push sent now arrives."""

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        """When new weights, decided on now from the pushes of `together` workers, arrive at each of `workers`."""

    def applied(self, now: float) -> None:
        """An update was decided on now."""


class Queue:
    """One direction of a link: passes one message at a time."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def pass_through(self, now: float, seconds: float) -> float:
        """When a message that comes now and needs `seconds` has passed."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


class ServerRoute:
    """To the parameter-server shards and back."""

    def __init__(self, cluster: Cluster) -> None:
        n, servers, link = cluster.model_bytes, cluster.servers, cluster.link
        ranks = cluster.ranks()
        links = [cluster.links.get(rank, link) for rank in ranks]
        self._latency = [one.latency for one in links]
        self._own_seconds = [_seconds(n, one.bandwidth) for one in links]
        self._server_seconds = _seconds(n / servers.shards, servers.bandwidth or link.bandwidth)
        if link.shared:  # one medium carries the bytes of all workers, both ways
            self._server_seconds = _seconds(n, link.bandwidth)
        self._update_seconds = _seconds(n / servers.shards, servers.update_rate)
        self._in = Queue()
        self._out = self._in if link.shared else Queue()
        self._updates = Queue()

    def push(self, worker: int, now: float) -> float:
        return self._at_both_ends(self._in.pass_through(now, self._server_seconds), worker, now)

    def applied(self, now: float) -> None:
        self._updates.pass_through(now, self._update_seconds)

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        start = max(now, self._updates.free_at)
        passed = self._out.pass_through(start, len(workers) * self._server_seconds)
        return [self._at_both_ends(passed, worker, start) for worker in workers]

    def permit(self, worker: int, now: float) -> float:
        """When a permission without weights, decided on now, arrives."""
        return max(now, self._updates.free_at) + self._latency[worker]

    def fetch(self, worker: int, now: float) -> float:
        """When the present weights arrive at a worker that requests them now."""
        passed = self._out.pass_through(now, self._server_seconds)
        return self._at_both_ends(passed, worker, now) + self._latency[worker]  # the request takes a latency, too

    def _at_both_ends(self, passed_server: float, worker: int, start: float) -> float:
        return max(passed_server, start + self._own_seconds[worker]) + self._latency[worker]


class AllReduceRoute:
    """No server: when the last worker is ready, all take part in one all-reduce."""

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self._cluster = cluster
        self._algorithm = algorithm
        self._seconds: dict[int, float] = {}
        all_reduce_seconds(algorithm, cluster, 2)  # refuse what is unknown before the run

    def push(self, worker: int, now: float) -> float:
        return now

    def applied(self, now: float) -> None:
        pass

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        if together not in self._seconds:
            self._seconds[together] = all_reduce_seconds(self._algorithm, self._cluster, together)
        return [now + self._seconds[together]] * len(workers)


class PeerRoute:
    """From worker to worker, over the links of both: a sender's carries the bytes for all its neighbours, a receiver's those
    of all its neighbours. What decides goes by messages without bytes, which take a latency."""

    def __init__(self, cluster: Cluster) -> None:
        links = [cluster.links.get(rank, cluster.link) for rank in cluster.ranks()]
        self._latency = [link.latency for link in links]
        self._seconds = [_seconds(cluster.model_bytes, link.bandwidth) for link in links]
        medium = Queue()  # of all bytes, where there is only one
        self._out = [medium if cluster.link.shared else Queue() for _ in links]
        self._in = [medium if cluster.link.shared else Queue() for _ in links]
        self._shared = cluster.link.shared

    def send(self, sender: int, receivers: Sequence[int], now: float) -> tuple[float, list[float]]:
        """When a model, sent now to each of these side by side, has left the sender, and when it arrives at each."""
        if not receivers:
            return now, []
        left = self._out[sender].pass_through(now, len(receivers) * self._seconds[sender])
        return left, [self._arrival(sender, receiver, left, now) for receiver in receivers]

    def _arrival(self, sender: int, receiver: int, left: float, now: float) -> float:
        passed = left if self._shared else self._in[receiver].pass_through(now, self._seconds[receiver])
        return max(left, passed) + max(self._latency[sender], self._latency[receiver])

    def push(self, worker: int, now: float) -> float:
        return now + self._latency[worker]

    def applied(self, now: float) -> None:
        pass

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        return [now + self._latency[worker] for worker in workers]


def make_route(cluster: Cluster, via: str) -> Route | None:
    """The route for `via` ("ps", "peers" or the name of an all-reduce), or None when nothing takes time on the way."""
    if via != "ps":
        return PeerRoute(cluster) if via == "peers" else AllReduceRoute(cluster, via)
    latencies = [cluster.link.latency, *(link.latency for link in cluster.links.values())]
    limits = [cluster.link.bandwidth, cluster.servers.bandwidth, cluster.servers.update_rate]
    limits += [link.bandwidth for link in cluster.links.values()]
    if not any(latencies) and (cluster.model_bytes == 0 or not any(limit is not None for limit in limits)):
        return None
    return ServerRoute(cluster)


def _seconds(bytes_: float, bandwidth: float | None) -> float:
    return bytes_ / bandwidth if bandwidth else 0.0

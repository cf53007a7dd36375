"""Links: how long pushes, answers and all-reduces take.

A route answers two questions: when does a push sent now arrive, and when do answers decided now arrive? Bytes pass a link
one message after another, in the order they were sent (so a saturated server queues its workers), at the pace of the
slower end; answers decided in one moment share the link and arrive together. The latency comes on top. Shards are cut
evenly and joined alike, so they advance together: S of them are one server with S times the bandwidth and S times the
update rate.

An all-reduce costs what the textbook's formulas say: alpha is a message's latency, beta the seconds a byte takes on a link,
gamma the seconds to add one up, n the bytes, p the ranks. They assume equal links and that all ranks start together, as
they do after a barrier. (`collectives/cost.py` has formulas of the same algorithms for another purpose: it predicts our own
plans, whose messages are chunks and whose hosts share links, to choose one. These are for clusters that are only described.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from polytempo.errors import ClusterError, nearest
from polytempo.simulate.cluster import Cluster


@dataclass(frozen=True)
class Costs:
    """alpha, beta and gamma of a group of ranks."""

    alpha: float
    beta: float
    gamma: float = 0.0


def ring(p: int, n: float, c: Costs) -> float:
    """Reduce-scatter, then all-gather, around a ring: the bytes a rank sends hardly depend on p."""
    share = (p - 1) / p * n
    return 2 * (p - 1) * c.alpha + 2 * share * c.beta + share * c.gamma


def halving_doubling(p: int, n: float, c: Costs) -> float:
    """Rabenseifner's: as few bytes as the ring in log p messages; ranks beyond a power of two pay two more."""
    q = 1 << (p.bit_length() - 1)
    share = (q - 1) / q * n
    inner = 2 * math.log2(q) * c.alpha + 2 * share * c.beta + share * c.gamma
    return inner if q == p else inner + 2 * c.alpha + 2 * n * c.beta + n * c.gamma


def tree(p: int, n: float, c: Costs) -> float:
    """Reduce to a root and broadcast from it, along a binomial tree."""
    levels = math.ceil(math.log2(p))
    return 2 * levels * (c.alpha + n * c.beta) + levels * n * c.gamma


def hierarchical(p: int, n: float, inside: Costs, between: Costs, size: int) -> float:
    """Inside each host a ring over its `size` ranks, between hosts a ring; the ranks of a host share its link."""
    return ring(min(size, p), n, inside) + ring(math.ceil(p / size), n, between)


FLAT: dict[str, Callable[[int, float, Costs], float]] = {"ring": ring, "halving-doubling": halving_doubling, "tree": tree}
ALGORITHMS = (*FLAT, "hierarchical")


def all_reduce_seconds(algorithm: str, cluster: Cluster, workers: int) -> float:
    """The seconds of one all-reduce of the cluster's model over `workers` of its workers."""
    if workers <= 1 or cluster.model_bytes == 0:
        return 0.0
    links = [cluster.link, *cluster.links.values()]
    gamma = 1 / cluster.reduce_rate if cluster.reduce_rate else 0.0
    slowest = Costs(max(link.latency for link in links), max(_seconds(1, link.bandwidth) for link in links), gamma)
    if algorithm in FLAT:
        seconds = FLAT[algorithm](workers, cluster.model_bytes, slowest)
        # On a shared medium nothing is sent side by side: all ranks' bytes one after another.
        return max(seconds, 2 * (workers - 1) * cluster.model_bytes * slowest.beta) if cluster.link.shared else seconds
    if algorithm != "hierarchical":
        known = ", ".join(ALGORITHMS)
        raise ClusterError(f"unknown all-reduce {algorithm!r}; known: {known}{nearest(algorithm, ALGORITHMS)}")
    if cluster.hosts is None:
        raise ClusterError("hierarchical all-reduce needs to know the workers a host; give hosts with a size")
    inside = Costs(cluster.hosts.latency, _seconds(1, cluster.hosts.bandwidth), gamma)
    return hierarchical(workers, cluster.model_bytes, inside, slowest, cluster.hosts.size)


def best_all_reduce(cluster: Cluster) -> str:
    """The cheapest algorithm for all workers of this cluster; the ring where they tie."""
    known = ALGORITHMS if cluster.hosts else tuple(FLAT)
    return min(known, key=lambda name: all_reduce_seconds(name, cluster, cluster.workers))


def _seconds(bytes_: float, bandwidth: float | None) -> float:
    return bytes_ / bandwidth if bandwidth else 0.0


class Queue:
    """One direction of a link: passes one message at a time."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def pass_through(self, now: float, seconds: float) -> float:
        """When a message that comes now and needs `seconds` has passed."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


class Route:
    """The way of updates between workers and servers, or among workers."""

    def __init__(self, cluster: Cluster) -> None:
        links = [cluster.links.get(rank, cluster.link) for rank in cluster.ranks()]
        self._shared = cluster.link.shared  # one medium carries all bytes
        self._latency = [link.latency for link in links]
        self._own_seconds = [_seconds(cluster.model_bytes, link.bandwidth) for link in links]

    def push(self, worker: int, now: float) -> float:
        """When a push sent now arrives."""
        return now

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        """When new weights, decided on now from the pushes of `together` workers, arrive at each of `workers`."""
        raise NotImplementedError

    def applied(self, now: float) -> None:
        """An update was decided on now."""


class ServerRoute(Route):
    """To the parameter-server shards and back."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        n, servers, link = cluster.model_bytes, cluster.servers, cluster.link
        self._server_seconds = _seconds(n / servers.shards, servers.bandwidth or link.bandwidth)
        if self._shared:  # the bytes of all workers, both ways
            self._server_seconds = _seconds(n, link.bandwidth)
        self._update_seconds = _seconds(n / servers.shards, servers.update_rate)
        self._in = Queue()
        self._out = self._in if self._shared else Queue()
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


class AllReduceRoute(Route):
    """No server: when the last worker is ready, all take part in one all-reduce."""

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self._seconds = cache(partial(all_reduce_seconds, algorithm, cluster))
        self._seconds(2)  # refuse what is unknown before the run

    def answer(self, workers: list[int], now: float, together: int) -> list[float]:
        return [now + self._seconds(together)] * len(workers)


class PeerRoute(Route):
    """From worker to worker, over the links of both: a sender's carries the bytes for all its neighbours, a receiver's those
    of all its neighbours. What decides goes by messages without bytes, which take a latency."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        medium = Queue()
        self._out = [medium if self._shared else Queue() for _ in cluster.ranks()]
        self._in = [medium if self._shared else Queue() for _ in cluster.ranks()]

    def send(self, sender: int, receivers: Sequence[int], now: float) -> tuple[float, list[float]]:
        """When a model, sent now to each of these side by side, has left the sender, and when it arrives at each."""
        if not receivers:
            return now, []
        left = self._out[sender].pass_through(now, len(receivers) * self._own_seconds[sender])
        arrivals = []
        for receiver in receivers:
            passed = left if self._shared else self._in[receiver].pass_through(now, self._own_seconds[receiver])
            arrivals.append(max(left, passed) + max(self._latency[sender], self._latency[receiver]))
        return left, arrivals

    def push(self, worker: int, now: float) -> float:
        return now + self._latency[worker]

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

"""The cost of an all-reduce, by the textbook's formulas.

alpha is a message's latency, beta the seconds a byte takes on a link, gamma the seconds to add one up, n the bytes, p the
ranks. The formulas assume equal links and that all ranks start together, as they do after a barrier.

`collectives/cost.py` has formulas of the same algorithms for another purpose: it predicts our own plans, whose messages are
chunks and whose hosts share links, to choose one. These are the textbook's, for clusters that are only described, with a
message of any size in each round; and the simulator must not import a room that loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    hosts = math.ceil(p / size)
    local = min(size, p)
    share = (local - 1) / local * n
    cost = 2 * (local - 1) * inside.alpha + 2 * share * inside.beta + share * inside.gamma
    return cost + ring(hosts, n, between)


FLAT: dict[str, Callable[[int, float, Costs], float]] = {"ring": ring, "halving-doubling": halving_doubling, "tree": tree}
ALGORITHMS = (*FLAT, "hierarchical")


def all_reduce_seconds(algorithm: str, cluster: Cluster, workers: int) -> float:
    """The seconds of one all-reduce of the cluster's model over `workers` of its workers."""
    if workers <= 1 or cluster.model_bytes == 0:
        return 0.0
    bytes_, link = cluster.model_bytes, _slowest_link(cluster)
    if algorithm in FLAT:
        seconds = FLAT[algorithm](workers, bytes_, link)
        # On a shared medium nothing is sent side by side: all ranks' bytes one after another.
        return max(seconds, 2 * (workers - 1) * bytes_ * link.beta) if cluster.link.shared else seconds
    if algorithm != "hierarchical":
        known = ", ".join(ALGORITHMS)
        raise ClusterError(f"unknown all-reduce {algorithm!r}; known: {known}{nearest(algorithm, ALGORITHMS)}")
    if cluster.hosts is None:
        raise ClusterError("hierarchical all-reduce needs to know the workers a host; give hosts with a size")
    inside = Costs(cluster.hosts.latency, _beta(cluster.hosts.bandwidth), link.gamma)
    return hierarchical(workers, bytes_, inside, link, cluster.hosts.size)


def best_all_reduce(cluster: Cluster) -> str:
    """The cheapest algorithm for all workers of this cluster; the ring where they tie."""
    known = ALGORITHMS if cluster.hosts else tuple(FLAT)
    return min(known, key=lambda name: all_reduce_seconds(name, cluster, cluster.workers))


def _slowest_link(cluster: Cluster) -> Costs:
    links = [cluster.link, *cluster.links.values()]
    gamma = 1 / cluster.reduce_rate if cluster.reduce_rate else 0.0
    return Costs(max(link.latency for link in links), max(_beta(link.bandwidth) for link in links), gamma)


def _beta(bandwidth: float | None) -> float:
    return 1 / bandwidth if bandwidth else 0.0

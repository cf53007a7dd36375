"""How long a collective takes by each algorithm, from latency and bandwidth, and so which one to take.

Textbook formulas for p ranks and n bytes, with these assumptions:

- Ranks are numbered host by host. All ranks of a host share its link to the others. A ring leaves each host once, and a step
  of it takes as long as its slowest link. A tree leaves each host once in the rounds between hosts; the others stay inside.
- A message is a chunk. So halving-doubling, which has few rounds, still sends as many messages as a ring; and an inner rank
  of the double tree serves two children, one after the other.
- Plans are cut into as many pieces as are good, and pieces cost nothing but in a chain.
- A barrier in shared memory takes as long as a message. A byte that is put and then read counts once: ranks do both at once.
- `nbytes` are those of the whole: all that is gathered, or scattered, or that one rank hands to all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from polytempo.collectives.halving_doubling import core_size
from polytempo.collectives.plans import algorithms_for, find_plan
from polytempo.collectives.steps import HostRanks
from polytempo.units import written_seconds

#: Among equals, in six digits, the first is taken.
PREFERENCE = ("shared-memory", "hierarchical", "ring", "tree", "double-tree", "halving-doubling", "linear")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds a message and a byte between hosts; a byte of adding; and a message and a byte inside a host.

    Unless measured: 10 Gbit/s Ethernet between hosts, and memory inside.
    """

    alpha: float = 50e-6
    beta: float = 0.8e-9
    gamma: float = 0.1e-9
    alpha_inside: float = 10e-6
    beta_inside: float = 0.2e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, why it was taken, and the seconds that each would take."""

    algorithm: str
    reason: str
    predicted: dict[str, float]


class _Job:
    """What the formulas are about: p ranks, the ranks on each host, and a and b of the slowest link."""

    def __init__(self, nbytes: int, hosts: HostRanks, speeds: Speeds) -> None:
        self.n, self.hosts, self.speeds, self.g = nbytes, hosts, speeds, speeds.gamma
        self.p = sum(map(len, hosts))
        self.rest = (self.p - 1) / self.p
        between = len(hosts) > 1
        self.a = max(speeds.alpha, speeds.alpha_inside) if between else speeds.alpha_inside
        self.b = max(speeds.beta, speeds.beta_inside) if between else speeds.beta_inside


def _rounds(count: int) -> int:
    """How often 1 must double to reach a count."""
    return (count - 1).bit_length()


def _ring_all_reduce(job: _Job) -> float:
    return 2 * (job.p - 1) * job.a + job.rest * job.n * (2 * job.b + job.g)


def _each_part_once(job: _Job) -> float:
    return (job.p - 1) * job.a + job.rest * job.n * job.b


def _tree_broadcast(job: _Job) -> float:
    between = _rounds(len(job.hosts))
    inside = max(0, _rounds(job.p) - between)
    return between * (job.a + job.n * job.b) + inside * (job.speeds.alpha_inside + job.n * job.speeds.beta_inside)


def _tree_reduce(job: _Job) -> float:
    return _tree_broadcast(job) + _rounds(job.p) * job.n * job.g


def _halving_doubling(job: _Job) -> float:
    """The rounds at a distance of more than a host are shared by all its ranks, the others stay inside."""
    core, largest = core_size(job.p), max(map(len, job.hosts))
    seconds = 2 * (core - 1) * job.a + (core - 1) / core * job.n * job.g
    for distance in (1 << level for level in range(_rounds(core))):
        outside = len(job.hosts) > 1 and distance >= largest
        seconds += 2 * distance / core * job.n * (largest * job.b if outside else job.speeds.beta_inside)
    fold = 2 * core * job.a + job.n * (2 * job.b + job.g)
    return seconds if core == job.p else seconds + fold


def _hierarchical(job: _Job) -> float:
    """Inside: three barriers; the sums to the leader, and the result from it. Between: a ring of whole tensors."""
    members, leaders = max(map(len, job.hosts)), tuple((host[0],) for host in job.hosts)
    inside = 3 * job.speeds.alpha_inside + job.n * job.speeds.beta_inside
    inside += (members - 1) / members * job.n * (2 * job.speeds.beta_inside + job.g)
    return inside + _ring_all_reduce(_Job(job.n, leaders, job.speeds))


def _straight_all_to_all(job: _Job) -> float:
    """The busiest link: what all ranks of a host have for all others."""
    if len(job.hosts) == 1:
        return _each_part_once(job)
    busiest = max(len(host) * (job.p - len(host)) for host in job.hosts)
    return (job.p - 1) * job.a + busiest / job.p * job.n * job.b


def _shared_parts(job: _Job) -> float:
    return job.a + job.rest * job.n * job.b


_FORMULAS: dict[tuple[str, str], Callable[[_Job], float]] = {
    # With the best number of pieces, which is the root of (p - 2) n b / a.
    ("broadcast", "ring"): lambda job: job.a + (sqrt((job.p - 2) * job.a) + sqrt(job.n * job.b)) ** 2,
    ("broadcast", "tree"): _tree_broadcast,
    ("broadcast", "shared-memory"): lambda job: job.a + job.n * job.b,
    ("reduce", "tree"): _tree_reduce,
    # The root adds up alone.
    ("reduce", "shared-memory"): lambda job: job.a + job.n * job.b + (job.p - 1) * job.n * job.g,
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "halving-doubling"): _halving_doubling,
    ("all_reduce", "tree"): lambda job: _tree_broadcast(job) + _tree_reduce(job),
    ("all_reduce", "double-tree"): lambda job: 4 * _rounds(job.p) * job.a + job.n * (2 * job.b + job.g),
    ("all_reduce", "hierarchical"): _hierarchical,
    ("all_reduce", "shared-memory"): lambda job: 2 * job.a + job.rest * job.n * (2 * job.b + job.g),
    ("gather", "linear"): _each_part_once,
    ("gather", "shared-memory"): _shared_parts,
    ("all_gather", "ring"): _each_part_once,
    ("all_gather", "shared-memory"): _shared_parts,
    ("scatter", "linear"): _each_part_once,
    ("scatter", "shared-memory"): _shared_parts,
    ("reduce_scatter", "ring"): lambda job: _each_part_once(job) + job.rest * job.n * job.g,
    ("reduce_scatter", "shared-memory"): lambda job: _shared_parts(job) + job.rest * job.n * job.g,
    ("all_to_all", "linear"): _straight_all_to_all,
    ("all_to_all", "shared-memory"): _shared_parts,
    ("barrier", "tree"): lambda job: _rounds(job.p) * job.a,
    ("barrier", "shared-memory"): lambda job: job.a,
}


def predict(collective: str, algorithm: str, nbytes: int, hosts: HostRanks, speeds: Speeds) -> float:
    """Seconds by this algorithm; nothing for a single rank."""
    find_plan(collective, algorithm)
    job = _Job(nbytes, hosts, speeds)
    return _FORMULAS[collective, algorithm](job) if job.p > 1 else 0.0


def applies(algorithm: str, hosts: HostRanks) -> bool:
    """Memory is shared on one host only; two levels need several hosts, and one on which there are several ranks."""
    if algorithm == "shared-memory":
        return len(hosts) == 1
    return algorithm != "hierarchical" or (len(hosts) > 1 and max(map(len, hosts)) > 1)


@lru_cache(maxsize=256)
def choose(collective: str, nbytes: int, hosts: HostRanks, speeds: Speeds) -> Choice:
    """The algorithm with the smallest prediction among those that apply; kept, since a job repeats the same calls."""
    candidates = sorted((name for name in algorithms_for(collective) if applies(name, hosts)), key=PREFERENCE.index)
    seconds = {name: predict(collective, name, nbytes, hosts, speeds) for name in candidates}
    predicted = dict(sorted(seconds.items(), key=lambda entry: float(f"{entry[1]:.6g}")))
    best, *others = predicted
    where = f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    rest = [f"{name} {written_seconds(predicted[name])}" for name in others] or ["nothing else applies"]
    reason = f"{best}: {written_seconds(predicted[best])} expected over {where}, {', '.join(rest)}"
    return Choice(best, reason, predicted)

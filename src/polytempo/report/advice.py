"""Which mode for this cluster: the modes that are worth comparing on it, the choice among their outcomes, and the advice in
words: what was taken for granted, the modes beside each other, the options to give.

What is compared is the time for a number of samples. That is not accuracy, so modes stand in an order of caution, and one
that may cost accuracy is chosen only where it gains much more than a small gain over the ones before it:

    exact        bsp, bsp+balance: the update of one process with the joint batch
    fresh        anytime, bsp+backup: no stale gradient, but the batch of an update varies
    local steps  local, adacomm, diloco: models drift apart between two averages
    stale        ssp, dssp, asp and the like, and models that are mixed with neighbours': shown, never chosen over others,
                 as times do not say how many more samples they need

Pure and deterministic: the same outcomes give the same advice, and of two alike the more cautious one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol, TypeVar

from polytempo.report.table import TextTable, mode_name
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.links import all_reduce_seconds, best_all_reduce
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import mean_step_time
from polytempo.simulate.worker import Worker
from polytempo.sync.capabilities import Caution
from polytempo.sync.spec import Spec, compared
from polytempo.units import plain_number, written_bytes, written_rate, written_seconds

#: A mode is recommended from this gain in throughput on, and this number of seconds: less is not worth a change.
WORTH, WORTH_SECONDS = 0.05, 1.0
#: Steps that are drawn of each worker to see how they differ.
DRAWN = 64
#: Workers are unequal from this ratio of their median steps on; they stall where this share of their time is in steps
#: that are longer than the median by half.
UNEQUAL, STALLED = 1.1, 0.05
#: Links are slow where an exchange takes this share of a step.
SLOW_LINK = 0.1


#: The throughput that a mode must have, over that of the more cautious one it would replace; and where that one has local
#: steps already, but fewer.
_MARGIN = {Caution.EXACT: 1 + WORTH, Caution.FRESH: 1.1, Caution.LOCAL: 1.25, Caution.STALE: float("inf")}
_MORE_LOCAL_STEPS = 1.5


@dataclass(frozen=True)
class Situation:
    """What of a cluster decides which modes are worth comparing."""

    unequal: bool  #: do some workers take longer than others, always?
    stalls: bool  #: do single steps take much longer now and then?
    slow_links: bool  #: do exchanges take much of the time?

    def in_words(self) -> str:
        """For a table's title."""
        parts = ["unequal workers" if self.unequal else "equal workers"]
        parts += ["stalls"] * self.stalls + ["slow links"] * self.slow_links
        return ", ".join(parts)


def situation_of(cluster: Cluster, seed: int = 0) -> Situation:
    """Look at a cluster: the steps of its workers, and what an exchange takes."""
    steps: dict[int, list[float]] = {}
    for rank in range(cluster.workers):
        worker = Worker(cluster, rank, seed)
        worker.draw()
        steps[rank] = list(worker.step_times)[-DRAWN:]
    typical = {rank: median(times) for rank, times in steps.items()}
    unequal = max(typical.values()) > UNEQUAL * min(typical.values())
    late = [sum(t - typical[rank] for t in times if t > 1.5 * typical[rank]) / sum(times) for rank, times in steps.items()]
    stalls = bool(cluster.stalls) or fmean(late) > STALLED
    return Situation(unequal, stalls, _exchange(cluster) > SLOW_LINK * median(typical.values()))


def _exchange(cluster: Cluster) -> float:
    """Seconds of an exchange by the cheaper way, without anything beside it."""
    if cluster.workers < 2:
        return 0.0
    links = [cluster.links.get(rank, cluster.link) for rank in range(cluster.workers)]
    servers = max(2 * (link.latency + (cluster.model_bytes / link.bandwidth if link.bandwidth else 0.0)) for link in links)
    if not cluster.model_bytes:  # what a record has: an exchange is a latency
        return servers
    return min(servers, all_reduce_seconds(best_all_reduce(cluster), cluster, cluster.workers))


def default_modes(cluster: Cluster, seed: int = 0) -> tuple[str, ...]:
    """The modes that are compared on this cluster unless told: those that may win there, and two with stale gradients."""
    if cluster.workers < 2:
        return ("bsp",)
    found = situation_of(cluster, seed)
    worth = {
        "bsp+balance": found.unequal,
        "anytime:auto": found.unequal or found.stalls,
        "bsp+backup:1": found.stalls and cluster.workers > 2,
        "local:8": found.slow_links,
        "diloco:100": found.slow_links,
        "dssp:3..15": found.unequal or found.stalls,
    }
    return tuple(mode for mode in compared() if worth.get(mode, True))


@dataclass(frozen=True)
class Advice:
    """The mode to use, and how the others stand to it."""

    best: Outcome
    base: Outcome  #: bsp by its faster way, or the most cautious of those that were compared
    ranked: tuple[Outcome, ...]  #: the fastest first

    def because(self) -> str:
        """The reason, in a clause or two."""
        base = self.base
        if self.best is not base:
            share = base.samples_per_second / self.best.samples_per_second
            times = f"it takes {100 * share:.0f} % of the time of {base.sync} for the same samples"
            return f"{times}; {_price(self.best)}"
        others = [one for one in self.ranked if one.sync != base.sync]
        safe = [one for one in others if _may_be_chosen(one)]
        if not others:
            return "it is the only mode that was compared"
        if not safe:
            return f"nothing here gains without stale gradients ({_beside(others[0], base)})"
        if gain_over(safe[0], base) < WORTH:
            return f"no mode without stale gradients is {100 * WORTH:.0f} % faster ({_beside(safe[0], base)})"
        return f"{_beside(safe[0], base)}: not worth that {_price(safe[0])}"

    def beside(self) -> str:
        """Of the others that are not stale the fastest, where it is about as fast, or faster and passed over; else empty."""
        rest = [one for one in self.ranked if one.sync != self.best.sync and _may_be_chosen(one)]
        if not rest or self.best is self.base:  # of the base, the reason says it
            return ""
        if abs(gain_over(rest[0], self.best)) < WORTH:
            return f"{rest[0].sync} is within {100 * WORTH:.0f} % of it"
        if gain_over(rest[0], self.best) < 0:
            return ""
        return f"{_beside(rest[0], self.best)}, but {_price(rest[0])}"


def _beside(one: Outcome, base: Outcome) -> str:
    gain = gain_over(one, base)
    return f"{one.sync} is {plain_number(1 + gain, 2)}x as fast" if gain >= 1 else f"{one.sync} {100 * gain:+.0f} %"


def _may_be_chosen(one: Outcome) -> bool:
    return one.spec.capabilities.caution < Caution.STALE


def _price(one: Outcome) -> str:
    return one.spec.price(one.staleness_mean)


def gain_over(one: Outcome, base: Outcome) -> float:
    """In throughput; 0.5 is half as much again."""
    return one.samples_per_second / base.samples_per_second - 1 if base.samples_per_second else 0.0


class Candidate(Protocol):
    """What is known of a mode on a cluster."""

    @property
    def spec(self) -> Spec: ...


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], rate: Callable[[C], float]) -> C:
    """Choose a mode by throughput: from the most cautious on, each next one that is worth it. Of modes that all have stale
    gradients the fastest."""
    order = compared()

    def place(one: C) -> tuple[Caution, int]:
        sync = one.spec.text
        return one.spec.capabilities.caution, order.index(sync) if sync in order else len(order)

    by_caution = sorted(candidates, key=place)
    chosen = by_caution[0]
    if chosen.spec.capabilities.caution is Caution.STALE:
        return max(by_caution, key=rate)
    for one in by_caution[1:]:
        caution = one.spec.capabilities.caution
        more = chosen.spec.capabilities.caution is caution is Caution.LOCAL
        if rate(one) >= (_MORE_LOCAL_STEPS if more else _MARGIN[caution]) * rate(chosen):
            chosen = one
    return chosen


def advise(outcomes: Sequence[Outcome]) -> Advice:
    """Choose among the outcomes of modes on one cluster; of a mode that went several ways the fastest counts."""
    fastest: dict[str, Outcome] = {}
    for one in sorted(outcomes, key=lambda one: -one.samples_per_second):
        fastest.setdefault(one.sync, one)
    ranked = tuple(fastest.values())
    base = min(ranked, key=lambda one: (one.spec.capabilities.caution, one.sync != "bsp"))
    return Advice(choose(ranked, lambda one: one.samples_per_second), base, ranked)


# In words.

#: What is said under every advice.
CAVEAT = (
    "Time for samples is not accuracy: only what is exact learns as bsp does. polytempo compare SCRIPT measures time to an "
    "accuracy live, polytempo simulate --train digits in virtual time."
)


@dataclass(frozen=True)
class Assumption:
    """A figure that the predictions rest on, and where it came from."""

    name: str
    value: str
    source: str

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"value": self.value, "source": self.source}


def assumptions_of(cluster: Cluster, sources: Mapping[str, str]) -> list[Assumption]:
    """All of them. `sources`: where each figure came from, by its name here."""
    ranks = range(cluster.workers)
    steps = [mean_step_time(cluster, rank) * cluster.slow.get(rank, 1.0) for rank in ranks]
    fixed = [cluster.fixed_times.get(rank, cluster.fixed_time) * cluster.slow.get(rank, 1.0) for rank in ranks]
    batches = [cluster.batches.get(rank, cluster.batch) for rank in ranks]
    samples = f"{min(batches)}" if min(batches) == max(batches) else f"{min(batches)} to {max(batches)}"
    values = {
        "step time": _from_to(steps),
        "fixed time": f"{_from_to(fixed)} of it, whatever its samples",
        "batch": f"{samples} samples a step and worker",
        "model": written_bytes(cluster.model_bytes) if cluster.model_bytes else "0 B",
        "links": _links(cluster),
    }
    return [Assumption(name, value, sources[name]) for name, value in values.items() if name in sources]


def assumption_lines(assumptions: list[Assumption]) -> list[str]:
    """A line each, aligned."""
    wide, values = (
        max(len(text) for text in column) for column in zip(*((a.name, a.value) for a in assumptions), strict=True)
    )
    return [f"  {one.name.ljust(wide)}  {one.value.ljust(values)}  {one.source}" for one in assumptions]


def _from_to(seconds: list[float]) -> str:
    low, high = (written_seconds(value) if value else "0 s" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low} to {high}"


def _links(cluster: Cluster) -> str:
    if cluster.links and not cluster.model_bytes:
        each = median(2 * cluster.links[rank].latency if rank in cluster.links else 0.0 for rank in range(cluster.workers))
        return f"{written_seconds(each) if each else '0 s'} an exchange"
    link = cluster.link
    if not link.bandwidth and not link.latency:
        return "exchanges take no time"
    speed = f"{written_rate(link.bandwidth)}{' shared' * link.shared}" if link.bandwidth else "no limit"
    return f"{speed}, {written_seconds(link.latency) if link.latency else 'no'} latency"


def use_line(advice: Advice) -> str:
    """What to use and why."""
    beside = advice.beside()
    return f"use {mode_name(advice.best)}, because {advice.because()}{f' ({beside})' if beside else ''}"


def advice_table(advice: Advice, samples: float, title: str) -> TextTable:
    """The fastest first: the time for these samples, beside the base, and what each may cost."""
    rows = [
        (
            mode_name(one),
            plain_number(samples / one.samples_per_second) if one.samples_per_second else "-",
            f"{1 + gain_over(one, advice.base):.2f}",
            _price(one),
        )
        for one in advice.ranked
    ]
    heads = ("mode", f"{plain_number(samples)}\nsamples (s)", f"times as\nfast as {advice.base.sync}", "may cost")
    return TextTable(title, heads, tuple(rows))


def run_options(outcome: Outcome, cluster: Cluster) -> dict[str, str | int]:
    """The options of `polytempo run`, and of `pt.launch`, that start the recommended job."""
    options: dict[str, str | int] = {"n": cluster.workers, "sync": outcome.sync}
    if cluster.model_bytes and outcome.spec.capabilities.reduces:  # else there is one way only
        options["via"] = "ps" if outcome.via == "ps" else "allreduce"
    if outcome.via == "ps" and cluster.servers.shards > 1:
        options["servers"] = cluster.servers.shards
    return options

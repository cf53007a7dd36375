"""Advice on a cluster in words: what was taken for granted, the modes beside each other, the options to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from polytempo.report.table import TextTable, mode_name
from polytempo.simulate.advice import Advice, gain_over, price_of
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import mean_step_time
from polytempo.sync.spec import parse_spec
from polytempo.units import plain_number, written_bytes, written_rate, written_seconds

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
            price_of(one),
        )
        for one in advice.ranked
    ]
    heads = ("mode", f"{plain_number(samples)}\nsamples (s)", f"times as\nfast as {advice.base.sync}", "may cost")
    return TextTable(title, heads, tuple(rows))


def run_options(outcome: Outcome, cluster: Cluster) -> dict[str, str | int]:
    """The options of `polytempo run`, and of `pt.launch`, that start the recommended job."""
    options: dict[str, str | int] = {"n": cluster.workers, "sync": outcome.sync}
    if cluster.model_bytes and parse_spec(outcome.sync).capabilities.reduces:  # else there is one way only
        options["via"] = "ps" if outcome.via == "ps" else "allreduce"
    if outcome.via == "ps" and cluster.servers.shards > 1:
        options["servers"] = cluster.servers.shards
    return options

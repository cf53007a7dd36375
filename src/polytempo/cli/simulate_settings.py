"""What `polytempo simulate` was asked for: the file, overridden by the flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import yaml

from polytempo.errors import ClusterError, UsageError
from polytempo.records.files import read_events, read_meta
from polytempo.simulate.cluster import Cluster, Hiccup, Hosts, Link
from polytempo.simulate.description import Experiment, cluster_from_record, experiment_from
from polytempo.simulate.durations import Constant, Lognormal, as_duration
from polytempo.simulate.outcome import Budget
from polytempo.simulate.run import resolve_via
from polytempo.summation import in_order
from polytempo.sync.spec import parse_spec
from polytempo.units import parse_factors, parse_hiccup, parse_rate, parse_seconds, parse_size

DEFAULT_MODES = ("bsp", "ssp:3", "dssp:3..15", "asp")
LIMITS = ("seconds", "steps", "samples", "steps_each")
DEFAULT_STEPS = 100  # of each worker, in runs without training


@dataclass(frozen=True)
class Settings:
    """Everything a comparison needs, checked."""

    cluster: Cluster
    jobs: tuple[tuple[str, str], ...]  #: modes, each with a way for its bytes to travel
    budget: Mapping[str, Any]
    train: Mapping[str, Any]
    seed: int


def load_experiment(path: Path | None) -> Experiment:
    """The experiment a YAML file describes; an empty one without a file."""
    if path is None:
        return Experiment()
    try:
        return experiment_from(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def settle(experiment: Experiment, flags: Mapping[str, Any], like: Path | None = None) -> Settings:
    """Flags win over the file, the file over the defaults. Whatever cannot work is refused here."""
    given = {name: value for name, value in flags.items() if not (value is None or value is False or value == [])}
    cluster = _cluster(cluster_like(like) if like else experiment.cluster, given)
    budget: dict[str, Any] = {name: given[name] for name in LIMITS if name in given}
    train = dict(experiment.train) | {name: given[name] for name in ("task", "lr", "target") if name in given}
    sync = given.get("sync") or experiment.sync or DEFAULT_MODES
    jobs = tuple(_jobs(sync, given.get("via") or experiment.via, cluster))
    budget = budget or dict(experiment.budget)
    if not budget and "task" not in train:
        budget = {"steps": DEFAULT_STEPS * cluster.workers}
    if budget:
        Budget(**budget)
    return Settings(cluster, jobs, budget, train, given.get("seed", experiment.seed or 0))


def cluster_like(directory: Path) -> Cluster:
    """The cluster of a recorded run."""
    return cluster_from_record(read_events(directory), read_meta(directory)["size"])


def mean_step_time(cluster: Cluster) -> float:
    """Seconds of a step on a worker that is not slow, on average."""
    draws = as_duration(cluster.step_time).draw(Random(0), 0, 64)
    return in_order(draws) / len(draws)


def _jobs(sync: Iterable[str], vias: Sequence[str], cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Each mode over the server; where bytes take time, those that need no server over all-reduce too, unless told."""
    for text in sync:
        spec = parse_spec(text)
        spec.policy(cluster.workers)
        choices = list(vias)
        if not choices:
            choices = ["ps"]
            if spec.mode.barrier and spec.mode.all_reduce and cluster.workers > 1 and cluster.link != Link():
                choices.append("allreduce")
        for via in choices:
            yield text, resolve_via(spec, via, cluster)


def _cluster(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    changes: dict[str, Any] = {name: given[name] for name in ("workers", "batch") if name in given}
    if "step_time" in given or "spread" in given:
        seconds = parse_seconds(given["step_time"], "--step-time") if "step_time" in given else mean_step_time(cluster)
        changes["step_time"] = Lognormal(seconds, given["spread"]) if "spread" in given else Constant(seconds)
    if "slow" in given:
        changes["slow"] = parse_factors(given["slow"])
    if "hiccup" in given:
        changes["hiccup"] = Hiccup(*parse_hiccup(given["hiccup"]))
    if "model" in given:
        changes["model_bytes"] = parse_size(given["model"], "--model")
    if "servers" in given:
        changes["servers"] = replace(cluster.servers, shards=given["servers"])
    if "per_host" in given:
        changes["hosts"] = replace(cluster.hosts, size=given["per_host"]) if cluster.hosts else Hosts(given["per_host"])
    link = {name: given[name] for name in ("shared",) if name in given}
    if "bandwidth" in given:
        link["bandwidth"] = parse_rate(given["bandwidth"], "--bandwidth")
    if "latency" in given:
        link["latency"] = parse_seconds(given["latency"], "--latency")
    return replace(cluster, **changes, link=replace(cluster.link, **link))

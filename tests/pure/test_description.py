"""Clusters and quantities from files and flags: what is good is read, what is bad is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from polytempo.errors import ClusterError
from polytempo.simulate.cluster import (
    Arrival,
    Cluster,
    Constant,
    Crash,
    Hiccup,
    Hosts,
    Link,
    Lognormal,
    Servers,
    Stall,
    Trace,
)
from polytempo.simulate.description import cluster_from, experiment_from
from polytempo.units import parse_factors, parse_rate, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "bytes_"), [("100MB", 1e8), ("1.5 GB", 1.5e9), ("8kb", 1e3), ("2MiB", 2.0**21), (17, 17.0), ("17", 17.0)]
)
def test_sizes(text: object, bytes_: float) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gb/s", 1.25e8), ("125MB/s", 1.25e8), ("100Mbit/s", 1.25e7), (5.0, 5.0), ("1e9", 1e9)]
)
def test_rates(text: object, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("0.5ms", 5e-4), ("2", 2.0), ("3min", 180.0), ("20us", 2e-5)])
def test_times(text: object, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("bad", ["fast", "1Gb", "1.2.3MB/s", "-1", None, True, "", "inf", float("nan"), [1]])
def test_what_is_no_rate_is_refused(bad: object) -> None:
    with pytest.raises(ClusterError, match=r"such as 1Gb/s|at least 0"):
        parse_rate(bad)


def test_factors() -> None:
    assert parse_factors("3:2.5,7:2") == {3: 2.5, 7: 2.0}
    with pytest.raises(ClusterError, match="RANK:FACTOR"):
        parse_factors("3=2")


def test_a_whole_experiment() -> None:
    experiment = experiment_from(
        {
            "cluster": {
                "workers": 3,
                "step_time": {"kind": "lognormal", "mean": "100ms", "spread": 0.2},
                "slow": {2: 3},
                "step_times": {1: [0.1, 0.2]},
                "hiccup": {"probability": 0.05, "seconds": 10},
                "stalls": [{"worker": 0, "at": 5, "seconds": "2s"}],
                "joins": [{"worker": 3, "at": 60}],
                "crashes": [{"worker": 1, "at": 70, "noticed_after": None}],
                "link": {"latency": "1ms", "bandwidth": "1Gb/s", "shared": True},
                "servers": {"shards": 2},
                "hosts": {"size": 4},
                "model": "100MB",
            },
            "sync": ["bsp", "ssp:3"],
            "via": "ps",
            "budget": {"seconds": 60},
            "train": {"task": "digits", "lr": 0.1},
            "seed": 4,
        }
    )
    assert experiment.cluster == Cluster(
        workers=3,
        step_time=Lognormal(0.1, 0.2),
        slow={2: 3.0},
        step_times={1: Trace((0.1, 0.2))},
        hiccup=Hiccup(0.05, 10.0),
        stalls=(Stall(0, 5.0, 2.0),),
        joins=(Arrival(3, 60.0),),
        crashes=(Crash(1, 70.0, None),),
        link=Link(0.001, 1.25e8, shared=True),
        servers=Servers(2),
        hosts=Hosts(4),
        model_bytes=1e8,
    )
    assert (experiment.sync, experiment.via, experiment.budget, experiment.seed) == (
        ("bsp", "ssp:3"),
        ("ps",),
        {"seconds": 60.0},
        4,
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"wokers": 3}, "cluster: unknown key 'wokers'.*nearest: workers"),
        ({"workers": "three"}, "cluster.workers: expected a whole number, got 'three'"),
        ({"workers": 0}, "cluster: expected at least 1 worker, got 0"),
        ({"step_time": 0}, "expected a step time above 0"),
        ({"step_time": {"kind": "lognormul", "mean": 1}}, "cluster.step_time: unknown kind 'lognormul'.*nearest: lognormal"),
        ({"step_time": {"kind": "lognormal", "mean": 1}}, "lognormal needs mean, spread; got mean"),
        ({"slow": {9: 2}}, "slow names worker 9; the ranks are 0 to 3"),
        ({"slow": [1]}, "expected ranks with their values"),
        ({"slow": {1: 0}}, "expected a slow-down above 0 for worker 1"),
        ({"stalls": [{"worker": 0, "at": 5}]}, r"cluster.stalls\[0\]: expected worker, at, seconds; got worker, at"),
        ({"stalls": {"worker": 0}}, "cluster.stalls: expected a list"),
        ({"joins": [{"worker": 0, "at": 5}]}, "joins names worker 0, which is there from the start"),
        ({"joins": [{"worker": 7, "at": 5}]}, "no worker has rank 4"),
        ({"link": {"bandwidth": "fast"}}, "cluster.link.bandwidth as a rate such as 1Gb/s"),
        ({"link": {"bandwidth": 0}}, "expected a bandwidth above 0"),
        ({"link": {"shared": "yes"}}, "expected true or false"),
        ({"hiccup": {"probability": 2, "seconds": 1}}, "from 0 to 1"),
        ({"servers": {"shards": 0}}, "at least 1 server shard"),
        ({"batch": 0}, "at least 1 sample"),
        ([1, 2], "cluster: expected keys and values"),
    ],
)
def test_bad_clusters_are_refused_in_one_line(data: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as refused:
        cluster_from(data)
    assert "\n" not in str(refused.value)


def test_a_plain_number_is_a_constant_step() -> None:
    assert cluster_from({"step_time": "80ms"}).step_time == Constant(0.08)

"""A plan in words."""

from __future__ import annotations

import pytest

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer, Profile
from polytempo.pipeline.plan_report import bubble, explain, why
from polytempo.pipeline.planner import parse_topology, plan

LAYERS = tuple(
    Layer(f"layer{n}", t, 0, a, w) for n, (t, a, w) in enumerate(zip((4, 4, 4, 1), (2, 2, 1, 1), (1, 1, 1, 60), strict=True))
)
KNOWN = Profile("known", LAYERS, 32)


def test_the_known_case_in_words() -> None:
    found = plan(KNOWN, parse_topology("4:10B/s"), formula="paper")
    assert (
        "\n".join(explain(KNOWN, found, microbatches=4))
        == """\
known: 2 stages (3-1) on 4 devices

stage  layers  from    to      devices    ms   busy  send ms  memory
--------------------------------------------------------------------
    0     0-2  layer0  layer2        3  4000  100 %      200    16 B
    1     3-3  layer3  layer3        1  1000   25 %             62 B

a minibatch of 32 samples every 4000 ms once the pipeline is full
data parallelism: 9450 ms, 2.36 times as long
idle with a flush after 4 microbatches: 20.0 % of the time, were all stages equal
why: data parallelism would have all devices exchange 63 B of weights; this plan is limited by the work of stage 0"""
    )


def test_data_parallelism_in_words() -> None:
    found = plan(KNOWN, parse_topology("4:10GB/s"), formula="paper")
    lines = explain(KNOWN, found)
    assert lines[0] == "known: 1 stage (4) on 4 devices"
    assert "data parallelism: 3250 ms, which is this plan" in lines
    assert lines[-1] == "why: exchanging 63 B of weights among all devices is cheaper than any cut"
    assert why(KNOWN, plan(KNOWN, parse_topology("1:1B/s"))) == "there is only one device"


def test_what_limits_a_plan() -> None:
    heavy = Profile("heavy", (Layer("a", 0, 0, 50, 0), Layer("b", 1, 0, 1, 1000)), 1)
    assert why(heavy, plan(heavy, parse_topology("2:10B/s"))).endswith("by the 50 B that pass from stage 0 to 1")
    mixed = Profile("mixed", (Layer("a", 9, 0, 1, 100), Layer("b", 1, 0, 1, 5000)), 1)
    assert why(mixed, plan(mixed, parse_topology("3:10B/s"), formula="paper")).endswith(
        "by the exchange of 100 B of weights in stage 0"
    )


def test_what_does_not_fit_is_said() -> None:
    found = plan(KNOWN, parse_topology("4:10GB/s"), 65)
    lines = explain(KNOWN, found)
    assert lines[-1].startswith("why: data parallelism needs 69 B on each device, which has 65 B; ")
    assert any(line.endswith("but it does not fit: 69 B on each device") for line in lines)
    forced = plan(KNOWN, parse_topology("4:10GB/s"), straight=True)
    assert why(KNOWN, forced).startswith("a single stage was not allowed; ")


def test_the_bubble_is_that_of_a_flush() -> None:
    found = plan(KNOWN, parse_topology("4:10GB/s"), straight=True)
    assert len(found.stages) == 4
    assert bubble(found, 4) == pytest.approx(3 / 7)
    assert bubble(found, 8) == pytest.approx(3 / 11)
    with pytest.raises(UsageError, match="at least 1 microbatch between flushes, got 0"):
        explain(KNOWN, found, microbatches=0)

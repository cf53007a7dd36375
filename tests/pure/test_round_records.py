"""The checker of rounds with shares and deadlines must not only accept: each promise, broken in a good record, is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from driving import Job

from polytempo.errors import BrokenInvariant
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.sync.spec import parse_spec


def push(job: Job, worker: int, now: float, **changes: Any) -> None:
    figures = {"count": 2, "work": 16.0, "computed": 1.0 + worker, "drawn": (0, job.steps[worker] + 1)}
    job.push(worker, now, **{**figures, **changes})


def balanced() -> list[RecordLine]:
    """Three workers of different speed; one joins, one leaves."""
    job = Job("bsp+balance", 3).start()
    for number in range(3):
        if number == 1:
            job.join(3, now=1.5)
        for worker in job.computing():
            push(job, worker, now=float(number + 1))
    job.leave(0, now=4.0)
    for worker in job.computing():
        push(job, worker, now=5.0)
    return job.lines


def timed() -> list[RecordLine]:
    """Worker 2 misses two rounds, is back, and counts again."""
    job = Job("anytime:2", 3).start()
    for worker in (0, 1):
        push(job, worker, now=2.0)
    job.tick(now=4.5)
    for worker in (0, 1):
        push(job, worker, now=5.0)
    push(job, 2, now=6.0)
    for worker in (0, 1):
        push(job, worker, now=7.0)
    for worker in (0, 1, 2):
        push(job, worker, now=9.0)
    return job.lines


RECORDS = {"bsp+balance": (balanced, 3), "anytime:2": (timed, 3)}


@pytest.mark.parametrize("sync", RECORDS)
def test_good_records_pass_and_replay(sync: str) -> None:
    make, workers = RECORDS[sync]
    lines = make()
    assert check_lines(lines, parse_spec(sync), workers) == len(lines)
    assert replay(lines, parse_spec(sync).policy(workers))


def nth(lines: list[RecordLine], kind: str, number: int, **having: Any) -> RecordLine:
    """The n-th line of a kind that has these values; True: any value."""
    found = [
        line
        for line in lines
        if line["kind"] == kind and all(key in line and value in (True, line[key]) for key, value in having.items())
    ]
    return found[number]


def change(kind: str, number: int, having: dict[str, Any], **values: Any) -> Callable[[list[RecordLine]], None]:
    """Give a line other values; None: without this one."""

    def alter(lines: list[RecordLine]) -> None:
        line = nth(lines, kind, number, **having)
        for key, value in values.items():
            if value is None:
                line.pop(key, None)
            else:
                line[key] = value

    return alter


def without(kind: str, number: int, **having: Any) -> Callable[[list[RecordLine]], None]:
    return lambda lines: lines.remove(nth(lines, kind, number, **having))


WEIGHTS = {"weights": True}
BALANCE_BREAKS = [
    (change("release", 1, WEIGHTS, weights=[[0, 1.0], [1, 2.5], [2, -0.5]]), "not between 0.1 and 2"),
    (change("release", 1, WEIGHTS, weights=[[0, 1.5], [1, 1.5], [2, 1.5]]), "shares are 1.5 on average"),
    (change("release", 1, WEIGHTS, weights=[[0, 1.0], [2, 1.0]]), "shares of [0, 2], members are [0, 1, 2]"),
    (change("release", 1, WEIGHTS, since=[0, 1]), "shares since [0, 1], and (0, 1) is drawn"),
    (change("release", 1, WEIGHTS, since=None), "shares since None, and (0, 1) is drawn"),
    (change("release", 4, {}, weights=[[0, 1.0], [1, 1.0], [2, 1.0]], since=[0, 2]), "shares are said twice"),
    (change("release", 3, {}, deadline=1.0), "deadline"),
    (change("apply", 1, {}, divisor=48.0), "a divisor in a mode that divides by what came"),
    (change("join", 3, {}, step=1), "a hold for a step that is not the worker's next"),
    (without("release", 3), "still held for step 1 without need"),
]
TIMED_BREAKS = [
    (change("release", 4, {}, deadline=3.0), "the deadline of round 1 is 2"),
    (change("release", 3, {}, deadline=None), "the deadline is 2 s"),
    (change("release", 0, {"behind": 3}, behind=2), "it has missed 3 rounds"),
    (change("release", -4, {}, behind=1), "rounds"),
    (change("release", 1, {"catching_up": True}, catching_up=[0]), "catching up are [2]"),
    (change("apply", 2, {}, divisor=1e6), "no workers are as fast as 1e+06"),
    (change("apply", 0, {}, workers=[0], staleness=[0]), "the round's pushes are those of [0, 1]"),
    (change("tick", 0, {}, t=2.5), "closed before workers were overdue"),
    (without("discard", 0), "a hold for a step that is not the worker's next"),
    (without("release", 3), "released were [1], expected [0, 1]"),
]


@pytest.mark.parametrize(
    ("sync", "alter", "text"),
    [*(("bsp+balance", *case) for case in BALANCE_BREAKS), *(("anytime:2", *case) for case in TIMED_BREAKS)],
)
def test_a_broken_promise_is_named(sync: str, alter: Callable[[list[RecordLine]], None], text: str) -> None:
    make, workers = RECORDS[sync]
    lines = copy.deepcopy(make())
    alter(lines)
    with pytest.raises(BrokenInvariant) as broken:
        check_lines(lines, parse_spec(sync), workers)
    assert text in str(broken.value)

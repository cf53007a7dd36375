"""The checker of records says no to each broken promise of the modes with neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from driving import Job

from polytempo.errors import BrokenInvariant
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.sync.events import Pushed
from polytempo.sync.spec import parse_spec

WORKERS = 4
Change = Callable[[RecordLine], Any]


def gossip(sync: str = "gossip:ring") -> list[RecordLine]:
    """Worker 1 is lost before it pushes step 2; worker 6 joins."""
    job = Job(sync, WORKERS).start()
    for _ in range(2):
        for worker in range(WORKERS):
            job.push(worker)
    for worker in (0, 2, 3):
        job.push(worker)
    job.leave(1, "lost")
    job.join(6)
    for _ in range(12):
        job.push(min(job.computing(), key=lambda worker: job.steps[worker]))
    return job.lines


def adpsgd() -> list[RecordLine]:
    job = Job("adpsgd:ring", WORKERS).start()
    for worker in (0, 1, 2, 3, 0, 0):
        job.push(worker)
    job.join(7)
    job.feed(Pushed(7, job.steps[7], samples=0))
    for worker in (7, 0, 2, 7, 4 - 3):
        job.push(worker)
    return job.lines


def lines_with(lines: list[RecordLine], **about: Any) -> list[RecordLine]:
    return [line for line in lines if all(line.get(key) == value for key, value in about.items())]


def verdict(sync: str, lines: list[RecordLine]) -> str:
    with pytest.raises(BrokenInvariant) as caught:
        check_lines(lines, parse_spec(sync), WORKERS)
    return str(caught.value)


def broken(lines: list[RecordLine], sync: str, change: Change, **about: Any) -> str:
    """What is said of a record in which the last line like this is changed."""
    lines = copy.deepcopy(lines)
    change(lines_with(lines, **about)[-1])
    return verdict(sync, lines)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "gossip:full", "gossip:exp,static=1"])
def test_a_good_record_passes(sync: str) -> None:
    assert check_lines(gossip(sync), parse_spec(sync), WORKERS) == len(gossip(sync))
    assert check_lines(adpsgd(), parse_spec("adpsgd:ring"), WORKERS) == len(adpsgd())


def test_the_records_hold_what_is_to_be_broken() -> None:
    assert lines_with(gossip(), kind="release", lost=[1], worker=0)
    assert lines_with(gossip(), kind="release", enters=True, worker=6)
    assert lines_with(adpsgd(), kind="release", enters=True, worker=7)


@pytest.mark.parametrize(
    ("change", "about", "says"),
    [
        (lambda line: line.pop("lost"), {"worker": 0, "lost": [1]}, "gone without pushing step 3 are [1]"),
        (lambda line: line.update(lost=[1, 2]), {"worker": 0, "lost": [1]}, "gone without pushing step 3 are [1]"),
        (lambda line: line.update(lost=[3]), {"worker": 0, "step": 2}, "gone without pushing step 1 are []"),
        (lambda line: line["mixing"].update(keep=0.5), {"worker": 0, "step": 2}, "sum to 1.1666"),
        (
            lambda line: line["mixing"]["send"].pop(),
            {"worker": 0, "step": 2},
            "what it keeps and what it may send sum to 0.66",
        ),
        (lambda line: line["mixing"].update(keep=1, send=[], receive=[]), {"worker": 3, "step": 2}, "do not agree"),
        (lambda line: line.pop("mixing"), {"worker": 3, "step": 2}, "do not agree on what they send each other"),
        (lambda line: line.pop("enters"), {"worker": 6, "enters": True}, "it has no model yet"),
        (lambda line: line.update(enters=True), {"worker": 0, "step": 3}, "it has a model"),
        (lambda line: line.update(slowest=0), {"worker": 0, "step": 3}, "slowest is"),
    ],
)
def test_a_release_that_breaks_gossips_promises(change: Change, about: dict[str, Any], says: str) -> None:
    assert says in broken(gossip(), "gossip:ring", change, kind="release", **about)


def test_a_release_before_a_neighbour_has_pushed() -> None:
    lines = gossip()
    held = next(place for place, line in enumerate(lines) if line["kind"] == "hold" and line["step"] == 1)
    worker = lines[held]["worker"]
    release = lines_with(lines, kind="release", worker=worker, step=1)[0]
    early = [*lines[:held], {**release, "t": lines[held]["t"], "slowest": 0}, *lines[held + 1 :]]
    assert "its neighbours" in verdict("gossip:ring", early)
    assert "have not pushed step 0" in verdict("gossip:ring", early)


def test_a_worker_that_is_not_released_although_its_neighbours_have_pushed() -> None:
    lines = gossip()
    late = lines_with(lines, kind="release", step=1)[0]
    assert "held without need" in verdict("gossip:ring", [line for line in lines if line is not late])


@pytest.mark.parametrize("count", [0, 1])
def test_a_hold_that_names_other_workers_than_its_neighbours(count: int) -> None:
    lines = gossip()
    hold = lines_with(lines, kind="hold", step=2)[count]
    others = [worker for worker in (0, 1, 2, 3) if worker not in hold["waiting_for"] and worker != hold["worker"]]
    change: Change = lambda line: line.update(waiting_for=others, waiting_count=len(others))  # noqa: E731
    said = broken(lines, "gossip:ring", change, kind="hold", step=2, worker=hold["worker"])
    assert "waits for" in said or "the neighbours it waits for are" in said


def test_a_joiner_that_starts_at_a_step_whose_graph_is_fixed() -> None:
    said = broken(gossip(), "gossip:ring", lambda line: line.update(step=2), kind="join", worker=6)
    assert "the first step that none has started, 4" in said


@pytest.mark.parametrize(
    ("change", "about", "says"),
    [
        (lambda line: pair_with(line, 0), {"worker": 0, "step": 2}, "worker 0 cannot be its partner"),
        (lambda line: pair_with(line, 9), {"worker": 0, "step": 2}, "worker 9 cannot be its partner"),
        (lambda line: pair_with(line, 2), {"worker": 0, "step": 2}, "is not the active one"),
        (lambda line: pair_with(line, 0), {"worker": 1, "step": 1}, "is not the active one"),
        (lambda line: line["mixing"].update(keep=0.4), {"worker": 0, "step": 2}, "a half"),
        (lambda line: line["mixing"].update(send=[]), {"worker": 0, "step": 2}, "a half"),
        (lambda line: line.pop("enters"), {"worker": 7, "enters": True}, "it has no model yet"),
        (lambda line: line.update(enters=True), {"worker": 0, "step": 2}, "it has a model"),
    ],
)
def test_a_release_that_breaks_adpsgds_promises(change: Change, about: dict[str, Any], says: str) -> None:
    assert says in broken(adpsgd(), "adpsgd:ring", change, kind="release", **about)


def pair_with(line: RecordLine, partner: int) -> None:
    line["mixing"] = {"keep": 0.5, "send": [[partner, 0.5]], "receive": [[partner, 0.5]]}


def test_a_step_on_a_workers_own_model_is_not_stale() -> None:
    said = broken(gossip(), "gossip:ring", lambda line: line.update(staleness=[1]), kind="apply", workers=[0])
    assert "a staleness that cannot be" in said


def test_no_hold_after_the_start_of_adpsgd() -> None:
    lines = adpsgd()
    release = lines_with(lines, kind="release", worker=0, step=2)[0]
    place = lines.index(release)
    hold = {"t": release["t"], "kind": "hold", "worker": 0, "step": 2, "waiting_for": [1], "waiting_count": 1, "reason": ""}
    assert "held without need" in verdict("adpsgd:ring", [*lines[:place], hold, *lines[place:]])

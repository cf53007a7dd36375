"""`polytempo modes check` finds what is wrong with a mode, and nothing where nothing is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from time import monotonic

import pytest
from clusters import MODES
from planted import ASP, BSP, PLANTED, SSP, Copy, Planted, brought
from typer.testing import CliRunner

from polytempo.errors import ModeError
from polytempo.proving.check import CheckReport, check, first_look, follows_the_clock
from polytempo.proving.games import Game, shrunk
from polytempo.proving.small_job import Job
from polytempo.proving.states import canonical, twin
from polytempo.proving.walk import BrokenOnTheWay, Walk
from polytempo.sync.events import Joined, Left, Pushed
from polytempo.sync.spec import Spec, parse_spec

COPIES = list(dict.fromkeys(plant.copy for plant in PLANTED))


def looked_at(spec: Spec, games: int, worlds: int, alone: bool = False) -> CheckReport:
    """No clock: what is played is counted."""
    return check(spec, lambda: 0.0, seconds=math.inf, games=games, worlds=worlds, alone=alone)


#: Of walks, and one that loads torch.
SLOW = ("fetches twice", "averages always", "optimizer reset")


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, id=plant.name, marks=[pytest.mark.long] * (plant.name in SLOW)) for plant in PLANTED],
)
def test_a_planted_mistake_is_found(plant: Planted, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    name = f"planted_{PLANTED.index(plant)}"
    spec = brought(plant.source(), plant.copy.mode, tmp_path, name)
    began = monotonic()
    report = looked_at(spec, games=300, worlds=5000, alone=plant.promise == "alone")
    record_property("seconds", monotonic() - began)
    finding = report.finding
    assert finding is not None, "not found"
    assert re.search(plant.said, finding.line), finding.line
    assert re.fullmatch(plant.promise, finding.promise), finding
    assert re.match(rf"{name}\.py:\d+: ", finding.line), finding.line
    assert len(finding.story) <= 40
    assert report.promises[finding.promise] == "broken"


@pytest.mark.long
@pytest.mark.parametrize("copy", COPIES, ids=[copy.mode for copy in COPIES])
def test_a_copy_without_a_mistake_passes(copy: Copy, tmp_path: Path) -> None:
    spec = brought(copy.source(), copy.mode, tmp_path, f"copy_{COPIES.index(copy)}")
    first_look(spec, 4)
    report = looked_at(spec, games=100, worlds=1000)
    assert report.finding is None, report.finding
    assert report.games > 100
    assert len(report.walks) > 3


@pytest.mark.long
@pytest.mark.parametrize("sync", MODES)
def test_our_modes_keep_their_promises_in_games(sync: str) -> None:
    report = looked_at(parse_spec(sync), games=200, worlds=1)
    assert report.finding is None, report.finding
    assert "broken" not in report.promises.values()


@pytest.mark.proof
@pytest.mark.parametrize("sync", MODES)
def test_our_modes_keep_their_promises(sync: str, record_property: Callable[[str, object], None]) -> None:
    report = check(parse_spec(sync), monotonic)
    record_property("seconds", report.seconds)
    assert report.finding is None, report.finding
    assert report.walks


@pytest.mark.parametrize(
    ("sync", "timed"), [("ssp:1", False), ("bsp", False), ("dssp:1..3", True), ("every:2,wait=1", True), ("anytime:2", True)]
)
def test_modes_that_follow_the_clock_are_known_by_what_they_do(sync: str, timed: bool) -> None:
    assert follows_the_clock(parse_spec(sync)) == timed


# What is said.

WRONG_RATE = next(plant for plant in PLANTED if plant.name == "wrong rate")


def test_the_line_is_where_the_action_is_made_and_the_story_is_the_shortest(tmp_path: Path) -> None:
    spec = brought(WRONG_RATE.source(), "ASP", tmp_path, "said")
    finding = looked_at(spec, games=50, worlds=1).finding
    assert finding is not None
    assert finding.line == (
        f"said.py:{WRONG_RATE.line()}: an update of a push at rate 1, expected 0.5 with 2 active workers; if that is meant, "
        "declare Promises(even=False)"
    )
    assert finding.story == (
        "1. worker 0 joins -> admitted at step 0; held for step 0: 1 of 2 workers have not joined yet",
        "2. worker 1 joins -> admitted at step 0; worker 0 released for step 0; released for step 0",
        "3. worker 0 pushes step 0 (1 sample) -> update of 0:0 at rate 1; released for step 1",
    )


def test_a_first_look_is_one_line_and_passes_what_is_right(tmp_path: Path) -> None:
    wrong = brought(WRONG_RATE.source(), "ASP", tmp_path, "first_wrong")
    with pytest.raises(ModeError, match=rf"^first_wrong\.py:{WRONG_RATE.line()}: an update of a push at rate 1[^\n]*$"):
        first_look(wrong, 8)
    first_look(brought(SSP.source(), SSP.mode, tmp_path, "first_right"), 8)
    first_look(parse_spec("ssp:3"), 8)  # one of ours needs none


def test_the_command_says_what_was_played_and_what_is_broken(tmp_path: Path) -> None:
    import typer

    from polytempo.cli.modes import check_mode

    app = typer.Typer()
    app.command()(check_mode)
    (tmp_path / "right.py").write_text(ASP.source(), "utf-8")
    (tmp_path / "wrong.py").write_text(WRONG_RATE.source(), "utf-8")
    figures = tmp_path / "figures.json"
    well = CliRunner().invoke(app, [f"{tmp_path}/right.py:ASP", "--seconds", "0.5", "--json", str(figures)])
    assert well.exit_code == 0, well.output
    assert "right.py:ASP keeps what it promises, as far as it was played" in well.output
    assert json.loads(figures.read_text())["promises"]["even"] == "ok"
    broken = CliRunner().invoke(app, [f"{tmp_path}/wrong.py:ASP", "--seconds", "5"])
    assert broken.exit_code == 1
    assert broken.output.startswith(f"wrong.py:{WRONG_RATE.line()}: an update of a push at rate 1")
    assert re.search(r"^  even +broken", broken.output, re.MULTILINE)


def test_an_argument_that_is_not_given_is_that_of_the_example(tmp_path: Path) -> None:
    from polytempo.cli.modes import spec_to_check

    brought(SSP.source(), SSP.mode, tmp_path, "example")
    assert spec_to_check("example.py:SSP").text == "example.py:SSP:3"
    assert spec_to_check("example.py:SSP,scale=1").text == "example.py:SSP:3,scale=1"
    assert spec_to_check("example.py:SSP:1").text == "example.py:SSP:1"
    assert spec_to_check("dssp").text == "dssp:3..15"
    assert spec_to_check("asp").text == "asp"


# The parts.


def test_a_walk_finds_the_shortest_way_and_says_when_it_is_not_over(tmp_path: Path) -> None:
    plant = next(plant for plant in PLANTED if plant.name == "runs ahead of releases")
    job = Job(brought(plant.source(), plant.copy.mode, tmp_path, "walked"), 1, 3)
    with pytest.raises(BrokenOnTheWay, match="computes for step 1 without a release") as found:
        Walk(job)
    assert [move for move, _ in found.value.way] == [("start", 0), ("told", 0), ("told", 0), ("computed", 0)]
    right = Job(parse_spec("ssp:0"), 2, 2)
    assert Walk(right).exhaustive
    assert not Walk(right, most=10).exhaustive
    assert not Walk(replace(right, losses=1), is_over=lambda: True).exhaustive


def test_a_copy_of_a_state_shares_nothing_that_changes(tmp_path: Path) -> None:
    spec = brought(SSP.source(), SSP.mode, tmp_path, "copied")
    for policy in (parse_spec("anytime:2").policy(2), spec.policy(2)):
        policy.handle(Joined(0), 0.0)
        before = canonical(policy)
        other = twin(policy, {})
        assert canonical(other) == before
        other.handle(Joined(1), 0.0)
        other.handle(Pushed(0, 0), 1.0)
        assert canonical(policy) == before != canonical(other)


def test_a_copy_knows_the_very_pushes_that_it_was_given() -> None:
    push = Pushed(0, 0)
    kept = {"arrived": [push], "also": [push], "seed": Random(3)}
    copied = twin(kept, {})
    assert copied["arrived"] is not kept["arrived"]
    assert copied["arrived"][0] is copied["also"][0] is push
    assert copied["seed"].random() == Random(3).random()
    assert kept["seed"].random() == Random(3).random()


def test_generators_in_a_state_tell_it_from_others() -> None:
    one, other = Random(3), Random(3)
    assert canonical(one) == canonical(other)
    other.random()
    assert canonical(one) != canonical(other)


def test_games_shrink_to_the_moves_that_matter() -> None:
    game = Game(4, 9, tuple(range(200, 260)), 4, "deaths")
    small = shrunk(game, lambda game: 217 in game.moves and 243 in game.moves and game.workers >= 2, 2000)
    assert small == Game(2, 1, (217, 243), 0, "slowest")


def test_a_worker_that_comes_back_does_not_wait_for_a_push_of_its_life_before(tmp_path: Path) -> None:
    policy = brought(BSP.source(), "BSP", tmp_path, "back").policy(2)
    for event in (Joined(0), Joined(1), Pushed(0, 0), Left(0), Joined(0), Pushed(1, 0)):
        policy.handle(event, 0.0)
    actions = policy.handle(Pushed(0, 0), 0.0)
    assert [push.worker for push in actions[0].pushes] == [0, 0, 1]

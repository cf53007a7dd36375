"""Blocks of local steps, the policies: `local:k`, `adacomm:k` and `diloco:k`. What each release says of the next block."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from driving import Job
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import Game, answers, only, play, played, under_each

from polytempo.errors import BrokenInvariant, SpecError
from polytempo.records.check import check_lines
from polytempo.records.files import to_text
from polytempo.records.lines import event_line, event_of
from polytempo.records.replay import replay
from polytempo.sync.actions import Action, Apply, Release
from polytempo.sync.adacomm import LossPeriod, mean_loss, next_period
from polytempo.sync.barrier import Barrier
from polytempo.sync.blocks import Averaging
from polytempo.sync.corrections import Corrections
from polytempo.sync.events import Measured, Pushed
from polytempo.sync.local_sgd import FixedPeriod
from polytempo.sync.spec import parse_spec

moderately = settings(max_examples=100, deadline=None, derandomize=True, database=None)

MODES = ("local:3,after=2", "adacomm:16,every=2", "diloco:4")


def periods(actions: Sequence[Action]) -> set[int]:
    return {release.directive.period if release.directive else 0 for release in only(Release, actions)}


def block(job: Job, loss: float | None = None, lr: float | None = None, now: float | None = None, count: int = 1) -> int:
    """All workers end a block; the period of the next."""
    for worker in list(job.steps):
        actions = job.push(worker, now, loss=loss, lr=lr, count=count)
    (period,) = periods(actions)
    assert len(only(Release, actions)) == len(job.steps)
    return period


# The rule of AdaComm.


@pytest.mark.parametrize(
    ("first", "loss", "before", "rate", "period"),
    [
        (20, 0.575, 2.3, 1.0, 10),  # sqrt(1/4) * 20
        (20, 0.575, 2.3, 0.2 / 0.02, 32),  # ceil(sqrt(10/4) * 20) = ceil(31.6)
        (10, 2.0, 2.0, 1.0, 10),
        (20, 2.3 * 1e-9, 2.3, 1.0, 1),
        (1, 1e-30, 1.0, 1.0, 1),
    ],
)
def test_the_vectors(first: int, loss: float, before: float, rate: float, period: int) -> None:
    assert next_period(first, loss / before, rate) == period


def adaptive(sync: str = "adacomm:20", workers: int = 2) -> Job:
    return Job(sync, workers).start()


def test_the_vectors_through_a_job() -> None:
    job = adaptive("adacomm:20,every=1")
    assert periods(job.history[-1][2]) == {20}
    assert block(job, 2.3, 0.2, now=0.5) == 20  # F_0, and the interval is not over
    assert block(job, 0.575, 0.2, now=1.5) == 10
    assert block(job, 0.575, 0.02, now=2.5) == 32


def test_a_flat_loss_shortens_the_period_by_gamma() -> None:
    job = adaptive("adacomm:10,every=1")
    assert block(job, 2.0, 0.1, now=1.0) == 5  # 10 asked for, which is not smaller
    assert block(job, 2.0, 0.1, now=2.0) == 3  # ceil(2.5)
    assert [block(job, 2.0, 0.1, now=3.0 + step) for step in range(4)] == [2, 1, 1, 1]
    other = adaptive("adacomm:10,every=1,gamma=0.9")
    assert [block(other, 2.0, 0.1, now=1.0 + step) for step in range(4)] == [9, 9, 9, 9]  # ceil(0.9 * 9) = 9


def test_a_period_changes_with_the_first_block_that_closes_after_the_interval() -> None:
    job = adaptive("adacomm:20,every=60")
    assert [block(job, loss, 0.1, now) for loss, now in ((4.0, 10.0), (1.0, 59.9), (1.0, 61.0))] == [20, 20, 10]
    assert block(job, 0.25, 0.1, now=120.9) == 10  # 60 s after 61 s
    assert block(job, 0.25, 0.1, now=121.0) == 5


def test_a_paper_interval_is_a_minute_and_begins_with_the_first_step() -> None:
    job = Job("adacomm:20", 2)
    job.join(0, now=5.0)
    job.join(1, now=100.0)
    assert block(job, 4.0, 0.1, now=101.0) == 20
    assert block(job, 1.0, 0.1, now=159.0) == 20
    assert block(job, 1.0, 0.1, now=160.0) == 10


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0, -1.0, None])
def test_a_loss_that_says_nothing_leaves_the_period_as_it_is(loss: float | None) -> None:
    job = adaptive("adacomm:20,every=1")
    block(job, 4.0, 0.1, now=0.5)
    assert block(job, loss, 0.1, now=5.0) == 20
    assert block(job, 1.0, 0.1, now=6.0) == 10  # and the interval goes on until a loss says something


def test_a_first_loss_that_says_nothing_is_not_the_first() -> None:
    job = adaptive("adacomm:20,every=1")
    assert block(job, math.nan, 0.1, now=1.0) == 20
    assert block(job, 4.0, 0.1, now=1.5) == 10  # the first; it is flat against itself
    assert block(job, 0.04, 0.1, now=3.0) == 2


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_rate_that_says_nothing_leaves_the_period_as_it_is(rate: float | None) -> None:
    job = adaptive("adacomm:20,every=1")
    block(job, 4.0, 0.1, now=0.5)
    assert block(job, 1.0, rate, now=5.0) == 20


def test_the_mean_loss_is_weighted_by_samples() -> None:
    assert mean_loss((Pushed(0, 0, 30, measured=Measured(1.0)), Pushed(1, 0, 10, measured=Measured(5.0)))) == 2.0
    assert mean_loss((Pushed(0, 0, 30, measured=Measured(1.0)), Pushed(1, 0, 10))) is None
    assert mean_loss((Pushed(0, 0, 0, measured=Measured(1.0)),)) is None


def test_an_upper_bound_of_the_period() -> None:
    job = adaptive("adacomm:20,every=1,most=16")
    assert periods(job.history[-1][2]) == {16}
    assert block(job, 1.0, 0.2, now=0.5) == 16
    assert block(job, 1.0, 0.0002, now=1.5) == 16  # 633 asked for


STEPS = st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(0, 3)), min_size=1, max_size=30)


@given(first=st.integers(1, 500), gamma=st.floats(0, 0.99), steps=STEPS)
@moderately
def test_at_a_constant_rate_the_period_is_a_whole_number_and_never_grows(
    first: int, gamma: float, steps: list[tuple[float, float]]
) -> None:
    rule, now, seen = LossPeriod(first, every=1.0, gamma=gamma), 0.0, [first]
    rule.start(0.0)
    for loss, took in steps:
        now += took
        rule.close((Pushed(0, 0, 32, measured=Measured(loss, 0.1)),), (0,), now)
        seen.append(rule.period)
    assert all(type(period) is int and period >= 1 for period in seen)
    assert seen == sorted(seen, reverse=True)


@given(
    first=st.integers(1, 500),
    most=st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(1e-9, 1e9) | st.just(math.nan), st.floats(1e-9, 10)), max_size=20),
)
@moderately
def test_at_any_rate_the_period_is_a_whole_number_within_its_bounds(
    first: int, most: int, steps: list[tuple[float, float]]
) -> None:
    rule = LossPeriod(first, every=1.0, most=most)
    rule.start(0.0)
    for now, (loss, lr) in enumerate(steps, 1):
        rule.close((Pushed(0, 0, 32, measured=Measured(loss, lr)),), (0,), float(now))
        assert type(rule.period) is int
        assert 1 <= rule.period <= most


@given(first=st.integers(1, 300), ratio=st.floats(1e-6, 1.0))
@moderately
def test_the_rule_is_the_one_of_the_paper(first: int, ratio: float) -> None:
    """Not with tau_0 inside the root, as another implementation has it."""
    exact = math.sqrt(ratio) * first
    assert exact - 1e-6 <= next_period(first, ratio) < max(exact, 0) + 1 + 1e-6


# Post-local SGD.


def test_after_a_number_of_blocks_of_one_the_blocks_are_whole() -> None:
    job = Job("local:8,after=3", 2).start()
    assert periods(job.history[-1][2]) == {1}
    assert [block(job) for _ in range(5)] == [1, 1, 8, 8, 8]


def test_after_the_first_fall_of_the_rate_the_blocks_are_whole() -> None:
    job = Job("local:8,after=decay", 2).start()
    rates = (0.1, 0.2, 0.1, 0.09, 0.2)  # a warm-up above the first is no fall below it
    assert [block(job, lr=lr) for lr in rates] == [1, 1, 1, 8, 8]


def test_a_job_that_goes_on_from_a_checkpoint_knows_how_far_it_was() -> None:
    for begin, period in ((0, 1), (2, 1), (3, 8), (100, 8)):
        policy = parse_spec("local:8,after=3").policy(2)
        policy.begin_at(begin)
        job = Job(policy, 2).start()
        assert periods(job.history[-1][2]) == {period}
        assert {release.step for release in only(Release, job.history[-1][2])} == {begin}


# Rounds with a period.


@pytest.mark.parametrize("sync", ["local:4", "diloco:4", "adacomm:4"])
def test_a_block_is_a_round_and_its_length_comes_with_each_release(sync: str) -> None:
    job = Job(sync, 3).start()
    assert periods(job.history[-1][2]) == {4}
    for worker in (2, 0):
        assert [type(action).__name__ for action in job.push(worker)] == ["Hold"]
    actions = job.push(1)
    assert [[push.worker for push in apply.pushes] for apply in only(Apply, actions)] == [[0, 1, 2]]
    assert [(release.worker, release.directive.period) for release in only(Release, actions)] == [(2, 4), (0, 4), (1, 4)]


def test_a_worker_that_dies_inside_a_block_is_left_out_and_a_joiner_starts_at_the_open_one() -> None:
    job = Job("local:4", 3).start()
    job.push(0)
    job.push(1)
    actions = job.leave(2, "lost")
    assert [[push.worker for push in apply.pushes] for apply in only(Apply, actions)] == [[0, 1]]
    (release,) = only(Release, job.join(2))
    assert (release.step, release.directive.period) == (1, 4)


def test_rounds_of_bsp_say_no_period() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    assert periods(job.push(1)) == {0}
    assert all("period" not in line for line in job.lines)


every_mode = under_each(MODES)


@every_mode
def test_each_round_has_one_period_for_all_and_decides_as_bsp_does(sync: str, game: Game) -> None:
    of_step: dict[int, set[int]] = {}
    for job in play(sync, game):
        _, _, actions = job.history[-1]
        for release in only(Release, actions):
            of_step.setdefault(release.step, set()).add(release.directive.period)
    assert all(len(found) == 1 and min(found) >= 1 for found in of_step.values())
    plain = [[without_period(action) for action in actions] for _, _, actions in job.history]
    assert plain == answers("bsp", job)


def without_period(action: Action) -> Action:
    return Release(action.worker, action.step, action.slowest) if isinstance(action, Release) else action


@every_mode
def test_the_record_passes_the_checker_and_replays_from_its_text(sync: str, game: Game) -> None:
    job = played(sync, game)
    assert check_lines(job.lines, parse_spec(sync), job.workers) == len(job.lines)
    lines = [json.loads(to_text(line)) for line in job.lines]
    decided = [line for line in lines if line["kind"] not in ("push", "leave", "tick")]
    assert replay(lines, parse_spec(sync).policy(job.workers)) == len(decided)


# Records.


@pytest.mark.parametrize(
    "push",
    [
        Pushed(1, 2, 32),
        Pushed(1, 2, 32, count=8),
        Pushed(1, 2, 32, (("lr", 0.1),), 8, Measured(2.5, 0.1)),
        Pushed(1, 2, 32, measured=Measured(1e-300)),
        Pushed(1, 2, 32, count=3, measured=Measured(work=48.0, computed=0.25, drawn=(1, 7))),
    ],
)
def test_a_push_is_read_back_from_its_line(push: Pushed) -> None:
    line = event_line(push, 1.5)
    assert event_of(json.loads(to_text(line or {}))) == push


def test_a_record_of_adacomm_replays_with_its_losses_and_not_with_others() -> None:
    job = adaptive("adacomm:20,every=1")
    losses = (4.0, 0.5, 0.3, 0.1, 0.1)
    seen = [block(job, loss, 0.1, now=0.5 + number, count=20) for number, loss in enumerate(losses)]
    assert seen == [20, 8, 6, 4, 2]
    assert check_lines(job.lines, parse_spec("adacomm:20,every=1"), 2) == len(job.lines)
    replay(job.lines, parse_spec("adacomm:20,every=1").policy(2))
    pushes = [line for line in job.lines if line["kind"] == "push"]
    assert {(line["count"], line["lr"]) for line in pushes} == {(20, 0.1)}
    assert [line["period"] for line in job.lines if line["kind"] == "release"][::2] == [20, *seen]
    for change in ({"loss": 3.9}, {"lr": 0.05}):
        other = [{**line, **change} if line["kind"] == "push" and line["step"] == 1 else line for line in job.lines]
        with pytest.raises(BrokenInvariant, match="replay expected"):
            replay(other, parse_spec("adacomm:20,every=1").policy(2))
    with pytest.raises(BrokenInvariant, match="replay expected"):
        replay(job.lines, parse_spec("adacomm:20,every=1,gamma=0.1").policy(2))


# Specs.


@pytest.mark.parametrize(
    ("text", "averaging"),
    [
        ("local:8", Averaging(8)),
        ("local:8,state=mean", Averaging(8, state="mean")),
        ("local:8,momentum=0.3", Averaging(8, outer_momentum=0.3, in_lr=True, state="reset")),
        ("local:8,momentum=0.3,state=keep", Averaging(8, outer_momentum=0.3, in_lr=True)),
        ("local:8,momentum=0", Averaging(8)),
        ("diloco:100", Averaging(100, 0.7, 0.9, nesterov=True)),
        ("diloco:100,outer_lr=1,outer_momentum=0", Averaging(100)),
        ("diloco:100,fragments=4,overlap=24", Averaging(100, 0.7, 0.9, nesterov=True, fragments=4, overlap=24)),
        (
            "diloco:100,quorum=3,fragments=4",
            Averaging(100, 0.7, 0.9, nesterov=True, fragments=4, decoupled=True, waits=False),
        ),
        ("diloco:100,quorum=3,grace=inf", Averaging(100, 0.7, 0.9, nesterov=True, decoupled=True)),
    ],
)
def test_what_workers_do_at_the_end_of_a_block(text: str, averaging: Averaging) -> None:
    spec = parse_spec(text)
    assert spec.averaging == averaging
    assert spec.capabilities.rounds != averaging.decoupled
    assert spec.corrections == Corrections()  # block momentum is not the momentum of a correction
    assert spec.averaging.plain == (text in ("local:8", "local:8,state=mean", "local:8,momentum=0") or "outer_lr=1" in text)


def test_periods_of_the_specs() -> None:
    for text, kind, first in (
        ("local:8", FixedPeriod, 8),
        ("local:8,after=2", FixedPeriod, 1),
        ("adacomm:9", LossPeriod, 9),
    ):
        policy = parse_spec(text).policy(2)
        assert isinstance(policy, Barrier)
        assert type(policy.rule) is kind
        assert policy.rule.period == first


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local", ["local needs a whole number K of at least 1", "local:8"]),
        ("local:0", ["at least 1", "'0'"]),
        ("local:8,after=0", ["a whole number of at least 1, or decay", "'0'", "after=1000"]),
        ("local:8,after=later", ["or decay", "'later'"]),
        ("local:8,momentum=1", ["at least 0 and below 1", "'1'"]),
        ("local:8,state=drop", ["keep or mean or reset", "'drop'", "state=keep"]),
        ("local:8,every=2", ["local has no option 'every'"]),
        ("adacomm:20,gamma=1", ["below 1", "'1'"]),
        ("adacomm:20,every=0", ["above 0", "'0'", "every=60"]),
        ("adacomm:20,most=0", ["at least 1", "'0'"]),
        ("adacomm:20,hold=yes", ["0 or 1", "'yes'"]),
        ("diloco:10,fragments=4", ["diloco:10 cannot be cut into 4 fragments evenly", "diloco:8"]),
        ("diloco:3,fragments=4", ["cannot be cut into 4 fragments", "diloco:4"]),
        ("diloco:8,fragments=4,overlap=2", ["overlap=2 must be below the 2 steps between two fragments"]),
        ("diloco:8,overlap=8", ["overlap=8 must be below the 8 steps"]),
        ("diloco:8,outer_lr=0", ["above 0"]),
        ("diloco:8,grace=1", ["'grace' of diloco needs a quorum", "quorum=2"]),
        ("diloco:8,drop=1", ["'drop' of diloco needs a quorum"]),
        ("diloco:8,quorum=0", ["at least 1", "'0'"]),
        ("diloco:8,quorum=2,grace=-1", ["a number of seconds of at least 0, auto, or inf", "'-1'"]),
        ("diloco:8,quorum=2,grace=never", ["auto, or inf", "'never'", "grace=0.5"]),
        ("diloco:8,quorum=2,overlap=1", ["overlap=1 has no place beside quorum", "leave it out"]),
        ("diloco:8,quorum=2,fragments=3", ["cannot be cut into 3 fragments evenly"]),
    ],
)
def test_a_wrong_spec_is_answered_in_one_line(text: str, says: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    said = str(caught.value)
    assert "\n" not in said
    assert [words for words in says if words not in said] == []

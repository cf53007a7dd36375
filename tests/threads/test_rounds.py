"""BSP without a sequencer: uneven data, changed gradients, unlike ranks, and deaths at any point of a step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_equal, loss_of, small_batches, small_model, trained_alone, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worlds import Opening, attempts, everywhere, nothing_left, opening

from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.reducer import sums
from polytempo.reducer.ballot import Ballot, outcome, size_of, unpack
from polytempo.reducer.coordination import ByBallot
from polytempo.reducer.peers import PeerExchange
from polytempo.reducer.sums import VotingGroup
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.summation import in_order
from polytempo.testing.threads import GroupJob
from polytempo.train.optimizer import DistributedOptimizer

__all__ = ["nothing_left", "opening"]
pytestmark = pytest.mark.timeout(60)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BUCKET", 100)


def wrapped(session: Session, model: nn.Module, **options: object) -> tuple[nn.Module, DistributedOptimizer]:
    mine = copy.deepcopy(model)
    return mine, DistributedOptimizer(sgd(list(mine.parameters())), **options)  # type: ignore[arg-type]


# Uneven data.


@pytest.mark.parametrize("counts", [(3, 5), (4, 0), (1, 2, 6), (2, 2, 2)], ids=str)
def test_who_has_run_out_takes_part_with_nothing(counts: tuple[int, ...]) -> None:
    """What is left of the joint batch is what the others have; all replicas end alike."""
    model, data = small_model(), small_batches(max(counts), (4,) * len(counts))
    there = [[batch for rank, batch in enumerate(step) if number < counts[rank]] for number, step in enumerate(data)]

    def work(session: Session) -> nn.Module:
        mine, optimizer = wrapped(session, model)
        for step in data[: counts[session.rank]]:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return mine

    with GroupJob(len(counts)) as job:
        models = job.run(work)
    for got in models:
        assert_close(weights(got), trained_alone(model, sgd, there), rtol=1e-9)
        assert_equal(weights(got), weights(models[0]))


def test_epochs_of_different_length_end_together() -> None:
    model, data, counts = small_model(), small_batches(12, (4, 4)), (2, 4)
    there = [[step[1]] if place % 4 >= 2 else step for place, step in enumerate(data)]

    def work(session: Session) -> list[torch.Tensor]:
        mine, optimizer = wrapped(session, model)
        for epoch in range(3):
            for step in data[4 * epoch : 4 * epoch + counts[session.rank]]:
                optimizer.zero_grad()
                loss_of(mine, step[session.rank]).backward()
                optimizer.step()
            optimizer.join()
        return weights(mine)

    with GroupJob(2) as job:
        for got in job.run(work):
            assert_close(got, trained_alone(model, sgd, there), rtol=1e-9)


def test_two_optimizers_that_take_turns_end_together() -> None:
    first, second, data = small_model(), small_model(), small_batches(4, (4, 4))

    def work(session: Session) -> None:
        (one, one_optimizer), (two, two_optimizer) = wrapped(session, first), wrapped(session, second)
        for step in data[: 1 if session.rank else 4]:
            for mine, optimizer in ((one, one_optimizer), (two, two_optimizer)):
                optimizer.zero_grad()
                loss_of(mine, step[session.rank]).backward()
                optimizer.step()

    with GroupJob(2) as job:
        job.run(work)


# What is changed after it was sent.


@pytest.mark.parametrize("who", [{0}, {1}, {0, 1, 2}], ids=str)
def test_a_gradient_changed_after_backward_counts_as_it_is_at_step(who: set[int]) -> None:
    model, data = small_model(), small_batches(4, (4, 4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        mine, optimizer = wrapped(session, model)
        for number, step in enumerate(data):
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            if session.rank in who and number % 2:
                for param in mine.parameters():
                    assert param.grad is not None
                    param.grad.mul_(3.0)
            optimizer.step()
        return weights(mine)

    alone = copy.deepcopy(model)
    optimizer = sgd(list(alone.parameters()))
    for number, step in enumerate(data):
        optimizer.zero_grad()
        for rank, batch in enumerate(step):
            (loss_of(alone, batch) * (3 if rank in who and number % 2 else 1) / 3).backward()
        optimizer.step()
    with GroupJob(3) as job:
        for got in job.run(work):
            assert_close(got, weights(alone), rtol=1e-9)


def test_a_backward_that_was_thrown_away_does_not_count() -> None:
    model, data = small_model(), small_batches(3, (4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        mine, optimizer = wrapped(session, model)
        for step in data:
            if session.rank == 0:
                loss_of(mine, data[0][1]).backward()
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return weights(mine)

    with GroupJob(2) as job:
        for got in job.run(work):
            assert_close(got, trained_alone(model, sgd, data), rtol=1e-9)


# Ranks that are not alike.


def test_other_rates_are_named() -> None:
    model, data = small_model(), small_batches(1, (4, 4, 4))

    def work(session: Session) -> str:
        mine, optimizer = wrapped(session, model)
        optimizer.param_groups[0]["lr"] = 0.1 if session.rank < 2 else 0.3
        loss_of(mine, data[0][session.rank]).backward()
        with pytest.raises(UsageError, match=r"rank 0 has lr=0\.1 in group 0 where rank 2 has lr=0\.3") as error:
            optimizer.step()
        session.leaving.of[LeavingStep.JOIN].clear()
        return str(error.value)

    with GroupJob(3) as job:
        assert len(set(job.run(work))) == 1


def test_other_models_are_named() -> None:
    def work(session: Session) -> None:
        model = nn.Linear(3, 2 + session.rank)
        with pytest.raises(UsageError, match=r"rank 0 has parameter .* where rank 1 has parameter"):
            DistributedOptimizer(sgd(list(model.parameters())))
        session.leaving.of[LeavingStep.JOIN].clear()

    with GroupJob(2) as job:
        job.run(work)


# Deaths.


class Died(Exception):
    """The end of a process, for its thread."""


def die_in(session: Session, point: str) -> None:
    """Let a rank end at some point of its next step."""
    world = session.world()

    def die(*_: object, **__: object) -> None:
        world.close(politely=False)
        raise Died

    reducer = session.leaving.of[LeavingStep.JOIN][0].__self__._reducer  # type: ignore[attr-defined]
    assert isinstance(reducer, PeerExchange)
    made: Any = reducer.coordination
    assert isinstance(made, ByBallot)
    if point == "before it reduced":
        made._sums._reduce = die  # type: ignore[method-assign]
    elif point == "before it voted":
        made._vote = die  # type: ignore[method-assign]
    elif point == "after it voted":
        vote = made._vote
        made._vote = lambda *a: (vote(*a), die())[0]  # type: ignore[method-assign]
    elif point == "while it voted":
        tell = world.engine.messages.notify

        def tell_one(ranks: list[int], *note: int) -> None:  # in the thread that drives, which cannot close the world
            tell(list(ranks)[:1], *note)
            for link in list(world.engine.messages.links.values()):
                link.close()
            raise Died

        def vote(*ballot: object) -> None:
            world.engine.messages.notify = tell_one  # type: ignore[method-assign, assignment]
            type(made)._vote(made, *ballot)  # type: ignore[arg-type]

        made._vote = vote  # type: ignore[method-assign, assignment]


POINTS = ["before it reduced", "before it voted", "while it voted", "after it voted"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_those_who_are_left_stay_alike_and_go_on(who: int, point: str) -> None:
    """The step in which it died is made with it or without it, by all alike."""
    model, data = small_model(), small_batches(6, (4, 4, 4))
    with_it = [step if number <= 2 else [b for r, b in enumerate(step) if r != who] for number, step in enumerate(data)]
    without = [step if number < 2 else [b for r, b in enumerate(step) if r != who] for number, step in enumerate(data)]

    def work(session: Session) -> list[torch.Tensor] | None:
        mine, optimizer = wrapped(session, model)
        try:
            for number, step in enumerate(data):
                optimizer.zero_grad()
                loss_of(mine, step[session.rank]).backward()
                if number == 2 and session.rank == who:
                    die_in(session, point)
                optimizer.step()
        except Died:
            session.leaving.of[LeavingStep.JOIN].clear()
            return None
        return weights(mine)

    with GroupJob(3, least=2) as job:
        got = [result for result in job.run(work) if result is not None]
    assert len(got) == 2
    assert_equal(got[0], got[1])
    wanted = [trained_alone(model, sgd, data) for data in (with_it, without)]
    close = [all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(got[0], one, strict=True)) for one in wanted]
    assert any(close)
    assert close[0] if point == "after it voted" else True
    assert close[1] if point in ("before it reduced", "before it voted") else True


def test_without_leave_to_go_on_the_dead_one_is_named_by_all() -> None:
    model, data = small_model(), small_batches(2, (4, 4, 4))
    gone = threading.Event()

    def work(session: Session) -> None:
        mine, optimizer = wrapped(session, model)
        loss_of(mine, data[0][session.rank]).backward()
        session.leaving.of[LeavingStep.JOIN].clear()
        if session.rank == 1:
            session.world().close(politely=False)
            gone.set()
            return
        with pytest.raises(PeerError, match="rank 1 is gone"):
            optimizer.step()

    with GroupJob(3) as job:
        job.run(work)
    assert gone.is_set()


# Ballots.

BALLOTS = st.builds(
    Ballot,
    weight=st.floats(0, 100),
    ran_out=st.booleans(),
    skips=st.booleans(),
    digest=st.integers(0, 2),
    changed=st.frozensets(st.integers(0, 9)),
    absent=st.frozensets(st.integers(0, 20)),
    gradient=st.integers(0, 3),
    loss=st.none() | st.floats(-1e9, 1e9),
    lr=st.none() | st.floats(0, 10),
    seconds=st.floats(0, 1e9),
)
settled: Callable[..., object] = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@given(ballot=BALLOTS)
@settled
def test_a_ballot_is_read_as_it_was_written(ballot: Ballot) -> None:
    data = ballot.pack(10, 21)
    assert len(data) == size_of(10, 21)
    assert unpack(data, 10, 21) == ballot


@given(ballots=st.lists(BALLOTS, min_size=1, max_size=6), seed=st.randoms(use_true_random=False))
@settled
def test_the_outcome_follows_from_those_who_have_data(ballots: list[Ballot], seed: object) -> None:
    found, active = outcome(ballots), [ballot for ballot in ballots if not ballot.ran_out]
    assert found.over == (not active)
    assert found.total == in_order(ballot.weight for ballot in active)
    assert found.skipped == any(ballot.skips for ballot in active)
    if active and not found.skipped:
        assert set(found.again) == set().union(*(ballot.changed for ballot in active))
    weighing = [ballot for ballot in active if ballot.weight > 0]  # a gradient of weight 0 counts for nothing
    assert set(found.absent) == (set.intersection(*(set(b.absent) for b in weighing)) if weighing else set())
    assert (found.unlike is None) == (len({ballot.digest for ballot in active if ballot.digest}) <= 1)  # 0: not compared
    gradients = [ballot.gradient for ballot in active if ballot.gradient]
    assert (found.alike is None) == (len(set(gradients)) == len(gradients))
    assert found.alike is None or len({ballots[index].gradient for index in found.alike}) == 1


def test_a_vote_that_is_learned_from_another_rank_is_one_of_the_ranks_that_took_part(opening: Opening) -> None:
    """Rank 2 dies when rank 0 has seen a vote to its end, and rank 1 has not: the ballots are of three, the group of two."""
    worlds = opening("memory", 3)
    voters = everywhere(worlds, lambda world: VotingGroup(world, 0, 1))
    voters[0].ballots, voters[0].voted, voters[0]._votes = [b"a", b"b", b"c"], (0, 1, 2), 1
    worlds[2].close(politely=False)
    lost = RankLost("rank 2 is gone", (2,))
    assert attempts(worlds[:2], lambda world: voters[world.rank].form_again(lost)) == [False, True]
    for one in voters[:2]:
        assert (one.ballots, one.voted, one.group.ranks) == ([b"a", b"b", b"c"], (0, 1, 2), (0, 1))

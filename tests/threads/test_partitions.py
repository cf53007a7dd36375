"""A network that breaks between ranks that are alive: at most one side goes on, and the others end with the reason.

Links are cut as kernels give up silent ones: an end is lost, and no kernel has said that the other process has ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from test_lost_ranks import sum_over, took_part
from worlds import Opening, alone, attempts, nothing_left, opening

from polytempo.collectives.world import World
from polytempo.errors import RankLost, UsageError
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

__all__ = ["nothing_left", "opening"]

Pairs = tuple[tuple[int, int], ...]


def cut(worlds: Sequence[World], pairs: Iterable[tuple[int, int]], both: bool = True) -> None:
    """The first of each pair hears nothing more of the second; and the other way round."""
    for one, other in pairs:
        for here, there in ((one, other), (other, one))[: 2 if both else 1]:
            link: Any = worlds[here].engine.messages.links[there]
            link._other, link.silent = link, True  # what it says when it closes reaches nobody
            link._lost("nothing was heard of its host for too long")


def go_on(world: World) -> tuple[int, ...]:
    """As a step does: form again, and add up, until that works; the ranks that took part. Else its process ends."""
    while True:
        try:
            group = world.reform()
        except RankLost:
            world.close(politely=False)
            raise
        try:
            total = sum_over(group)
        except RankLost:
            continue
        assert took_part(total) == list(group.ranks)
        return group.ranks


def outcomes(worlds: Sequence[World]) -> list[Any]:
    """The group in which each rank has gone on, or why it has not."""
    for world in worlds:
        world.patience = 0.1
    found = attempts(worlds, go_on)
    assert all(isinstance(one, tuple | RankLost) for one in found), found
    return found


def broken(size: int) -> Iterator[Pairs]:
    """All ways to break links between ranks, of those that differ by the ranks' numbers only one."""
    every, seen = list(combinations(range(size), 2)), set[Pairs]()
    for count in range(1, len(every) + 1):
        for pairs in combinations(every, count):
            form = min(tuple(sorted(tuple(sorted((p[a], p[b]))) for a, b in pairs)) for p in permutations(range(size)))
            if form not in seen:
                seen.add(form)  # type: ignore[arg-type]
                yield pairs


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(5, marks=pytest.mark.proof)])
def test_whatever_links_break_one_group_goes_on_at_most(opening: Opening, size: int) -> None:
    for pairs in broken(size):
        worlds = opening("memory", size)
        cut(worlds, pairs)
        found = outcomes(worlds)
        groups = {one for one in found if isinstance(one, tuple)}
        assert len(groups) <= 1, (pairs, found)
        for group in groups:
            assert 2 * len(group) > size, (pairs, found)
            assert not any(set(pair) <= set(group) for pair in pairs)
            assert [rank for rank, one in enumerate(found) if isinstance(one, tuple)] == list(group)
        if len({rank for pair in pairs for rank in pair}) - 1 == len(pairs) < size - 1:  # one rank's links are broken
            assert groups, (pairs, found)


def test_two_against_two_end_with_the_reason(opening: Opening) -> None:
    worlds = opening("memory", 4)
    cut(worlds, [(0, 2), (0, 3), (1, 2), (1, 3)])
    for rank, error in enumerate(outcomes(worlds)):
        others = ("2, 3", "0, 1")[rank // 2]
        assert f"nothing is heard of ranks {others}, which may be alive behind a broken link" in str(error)
        assert "of 4 ranks are here" in str(error)


def test_a_rank_that_hears_and_is_not_heard_is_told_that_the_others_go_on(opening: Opening) -> None:
    """One way only: its own links say nothing of it."""
    worlds = opening("memory", 3)
    cut(worlds, [(0, 2)], both=False)
    one, other, third = outcomes(worlds)
    assert one == other == (0, 1)
    assert str(third) == "the other ranks go on without rank 2: another rank has heard nothing of rank 2"


def test_a_process_that_has_ended_needs_no_vote(opening: Opening) -> None:
    """min_workers is as documented: one rank of three may go on alone, where the kernel says that the others have ended."""
    worlds = opening("memory", 3)
    for world in worlds[1:]:
        world.close(politely=False)
    assert outcomes(worlds[:1]) == [(0,)]


def test_the_coordinators_word_decides(opening: Opening) -> None:
    """A single rank goes on by it, and two that are more than half do not without; a closed connection is no word."""
    worlds, words = opening("memory", 3, hosts=alone(3)), [frozenset({1, 2}), frozenset[int](), frozenset[int]()]
    for world, word in zip(worlds, words, strict=True):
        world.word = lambda word=word: word  # type: ignore[misc]
    cut(worlds, [(0, 1), (0, 2)])
    first, *rest = outcomes(worlds)
    assert first == (0,)
    for rank, error in enumerate(rest, 1):
        which = "(rank 0|ranks 0, [12])"  # one of them may have ended before the other
        assert re.match(f"rank {rank} cannot reach {which}, and the coordinator has not given up {which} in", str(error))
    worlds = opening("memory", 2, hosts=alone(2))
    worlds[0].word = frozenset
    worlds[1].close(politely=False)
    assert "cannot reach rank 1" in str(outcomes(worlds[:1])[0])


def test_a_call_that_ends_in_time_does_not_listen_to_the_coordinator(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listening takes a moment, which would be lost in every step."""
    monkeypatch.setattr("polytempo.collectives.world.LISTEN_EVERY", 60.0)
    worlds, asked = opening("memory", 2), []

    def add_up(world: World) -> None:
        world.word = lambda: asked.append(world.rank) or frozenset()  # type: ignore[func-returns-value]
        world.wait(world.all_ranks.all_reduce([torch.ones(3)], algorithm="ring"))

    assert attempts(worlds, add_up) == [None, None]
    assert asked == []


def test_replicas_are_compared_where_ranks_go_on_without_one() -> None:
    """A rank whose values differ, unseen, is found when another is lost."""

    def work(session: Session) -> list[float]:
        values = torch.nn.Parameter(torch.zeros(3))
        optimizer = DistributedOptimizer(torch.optim.SGD([values], lr=1.0), named_parameters=[("values", values)])
        for step in range(4):
            if step == 2 and session.rank == 2:
                session.leaving.of[LeavingStep.JOIN].clear()
                session.world().close(politely=False)
                return []
            if step == 2 and session.rank == differs:
                optimizer._reducer.copier.watch.compare_by([torch.ones(1)])  # type: ignore[union-attr]
            optimizer.zero_grad()
            values.sum().backward()
            optimizer.step()
        return [round(value, 5) for value in values.tolist()]

    differs = -1
    with GroupJob(3, least=2) as job:
        assert job.run(work) == [[-4.0] * 3, [-4.0] * 3, []]
    differs = 1
    with GroupJob(3, least=2) as job, pytest.raises(UsageError, match="workers 0 and 1 hold different values after"):
        job.run(work)

"""Who may go on without whom: never two sides at once, whatever they know and however often they form again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import pytest

from polytempo.collectives.quorum import objection

Ranks = frozenset[int]


def subsets(ranks: Ranks) -> Iterator[Ranks]:
    ordered = sorted(ranks)
    return map(frozenset, chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1)))


@pytest.mark.parametrize("size", range(1, 7))
def test_no_two_sides_go_on_without_a_coordinator(size: int) -> None:
    """All pairs of disjoint sides, and all that each may know of ranks that have ended: those are on neither side."""
    members = frozenset(range(size))
    for one in subsets(members):
        for other in subsets(members - one) if one else ():
            if not other:
                continue
            ended = list(subsets(members - one - other))
            goes = [any(not objection(members, side, known, None) for known in ended) for side in (one, other)]
            assert goes != [True, True], (one, other)


@pytest.mark.parametrize("size", range(2, 6))
def test_no_two_sides_go_on_by_the_coordinators_word(size: int) -> None:
    """The coordinator's word only grows, so of two sides one knows what the other knows, and perhaps more."""
    members = frozenset(range(size))
    for one in subsets(members):
        for other in subsets(members - one) if one else ():
            if not other:
                continue
            ended = list(subsets(members - one - other))
            for early in subsets(members):
                for late in subsets(members - early):
                    for first, second in ((one, other), (other, one)):
                        goes = [
                            any(not objection(members, side, known, word) for known in ended)
                            for side, word in ((first, early), (second, early | late))
                        ]
                        assert goes != [True, True], (first, second, early, late)


def histories(size: int) -> Iterator[list[tuple[Ranks, Ranks, Ranks]]]:
    """All ways in which one side forms twice: who goes on without whom, and which of them end in between."""
    members = frozenset(range(size))
    for first in subsets(members):
        for died in subsets(first):
            for second in subsets(first - died):
                if first and second:
                    yield [(members, first, frozenset()), (first, second, died)]


@pytest.mark.parametrize("size", range(2, 6))
def test_a_side_that_was_left_behind_never_goes_on_though_those_who_left_it_have_ended_since(size: int) -> None:
    """What is left of a majority goes on, after some of it have ended; those that it gave up know of these ends, too."""
    members = frozenset(range(size))
    for history in histories(size):
        if any(objection(group, side, ended, None) for group, side, ended in history):
            continue
        (_, first, _), (_, second, died) = history
        for behind in subsets(members - first):
            assert not behind or objection(members, behind, (members - first - behind) | died, None), (first, second, behind)


@pytest.mark.parametrize(
    ("present", "ended", "word", "why"),
    [
        ({0, 1}, {2, 3}, None, ""),
        ({0, 1, 2}, set(), None, ""),
        ({0}, {1, 2, 3}, None, ""),
        ({0, 1}, set(), {2, 3}, ""),
        ({0}, {1}, {2, 3}, ""),
        (
            {0, 1},
            {2},
            None,
            "nothing is heard of rank 3, which may be alive behind a broken link, and 2 of 4 ranks are here",
        ),
        ({0, 1, 2}, set(), set(), "the coordinator has not given up rank 3: ranks 0, 1, 2 cannot go on without"),
        ({2, 3}, {0, 1}, {2}, "the coordinator has given up rank 2, and the job goes on without"),
    ],
)
def test_reasons_name_the_ranks(present: set[int], ended: set[int], word: set[int] | None, why: str) -> None:
    said = objection(range(4), present, ended, word)
    assert why in said if why else said == ""

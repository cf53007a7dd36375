"""The plan of an all-reduce, run by a small interpreter: whatever the order of things, everybody ends with the sum."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.collectives.plan import GRAIN, Meet, Put, Reduce, Span, Step, Take, own_part, parts, shared_all_reduce

LENGTHS = st.integers(0, 5 * GRAIN) | st.integers(0, 40 * GRAIN)
MEMBERS = st.sets(st.integers(0, 20), min_size=1, max_size=6).map(sorted).map(tuple)

settled = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def made(member: int, number: int, length: int) -> list[int]:
    """A member's tensor in a round, unlike all others."""
    return [(number + 1) * (member + 1) * 1000003**2 + i * (member + 7) for i in range(length)]


class Run:
    """All members' steps on plain lists. `None` in a slot, or in the result, is what nobody has written yet."""

    def __init__(self, members: tuple[int, ...], length: int, in_place: bool = False) -> None:
        self.members, self.length, self.in_place = members, length, in_place
        self.own: dict[int, list[int]] = {}
        self.result: list[int | None] = [None] * length
        self.slots: dict[int, list[int | None]] = {member: [None] * length for member in members}
        self.arrived: dict[tuple[int, str], set[int]] = {}

    def plan(self, member: int) -> list[Step]:
        return shared_all_reduce(self.members, member, self.length, self.in_place)

    def inputs(self, number: int) -> dict[int, list[int]]:
        return {member: made(member, number, self.length) for member in self.members}

    def rounds(self, count: int, pick: Callable[[list[int]], int]) -> None:
        """Everybody goes through so many rounds; `pick` says who takes the next step, of those who can."""
        wanted = [[sum(column) for column in zip(*self.inputs(n).values(), strict=True)] for n in range(count)]
        steps = {m: [(n, step) for n in range(count) for step in (None, *self.plan(m), None)] for m in self.members}
        while able := [m for m in self.members if steps[m] and self.can(m, *steps[m][0])]:
            member = pick(able)
            number, step = steps[member].pop(0)
            if step is not None:
                self.do(member, step)
            elif not steps[member] or steps[member][0][0] != number:
                assert (self.result if self.in_place else self.own[member]) == wanted[number], (member, number)
            else:
                self.begin(member, number)
        assert not any(steps.values()), "somebody waits for ever"

    def begin(self, member: int, number: int) -> None:
        data = made(member, number, self.length)
        if self.in_place:
            assert self.slots[member] == data, "everybody knows that it is there"
        self.own[member] = data

    def can(self, member: int, number: int, step: Step | None) -> bool:
        if not isinstance(step, Meet):
            return True
        assert set(step.members) == set(self.members)
        arrived = self.arrived.setdefault((number, step.name), set())
        arrived.add(member)
        return arrived == set(self.members)

    def do(self, member: int, step: Step) -> None:
        if isinstance(step, Put):
            for i in range(step.span.start, step.span.stop):
                self.slots[member][i] = self.own[member][i]
        elif isinstance(step, Take):
            for i in range(step.span.start, step.span.stop):
                taken = self.result[i]
                assert taken is not None, f"{member} took element {i}, which nobody had added up"
                self.own[member][i] = taken
        elif isinstance(step, Reduce):
            for i in range(step.span.start, step.span.stop):
                self.result[i] = sum(self.term(member, other, i) for other in step.members)
                if not self.in_place:
                    self.own[member][i] = self.result[i] or 0

    def term(self, member: int, other: int, i: int) -> int:
        value = self.own[member][i] if other == member and not self.in_place else self.slots[other][i]
        assert value is not None, f"{member} read element {i} of {other}, which was not put"
        return value


def by_chance(seed: int) -> Callable[[list[int]], int]:
    return Random(seed).choice


ORDERS: dict[str, Callable[[list[int]], int]] = {"the lowest first": min, "the highest first": max}


# Parts.


@given(length=LENGTHS, count=st.integers(1, 12))
@settled
def test_parts_cover_every_element_once_in_order(length: int, count: int) -> None:
    spans = parts(length, count)
    assert len(spans) == count
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(length))
    assert all(span.start <= span.stop for span in spans)


@given(length=LENGTHS, count=st.integers(1, 12))
@settled
def test_no_two_processes_write_to_one_cache_line(length: int, count: int) -> None:
    borders = [span.stop for span in parts(length, count)[:-1]]
    assert all(border % GRAIN == 0 or border == length for border in borders)


@given(length=LENGTHS, count=st.integers(1, 12))
@settled
def test_parts_differ_by_at_most_a_grain(length: int, count: int) -> None:
    sizes = [span.stop - span.start for span in parts(length, count)]
    assert max(sizes) - min(sizes) <= GRAIN


@given(members=MEMBERS, length=LENGTHS)
@settled
def test_everybodys_own_part_is_its_place_among_the_members(members: tuple[int, ...], length: int) -> None:
    assert [own_part(members, member, length) for member in members] == parts(length, len(members))


def test_who_is_no_member_has_no_part() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        own_part((0, 2), 1, 100)


# What each does.


def elements(steps: list[Step], kind: type[Put] | type[Take] | type[Reduce]) -> list[int]:
    return [i for step in steps if isinstance(step, kind) for i in range(step.span.start, step.span.stop)]


@given(members=MEMBERS, length=LENGTHS)
@settled
def test_a_member_puts_and_takes_everything_but_its_own_part(members: tuple[int, ...], length: int) -> None:
    for member in members:
        steps, own = shared_all_reduce(members, member, length), own_part(members, member, length)
        others = [i for i in range(length) if not own.start <= i < own.stop]
        assert elements(steps, Put) == elements(steps, Take) == others
        assert elements(steps, Reduce) == list(range(own.start, own.stop))
        assert all(step.span.start < step.span.stop for step in steps if isinstance(step, Put | Take)), "an idle step"


@given(members=MEMBERS, length=LENGTHS)
@settled
def test_in_place_nothing_is_copied_and_one_meeting_is_enough(members: tuple[int, ...], length: int) -> None:
    for member in members:
        own = own_part(members, member, length)
        assert shared_all_reduce(members, member, length, in_place=True) == [Reduce(own, members), Meet("reduced", members)]


def test_terms_are_added_in_the_order_given() -> None:
    reduce = next(step for step in shared_all_reduce([2, 0, 1], 0, 96) if isinstance(step, Reduce))
    assert reduce == Reduce(Span(32, 64), (2, 0, 1))


# All together.


@given(members=MEMBERS, length=LENGTHS, seed=st.integers(0, 1 << 32), count=st.integers(1, 3))
@settled
def test_in_any_order_of_things_everybody_has_the_sum_after_each_round(
    members: tuple[int, ...], length: int, seed: int, count: int
) -> None:
    """What is not put before it is read, or is overwritten while it is needed, would give another sum."""
    Run(members, length).rounds(count, by_chance(seed))


@pytest.mark.parametrize("order", ORDERS)
def test_somebody_who_is_always_first_spoils_nothing(order: str) -> None:
    Run((0, 1, 2, 5), 7 * GRAIN + 3).rounds(4, ORDERS[order])


@given(members=MEMBERS, length=LENGTHS, seed=st.integers(0, 1 << 32))
@settled
def test_in_place_the_result_is_whole_when_the_first_goes_on(members: tuple[int, ...], length: int, seed: int) -> None:
    run = Run(members, length, in_place=True)
    for member in members:
        run.slots[member] = [*made(member, 0, length)]
    run.rounds(1, by_chance(seed))


@pytest.mark.parametrize("name", ["put", "reduced"])
def test_without_one_of_the_meetings_it_would_be_noticed_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter itself can fail."""
    whole = Run.plan

    def hasty(run: Run, member: int) -> list[Step]:
        return [step for step in whole(run, member) if not (isinstance(step, Meet) and step.name == name)]

    monkeypatch.setattr(Run, "plan", hasty)
    with pytest.raises(AssertionError, match=r"was not put|nobody had added up"):
        Run((0, 1, 2), 3 * GRAIN).rounds(1, min)

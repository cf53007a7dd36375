"""Parcels between two ranks: whatever their forms and their order, each comes as it was sent, and the last is not lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import everywhere

from polytempo.errors import RankLost
from polytempo.stages.carrying import BACKWARD, FORWARD, Carrier
from polytempo.stages.parcels import Parcel
from polytempo.train.session import Session

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

#: Forms: shapes of what is in a parcel.
FORMS = [[(2, 3)], [(5,)], [(2, 3), (0,)], [], [(40_000,)]]


def parcel(form: int, number: int) -> Parcel:
    values = [torch.full(shape, number + index / 8) for index, shape in enumerate(FORMS[form])]
    return Parcel([*values, form], number=number, version=-number, figure=number / 3)


def carrier_of(session: Session) -> Carrier:
    group = session.world().new_group(range(2))
    assert group is not None
    return Carrier(group, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(forms=st.lists(st.integers(0, len(FORMS) - 1), min_size=1, max_size=8), ahead=st.booleans(), data=st.data())
def test_parcels_of_changing_forms_taken_in_any_order(forms: list[int], ahead: bool, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(forms))))

    def work(session: Session) -> None:
        carrier, everybody = carrier_of(session), session.world().everybody
        for kind in (FORWARD, BACKWARD):
            if session.rank == kind:
                for number, form in enumerate(forms):
                    carrier.send(1 - kind, kind, parcel(form, number))
            if ahead:
                carrier.settle()
                everybody.barrier().wait()  # all of it is there before anything is taken
            for number in order if session.rank != kind else ():
                got, wanted = carrier.take(kind, kind, number), parcel(forms[number], number)
                assert (got.number, got.version, got.figure) == (wanted.number, wanted.version, wanted.figure)
                assert got.values[-1] == forms[number]
                assert all(torch.equal(a, b) for a, b in zip(got.values[:-1], wanted.values[:-1], strict=True))
        carrier.settle()

    assert everywhere(2, work) == [None, None]


def test_what_was_sent_before_the_end_arrives() -> None:
    """Who has settled may leave at once."""

    def work(session: Session) -> int:
        carrier = carrier_of(session)
        if session.rank == 0:
            for number in range(20):
                carrier.send(1, FORWARD, Parcel([torch.full((200_000,), float(number))], number=number))
            carrier.settle()
            return 20
        return sum(int(carrier.take(0, FORWARD, number).values[0][-1]) == number for number in range(20))

    assert everywhere(2, work) == [20, 20]


def test_who_waits_for_one_who_has_left_is_told() -> None:
    def work(session: Session) -> None:
        carrier = carrier_of(session)
        if session.rank == 1:
            carrier.take(0, FORWARD, 0)

    _, error = everywhere(2, work)
    assert isinstance(error, RankLost)
    assert error.ranks == (0,)


def test_what_was_sent_may_be_changed_at_once() -> None:
    def work(session: Session) -> float:
        carrier = carrier_of(session)
        if session.rank == 0:
            value = torch.ones(300_000)
            carrier.send(1, FORWARD, Parcel([value]))
            value.zero_()
            carrier.settle()
            return 1.0
        return float(carrier.take(0, FORWARD, 0).values[0].min())

    assert everywhere(2, work) == [1.0, 1.0]

"""Parcels between two ranks: whatever their forms and their order, each comes as it was sent, and the last is not lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import everywhere

from polytempo.errors import PeerError, RankLost
from polytempo.pipeline import point_to_point
from polytempo.pipeline.point_to_point import BACKWARD, FORWARD, REFERENCE, PointToPoint
from polytempo.pipeline.stage_message import StageMessage
from polytempo.session.session import Session
from polytempo.transport import shared_memory
from polytempo.transport.shared_memory import LeasedBlocks, Segment, make_segment

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

#: Forms: shapes of what is in a parcel.
FORMS = [[(2, 3)], [(5,)], [(2, 3), (0,)], [], [(40_000,)]]


def parcel(form: int, number: int) -> StageMessage:
    values = [torch.full(shape, number + index / 8) for index, shape in enumerate(FORMS[form])]
    return StageMessage([*values, form], number=number, version=-number, figure=number / 3)


def carrier_of(session: Session) -> PointToPoint:
    group = session.world().new_group(range(2))
    assert group is not None
    return PointToPoint(group, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(forms=st.lists(st.integers(0, len(FORMS) - 1), min_size=1, max_size=8), ahead=st.booleans(), data=st.data())
def test_parcels_of_changing_forms_taken_in_any_order(forms: list[int], ahead: bool, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(forms))))

    def work(session: Session) -> None:
        carrier, everybody = carrier_of(session), session.world().all_ranks
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
                carrier.send(1, FORWARD, StageMessage([torch.full((200_000,), float(number))], number=number))
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
            carrier.send(1, FORWARD, StageMessage([value]))
            value.zero_()
            carrier.settle()
            return 1.0
        return float(carrier.take(0, FORWARD, 0).values[0].min())

    assert everywhere(2, work) == [1.0, 1.0]


def test_large_parcels_lie_in_memory_that_is_shared_and_used_again() -> None:
    """A few bytes travel, and slots stay as few as are held at once."""

    def work(session: Session) -> tuple[int, int]:
        carrier, everybody, held = carrier_of(session), session.world().all_ranks, []
        for number in range(40):
            if session.rank == 0:
                carrier.send(1, FORWARD, StageMessage([torch.full((300_000,), float(number))], number=number))
            else:
                held = [*held[-2:], carrier.take(0, FORWARD, number)]
                assert [float(one.values[0].sum()) for one in held] == [300_000.0 * one.number for one in held]
            everybody.barrier().wait()
        carrier.settle()
        if session.rank == 1:
            return 0, 0
        slots = carrier._blocks[1]._blocks
        return sum(map(len, slots.values())), sum(
            link.payload_sent for link in session.world().engine.messages.links.values()
        )

    slots, sent = everywhere(2, work)[0]
    assert 3 <= slots <= 4
    assert sent < 20_000, "an announcement, and places"


def test_blocks_of_one_size_share_segments_and_open_few_files() -> None:
    blocks, made = LeasedBlocks(), []
    for _ in range(200):
        block, segment = blocks.take(20_000)
        block.room[:20_000:100] = 1  # its own
        made += [segment] if segment is not None else []
    assert len(made) < 25
    assert sum(segment.size for segment in made) < 1.3 * 200 * 20_480
    assert blocks.take(100_000)[1] is not None, "another size"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("none")])
@pytest.mark.parametrize("slots", [0, 1])
def test_without_room_for_shared_memory_bytes_travel(
    error: Exception, slots: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    allowed = [1] * slots

    def sometimes(size: int) -> Segment:
        if not allowed:
            raise error
        allowed.pop()
        return make_segment(size)

    monkeypatch.setattr(shared_memory, "make_segment", sometimes)

    def work(session: Session) -> list[float]:
        carrier = carrier_of(session)
        if session.rank == 0:
            for number in range(6):
                carrier.send(1, FORWARD, StageMessage([torch.full((300_000,), float(number))], number=number))
            carrier.settle()
            return []
        parcels = [carrier.take(0, FORWARD, number) for number in range(6)]  # the first keeps the only slot
        return [float(parcel.values[0][-1]) for parcel in parcels]

    assert everywhere(2, work)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot share" in line]
    assert len(said) == 1
    assert "rank 0 cannot share 1200064 bytes of memory with rank 1" in said[0]


@pytest.mark.parametrize(("number", "offset"), [(7, 0), (0, 1 << 40), (0, -64)])
def test_a_place_that_is_nowhere_is_refused(number: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        size, unpack = REFERENCE.size, staticmethod(REFERENCE.unpack)

        @staticmethod
        def pack(*_: int) -> bytes:
            return REFERENCE.pack(number, offset)

    monkeypatch.setattr(point_to_point, "REFERENCE", Wrong)

    def work(session: Session) -> None:
        carrier = carrier_of(session)
        if session.rank == 0:
            carrier.send(1, FORWARD, StageMessage([torch.ones(30_000)]))
            carrier.settle()
        else:
            carrier.take(0, FORWARD, 0)

    error = everywhere(2, work)[1]
    assert isinstance(error, PeerError)
    assert f"invalid shared-memory reference from rank 0 (segment {number}, offset {offset})" in str(error)


def test_who_sends_and_receives_on_one_host_needs_no_thread() -> None:
    def work(session: Session) -> bool:
        carrier, other = carrier_of(session), 1 - session.rank
        for number in range(5):
            carrier.send(other, FORWARD, StageMessage([torch.ones(300_000)], number=number))
            carrier.take(other, FORWARD, number)
        carrier.settle()
        return session.world().engine._thread is None

    assert everywhere(2, work) == [True, True]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(2, 2)[:, :1],
        torch.tensor(3.0),
    ],
    ids=["transposed", "conjugated", "sliced", "a-number"],
)
def test_however_a_tensor_lies_its_values_come(value: torch.Tensor) -> None:
    def work(session: Session) -> bool:
        carrier = carrier_of(session)
        if session.rank == 0:
            carrier.send(1, FORWARD, StageMessage([value]))
            carrier.settle()
            return True
        return torch.equal(carrier.take(0, FORWARD, 0).values[0], value)

    assert everywhere(2, work) == [True, True]

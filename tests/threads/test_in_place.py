"""Means in shared memory: they do not depend on who lived to the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import PATIENCE, Place, nothing_is_left, place, together
from wires import Client

from polytempo.collectives import shared_buffer
from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.collectives.shared_buffer import SharedMeanBuffer, mean_in_place
from polytempo.errors import PeerError
from polytempo.transport.local_peers import LocalPeers
from polytempo.transport.shared_memory import Segment

__all__ = ["nothing_is_left", "place"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
    return torch.randint(0, 1000, shape, generator=generator).to(dtype)


# Boards.


def test_without_room_for_a_board_it_is_said_what_to_do(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(size: int) -> Segment:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_buffer, "make_segment", no_room)
    (peers,) = place.open(0)
    with pytest.raises(PeerError, match=r"2 ranks need 16384 bytes .*No space left on device.*use --via ps"):
        SharedMeanBuffer(peers, [0, 1], 0, 4096)


def test_without_the_one_who_makes_the_memory_nobody_waits(place: Place) -> None:
    first, second = place.met(2)
    opening = Client(lambda: SharedMeanBuffer(second, [0, 1], 0, 4096))
    first.close()
    opening.join(PATIENCE)
    assert isinstance(opening.error, PeerError)
    assert "rank 0 is gone, and with it the memory" in str(opening.error)


# Deaths while a mean is made in place.


class Died(Exception):
    """The end of a process, for its thread."""


class Member:
    """One who takes part in means, perhaps not to the end."""

    def __init__(self, peers: LocalPeers, members: Sequence[int], length: int) -> None:
        self.peers, self.length = peers, length
        self.buffer = SharedMeanBuffer(peers, members, 0, max(1, 8 * length))

    def die(self, *_: object) -> None:
        self.peers.close()
        raise Died

    def doom(self, point: str) -> None:
        """Let it end at some point of the next round."""
        finish, tell, meet = self.buffer.finish, self.peers.tell, self.buffer.meet
        if point == "before it finished":
            self.buffer.finish = self.spoil_and_die  # type: ignore[method-assign]
        elif point == "before it told":
            self.buffer.finish = lambda: (finish(), self.die())  # type: ignore[method-assign]
        elif point == "after it told one":
            self.peers.tell = lambda ranks, *note: (tell(list(ranks)[:1], *note), self.die())  # type: ignore[method-assign]
        elif point == "after it told all":
            self.peers.tell = lambda ranks, *note: (tell(ranks, *note), self.die())  # type: ignore[method-assign]
        elif point == "while it made up for others":
            self.buffer.meet = (  # type: ignore[method-assign]
                lambda name, members: self.die() if name == "recovered" else meet(name, members)
            )

    def spoil_and_die(self) -> None:
        """What it has added up so far is nothing to go by."""
        own = shared_buffer.own_part(self.buffer.members, self.peers.rank, self.length)
        self.buffer.result(torch.float64, self.length)[own.start : own.stop] = float("nan")
        self.die()

    def mean(self, members: Sequence[int], weights: Sequence[float]) -> bool:
        """Take part, and use the slot again at once; did it live?"""
        self.buffer.round += 1
        try:
            mean_in_place(self.buffer, members, weights, torch.float64, self.length, 0)
        except Died:
            return False
        self.buffer.slot(self.peers.rank, torch.float64, self.length).fill_(float("nan"))
        return True


POINTS = ["before it finished", "before it told", "after it told one", "after it told all", "while it made up for others"]


def crew(place: Place, count: int, length: int) -> list[Member]:
    endpoints = place.met(count)
    return [Member(peers, range(count), length) for peers in endpoints]  # the first hands over, and waits for nobody


def fill(members: Sequence[Member], seed: int) -> list[torch.Tensor]:
    terms = [made(torch.float64, member.length, seed=seed + member.peers.rank) for member in members]
    for member, term in zip(members, terms, strict=True):
        member.buffer.slot(member.peers.rank, torch.float64, member.length).copy_(term)
    return terms


def check_round(members: Sequence[Member], weights: Sequence[float], seed: int) -> list[Member]:
    """One round: whatever happens to some, those who are left have the mean of all; who they are."""
    terms = fill(members, seed)
    wanted = torch.empty(members[0].length, dtype=torch.float64)
    weighted_mean(terms, weights, wanted)
    ranks = [member.peers.rank for member in members]
    lived = together([lambda m=m: m.mean(ranks, weights) for m in members])
    survivors = [member for member, alive in zip(members, lived, strict=True) if alive]
    for member in survivors:
        assert torch.equal(member.buffer.result(torch.float64, member.length), wanted)
    return survivors


@pytest.mark.parametrize("point", POINTS[:4])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_survivors_have_the_undisturbed_mean(place: Place, who: int, point: str) -> None:
    members = crew(place, 3, 1000)
    assert check_round(members, [1.0, 2.0, 5.0], 0) == members
    members[who].doom(point)
    survivors = check_round(members, [3.0, 1.0, 0.5], 10)
    assert [member.peers.rank for member in survivors] == [rank for rank in range(3) if rank != who]
    assert check_round(survivors, [1.0, 4.0], 20) == survivors, "and they go on without it"


@given(
    points=st.lists(st.sampled_from(["lives", *POINTS]), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=4, max_size=4),
    length=st.sampled_from([1, 31, 64, 129, 1000]),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_whoever_dies_wherever_the_mean_is_the_same(points: list[str], weights: list[float], length: int) -> None:
    place = Place()
    try:
        members = crew(place, len(points) + 1, length)
        for member, point in zip(members[1:], points, strict=True):
            member.doom(point)
        survivors = check_round(members, weights[: len(members)], 0)
        assert members[0] in survivors
        assert [m.peers.rank for m in survivors if points[m.peers.rank - 1] in POINTS[:4] and m.peers.rank] == []
        members.clear()
        survivors.clear()
    finally:
        place.close()


def test_nobody_writes_to_its_slot_while_another_makes_up_for_the_dead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = crew(place, 3, 1000)
    members[1].doom("before it finished")
    returned, slow = threading.Event(), members[2]
    original, calls = slow.buffer.has_finished, list[int]()

    def slowly(rank: int) -> bool:
        calls.append(rank)
        assert not returned.wait(0.3), "worker 0 has gone on, and its slot with it"
        return original(rank)

    monkeypatch.setattr(slow.buffer, "has_finished", slowly)
    mean = members[0].mean
    monkeypatch.setattr(members[0], "mean", lambda *about: (mean(*about), returned.set())[0])
    assert check_round(members, [1.0, 2.0, 3.0], 0) == [members[0], slow]
    assert calls == [1]
    assert returned.is_set()


def test_one_who_died_before_the_round_is_made_up_for(place: Place) -> None:
    """It has pushed, so it is in the round, and its slot is there."""
    members = crew(place, 3, 500)
    terms, wanted = fill(members, 7), torch.empty(500, dtype=torch.float64)
    weighted_mean(terms, [1.0, 1.0, 1.0], wanted)
    members[2].peers.close()
    assert together([lambda m=m: m.mean([0, 1, 2], [1.0, 1.0, 1.0]) for m in members[:2]]) == [True, True]
    assert torch.equal(members[0].buffer.result(torch.float64, 500), wanted)


def test_survivors_who_add_up_at_the_same_time_do_not_add_to_each_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stops in the middle of the dead one's part until the other is there, too."""
    members, both_in_the_middle = crew(place, 3, 500), threading.Barrier(2, timeout=PATIENCE)
    dead = shared_buffer.own_part([0, 1, 2], 2, 500)

    def in_two_steps(terms: list[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
        out.copy_(terms[0] + terms[1])
        if torch.equal(terms[0], first[dead.start : dead.stop]):
            both_in_the_middle.wait()
        out.add_(terms[2]).mul_(1 / 3)

    monkeypatch.setattr(shared_buffer, "weighted_mean", in_two_steps)
    first, *_ = terms = fill(members, 3)
    wanted = (terms[0] + terms[1]).add_(terms[2]).mul_(1 / 3)
    members[2].peers.close()
    assert together([lambda m=m: m.mean([0, 1, 2], [1.0, 1.0, 1.0]) for m in members[:2]]) == [True, True]
    assert torch.equal(members[0].buffer.result(torch.float64, 500), wanted)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread for thread in threading.enumerate() if isinstance(thread, Client)] == []

"""Peers that talk to each other directly: notes, memory, and who is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy
import pytest
from helpers import until
from sharing import PATIENCE, Place, nothing_is_left, place, together
from wires import Client

from polytempo.errors import PeerError
from polytempo.transport import deadline, local_peers
from polytempo.transport.local_peers import HANDED_OVER, LocalPeers
from polytempo.transport.peer_link import DATA, LinkMessage
from polytempo.transport.shared_memory import make_segment

__all__ = ["nothing_is_left", "place"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")

NOBODY = 65534


def left_by_one_that_was_killed(place: Place, rank: int) -> None:
    """A path at which nobody listens any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"{place.directory}/peer-{rank}")
        sock.listen()


# Notes.


def test_everybody_hears_what_everybody_told(place: Place) -> None:
    all_peers = place.met(4)

    def talk(peers: LocalPeers) -> list[int]:
        others = [rank for rank in range(4) if rank != peers.rank]
        peers.tell(others, 3, 7, 10 + peers.rank)
        peers.wait(others, 3, 7, 10)
        return [peers.heard(rank, 3, 7) for rank in others]

    heard = together([lambda m=m: talk(m) for m in all_peers])
    assert heard == [[11, 12, 13], [10, 12, 13], [10, 11, 13], [10, 11, 12]]
    assert all(peers.lost == set() for peers in all_peers)


def test_a_note_means_at_least_so_far(place: Place) -> None:
    first, second = place.met(2)
    first.tell([1], 1, 0, 5)
    second.wait([0], 1, 0, 3)
    assert second.heard(0, 1, 0) == 5
    second.wait([0], 1, 0, 5)  # it is there already: nothing more comes
    first.tell([1], 1, 0, 4)
    first.tell([1], 2, 0, 1)
    second.wait([0], 2, 0, 1)
    assert second.heard(0, 1, 0) == 5, "an earlier round takes nothing back"


def test_kinds_boards_and_peers_are_told_apart(place: Place) -> None:
    first, second, third = place.met(3)
    first.tell([2], 1, 0, 8)
    second.tell([2], 2, 1, 9)
    third.wait([0], 1, 0, 8)
    third.wait([1], 2, 1, 9)
    known = {(rank, kind, board): third.heard(rank, kind, board) for rank in (0, 1) for kind in (1, 2) for board in (0, 1)}
    assert {key: number for key, number in known.items() if number >= 0} == {(0, 1, 0): 8, (1, 2, 1): 9}


def test_many_notes_come_in_order(place: Place) -> None:
    first, second = place.met(2)
    numbers: list[int] = []
    arrived = second.arrived

    def counted(*about: Any) -> None:
        arrived(*about)
        numbers.append(second.heard(0, 1, 0))

    second.arrived = counted  # type: ignore[method-assign]
    together([lambda: [first.tell([1], 1, 0, n) for n in range(3000)], lambda: second.wait([0], 1, 0, 2999)])
    assert numbers == list(range(3000))


# Memory.


def test_a_segment_that_is_handed_over_is_the_same_memory(place: Place) -> None:
    first, second, third = place.met(3)
    for number in (0, 1):
        segment = make_segment(8192)
        first.hand_over([1, 2], number, segment)
        for peers in (second, third):
            peers.wait([0], HANDED_OVER, number, 0)
            segment.view(100, 1)[0] += 1
            theirs = peers.segment(0, number)
            assert (theirs.size, theirs.view(100, 1)[0]) == (8192, segment.view(100, 1)[0])
            theirs.view(5000, 1)[0] = peers.rank
            assert segment.view(5000, 1)[0] == peers.rank


def test_memory_that_was_handed_over_is_not_inherited(place: Place) -> None:
    """A program that a worker starts would keep it, and it would not end with the job."""
    first, second = place.met(2)
    first.hand_over([1], 0, make_segment(4096))
    second.wait([0], HANDED_OVER, 0, 0)
    assert not os.get_inheritable(second.segment(0, 0).descriptor)


# Who is gone.


def test_nobody_waits_for_one_who_has_closed(place: Place) -> None:
    first, second, third = place.met(3)
    second.tell([0], 1, 0, 4)
    second.close()
    third.tell([0], 1, 0, 9)
    first.wait([1, 2], 1, 0, 9)
    assert first.lost == {1}
    assert first.heard(1, 1, 0) == 4, "what it said before is known"
    first.tell([1, 2], 1, 0, 1)  # to nobody, and to somebody
    third.wait([0], 1, 0, 1)


def test_one_who_closes_while_it_is_waited_for_is_noticed_at_once(place: Place) -> None:
    first, second = place.met(2)
    waiting = Client(lambda: first.wait([1], 1, 0, 1))
    began = time.monotonic()
    second.close()
    waiting.join(PATIENCE)
    assert waiting.over(), "it waits for nobody"
    assert (waiting.error, first.lost) == (None, {1})
    assert time.monotonic() - began < deadline.FIRST_REPORT, "the kernel says so; nobody has to look"


def test_what_a_peer_said_last_is_heard_though_it_can_be_told_nothing(place: Place) -> None:
    first, second = place.met(2)
    second.tell([0], 1, 0, 4)
    second.close()
    first.tell([1], 1, 0, 4)
    first.wait([1], 1, 0, 4)
    assert first.lost == {1}
    assert first.heard(1, 1, 0) == 4


@pytest.mark.parametrize("me", [0, 2])
def test_meeting_notices_one_who_died_before_it_connected(place: Place, me: int) -> None:
    left_by_one_that_was_killed(place, 1)
    ranks = [0, 2]
    all_peers = place.open(*ranks)
    together([lambda m=m: m.meet([0, 1, 2], PATIENCE) for m in all_peers])
    assert place.all_peers[me].lost == {1}
    place.all_peers[me].wait([1], 1, 0, 1)
    os.unlink(f"{place.directory}/peer-1")


def test_whoever_is_seen_already_listens(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its name and its ears there is no moment in which one seems dead."""
    (second,) = place.open(1)
    refused = []

    class Slow(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            refused.append(second._has_ended(0))
            super().listen(backlog)
            refused.append(second._has_ended(0))

    monkeypatch.setattr(local_peers.socket, "socket", Slow)
    place.open(0)
    assert refused == [False, False]
    assert sorted(os.listdir(place.directory)) == ["peer-0", "peer-1"]


def test_meeting_waits_for_those_who_are_late(place: Place) -> None:
    (last,) = place.open(2)
    meeting = Client(lambda: last.meet(range(3)))
    others = place.open(0, 1)
    together([lambda m=m: m.meet(range(3)) for m in others])
    meeting.join(PATIENCE)
    assert (meeting.error, last.lost) == (None, set())


@pytest.mark.parametrize(("rank", "words"), [(0, "waited 0.1 s for rank 1"), (1, "rank 0 does not listen")])
def test_one_who_never_comes_is_named(place: Place, rank: int, words: str) -> None:
    (peers,) = place.open(rank)
    with pytest.raises(PeerError, match=words):
        peers.meet([0, 1], timeout=0.1)


def test_meeting_again_changes_nothing(place: Place) -> None:
    first, second = place.met(2)
    first.tell([1], 1, 0, 3)
    together([lambda m=m: m.meet(range(2)) for m in (first, second)])
    second.wait([0], 1, 0, 3)
    assert second.heard(0, 1, 0) == 3


# Waiting for more than peers.


def test_who_waits_hears_other_things_too(place: Place) -> None:
    first, second = place.met(2)
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []

    def listen() -> None:
        heard.append(theirs.recv(1))
        second.tell([0], 1, 0, len(heard))

    with ours, theirs:
        ours.sendall(b"xy")
        first.wait([1], 1, 0, 2, [(theirs.fileno(), listen)])
    assert heard == [b"x", b"y"]


def test_what_another_thing_raises_ends_the_wait(place: Place) -> None:
    first, _ = place.met(2)
    ours, theirs = socket.socketpair()

    def end() -> None:
        raise PeerError("the job is over")

    with ours, theirs:
        ours.sendall(b"x")
        with pytest.raises(PeerError, match="the job is over"):
            first.wait([1], 1, 0, 1, [(theirs.fileno(), end)])


def test_who_waits_long_says_for_whom(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deadline, "FIRST_REPORT", 0.01)
    monkeypatch.setattr(deadline, "LOOK_EVERY", 0.01)
    first, second, third = place.met(3)
    said: list[str] = []
    waiting = Client(lambda: first.wait([1, 2], 1, 0, 1))
    second.tell([0], 1, 0, 1)
    until(lambda: bool(said.append(capsys.readouterr().err) or "for rank 2 to" in "".join(said)), "nothing was said")
    third.tell([0], 1, 0, 1)
    waiting.join(PATIENCE)
    assert waiting.over()
    assert "polytempo: rank 0 has waited" in "".join(said)


# Who may not come in.

KNOCK = """
import os, socket, sys
path, user = sys.argv[1], int(sys.argv[2])
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.settimeout(10)
os.setgroups([]); os.setgid(user); os.setuid(user)
sock.connect(path)
try:
    sock.sendall(bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    print("let in" if sock.recv(1) else "turned away")
except (ConnectionResetError, BrokenPipeError):
    print("turned away")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_turned_away(place: Place) -> None:
    os.chmod(place.directory, 0o711)
    first, second = place.open(0, 1)
    os.chmod(f"{place.directory}/peer-0", 0o666)
    meeting = Client(lambda: first.meet([1]))
    command = [sys.executable, "-I", "-S", "-c", KNOCK, f"{place.directory}/peer-0", str(NOBODY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "turned away", done.stderr
    assert not meeting.over(), "it was not taken for the one who is awaited"
    second.meet([0])
    meeting.join(PATIENCE)
    assert meeting.over()
    first.tell([1], 1, 0, 1)
    second.wait([0], 1, 0, 1)


def test_one_who_only_looks_is_nobody(place: Place) -> None:
    first, second = place.open(0, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"{place.directory}/peer-0")
    together([lambda: first.meet([1]), lambda: second.meet([0])])
    first.tell([1], 1, 0, 1)
    second.wait([0], 1, 0, 1)


def test_a_payload_ends_the_link(place: Place) -> None:
    first, second = place.met(2)
    second._links[0].send(LinkMessage(DATA, 0, 0), numpy.zeros(8, dtype=numpy.uint8))
    first.wait([1], 1, 0, 1)
    assert first.lost == {1}


# A dead rank's sockets may live on in a process that it has forked: then the job says that it is gone.


def die_with_sockets_kept(peers: LocalPeers) -> list[int]:
    kept = [os.dup(link.fileno) for link in peers._links.values()]
    peers.close()
    return kept


def test_nobody_waits_for_one_who_is_said_to_be_gone(place: Place) -> None:
    first, second = place.met(2)
    kept = die_with_sockets_kept(second)
    read, write = os.pipe()
    os.write(write, b"x")
    first.wait([1], 1, 0, 0, also=[(read, lambda: first.forget(1))])
    assert first.lost == {1}
    for descriptor in (read, write, *kept):
        os.close(descriptor)


def test_what_it_said_before_counts(place: Place) -> None:
    first, second = place.met(2)
    second.tell([0], 1, 0, 7)
    kept = die_with_sockets_kept(second)
    first.forget(1)
    assert first.heard(1, 1, 0) == 7
    assert first.lost == {1}
    for descriptor in kept:
        os.close(descriptor)

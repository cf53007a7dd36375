"""Links: garbage ends them with a reason, strangers are not let in, and whatever happens, everything is given back."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import zmq
from calls import Call
from helpers import until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wires import Client
from worlds import (
    KINDS,
    PATIENCE,
    ROUTE,
    Leftovers,
    Opening,
    Shelf,
    at_once,
    attempts,
    close_all,
    everywhere,
    hosts_of_threads,
    keys,
    nothing_left,
    open_worlds,
    opening,
    outcomes,
    results,
    said,
    unused_name,
)

from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.world import World, open_by_name, open_by_store
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.transport import rendezvous, stream
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.framing import HEAD, MAGIC
from polytempo.transport.keys import WorkerKeys, make_keys
from polytempo.transport.memory import MemoryLink
from polytempo.transport.peer_link import BYE, CALL, DATA, FAILED, NOTE, PAYLOAD_LIMIT, SEGMENT, LinkMessage
from polytempo.transport.peer_link import KINDS as MESSAGE_KINDS
from polytempo.transport.shared_memory import make_segment
from polytempo.transport.stream import HELLO, StreamLink

__all__ = ["nothing_left", "opening"]
pytestmark = pytest.mark.usefixtures("nothing_left")


def head(kind: int, meta: bytes = b"", context: int = 0, tag: int = 0, length: int = 0) -> bytes:
    return HEAD.pack(MAGIC, kind, kind == SEGMENT, len(meta), length > 0, context, tag, length) + meta


# Garbage on a Unix link.


@contextlib.contextmanager
def beside_a_fake(timeout: float | None = None) -> Iterator[tuple[World, socket.socket]]:
    """Rank 0 of 2, and what is at the other end instead of rank 1."""
    name = unused_name()
    opening = Client(lambda: open_by_name(name, 0, 2, PATIENCE, timeout))
    fake = connected(name, 0)
    fake.sendall(HELLO.pack(1, 2))
    (world,) = results(opening)
    try:
        yield world, fake
    finally:
        fake.close()
        (closed,) = outcomes(Client(world.close))
        assert closed is None


def connected(name: str, rank: int) -> socket.socket:
    """A connection to somebody who is about to listen."""
    found: list[socket.socket] = []

    def listens() -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0polytempo-{rendezvous._digest(name)}-{rank}")
        except OSError:
            sock.close()
            return False
        found.append(sock)
        return True

    until(listens, f"rank {rank} listens")
    return found[0]


def loss(world: World) -> str:
    """Why rank 1 is lost: by a call that needs it."""
    return loss_of(world, lambda group: group.all_reduce([torch.ones(3)], algorithm="ring").wait())


def loss_of(world: World, call: Callable[[RankGroup], object]) -> str:
    (outcome,) = outcomes(Client(lambda: call(world.all_ranks)))
    assert isinstance(outcome, PeerError), repr(outcome)
    return str(outcome)


GARBAGE = {
    "no kind of message": head(MESSAGE_KINDS),
    "a kind far off": head(255),
    "more than anybody sends": head(DATA, length=PAYLOAD_LIMIT + 1),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "ones": b"\xff" * 100,
    "the start of a head": head(DATA)[:10],
    "a head without its meta": HEAD.pack(MAGIC, NOTE, 0, 100, 0, 0, 0, 0) + b"1 barrier()",
    "a payload cut short": head(DATA, length=1000) + b"x" * 999,
    "a payload larger than memory": head(DATA, length=PAYLOAD_LIMIT),
    "a payload larger than memory, expected by nobody": head(DATA, context=9, tag=-3, length=1 << 45),
    "a payload larger than memory of no data": head(CALL, length=1 << 45),
    "a call without a number": head(CALL, b"barrier()"),
    "a call of nothing": head(CALL, b" "),
    "a call that is no text": head(NOTE, b"\xff\xfe 1"),
    "a call with a number too long": head(CALL, b"9" * 5000 + b" barrier()"),
    "memory that is not there": head(SEGMENT, tag=1 << 16),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_a_link_with_a_reason(garbage: str) -> None:
    with beside_a_fake() as (world, fake):
        fake.sendall(GARBAGE[garbage])
        fake.shutdown(socket.SHUT_WR)
        text = loss(world)
        assert re.search(r"rank 1 is gone \(.+\)", text), text


@pytest.mark.parametrize("garbage", ["no kind of message", "a kind far off", "more than anybody sends", "text", "ones"])
def test_what_is_no_message_is_called_so(garbage: str) -> None:
    """And it does not wait for the end of it."""
    with beside_a_fake() as (world, fake):
        fake.sendall(GARBAGE[garbage])
        assert "rank 1 is gone (it sent something that is no message)" in loss(world)


@given(garbage=st.binary(max_size=300), kind=st.none() | st.integers(0, MESSAGE_KINDS))
@example(garbage=b"", kind=None)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_garbage_is_survived(garbage: bytes, kind: int | None) -> None:
    """Bytes of any kind, some of which begin as a message does."""
    with beside_a_fake() as (world, fake):
        fake.sendall(garbage if kind is None else head(kind, garbage[:20], length=len(garbage[20:])) + garbage[20:])
        fake.shutdown(socket.SHUT_WR)
        assert "rank 1" in loss(world) or kind == FAILED


def test_a_text_of_failure_is_only_a_text() -> None:
    with beside_a_fake() as (world, fake):
        fake.sendall(head(FAILED, b"\xff\xfe\x00 no text"))
        assert "no text" in loss(world)


def test_messages_of_no_use_do_no_harm() -> None:
    """Of groups that are not there, of calls long gone, with payloads where there is nothing to say."""
    with beside_a_fake() as (world, fake):
        odd = [head(NOTE, context=4_000_000_000, tag=-5), head(BYE, length=3) + b"abc", head(NOTE, length=5) + b"abcde"]
        odd += [
            head(DATA, context=77, tag=1 << 62, length=2) + b"ab",
            head(FAILED, b"x", context=88),
            head(CALL, b"0 x", 99),
        ]
        for _ in range(20):
            fake.sendall(b"".join(odd))
        fake.shutdown(socket.SHUT_WR)
        assert "rank 1 has left the job" in loss(world)


@pytest.mark.parametrize("what", ["a pipe", "memory that can shrink", "a directory", "many", "with no message for it"])
def test_descriptors_that_are_no_shared_memory_are_refused_and_closed(what: str) -> None:
    with beside_a_fake() as (world, fake):
        opened = handed_over(what)
        try:
            message = (
                head(DATA, context=55, length=1) + b"x" if what == "with no message for it" else head(SEGMENT, tag=1 << 16)
            )
            socket.send_fds(fake, [message], opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        fake.shutdown(socket.SHUT_WR)
        assert "rank 1 is gone" in loss(world)


def handed_over(what: str) -> list[int]:
    if what == "memory that can shrink":
        descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, 1 << 17)
        return [descriptor]
    if what == "a directory":
        return [os.open("/", os.O_RDONLY)]
    if what == "many":
        return [os.dup(0) for _ in range(16)]
    one, other = os.pipe()
    os.close(other)
    return [one]


def test_memory_that_is_too_small_for_a_board_is_an_error() -> None:
    """Rank 0 makes boards, so here rank 0 is the fake."""
    name = unused_name()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0polytempo-{rendezvous._digest(name)}-0")
    listener.listen()
    opening = Client(lambda: open_by_name(name, 1, 2, PATIENCE))
    fake, _ = listener.accept()
    listener.close()
    (world,) = results(opening)
    segment = make_segment(4096)
    socket.send_fds(fake, [head(SEGMENT, tag=64 << 10)], [segment.descriptor])
    fake.sendall(head(NOTE, b"1 all_reduce(sum, float32[3])", tag=1) + head(NOTE, tag=2))
    (outcome,) = outcomes(Client(lambda: world.all_ranks.all_reduce([torch.ones(3)]).wait(PATIENCE / 4)))
    assert isinstance(outcome, Exception), outcome
    fake.close()
    results(Client(world.close))


def test_a_peer_that_stops_reading_is_lost() -> None:
    """Who cannot take anything, but says nothing either, must not keep anybody busy."""
    with beside_a_fake() as (world, fake):
        fake.shutdown(socket.SHUT_RD)
        assert "rank 1 is gone" in loss(world)


def test_a_peer_that_sends_garbage_and_reads_nothing_is_soon_let_go() -> None:
    with beside_a_fake() as (world, fake):
        sending = send(world.all_ranks, torch.ones(8_000_000), 1, background=True)
        fake.sendall(GARBAGE["ones"])
        (outcome,) = outcomes(Client(sending.wait))
        assert outcome is None or "rank 1 is gone" in str(outcome)
        assert "rank 1 is gone (it sent something that is no message)" in loss(world)


def test_a_payload_that_is_under_way_when_its_call_fails_does_no_harm() -> None:
    """Half of it was there before the call, and the other half comes when nobody wants it any more."""
    with beside_a_fake(timeout=0.2) as (world, fake):
        fake.sendall(head(DATA, context=1, tag=6, length=4) + b"abcd" + head(DATA, tag=1, length=4000) + bytes(100))
        place = torch.zeros(4, dtype=torch.uint8)
        results(Client(lambda: receive(world.all_ranks, place, 1, tag=6).wait()))
        assert "rank 0 has waited" in loss_of(
            world, lambda group: group.all_reduce([torch.ones(2000)], algorithm="ring").wait()
        )
        fake.sendall(bytes(3900) + head(DATA, context=1, tag=7, length=4) + b"efgh")
        results(Client(lambda: receive(world.all_ranks, place, 1, tag=7).wait()))
        assert bytes(place.tolist()) == b"efgh"


# Messages in any pieces.


class Heard:
    """A receiver that writes down what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int, int, bytes, bytes]] = []
        self.gone_because: list[str] = []

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        return numpy.empty(length, dtype=numpy.uint8)

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        body = payload.tobytes() if payload is not None else b""
        self.got.append((message.kind, message.context, message.tag, message.meta, body))

    def gone(self, source: int, reason: str) -> None:
        self.gone_because.append(reason)


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([DATA, NOTE, CALL, FAILED, BYE]),
        st.integers(0, 2**32 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=40),
        st.binary(max_size=200) | st.sampled_from([4095, 4096, 4097, 16_384, 16_385, 100_000]).map(bytes),
    ),
    max_size=8,
)


def drive(link: Any, poller: Poller, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, "it never came"
        link.handle(poller.poll(20))


@given(messages=MESSAGES, data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_messages_arrive_whole_however_they_are_cut(
    messages: list[tuple[int, int, int, bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(head(kind, meta, context, tag, len(body)) + body for kind, context, tag, meta, body in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    heard, poller = Heard(), Poller()
    link = StreamLink(1, heard, ours)
    link.attach(poller)
    sending = Client(lambda: [theirs.sendall(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)])
    drive(link, poller, lambda: len(heard.got) == len(messages))
    results(sending)
    assert heard.got == messages
    theirs.close()
    drive(link, poller, lambda: bool(heard.gone_because))
    assert heard.gone_because == ["its connection has closed"]
    assert not link.open


@given(messages=MESSAGES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_messages_of_a_link_arrive_at_the_other_end(messages: list[tuple[int, int, int, bytes, bytes]]) -> None:
    """Through sockets, and through queues; `sent` is called once for each."""
    for kind in ("unix", "memory"):
        here, there = Heard(), Heard()
        if kind == "unix":
            one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            links: list[Any] = [StreamLink(1, here, one), StreamLink(0, there, two)]
        else:
            links = list(MemoryLink.pair((0, here), (1, there)))
        pollers = [Poller(), Poller()]
        for link, poller in zip(links, pollers, strict=True):
            link.attach(poller)
        sent: list[int] = []
        for index, (number, context, tag, meta, body) in enumerate(messages):
            payload = numpy.frombuffer(body, dtype=numpy.uint8).copy() if body else None
            links[0].send(
                LinkMessage(number, context, tag, meta), payload, lambda index=index, sent=sent: sent.append(index)
            )
        deadline = time.monotonic() + PATIENCE
        while len(there.got) < len(messages) and time.monotonic() < deadline:
            links[1].handle(pollers[1].poll(20))
            links[0].handle(pollers[0].poll(0))
        drive(links[0], pollers[0], lambda sent=sent: len(sent) == len(messages))
        assert there.got == messages
        assert sent == list(range(len(messages)))
        assert links[0].payload_sent == sum(len(body) for *_, body in messages)
        for link in links:
            link.close()
        for link in links:
            link.send(LinkMessage(BYE, 0, 0), None, lambda sent=sent: sent.append(-1))
        assert sent[-2:] == [-1, -1], "on a closed link nothing is kept"


# Garbage on a ZeroMQ link.


@contextlib.contextmanager
def beside_a_fake_host(fake_rank: int, secure: bool = False) -> Iterator[tuple[World, zmq.Socket[bytes]]]:
    """One of two ranks on two hosts, and what is at the other end instead of the other."""
    store, context = Shelf(), zmq.Context()
    fake = context.socket(zmq.PAIR)
    fake.linger = 1000
    if fake_rank == 0:
        store.put("token-0", "t")
    store.put(f"host-{fake_rank}", "elsewhere")
    try:
        with hosts_of_threads() as here:

            def open_one() -> World:
                here.name = "here"
                about = {"keys": keys()} if secure else {"insecure": True}
                return open_by_store(store, 1 - fake_rank, 2, ROUTE, join_timeout=PATIENCE, **about)  # type: ignore[arg-type]

            opening = Client(open_one)
            if secure:
                fake.curve_serverkey = keys().worker_public.encode()
                fake.curve_publickey, fake.curve_secretkey = keys().worker_public.encode(), keys().worker_secret.encode()
            if fake_rank == 0:
                fake.bind("tcp://127.0.0.1:*")
                store.put("link-0-1", fake.getsockopt_string(zmq.LAST_ENDPOINT))
            else:
                fake.connect(said(store, "link-0-1"))
            (world,) = results(opening)
        try:
            yield world, fake
        finally:
            (closed,) = outcomes(Client(world.close))
            assert closed is None
    finally:
        fake.close()
        context.term()


FRAMES = {
    "nothing": [b""],
    "less than a head": [head(DATA)[:-1]],
    "no kind of message": [head(MESSAGE_KINDS)],
    "less than it says": [head(DATA, length=10), b"123456789"],
    "more than it says": [head(DATA, length=1), b"12"],
    "a payload where none is": [head(NOTE), b"1"],
    "more meta than it says": [head(NOTE) + b"1 barrier()"],
    "less meta than it says": [HEAD.pack(MAGIC, NOTE, 0, 50, 0, 0, 0, 0) + b"1 barrier()"],
    "more than anybody sends": [head(DATA, length=PAYLOAD_LIMIT + 1), b""],
    "text": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
}


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("fake_rank", [0, 1])
def test_garbage_ends_a_link_between_hosts_with_a_reason(frames: str, fake_rank: int) -> None:
    with beside_a_fake_host(fake_rank) as (world, fake):
        fake.send_multipart(FRAMES[frames])
        (outcome,) = outcomes(Client(lambda: world.all_ranks.barrier().wait()))
        assert isinstance(outcome, PeerError), repr(outcome)
        assert f"rank {fake_rank} is gone (it sent something that is no message)" in str(outcome)


@pytest.mark.parametrize("meta", [b"barrier()", b" ", b"\xff\xfe 1", b"9" * 5000])
def test_a_call_that_is_none_ends_a_link_between_hosts_with_a_reason(meta: bytes) -> None:
    with beside_a_fake_host(1) as (world, fake):
        fake.send(head(CALL, meta))
        (outcome,) = outcomes(Client(lambda: world.all_ranks.barrier().wait()))
        assert isinstance(outcome, PeerError), repr(outcome)
        assert "rank 1 is gone" in str(outcome)


def test_shared_memory_is_not_taken_from_another_host() -> None:
    with beside_a_fake_host(1) as (world, fake):
        fake.send(head(SEGMENT, tag=1 << 16))
        fake.send(head(BYE))
        fake.close()
        (outcome,) = outcomes(Client(lambda: world.all_ranks.barrier().wait()))
        assert "rank 1" in str(outcome)


@pytest.mark.parametrize("what", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10 + b"\x7f" + bytes(53)])
def test_a_stranger_at_the_door_does_not_end_a_link(what: bytes) -> None:
    """Somebody scans ports, or speaks something else, while the real one is connected: nobody is lost."""
    store, keys_here = Shelf(), keys()
    with hosts_of_threads() as here:

        def open_one(rank: int) -> World:
            here.name = str(rank)
            return open_by_store(store, rank, 2, ROUTE, keys_here, join_timeout=PATIENCE)

        worlds = at_once(2, open_one)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())
    host, _, port = said(store, "link-0-1").removeprefix("tcp://").rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), PATIENCE) as stranger, contextlib.suppress(OSError):
            stranger.sendall(what)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):  # until the other side has ended it
                pass
        found = attempts(
            worlds, lambda world: [Call("all_reduce", "ring", 5).make(world.all_ranks).check() for _ in range(3)]
        )
        close_if_broken(worlds, found)
        assert not any(isinstance(outcome, BaseException) for outcome in found), found
    close_all(worlds)


def close_if_broken(worlds: list[World], found: list[Any]) -> None:
    if any(isinstance(outcome, BaseException) for outcome in found):
        close_all(worlds)


# Who is let in.


def test_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by who listens and by who connects."""
    for module in (rendezvous, stream):
        monkeypatch.setattr(module, "process_and_user", lambda sock: (os.getpid(), os.getuid() + 1))
    name = unused_name()
    found = outcomes(*[Client(lambda rank=rank: open_by_name(name, rank, 2, 0.5)) for rank in range(2)])
    assert isinstance(found[1], UsageError), found
    assert "rank 0 is a process of another user" in str(found[1])
    assert isinstance(found[0], PeerError), found
    assert "rank 0 has waited 0.5 s for rank 1 to join: rank 1 has called no collective yet; was it started?" in str(
        found[0]
    )


def test_a_stranger_of_another_user_does_not_take_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real rank comes after it."""
    name, strangers = unused_name(), iter([(os.getpid(), os.getuid() + 1)])
    real = stream.process_and_user
    monkeypatch.setattr(stream, "process_and_user", lambda sock: next(strangers, None) or real(sock))
    first = Client(lambda: open_by_name(name, 0, 2, PATIENCE))
    with connected(name, 0) as stranger, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stranger.sendall(HELLO.pack(1, 2))
        assert stranger.recv(1) == b"", "it was turned away"
    worlds = results(first, Client(lambda: open_by_name(name, 1, 2, PATIENCE)))
    everywhere(worlds, lambda world: Call("all_reduce").make(world.all_ranks).check())
    close_all(worlds)


@pytest.mark.parametrize("words", [b"", b"abc", HELLO.pack(5, 2), HELLO.pack(0, 2), HELLO.pack(2**32 - 1, 2)])
def test_a_stranger_who_says_nothing_sensible_does_not_take_a_place(words: bytes) -> None:
    name = unused_name()
    first = Client(lambda: open_by_name(name, 0, 2, PATIENCE))
    with connected(name, 0) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        worlds = results(first, Client(lambda: open_by_name(name, 1, 2, PATIENCE)))
    assert sorted(worlds[0].engine.messages.links) == [1]
    everywhere(worlds, lambda world: Call("all_reduce").make(world.all_ranks).check())
    close_all(worlds)


def test_one_who_claims_a_rank_that_has_come_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    name, has_come, original = unused_name(), threading.Event(), rendezvous._accept

    def accept(listener: socket.socket, found: dict[int, socket.socket], *about: Any) -> None:
        original(listener, found, *about)
        has_come.set()

    monkeypatch.setattr(rendezvous, "_accept", accept)
    opening = [Client(lambda rank=rank: open_by_name(name, rank, 3, PATIENCE)) for rank in (0, 1)]
    assert has_come.wait(PATIENCE)
    with connected(name, 0) as second:
        second.sendall(HELLO.pack(1, 3))
        worlds = results(*opening, Client(lambda: open_by_name(name, 2, 3, PATIENCE)))
        found = attempts(worlds, lambda world: Call("all_reduce", "ring").make(world.all_ranks).check())
    close_all(worlds)
    assert not any(isinstance(outcome, BaseException) for outcome in found), found


def test_sizes_that_disagree_are_an_error() -> None:
    name = unused_name()
    found = outcomes(
        Client(lambda: open_by_name(name, 0, 2, 0.5)),
        Client(lambda: open_by_name(name, 1, 3, 0.5)),
    )
    assert isinstance(found[0], UsageError), found
    assert "rank 1 expects 3 ranks, and rank 0 expects 2" in str(found[0])
    assert isinstance(found[1], PeerError | UsageError), found
    assert "rank" in str(found[1])


def test_who_believes_in_fewer_ranks_learns_of_it_by_his_first_call() -> None:
    name = unused_name()
    found = outcomes(Client(lambda: open_by_name(name, 0, 3, 0.5)), Client(lambda: open_by_name(name, 1, 2, 0.5)))
    assert "rank 1 expects 2 ranks, and rank 0 expects 3" in str(found[0])
    if isinstance(found[1], World):
        (outcome,) = outcomes(Client(lambda: found[1].all_ranks.barrier().wait()))
        assert isinstance(outcome, RankLost)
        found[1].close()
    else:
        assert isinstance(found[1], PeerError | UsageError), found[1]


def test_two_jobs_of_one_name_are_told_so() -> None:
    name = unused_name()
    first = Client(lambda: open_by_name(name, 0, 2, PATIENCE))
    connected(name, 0).close()  # it listens
    refused = f"process {os.getpid()} is rank 0 of this job already, so process {os.getpid()} cannot be"
    (outcome,) = outcomes(Client(lambda: open_by_name(name, 0, 2, 1.0)))
    assert isinstance(outcome, PeerError)
    assert refused in str(outcome)
    worlds = results(first, Client(lambda: open_by_name(name, 1, 2, PATIENCE)))
    (late,) = outcomes(Client(lambda: open_by_name(name, 0, 2, 1.0)))  # when all have met, too
    assert isinstance(late, PeerError)
    assert refused in str(late)
    close_all(worlds)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12: links have threads
def test_a_forked_child_does_not_keep_its_parents_rank() -> None:
    name = unused_name()
    worlds = at_once(2, lambda rank: open_by_name(name, rank, 2, PATIENCE))
    reader, writer = os.pipe()
    forked, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.close(ready)  # it is there, and has let go
        os.read(reader, 1)  # until the parent has done its part, or is gone
        os._exit(0)
    try:
        os.close(ready)
        os.read(forked, 1)
        os.close(forked)
        close_all(worlds)
        close_all(at_once(2, lambda rank: open_by_name(name, rank, 2, 5.0)))
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "rank 0 has waited 0.1 s for ranks 1, 2 to join: rank 1 has called no collective yet; "),
        (2, "rank 0 has called no collective yet; it cannot be reached (Connection refused); was it started?"),
    ],
)
def test_who_does_not_come_is_named(rank: int, words: str) -> None:
    (outcome,) = outcomes(Client(lambda: open_by_name(unused_name(), rank, 3, 0.1)))
    assert isinstance(outcome, PeerError)
    assert words in str(outcome)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"expected a rank between 0 and {size - 1}, got {rank}"):
        open_by_name("any", rank, size)


def test_ranks_meet_in_a_process_with_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    many = [os.dup(2) for _ in range(1100)]
    try:
        for kind in ("unix", "zmq"):
            worlds = open_worlds(kind, 3)
            everywhere(worlds, lambda world: Call("all_reduce").make(world.all_ranks).check())
            close_all(worlds)
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Keys.


def open_two(*about: dict[str, Any], join_timeout: float = PATIENCE) -> list[Any]:
    """Two ranks on two hosts, each with its own idea of secrecy; or their errors."""
    store = Shelf()
    with hosts_of_threads() as here:

        def open_one(rank: int) -> World:
            here.name = str(rank)
            return open_by_store(store, rank, 2, ROUTE, join_timeout=join_timeout, **about[rank])

        return outcomes(*[Client(lambda rank=rank: open_one(rank)) for rank in range(2)])


def another_key() -> WorkerKeys:
    return make_keys().workers


WRONG: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "two key files": lambda: [{"keys": keys()}, {"keys": another_key()}],
    "only the first has one": lambda: [{"keys": keys()}, {"insecure": True}],
    "only the second has one": lambda: [{"insecure": True}, {"keys": keys()}],
    "the public half alone": lambda: [
        {"keys": keys()},
        {"keys": WorkerKeys(keys().server_public, keys().worker_public, another_key().worker_secret)},
    ],
}


@pytest.mark.parametrize("case", WRONG)
def test_keys_that_do_not_fit_are_named(case: str) -> None:
    for outcome in open_two(*WRONG[case](), join_timeout=0.5):
        assert isinstance(outcome, PeerError), outcome
        assert re.search(r"rank [01] cannot talk to rank [01]: .*key file", str(outcome)), outcome


def test_without_keys_it_must_be_said_that_none_are_wanted() -> None:
    for outcome in open_two({}, {}):
        assert isinstance(outcome, UsageError), outcome
        assert re.search("ranks [01] are on other hosts: give all ranks the same key file .* or say insecure", str(outcome))
    worlds = open_two({"insecure": True}, {"insecure": True})
    everywhere(worlds, lambda world: Call("all_reduce", size=100_000).make(world.all_ranks).check())
    close_all(worlds)


def test_on_one_host_no_keys_are_needed() -> None:
    store = Shelf()
    worlds = at_once(2, lambda rank: open_by_store(store, rank, 2, ROUTE))
    assert {world.hosts for world in worlds} == {((0, 1),)}
    everywhere(worlds, lambda world: Call("all_reduce", "shared-memory").make(world.all_ranks).check())
    close_all(worlds)


def test_what_goes_between_hosts_cannot_be_read() -> None:
    """Whoever sits on the cable sees no word of it."""
    store, seen = Shelf(), bytearray()
    secret = b"nobody may read these words" * 10

    class Tapped(Shelf):
        """Says the address of a wire that is listened to."""

        def find(self, key: str, seconds: float) -> str | None:
            value = store.find(key, seconds)
            if value is None or not key.startswith("link-"):
                return value
            host, _, port = value.removeprefix("tcp://").rpartition(":")
            return f"tcp://127.0.0.1:{tap((host, int(port)), seen)}"

        def put(self, key: str, value: str) -> None:
            store.put(key, value)

    with hosts_of_threads() as here:

        def open_one(rank: int) -> World:
            here.name = str(rank)
            return open_by_store(Tapped(), rank, 2, ROUTE, keys(), join_timeout=PATIENCE)

        worlds = at_once(2, open_one)
    words = torch.frombuffer(bytearray(secret), dtype=torch.uint8)

    def work(world: World) -> None:
        if world.rank == 0:
            send(world.all_ranks, words, 1).wait()
        else:
            place = torch.zeros_like(words)
            receive(world.all_ranks, place, 0).wait()
            assert torch.equal(place, words)
        world.all_ranks.barrier().wait()

    everywhere(worlds, work)
    close_all(worlds)
    assert len(seen) > len(secret)
    assert b"nobody may read" not in seen
    assert b"barrier" not in seen


def tap(to: tuple[str, int], seen: bytearray) -> int:
    """Hands everything on to an address, and keeps it; the port at which it does so."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            near, _ = listener.accept()
        far = socket.create_connection(to, PATIENCE)
        back = threading.Thread(target=pump, args=(far, near), daemon=True)
        back.start()
        pump(near, far)
        back.join()
        near.close()
        far.close()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


# What is given back.


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", [False, True])
def test_everything_is_given_back(kind: str, background: bool) -> None:
    """Descriptors, threads and shared memory, each time."""
    before = Leftovers()
    for _ in range(3):
        worlds = open_worlds(kind, 3)

        def work(world: World) -> None:
            for size in (10, 50_000, 700_000):
                for call in (Call("all_reduce", size=size), Call("all_gather", size=size), Call("barrier")):
                    call.make(world.all_ranks, background).check()

        everywhere(worlds, work)
        close_all(worlds)
        worlds.clear()
        before.check()


@pytest.mark.parametrize("kind", KINDS)
def test_worlds_that_were_never_used_are_given_back(kind: str) -> None:
    close_all(open_worlds(kind, 3))


def test_a_group_nobody_uses_any_more_gives_back_its_memory(opening: Opening) -> None:
    worlds = opening("unix", 3)
    everywhere(worlds, lambda world: Call("all_reduce").make(world.all_ranks).check())
    before = Leftovers()
    for _ in range(5):
        groups = [world.new_group([0, 1, 2]) for world in worlds]
        everywhere(worlds, lambda world, groups=groups: Call("all_reduce").make(groups[world.rank]).check())
        groups.clear()
    before.check()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12: links have threads
def test_a_forked_child_does_not_keep_links_open(opening: Opening) -> None:
    """Such as a data loader's worker: its parent's end is seen although it lives."""
    worlds = opening("unix", 2)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())
    alive, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(alive, 1)
        os._exit(0)
    try:
        os.close(alive)
        worlds[1].close()
        (outcome,) = outcomes(Client(lambda: worlds[0].all_ranks.barrier().wait()))
        assert "rank 1 has left the job" in str(outcome)
    finally:
        os.close(end)
        os.waitpid(child, 0)

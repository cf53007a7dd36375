"""Who may not come in gets nothing: strangers' bytes, other users, other keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import STRANGER_LIMIT, Client, Wire, filled, hear

from polytempo.errors import PeerError, UsageError
from polytempo.transport.buffer_pool import KEEP_FROM, Pool
from polytempo.transport.channel import BUFFER_COUNT_LIMIT, Bytes
from polytempo.transport.framing import ENTRY, HEAD, MAGIC, MESSAGE, NONE, FrameReader, FrameWriter
from polytempo.transport.keys import WorkerKeys, make_keys, read_key_file, write_key_file
from polytempo.transport.zeromq import ZmqEndpoint

NOBODY = 65534


@pytest.fixture
def ipc() -> Iterator[Wire]:
    made = Wire("ipc", STRANGER_LIMIT)
    yield made
    made.close()


def raw(path: str, data: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    sock.sendall(data)
    return sock


def message(header: bytes, buffers: list[Bytes]) -> bytes:
    pieces, _ = FrameWriter(Pool()).write(header, buffers, None)
    return b"".join(bytes(data) for data, _ in pieces)


def begun(meta: int, buffers: int = 0, length: int = 0) -> bytes:
    """The head of a message."""
    return HEAD.pack(MAGIC, MESSAGE, 0, meta, buffers, NONE, 0, length)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # what it sent was not even read
        return True


# Bytes of strangers.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "does not speak polytempo's protocol"),
        (b"PT02" + bytes(40), "does not speak polytempo's protocol"),
        (begun(0xFFFFFFFF), "a header of 4294967295 bytes and 0 buffers was refused"),
        (begun(STRANGER_LIMIT + 1), "was refused"),
        (begun(0, 0xFFFFFFFF), "4294967295 buffers was refused"),
        (begun(ENTRY.size, 1, 1 << 60) + ENTRY.pack(1 << 60, 0, NONE), f"at most {STRANGER_LIMIT} are taken"),
        (
            begun(2 * ENTRY.size, 2, STRANGER_LIMIT + 1) + ENTRY.pack(STRANGER_LIMIT, 0, NONE) + ENTRY.pack(1, 0, NONE),
            f"at most {STRANGER_LIMIT} are taken",
        ),
        (begun(ENTRY.size, 1, 8) + ENTRY.pack(9, 0, NONE), "lengths must be true"),
        (HEAD.pack(MAGIC, 0, 0, 0, 0, 0, 0, 0), "does not speak polytempo's protocol"),
    ],
    ids=[
        "http",
        "old version",
        "huge header",
        "large header",
        "many buffers",
        "huge buffer",
        "two buffers",
        "length",
        "link",
    ],
)
def test_what_is_no_message_closes_the_connection_before_memory_is_taken(
    ipc: Wire, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    monkeypatch.setattr(ipc.pool, "take", lambda size: pytest.fail(f"{size} bytes were taken"))
    with raw(ipc.path, data) as sock:
        assert ipc.serve(lambda: ipc.closed)
        assert words in ipc.closed[0].reason
        assert ipc.received == []
        sock.settimeout(10)
        assert is_closed(sock)


def test_one_that_says_nothing_or_half_of_something_keeps_nobody_waiting(ipc: Wire) -> None:
    whole = message(b"half", [filled(100)])[:-100]
    with raw(ipc.path, b""), raw(ipc.path, whole[:9]), raw(ipc.path, whole):
        channel = ipc.connect()
        channel.send(b"whole")
        assert ipc.serve(lambda: ipc.received)
    assert ipc.serve(lambda: len(ipc.closed) == 3)
    assert [received.header for received in ipc.received] == [b"whole"]


def test_a_member_may_not_name_more_buffers_than_there_can_be() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(begun(0xFFFFFFFF, BUFFER_COUNT_LIMIT + 1))
        with pytest.raises(PeerError, match="was refused"):
            FrameReader(Pool(), 1 << 62).read(theirs)


# The reader takes bytes as they come.

MESSAGES = st.lists(st.tuples(st.binary(max_size=20), st.lists(st.binary(max_size=40), max_size=3)), min_size=1, max_size=4)


def read_in_pieces(data: bytes, size: int) -> list[tuple[bytes, list[bytes]]]:
    ours, theirs = socket.socketpair()
    found = []
    with ours, theirs:
        theirs.setblocking(False)
        reader = FrameReader(Pool(), 1 << 20)
        for start in range(0, len(data), size):
            ours.sendall(data[start : start + size])
            try:
                while True:
                    header, buffers = reader.read(theirs)
                    found.append((header, [bytes(buffer) for buffer in buffers]))
            except BlockingIOError:
                continue
    return found


@given(messages=MESSAGES, size=st.sampled_from([1, 2, 11, 23, 24, 25, 1000]))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_messages_are_whole_however_their_bytes_come(messages: list[tuple[bytes, list[bytes]]], size: int) -> None:
    wire = b""
    for header, buffers in messages:
        arrays = [filled(0) if not buffer else filled_with(buffer) for buffer in buffers]
        wire += message(header, arrays)
    assert read_in_pieces(wire, size) == messages


def filled_with(data: bytes) -> Bytes:
    buffer = filled(len(data))
    buffer[:] = bytearray(data)
    return buffer


def test_the_end_of_a_connection_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(message(b"header", [])[:-1])
        ours.close()
        with pytest.raises(EOFError):
            FrameReader(Pool(), 1 << 20).read(theirs)


def test_buffers_that_are_given_back_are_used_again() -> None:
    pool = Pool()
    large, small = pool.take(KEEP_FROM), pool.take(KEEP_FROM - 1)
    pool.give(large)
    pool.give(small)
    assert pool.take(KEEP_FROM) is large
    assert pool.take(KEEP_FROM) is not large
    assert pool.take(KEEP_FROM - 1) is not small


# Other users.

KNOCK = """
import os, socket, sys
path, user, data = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.settimeout(10)
os.setgroups([]); os.setgid(user); os.setuid(user)
try:
    sock.connect(path)
    sock.sendall(data)
    print("answered" if sock.recv(1) else "turned away")
except PermissionError:
    print("no way in")
except (ConnectionResetError, BrokenPipeError):
    print("turned away")
"""


def knock(wire: Wire, user: int) -> str:
    """What a process of this user finds."""
    data = message(b"hello", []).hex()
    wire.on_message = lambda received: received.peer.send(b"welcome")
    command = [sys.executable, "-I", "-S", "-c", KNOCK, wire.path, str(user), data]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert wire.serve(lambda: process.poll() is not None)
        assert process.stdout is not None
        return process.stdout.read().strip()


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
def test_another_user_finds_no_way_in(ipc: Wire) -> None:
    assert knock(ipc, NOBODY) == "no way in"
    assert knock(ipc, 0) == "answered"
    assert os.stat(ipc.path).st_mode & 0o077 == 0


@as_root
def test_another_user_who_gets_in_all_the_same_is_turned_away_unread(ipc: Wire) -> None:
    os.chmod(ipc.directory, 0o711)
    os.chmod(ipc.path, 0o666)
    assert knock(ipc, NOBODY) == "turned away"
    assert (ipc.received, ipc.closed) == ([], [])
    assert knock(ipc, 0) == "answered"


# Keys.


@pytest.mark.long
def test_without_the_jobs_keys_nothing_goes_through() -> None:
    wire = Wire("tcp")
    try:
        assert wire.keys is not None
        right, other = wire.keys.workers, make_keys().workers
        strangers = {
            "no key": None,
            "a key of another job": other,
            "the server's public key alone": WorkerKeys(right.server_public, other.worker_public, other.worker_secret),
            "somebody else's public key": WorkerKeys(right.server_public, right.worker_public, other.worker_secret),
            "the right key, for another server": WorkerKeys(other.server_public, right.worker_public, right.worker_secret),
        }
        channels = {name: wire.connect_with(keys, name) for name, keys in strangers.items()}
        for name, channel in channels.items():
            with suppress(PeerError):  # it may have been turned away already
                channel.send(name.encode())
        member = wire.connect("member")
        member.send(b"member")
        assert wire.serve(lambda: wire.received)
        wire.received[0].peer.send(b"welcome")
        client = Client(lambda: hear(member))
        assert wire.serve(client.over)
        assert client.result == (b"welcome", [])
        wire.serve(lambda: len(wire.received) > 1, seconds=1.0)  # for strangers that are only slower
        assert [received.header for received in wire.received] == [b"member"]
        assert {name: channel.receive() for name, channel in channels.items()} == dict.fromkeys(strangers)
    finally:
        wire.close()


@pytest.mark.parametrize("known", ["nothing", "the server's key"])
def test_who_was_turned_away_does_not_wait_in_its_next_messages(known: str) -> None:
    """ZeroMQ gives such a connection up, and would keep a message for it for ever, and its sender with it."""
    wire = Wire("tcp")
    try:
        assert wire.keys is not None
        other = make_keys().workers
        keys = WorkerKeys(wire.keys.workers.server_public, other.worker_public, other.worker_secret)
        channel = wire.connect_with(None if known == "nothing" else keys, "stranger")

        def talk() -> None:
            for _ in range(100):  # in this time ZeroMQ mostly gives the connection up, but it may also try again
                channel.send(b"again")
                threading.Event().wait(0.01)

        client = Client(talk)
        assert wire.serve(client.over), "it waits for ever"
        assert client.error is None or "has refused this connection" in str(client.error)
    finally:
        wire.close()


def test_an_address_that_is_taken_is_said_so() -> None:
    wire = Wire("tcp")
    with pytest.raises(PeerError, match="cannot listen on"):
        ZmqEndpoint(wire.endpoint.address, wire.keys, Pool(), STRANGER_LIMIT)
    wire.close()


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    keys = make_keys().workers
    path = tmp_path / "key"
    write_key_file(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == keys
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(UsageError, match=r"can be read by others.*chmod 600"):
            read_key_file(path)


def test_a_key_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_key_file(path, make_keys().workers)
    assert path.read_text() == "mine"


def test_the_servers_secret_is_not_in_the_key_file(tmp_path: Path) -> None:
    keys = make_keys()
    write_key_file(tmp_path / "key", keys.workers)
    assert keys.server_secret not in (tmp_path / "key").read_text()


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"server_public": "x"}', "\xff", '"text"'])
def test_what_is_no_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not a key file of polytempo"):
        read_key_file(path)


def test_a_key_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the key file .* No such file"):
        read_key_file(tmp_path / "key")

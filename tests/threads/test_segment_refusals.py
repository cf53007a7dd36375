"""References to memory that is not there, or not fit to be shared, are refused, and those who sent them with them."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from sharing import SIZE, Pair, descriptors, nothing_is_left, pair, shared
from wires import STRANGER_LIMIT

from polytempo.transport.buffer_pool import Pool
from polytempo.transport.connect import LIMIT
from polytempo.transport.framing import ENTRY, HEAD, MAGIC, MESSAGE, NONE
from polytempo.transport.shared_memory import SharedMemoryRegistry
from polytempo.transport.stream import StreamChannel

__all__ = ["nothing_is_left", "pair"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def memfd(size: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def refers(number: int, offset: int = 0, length: int = SIZE, new: int = 0, loan: tuple[int, int] = (NONE, 0)) -> bytes:
    """A message with one buffer that refers to a segment."""
    own = length if number == NONE else 0
    return HEAD.pack(MAGIC, MESSAGE, new, ENTRY.size, 1, *loan, own) + ENTRY.pack(length, offset, number)


SEALED = fcntl.F_SEAL_SHRINK
NO_FILE = (0, -1)


@pytest.mark.parametrize(
    ("data", "file", "words"),
    [
        (refers(0), NO_FILE, "invalid shared-memory reference"),
        (refers(0, new=1), NO_FILE, "hands over 1 segments, and came with 0 descriptors"),
        (refers(0, new=2), (SIZE, SEALED), "hands over 2 segments, and came with 1 descriptors"),
        (refers(1, new=1), (SIZE, SEALED), "invalid shared-memory reference"),
        (refers(0, offset=1, new=1), (SIZE, SEALED), "invalid shared-memory reference"),
        (refers(0, offset=(1 << 64) - 1, new=1), (SIZE, SEALED), "invalid shared-memory reference"),
        (refers(0, new=1, loan=(0, SIZE)), (SIZE, SEALED), "invalid lease"),
        (refers(0, new=1, loan=(1, 0)), (SIZE, SEALED), "invalid lease"),
        (refers(0, new=1), (SIZE, 0), "lacks F_SEAL_SHRINK"),
        (refers(0, new=1), (SIZE, fcntl.F_SEAL_GROW), "lacks F_SEAL_SHRINK"),
        (refers(0, new=1), (SIZE, SEALED | fcntl.F_SEAL_WRITE), "shared memory cannot be used"),
        (refers(0, new=1), (0, SEALED), "cannot be used"),
    ],
    ids=[
        *("no segment", "no descriptor", "one of two", "a wrong number", "beyond its end", "far beyond", "a word beyond"),
        *("words elsewhere", "no seals", "only grow", "read only", "an empty one"),
    ],
)
def test_a_push_that_refers_to_what_is_not_there_is_refused(
    pair: Pair, data: bytes, file: tuple[int, int], words: str
) -> None:
    other, _ = pair.join()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(pair.path)
        sock.settimeout(10)
        given = [] if file == NO_FILE else [memfd(*file)]
        socket.send_fds(sock, [data], given)
        for descriptor in given:
            os.close(descriptor)
        assert pair.serve(lambda: pair.closed), "it was not refused"
        assert words in pair.closed[0].reason
        assert sock.recv(1) == b""
    assert pair.received == []
    other.send(b"still here")
    assert pair.serve(lambda: pair.received), "others are served as before"


def test_what_is_no_shared_memory_at_all_is_refused(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, (tmp_path / "file").open("r+b") as file:
        sock.connect(pair.path)
        socket.send_fds(sock, [refers(0, new=1)], [file.fileno()])
        assert pair.serve(lambda: pair.closed)
    assert "shared memory cannot be used" in pair.closed[0].reason


def test_strangers_cannot_hand_over_memory() -> None:
    with closing(Pair(STRANGER_LIMIT)) as pair:
        worker = SharedMemoryRegistry()
        channel = StreamChannel(pair.path, Pool(worker), LIMIT)
        pair.channels.append(channel)
        channel.send(b"", [shared(worker)])
        assert pair.serve(lambda: pair.closed)
        assert "was refused" in pair.closed[0].reason
        assert pair.received == []


def test_descriptors_nobody_asked_for_end_with_their_connection() -> None:
    with closing(Pair(STRANGER_LIMIT)) as pair:
        before, given = descriptors(), memfd(SIZE, SEALED)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(pair.path)
            socket.send_fds(sock, [HEAD.pack(MAGIC, MESSAGE, 0, 0, 0, NONE, 0, 0)], [given])
            os.close(given)
            assert pair.serve(lambda: pair.received)
        assert pair.serve(lambda: pair.closed)
        assert descriptors() == before

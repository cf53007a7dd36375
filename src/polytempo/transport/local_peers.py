"""Processes of one host that talk to each other directly: a Unix socket for each pair.

Over it go *notes*, 16 bytes each ("my part of round 7 on board 2 is there"), and segments of shared memory. Rounds only
grow, so a note says "at least so far", and waiting is comparing numbers. Who waits blocks in `poll`, on the sockets of those
it waits for, and on whatever else it must hear meanwhile. The end of a process closes its sockets: that is how others know.

    each listens at <directory>/peer-<rank>; the higher rank of a pair connects; the kernel says who it is (SO_PEERCRED)
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from polytempo.errors import PeerError
from polytempo.transport.deadline import Deadline
from polytempo.transport.shared_memory import Segment, open_segment
from polytempo.transport.stream import peer_uid

NOTE = struct.Struct("<HHIQ")  # kind, unused, board, round
RANK = struct.Struct("<I")
HANDED_OVER = 0  # the kind of note that comes with a segment

#: Something else to watch while waiting: a descriptor, and what to do when it is ready.
Also = tuple[int, Callable[[], object]]


class LocalPeers:
    """This process's connections to its peers."""

    def __init__(self, directory: str, rank: int) -> None:
        self.rank = rank
        self.gone: set[int] = set()
        self._directory = directory
        self._sockets: dict[int, socket.socket] = {}
        self._rest: dict[int, bytes] = {}  # bytes of a note that is not whole
        self._heard: dict[tuple[int, int, int], int] = {}  # (peer, kind, board) -> round
        self._segments: dict[tuple[int, int], Segment] = {}  # (peer, board)
        self._descriptors: dict[int, list[int]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _listen_at(self._listener, self._path(rank))
        self._listener.setblocking(False)

    def _path(self, rank: int) -> str:
        return f"{self._directory}/peer-{rank}"

    # Finding each other.

    def meet(self, ranks: Iterable[int], timeout: float = 60.0) -> None:
        """Be connected to all of these. They listen already, or will soon; one that is gone is noted as gone."""
        wanted = [rank for rank in ranks if rank != self.rank and rank not in self._sockets and rank not in self.gone]
        deadline = Deadline(self.rank, timeout)
        for rank in wanted:
            if rank < self.rank:
                self._connect(rank, deadline)
        while missing := [r for r in wanted if r > self.rank and r not in self._sockets and r not in self.gone]:
            if _ready([self._listener.fileno()], deadline.until_next_look):
                self._accept()
            elif deadline.over:
                raise PeerError(f"rank {self.rank} has waited {timeout:g} s for rank {missing[0]} to connect")
            else:
                self.gone.update(rank for rank in missing if self._is_gone(rank))
                deadline.look([rank for rank in missing if rank not in self.gone], "to connect")

    def _connect(self, rank: int, deadline: Deadline) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self._path(rank))
                sock.sendall(RANK.pack(self.rank))
                return self._add(rank, sock)
            except ConnectionRefusedError:
                sock.close()
                self.gone.add(rank)
                return None
            except FileNotFoundError:
                sock.close()
                deadline.look([rank], "to listen")
                if deadline.over:
                    raise PeerError(f"rank {rank} does not listen at {self._path(rank)}") from None
                time.sleep(0.005)  # it is starting, and has no socket to wait on

    def _is_gone(self, rank: int) -> bool:
        """A path at which nobody listens was left by a process that has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self._path(rank))
            except ConnectionRefusedError:
                return True
            except FileNotFoundError:
                return False
            return False

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.settimeout(5.0)
            name = b""
            if peer_uid(sock) == os.getuid():
                with suppress(OSError):
                    name = sock.recv(RANK.size, socket.MSG_WAITALL)
            if len(name) < RANK.size:  # somebody who only looked whether we are there, or who does not belong here
                sock.close()
            else:
                self._add(RANK.unpack(name)[0], sock)

    def _add(self, rank: int, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sockets[rank], self._rest[rank], self._descriptors[rank] = sock, b"", []

    # Telling and waiting.

    def hand_over(self, ranks: Iterable[int], board: int, segment: Segment) -> None:
        """Give these a segment."""
        self.tell(ranks, HANDED_OVER, board, 0, segment)

    def tell(self, ranks: Iterable[int], kind: int, board: int, number: int, segment: Segment | None = None) -> None:
        """Send a note."""
        note = NOTE.pack(kind, 0, board, number)
        for rank in ranks:
            sock = self._sockets.get(rank)
            if sock is None:
                continue
            try:
                if segment is None:
                    sock.sendall(note)
                else:
                    socket.send_fds(sock, [note], [segment.descriptor])
            except OSError:
                while rank in self._sockets:  # what it said last counts
                    self._read(rank)

    def heard(self, rank: int, kind: int, board: int) -> int:
        """The highest round of this kind that a peer has noted; -1 before the first."""
        return self._heard.get((rank, kind, board), -1)

    def segment(self, rank: int, board: int) -> Segment:
        """What a peer has handed over for a board."""
        return self._segments[rank, board]

    def wait(self, ranks: Iterable[int], kind: int, board: int, number: int, also: Iterable[Also] = ()) -> None:
        """Wait until all of these have noted this round, or are gone."""
        deadline, others = Deadline(self.rank), dict(also)
        while missing := [r for r in ranks if r in self._sockets and self.heard(r, kind, board) < number]:
            watched = {self._sockets[rank].fileno(): rank for rank in missing}
            ready = _ready([*watched, *others], deadline.until_next_look)
            for descriptor in ready:
                if descriptor in watched:
                    self._read(watched[descriptor])
                else:
                    others[descriptor]()
            if not ready:
                deadline.look(missing, "to do their part")

    def _read(self, rank: int) -> None:
        if rank not in self._sockets:
            return
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sockets[rank], 4096, 16)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._lose(rank)
            return
        for descriptor in descriptors:  # not for programs that a worker starts
            os.set_inheritable(descriptor, False)
        self._descriptors[rank] += descriptors
        data = self._rest[rank] + data
        whole = len(data) - len(data) % NOTE.size
        self._rest[rank] = data[whole:]
        for kind, _, board, number in NOTE.iter_unpack(data[:whole]):
            self._heard[rank, kind, board] = max(number, self.heard(rank, kind, board))
            if kind == HANDED_OVER and self._descriptors[rank]:
                self._segments[rank, board] = open_segment(self._descriptors[rank].pop(0))

    def forget(self, rank: int) -> None:
        """Somebody else knows that this peer is gone. What it said before counts."""
        while rank in self._sockets and _ready([self._sockets[rank].fileno()], 0):
            self._read(rank)
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.gone.add(rank)
        sock = self._sockets.pop(rank, None)
        if sock is not None:
            sock.close()

    def let_go(self) -> None:
        """In a child after a fork: leave all connections, and the path, to the parent."""
        for sock in (*self._sockets.values(), self._listener):
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """End all connections."""
        for rank in list(self._sockets):
            self._lose(rank)
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path(self.rank))


def _listen_at(listener: socket.socket, path: str) -> None:
    """The path appears when somebody listens there, not before: whoever is refused takes its owner for dead."""
    hidden = f"{path}-unready"
    listener.bind(hidden)
    listener.listen(128)
    try:
        os.link(hidden, path)
    finally:
        os.unlink(hidden)


def _ready(descriptors: list[int], seconds: float) -> list[int]:
    """Which of these can be read, waiting at most so long for the first."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(seconds * 1000)]

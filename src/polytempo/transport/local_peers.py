"""Links between the ranks of one host that reduce in shared memory: notifications, and segments handed over.

A notification says "round 7 of buffer 2 has reached this point". Rounds only grow, so it means "at least so far", and a wait
compares numbers. A rank that waits blocks in `poll` on the links of the ranks it waits for, and on whatever else it must
hear meanwhile. The end of a process closes its links: that is how the others know.

    each rank listens at <directory>/peer-<rank>; the higher rank of a pair connects
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.deadline import MORE_TIME, Deadline, named
from polytempo.transport.peer_link import NOTE, SEGMENT, LinkMessage
from polytempo.transport.shared_memory import Segment
from polytempo.transport.stream import HELLO, StreamLink, accept_rank, connect_to

#: The kind of notification that a segment counts as.
HANDED_OVER = 0
#: Kinds of notifications of a buffer: on a link, the context is the number of the buffer and the kind.
KINDS = 16

#: Something else to watch while waiting: a descriptor, and what to do when it is ready.
Also = tuple[int, Callable[[], object]]


class LocalPeers:
    """This rank's links to the other ranks of its host. It is the receiver of all of them."""

    def __init__(self, directory: str, rank: int, timeout: float | None = None) -> None:
        self.rank, self.timeout = rank, timeout
        self.lost: set[int] = set()
        self._directory = directory
        self._links: dict[int, StreamLink] = {}
        self._heard: dict[tuple[int, int], int] = {}  # (rank, context) -> round
        self._segments: dict[tuple[int, int], Segment] = {}  # (rank, context)
        self._deadline = Deadline(rank, timeout)  # of the wait that goes on
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hidden = f"{self._path(rank)}-unready"
        self._listener.bind(hidden)
        self._listener.listen(128)
        try:
            os.link(hidden, self._path(rank))  # only now: a rank whose path refuses connections counts as lost
        finally:
            os.unlink(hidden)
        self._listener.setblocking(False)

    def _path(self, rank: int) -> str:
        return f"{self._directory}/peer-{rank}"

    # Rendezvous.

    def meet(self, ranks: Iterable[int], timeout: float = 60.0) -> None:
        """Be linked to all of these. They listen already, or will soon; one that has ended counts as lost."""
        wanted = [rank for rank in ranks if rank != self.rank and rank not in self._links and rank not in self.lost]
        deadline = Deadline(self.rank, timeout)
        for rank in wanted:
            if rank < self.rank:
                self._connect(rank, deadline)
        while missing := [r for r in wanted if r > self.rank and r not in self._links and r not in self.lost]:
            if _readable([self._listener.fileno()], deadline.until_next_look):
                with suppress(BlockingIOError):
                    accepted = accept_rank(self._listener)  # none: a probe, or a process that does not belong here
                    if accepted is not None:
                        self._links[accepted[0]] = StreamLink(accepted[0], self, accepted[2])
            elif deadline.over:
                raise PeerError(f"rank {self.rank} has waited {timeout:g} s for rank {missing[0]} to connect")
            else:
                self.lost.update(rank for rank in missing if self._has_ended(rank))
                deadline.look(missing, "to connect")

    def _connect(self, rank: int, deadline: Deadline) -> None:
        def retry(error: OSError) -> bool:
            if isinstance(error, ConnectionRefusedError):  # its process has ended, and left its path
                return False
            deadline.look([rank], "to listen")
            if deadline.over:
                raise PeerError(f"rank {rank} does not listen at {self._path(rank)}") from None
            return True

        sock = connect_to(self._path(rank), retry)
        if sock is None:
            self.lost.add(rank)
        else:
            sock.sendall(HELLO.pack(self.rank, 0))
            self._links[rank] = StreamLink(rank, self, sock)

    def _has_ended(self, rank: int) -> bool:
        """Whether the path of a rank is left from a process that has ended: then a connection is refused."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self._path(rank))
            except ConnectionRefusedError:
                return True
            except FileNotFoundError:
                return False
            return False

    # Notifying and waiting.

    def hand_over(self, ranks: Iterable[int], number: int, segment: Segment) -> None:
        self._send(ranks, LinkMessage(SEGMENT, number * KINDS + HANDED_OVER, 0, segment=segment))

    def tell(self, ranks: Iterable[int], kind: int, number: int, round_: int) -> None:
        """Notify these ranks that this one has reached a point of a round of a buffer."""
        self._send(ranks, LinkMessage(NOTE, number * KINDS + kind, round_))

    def _send(self, ranks: Iterable[int], message: LinkMessage) -> None:
        for rank in ranks:
            link = self._links.get(rank)
            if link is not None:
                link.send(message)

    def heard(self, rank: int, kind: int, number: int) -> int:
        """The latest round of which a rank has notified this one; -1 before the first."""
        return self._heard.get((rank, number * KINDS + kind), -1)

    def segment(self, rank: int, number: int) -> Segment:
        return self._segments[rank, number * KINDS + HANDED_OVER]

    def wait(self, ranks: Iterable[int], kind: int, number: int, round_: int, also: Iterable[Also] = ()) -> None:
        """Wait until all of these ranks have reached this round, or are lost."""
        deadline, others, context = self._deadline, dict(also), number * KINDS + kind
        deadline.restart()
        while missing := [r for r in ranks if r in self._links and self._heard.get((r, context), -1) < round_]:
            links = {self._links[rank].fileno: self._links[rank] for rank in missing}
            ready = _readable([*links, *others], deadline.until_next_look)
            for descriptor in ready:
                if descriptor in links:
                    links[descriptor].read()
                else:
                    others[descriptor]()
            if not ready:
                check_peers(deadline, missing, "to do their part")

    def read(self, ranks: Iterable[int]) -> None:
        """Take what these ranks have sent so far, without waiting; a link that has ended is seen here, too."""
        links = {self._links[rank].fileno: self._links[rank] for rank in ranks if rank in self._links}
        for descriptor in _readable([*links], 0) if links else ():
            links[descriptor].read()

    # The receiver of the links.

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        """Refuse a payload: notifications have none."""
        raise PeerError(f"it sent a payload of {length} bytes where notifications were expected")

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        key = source, message.context
        if message.kind == NOTE:
            self._heard[key] = max(message.tag, self._heard.get(key, -1))
        elif message.kind == SEGMENT and message.segment is not None:
            self._segments[key] = message.segment
            self._heard[key] = 0

    def gone(self, source: int, reason: str) -> None:
        self.lost.add(source)
        self._links.pop(source, None)

    # The end.

    def forget(self, rank: int) -> None:
        """The job says that this rank is lost, though a process it forked may keep its link open. What it sent counts."""
        link = self._links.get(rank)
        if link is not None:
            link.drain()
            link.close()
        self.gone(rank, "")

    def let_go(self) -> None:
        """In a child after a fork: leave all links, and the path, to the parent."""
        for link in self._links.values():
            link.abandon()
        self._listener.close()
        self._links.clear()

    def close(self) -> None:
        for rank, link in list(self._links.items()):
            link.close()
            self.gone(rank, "")
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path(self.rank))


def check_peers(deadline: Deadline, missing: list[int], action: str) -> None:
    """Report the ranks of this host that are waited for, if that is due; `PeerError` when the time is over."""
    deadline.look(missing, action)
    if deadline.over:
        raise PeerError(f"{deadline.line(f'for {named(missing)} {action}')}; {MORE_TIME}")


def _readable(descriptors: list[int], seconds: float) -> list[int]:
    """Which of these can be read, waiting at most this long for the first."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(seconds * 1000)]

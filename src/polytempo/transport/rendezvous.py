"""Rendezvous: how the ranks of a job find each other, by a name they all know or through a key-value store.

On one host each rank listens at an abstract Unix address made from the name (nothing is left in any directory, however a
process ends) and connects to all lower ranks. A process of another user is refused (`stream.py`).

With a store, each rank first publishes its host (machine and network namespace). Pairs on one host connect as above; others
by ZeroMQ, at addresses published in the store.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import select
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.errors import PeerError, UsageError
from polytempo.transport.deadline import MORE_TIME, Deadline, RankWatch, named, said_of
from polytempo.transport.host_addresses import own_host
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.link_relay import RELAY_HOST, EmulatedHost
from polytempo.transport.peer_link import PeerLink, Receiver
from polytempo.transport.stream import HELLO, RETRY_EVERY, StreamLink, accept_rank, connect_to, process_and_user
from polytempo.transport.zeromq import HOST_TIMEOUT, ZmqLink, ZmqWires

#: What stands for the address by which others reach a host that listens at all its addresses.
OWN_HOST = "HOST"
#: Seconds in which what a rank has sent before its end may still arrive.
LAST_WORDS = 0.5


class KeyValueStore(ABC):
    """Keys and values that all ranks see."""

    @abstractmethod
    def put(self, key: str, value: str) -> None:
        """Set it, for good."""

    @abstractmethod
    def find(self, key: str, seconds: float) -> str | None:
        """Wait for a value at most this long; None if no rank has put it there yet."""


@dataclass
class RankLinks:
    """The links of a rank to all others, and which ranks are on which host."""

    hosts: tuple[tuple[int, ...], ...]
    links: list[PeerLink] = field(default_factory=list)
    wires: ZmqWires | None = None
    listener: RankSocket | None = None  #: kept for as long as the links, so that no other process takes this rank
    absent: dict[int, str] = field(default_factory=dict)  #: ranks that had ended before they came, and why

    def close(self) -> None:
        """Close the listener, so that another process may take the rank, and the ZeroMQ context."""
        if self.wires is not None:
            self.wires.close()
        if self.listener is not None:
            self.listener.close()


@dataclass
class Rendezvous:
    """A rendezvous as one rank sees it. A rank that is known to have ended is not waited for: what needs it says so."""

    rank: int
    size: int
    deadline: Deadline
    watch: RankWatch = field(default_factory=RankWatch)
    call: str = ""  #: that brought this rank here
    absent: dict[int, str] = field(default_factory=dict)  #: ranks that have ended, and why

    def look(self, missing: Sequence[int]) -> bool:
        """Whether one of the ranks that are waited for has ended; reports them if that is due."""
        self.watch.look(self.call, missing)
        ended = {rank: self.watch.ended[rank] for rank in missing if rank in self.watch.ended}
        self.absent |= ended
        if not ended:
            self.deadline.report(lambda: self._waiting(missing))
        return bool(ended)

    def check_time(self, missing: Sequence[int], problem: str = "") -> None:
        """`PeerError` when the time is over."""
        if self.deadline.over:
            waited = f"rank {self.rank} has waited {self.deadline.seconds:g} s {self._waiting(missing)}"
            started = "were they started?" if len(missing) > 1 else "was it started?"
            known = all(rank in self.watch.calls for rank in missing)
            raise PeerError(f"{waited}; {MORE_TIME if known else f'{problem}{started}'}")

    def _waiting(self, missing: Sequence[int]) -> str:
        said = said_of(missing, self.watch.calls, "has called no collective yet")
        return f"{f'in {self.call}, ' if self.call else ''}for {named(missing)} to join: {said}"


class RankSocket(socket.socket):
    """The listener of a rank. A forked child closes it: it may live longer than its parent."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        reference = weakref.ref(self)

        def let_go() -> None:
            inherited = reference()
            if inherited is not None:
                inherited.close()

        os.register_at_fork(after_in_child=let_go)


def rendezvous_by_name(name: str, meeting: Rendezvous, receiver: Receiver) -> RankLinks:
    """All ranks are on this host and know this name."""
    made = RankLinks((tuple(range(meeting.size)),), absent=meeting.absent)
    made.links, made.listener = _link_host(_digest(name), range(meeting.size), meeting, receiver)
    return made


def rendezvous_by_store(
    store: KeyValueStore,
    meeting: Rendezvous,
    receiver: Receiver,
    keys: WorkerKeys | None,
    insecure: bool,
    route: str,
    emulated: EmulatedHost | None = None,
    host_timeout: float = HOST_TIMEOUT,
) -> RankLinks:
    """Ranks may be anywhere. `route`: an address that all hosts reach, to find which of its own a host is reached at.
    `emulated`: this rank's place where the network is emulated (`link_relay.py`); each rank is a host of its own then."""
    rank = meeting.rank
    store.put(f"token-{rank}", secrets.token_hex(16))  # before its host: who has said where it is has a token
    store.put(f"host-{rank}", emulated.name if emulated else _host())
    by_host: dict[str, list[int]] = {}
    for other in range(meeting.size):
        host = _found(store, f"host-{other}", other, meeting)
        by_host.setdefault(f"of rank {other}" if host is None else host, []).append(other)
    made = RankLinks(tuple(tuple(ranks) for ranks in by_host.values()), absent=meeting.absent)
    here = next(ranks for ranks in made.hosts if rank in ranks)
    first = min(other for other in range(meeting.size) if other not in made.absent)  # so on all: who has ended says no more
    token = _found(store, f"token-{first}", first, meeting)
    if token is None:
        raise PeerError(f"rank {first} {meeting.absent[first]}, and has left no token")
    made.links, made.listener = _link_host(_digest(token), here, meeting, receiver)
    away = [other for other in range(meeting.size) if other not in here and other not in made.absent]
    try:
        if away:
            _check_keys(away, keys, insecure)
            made.wires = ZmqWires(keys, emulated.proxy if emulated else "", host_timeout)
            links = [ZmqLink(other, receiver, made.wires, serves=rank < other) for other in away]
            made.links += links
            _link_hosts(store, links, meeting, route, emulated)
    except BaseException:
        for link in made.links:
            link.close()
        made.close()
        raise
    for link in [link for link in made.links if link.rank in made.absent]:
        link.close()
        made.links.remove(link)
    return made


def _found(store: KeyValueStore, key: str, other: int, meeting: Rendezvous) -> str | None:
    """What this rank has put there, or will; None where it has ended."""
    meeting.deadline.restart()
    while (value := store.find(key, meeting.deadline.until_next_look)) is None:
        if meeting.look([other]):
            value = store.find(key, 0)  # it may have been its last word
            if value is not None:
                del meeting.absent[other]
            return value
        meeting.check_time([other])
    return value


# On this host.


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _link_host(
    name: str, ranks: Iterable[int], meeting: Rendezvous, receiver: Receiver
) -> tuple[list[PeerLink], RankSocket]:
    meeting.deadline.restart()
    rank, others = meeting.rank, [other for other in ranks if other != meeting.rank]
    found: dict[int, socket.socket] = {}
    listener = RankSocket()
    try:
        if others:
            _bind(listener, f"\0polytempo-{name}-{rank}", rank)
        for other in others:
            sock = _connect(name, other, meeting) if other < rank else None
            if sock is not None:
                found[other] = sock
        while missing := [other for other in others if other not in found and other not in meeting.absent]:
            _accept(listener, found, meeting, missing)
    except BaseException:  # ranks that have connected must learn that this one gave up
        for sock in (*found.values(), listener):
            sock.close()
        raise
    return [StreamLink(other, receiver, sock) for other, sock in found.items()], listener


def _bind(listener: socket.socket, address: str, rank: int) -> None:
    try:
        listener.bind(address)
    except OSError:
        process = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):  # it may have just ended
            probe.connect(address)
            process = process_and_user(probe)[0]
        raise PeerError(
            f"process {process} is rank {rank} of this job already, so process {os.getpid()} cannot be; "
            "are two jobs using one name?"
        ) from None
    listener.listen(1024)


def _connect(name: str, other: int, meeting: Rendezvous) -> socket.socket | None:
    """The connection to a lower rank; None where that has ended."""
    looked = 0.0

    def retry(error: OSError) -> bool:
        nonlocal looked
        if (
            time.monotonic() - looked < meeting.deadline.until_next_look
        ):  # tried more often than looked: to listen takes it a moment
            return True
        looked = time.monotonic()
        if meeting.look([other]):
            return False
        meeting.check_time([other], f"it cannot be reached ({error.strerror}); ")
        return True

    while (sock := connect_to(f"\0polytempo-{name}-{other}", retry)) is not None:
        if process_and_user(sock)[1] != os.getuid():
            sock.close()
            raise UsageError(f"rank {other} is a process of another user; this rank does not talk to it")
        try:
            sock.sendall(HELLO.pack(meeting.rank, meeting.size))
            return sock
        except OSError as error:  # it has ended just now, or does not listen any more
            sock.close()
            if not retry(error):
                break
    return None


def _accept(listener: socket.socket, found: dict[int, socket.socket], meeting: Rendezvous, missing: list[int]) -> None:
    """Take the next rank that connects, or learn that one of them will not."""
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    while not poller.poll(meeting.deadline.until_next_look * 1000):
        if meeting.look(missing) and not poller.poll(0):  # else it may have come, and left again since
            return
        meeting.check_time(missing)
    accepted = accept_rank(listener)
    if accepted is None:
        return
    rank, their_size, sock = accepted
    if rank not in missing or their_size != meeting.size:
        sock.close()
    if rank not in missing:  # a stranger, or a second process with the rank of another
        return
    if their_size != meeting.size:
        raise UsageError(f"rank {rank} expects {their_size} ranks, and rank {meeting.rank} expects {meeting.size}")
    found[rank] = sock
    meeting.absent.pop(rank, None)


# Between hosts.


def _host() -> str:
    """This machine and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def _check_keys(away: list[int], keys: WorkerKeys | None, insecure: bool) -> None:
    if keys is None and not insecure:
        raise UsageError(
            f"ranks {', '.join(map(str, away[:8]))} are on other hosts: give all ranks the same key file "
            "(made by `polytempo key FILE`), or say insecure to go without"
        )


def _link_hosts(
    store: KeyValueStore, links: list[ZmqLink], meeting: Rendezvous, route: str, emulated: EmulatedHost | None
) -> None:
    """The lower rank of a pair listens, and publishes where. Both wait until the other has proved that it has the key."""
    rank = meeting.rank
    host, known = (RELAY_HOST, False) if emulated else own_host(route)
    reached_as = emulated.name if emulated else OWN_HOST
    for link in links:
        if rank < link.rank:
            address = link.bind(f"[{host}]" if ":" in host else host)
            store.put(f"link-{rank}-{link.rank}", address if known else f"tcp://{reached_as}:{address.rpartition(':')[2]}")
    for link in links:
        if link.rank < rank:
            found = _found(store, f"link-{link.rank}-{rank}", link.rank, meeting)
            if found is not None:
                link.connect(found.replace(OWN_HOST, route.rpartition(":")[0]))
    meeting.deadline.restart()
    look_at = 0.0
    while missing := [link for link in links if not link.established and link.rank not in meeting.absent]:
        for link in missing:
            link.hear()
            if link.problem or meeting.deadline.over:
                why = link.problem or "it has not come, or not with the same key file"
                raise PeerError(f"rank {rank} cannot talk to rank {link.rank}: {why}; give all ranks the same one")
        waited_for = [link.rank for link in missing if not link.established]
        if waited_for and time.monotonic() >= look_at:
            look_at = time.monotonic() + meeting.deadline.until_next_look
            if meeting.look(waited_for):
                _hear_last(links, meeting)
        time.sleep(RETRY_EVERY)


def _hear_last(links: list[ZmqLink], meeting: Rendezvous) -> None:
    """A rank has ended, perhaps after it had met all others: what it sent may be on its way."""
    deadline = time.monotonic() + LAST_WORDS
    while time.monotonic() < deadline and (gone := [link for link in links if link.rank in meeting.absent]):
        for link in gone:
            link.hear()
            if link.established:
                del meeting.absent[link.rank]
        time.sleep(RETRY_EVERY)

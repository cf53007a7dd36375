"""How ranks find each other: by a name they all know, or through a store of keys and values.

On one host: everybody listens at an abstract Unix address made from the name (nothing is left in any directory, however a
process ends) and connects to all lower ranks. The kernel says whose process is at the other end: another user's is refused.

With a store, each rank first says which host it is on (machine and network namespace). Pairs on one host meet as above;
others by ZeroMQ, at addresses that go through the store.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.errors import PeerError, UsageError
from polytempo.transport.deadline import Deadline, named
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.peer_link import PeerLink, Receiver
from polytempo.transport.stream_link import StreamLink
from polytempo.transport.unix_socket import HELLO, RETRY_EVERY, accept_rank, connect_to, peer_pid, peer_uid
from polytempo.transport.zmq_link import ZmqLink, ZmqWires

#: A host that listens at all its addresses, and what stands for the one by which others reach it.
EVERYWHERE = ("0.0.0.0", "*", "::", "[::]")
UNKNOWN = "HOST"


class KeyValueStore(ABC):
    """Keys and values that all ranks see."""

    @abstractmethod
    def put(self, key: str, value: str) -> None:
        """Set it, for good."""

    @abstractmethod
    def find(self, key: str, seconds: float) -> str | None:
        """Wait for it, at most so long; None if nobody has put it there yet."""


@dataclass
class Met:
    """All links of a rank, and which ranks are on which host."""

    hosts: tuple[tuple[int, ...], ...]
    links: list[PeerLink] = field(default_factory=list)
    wires: ZmqWires | None = None
    seat: RankSocket | None = None  #: kept for as long as the links, so that no other process takes this rank

    def close(self) -> None:
        """Let others have the rank, and the sockets end."""
        if self.wires is not None:
            self.wires.close()
        if self.seat is not None:
            self.seat.close()


class RankSocket(socket.socket):
    """Where a rank listens. A forked child lets go of it: it may live longer than its parent."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        reference = weakref.ref(self)

        def let_go() -> None:
            inherited = reference()
            if inherited is not None:
                inherited.close()

        os.register_at_fork(after_in_child=let_go)


def meet_by_name(name: str, rank: int, size: int, receiver: Receiver, deadline: Deadline) -> Met:
    """All ranks are on this host and know this name."""
    met = Met((tuple(range(size)),))
    met.links, met.seat = _meet_here(_digest(name), rank, range(size), size, receiver, deadline)
    return met


def meet_by_store(
    store: KeyValueStore,
    rank: int,
    size: int,
    receiver: Receiver,
    deadline: Deadline,
    keys: WorkerKeys | None,
    insecure: bool,
    route: str,
) -> Met:
    """Ranks may be anywhere. `route`: an address that all hosts reach, to find which of its own a host is reached at."""
    if rank == 0:
        store.put("token", secrets.token_hex(16))
    store.put(f"host-{rank}", _host())
    by_host: dict[str, list[int]] = {}
    for other in range(size):
        by_host.setdefault(_found(store, f"host-{other}", other, deadline), []).append(other)
    met = Met(tuple(tuple(ranks) for ranks in by_host.values()))
    here = next(ranks for ranks in met.hosts if rank in ranks)
    name = _digest(_found(store, "token", 0, deadline))
    met.links, met.seat = _meet_here(name, rank, here, size, receiver, deadline)
    away = [other for other in range(size) if other not in here]
    try:
        if away:
            _check_keys(away, keys, insecure)
            met.wires = ZmqWires(keys)
            links = [ZmqLink(other, receiver, met.wires, serves=rank < other) for other in away]
            met.links += links
            _meet_away(store, rank, links, deadline, route)
    except BaseException:
        for link in met.links:
            link.close()
        met.close()
        raise
    return met


def _found(store: KeyValueStore, key: str, other: int, deadline: Deadline) -> str:
    """What this rank has put there, or will."""
    deadline.restart()
    while (value := store.find(key, deadline.until_next_look)) is None:
        deadline.look([other])
        if deadline.over:
            raise PeerError(f"rank {deadline.rank} has waited {deadline.seconds:g} s for rank {other}; was it started?")
    return value


# On this host.


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _meet_here(
    name: str, rank: int, ranks: Iterable[int], size: int, receiver: Receiver, deadline: Deadline
) -> tuple[list[PeerLink], RankSocket]:
    deadline.restart()
    others = [other for other in ranks if other != rank]
    found: dict[int, socket.socket] = {}
    seat = RankSocket()
    try:
        if others:
            _bind(seat, f"\0polytempo-{name}-{rank}", rank)
        for other in others:
            if other < rank:
                found[other] = _connect(name, rank, other, size, deadline)
        while missing := [other for other in others if other not in found]:
            _accept(seat, found, size, deadline, missing)
    except BaseException:  # who has come must learn that nothing comes of it
        for sock in (*found.values(), seat):
            sock.close()
        raise
    return [StreamLink(other, receiver, sock) for other, sock in found.items()], seat


def _bind(listener: socket.socket, address: str, rank: int) -> None:
    try:
        listener.bind(address)
    except OSError:
        raise PeerError(
            f"process {_listener_at(address)} is rank {rank} of this job already, so process {os.getpid()} cannot be; "
            "are two jobs using one name?"
        ) from None
    listener.listen(1024)


def _listener_at(address: str) -> int:
    """The process that listens there; 0 when it has just ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
            return peer_pid(probe)
        except OSError:
            return 0


def _connect(name: str, rank: int, other: int, size: int, deadline: Deadline) -> socket.socket:
    def retry(error: OSError) -> bool:
        deadline.look([other])
        if deadline.over:
            raise PeerError(f"rank {rank} cannot reach rank {other}: {error.strerror}; was it started?") from None
        return True

    sock = connect_to(f"\0polytempo-{name}-{other}", retry)
    assert sock is not None
    if peer_uid(sock) != os.getuid():
        sock.close()
        raise UsageError(f"rank {other} is a process of another user; this rank does not talk to it")
    sock.sendall(HELLO.pack(rank, size))
    return sock


def _accept(
    listener: socket.socket, found: dict[int, socket.socket], size: int, deadline: Deadline, missing: list[int]
) -> None:
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    while not poller.poll(deadline.until_next_look * 1000):
        deadline.look(missing)
        if deadline.over:
            raise PeerError(f"{named(missing)} did not connect in {deadline.seconds:g} s; were they started?")
    accepted = accept_rank(listener)
    if accepted is None:
        return
    rank, their_size, sock = accepted
    if rank not in missing or their_size != size:
        sock.close()
    if rank not in missing:  # a stranger, or a second process with the rank of another
        return
    if their_size != size:
        raise UsageError(f"rank {rank} expects {their_size} ranks, and rank {deadline.rank} expects {size}")
    found[rank] = sock


# Between hosts.


def _host() -> str:
    """This machine and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def own_address(route: str) -> str:
    """The address of this host on the way to another."""
    host = route.rpartition(":")[0] or route
    family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _own_host(route: str) -> tuple[str, bool]:
    """Where to listen; and is that an address others can use? Who listens everywhere does not know which one they see."""
    if route.rpartition(":")[0] in EVERYWHERE:
        return "*", False
    return own_address(route), True


def _check_keys(away: list[int], keys: WorkerKeys | None, insecure: bool) -> None:
    if keys is None and not insecure:
        raise UsageError(
            f"ranks {', '.join(map(str, away[:8]))} are on other hosts: give all ranks the same key file "
            "(made by `polytempo key FILE`), or say insecure to go without"
        )


def _meet_away(store: KeyValueStore, rank: int, links: list[ZmqLink], deadline: Deadline, route: str) -> None:
    """The lower rank of a pair listens, and says where. Both then wait until the other has proved who it is."""
    host, known = _own_host(route)
    for link in links:
        if rank < link.rank:
            address = link.bind(f"[{host}]" if ":" in host else host)
            store.put(f"link-{rank}-{link.rank}", address if known else f"tcp://{UNKNOWN}:{address.rpartition(':')[2]}")
    for link in links:
        if link.rank < rank:
            address = _found(store, f"link-{link.rank}-{rank}", link.rank, deadline)
            link.connect(address.replace(UNKNOWN, route.rpartition(":")[0]))
    deadline.restart()
    while missing := [link for link in links if not link.established]:
        deadline.look([link.rank for link in missing])
        for link in missing:
            link.hear()
            if link.problem or deadline.over:
                why = link.problem or "it has not come, or not with the same key file"
                raise PeerError(f"rank {rank} cannot talk to rank {link.rank}: {why}; give all ranks the same one")
        time.sleep(RETRY_EVERY)

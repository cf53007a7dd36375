"""Rendezvous: how the ranks of a job find each other, by a name they all know or through a key-value store.

On one host each rank listens at an abstract Unix address made from the name (nothing is left in any directory, however a
process ends) and connects to all lower ranks. A process of another user is refused (`unix_socket.py`).

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.errors import PeerError, UsageError
from polytempo.transport.deadline import Deadline, named
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.link_relay import RELAY_HOST, EmulatedHost
from polytempo.transport.peer_link import PeerLink, Receiver
from polytempo.transport.stream_link import StreamLink
from polytempo.transport.unix_socket import HELLO, RETRY_EVERY, accept_rank, connect_to, peer_pid, peer_uid
from polytempo.transport.zmq_link import HOST_TIMEOUT, ZmqLink, ZmqWires

#: A host that listens at all its addresses, and what stands for the one by which others reach it.
EVERYWHERE = ("0.0.0.0", "*", "::", "[::]")
OWN_HOST = "HOST"


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

    def close(self) -> None:
        """Close the listener, so that another process may take the rank, and the ZeroMQ context."""
        if self.wires is not None:
            self.wires.close()
        if self.listener is not None:
            self.listener.close()


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


def rendezvous_by_name(name: str, rank: int, size: int, receiver: Receiver, deadline: Deadline) -> RankLinks:
    """All ranks are on this host and know this name."""
    made = RankLinks((tuple(range(size)),))
    made.links, made.listener = _link_host(_digest(name), rank, range(size), size, receiver, deadline)
    return made


def rendezvous_by_store(
    store: KeyValueStore,
    rank: int,
    size: int,
    receiver: Receiver,
    deadline: Deadline,
    keys: WorkerKeys | None,
    insecure: bool,
    route: str,
    emulated: EmulatedHost | None = None,
    host_timeout: float = HOST_TIMEOUT,
) -> RankLinks:
    """Ranks may be anywhere. `route`: an address that all hosts reach, to find which of its own a host is reached at.
    `emulated`: this rank's place where the network is emulated (`link_relay.py`); each rank is a host of its own then."""
    if rank == 0:
        store.put("token", secrets.token_hex(16))
    store.put(f"host-{rank}", emulated.name if emulated else _host())
    by_host: dict[str, list[int]] = {}
    for other in range(size):
        by_host.setdefault(_found(store, f"host-{other}", other, deadline), []).append(other)
    made = RankLinks(tuple(tuple(ranks) for ranks in by_host.values()))
    here = next(ranks for ranks in made.hosts if rank in ranks)
    name = _digest(_found(store, "token", 0, deadline))
    made.links, made.listener = _link_host(name, rank, here, size, receiver, deadline)
    away = [other for other in range(size) if other not in here]
    try:
        if away:
            _check_keys(away, keys, insecure)
            made.wires = ZmqWires(keys, emulated.proxy if emulated else "", host_timeout)
            links = [ZmqLink(other, receiver, made.wires, serves=rank < other) for other in away]
            made.links += links
            _link_hosts(store, rank, links, deadline, route, emulated)
    except BaseException:
        for link in made.links:
            link.close()
        made.close()
        raise
    return made


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


def _link_host(
    name: str, rank: int, ranks: Iterable[int], size: int, receiver: Receiver, deadline: Deadline
) -> tuple[list[PeerLink], RankSocket]:
    deadline.restart()
    others = [other for other in ranks if other != rank]
    found: dict[int, socket.socket] = {}
    listener = RankSocket()
    try:
        if others:
            _bind(listener, f"\0polytempo-{name}-{rank}", rank)
        for other in others:
            if other < rank:
                found[other] = _connect(name, rank, other, size, deadline)
        while missing := [other for other in others if other not in found]:
            _accept(listener, found, size, deadline, missing)
    except BaseException:  # ranks that have connected must learn that this one gave up
        for sock in (*found.values(), listener):
            sock.close()
        raise
    return [StreamLink(other, receiver, sock) for other, sock in found.items()], listener


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


def own_host(route: str) -> tuple[str, bool]:
    """Where to listen, and whether others can use that address: `*` stands for all addresses of this host."""
    if route.rpartition(":")[0] in EVERYWHERE:
        return "*", False
    return own_address(route), True


def _check_keys(away: list[int], keys: WorkerKeys | None, insecure: bool) -> None:
    if keys is None and not insecure:
        raise UsageError(
            f"ranks {', '.join(map(str, away[:8]))} are on other hosts: give all ranks the same key file "
            "(made by `polytempo key FILE`), or say insecure to go without"
        )


def _link_hosts(
    store: KeyValueStore, rank: int, links: list[ZmqLink], deadline: Deadline, route: str, emulated: EmulatedHost | None
) -> None:
    """The lower rank of a pair listens, and publishes where. Both wait until the other has proved that it has the key."""
    host, known = (RELAY_HOST, False) if emulated else own_host(route)
    reached_as = emulated.name if emulated else OWN_HOST
    for link in links:
        if rank < link.rank:
            address = link.bind(f"[{host}]" if ":" in host else host)
            store.put(f"link-{rank}-{link.rank}", address if known else f"tcp://{reached_as}:{address.rpartition(':')[2]}")
    for link in links:
        if link.rank < rank:
            address = _found(store, f"link-{link.rank}-{rank}", link.rank, deadline)
            link.connect(address.replace(OWN_HOST, route.rpartition(":")[0]))
    deadline.restart()
    while missing := [link for link in links if not link.established]:
        deadline.look([link.rank for link in missing])
        for link in missing:
            link.hear()
            if link.problem or deadline.over:
                why = link.problem or "it has not come, or not with the same key file"
                raise PeerError(f"rank {rank} cannot talk to rank {link.rank}: {why}; give all ranks the same one")
        time.sleep(RETRY_EVERY)

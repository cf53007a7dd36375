"""Worlds whose ranks are threads, over each kind of link; and a look afterwards whether anything of them is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import pytest
from sharing import link_of, mapped
from wires import Client

from polytempo.collectives.group import RankGroup
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.world import World, open_by_name, open_by_store, open_in_threads
from polytempo.transport import rendezvous
from polytempo.transport.keys import WorkerKeys, make_keys
from polytempo.transport.memory import MemoryLink
from polytempo.transport.rendezvous import KeyValueStore, RankLinks

#: Nothing here takes nearly so long, unless somebody waits for ever.
PATIENCE = 20.0
KINDS = ["memory", "unix", "zmq"]
ROUTE = "127.0.0.1:9"

Hosts = tuple[tuple[int, ...], ...]

_names = count()


# Opening.


class Shelf(KeyValueStore):
    """A store for threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def find(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)


def said(store: KeyValueStore, key: str) -> str:
    """What somebody says there soon."""
    value = store.find(key, PATIENCE)
    assert value is not None, f"nobody has said {key}"
    return value


@cache
def keys() -> WorkerKeys:
    return make_keys().workers


def unused_name() -> str:
    return f"test-{os.getpid()}-{next(_names)}"


def alone(size: int) -> Hosts:
    """Each rank on a host of its own."""
    return tuple((rank,) for rank in range(size))


def at_once(size: int, work: Callable[[int], Any]) -> list[Any]:
    """The same for each rank, in a thread of its own; their results, or the first error."""
    return results(*[Client(lambda rank=rank: work(rank)) for rank in range(size)])


def results(*clients: Client) -> list[Any]:
    """What came out of all of them; the first error of any, which may be why others wait."""
    deadline = time.monotonic() + PATIENCE
    while waiting := [client for client in clients if not client.over()]:
        if any(client.error is not None for client in clients):
            deadline = min(deadline, time.monotonic() + 2.0)
        if time.monotonic() > deadline:
            break
        waiting[0].join(0.2)
    for client in clients:
        if client.error is not None:
            raise client.error
    return _outcomes(clients)


def outcomes(*clients: Client) -> list[Any]:
    """What came out of each, or its error; nobody may hang."""
    deadline = time.monotonic() + PATIENCE
    for client in clients:
        client.join(max(0.0, deadline - time.monotonic()))
    return _outcomes(clients)


def _outcomes(clients: Sequence[Client]) -> list[Any]:
    waiting = [index for index, client in enumerate(clients) if not client.over()]
    assert waiting == [], f"of {len(clients)} threads, {waiting} still wait"
    return [client.result if client.error is None else client.error for client in clients]


def open_worlds(kind: str, size: int, hosts: Hosts | None = None, timeout: float | None = None) -> list[World]:
    """A world for each rank. Links between hosts are ZeroMQ's where the kind is; inside a host, they are Unix sockets."""
    if kind == "memory":
        return open_in_threads(size, timeout) if hosts is None else _open_on_hosts(hosts, timeout)
    if kind == "unix":
        name = unused_name()
        worlds: list[World] = at_once(size, lambda rank: open_by_name(name, rank, size, PATIENCE, timeout))
        return [_placed(world, hosts) for world in worlds]
    store = Shelf()
    with hosts_of_threads() as here:

        def open_one(rank: int) -> World:
            here.name = next(str(index) for index, ranks in enumerate(hosts or alone(size)) if rank in ranks)
            return open_by_store(store, rank, size, ROUTE, keys(), join_timeout=PATIENCE, timeout=timeout)

        found: list[World] = at_once(size, open_one)
        return found


def _open_on_hosts(hosts: Hosts, timeout: float | None) -> list[World]:
    size = sum(map(len, hosts))
    engines = [ProgressEngine(rank) for rank in range(size)]
    mets = [RankLinks(hosts) for _ in range(size)]
    for high in range(size):
        for low in range(high):
            one, two = MemoryLink.pair((low, engines[low].messages), (high, engines[high].messages))
            mets[low].links.append(one)
            mets[high].links.append(two)
    return [World(engine, size, met, timeout) for engine, met in zip(engines, mets, strict=True)]


def _placed(world: World, hosts: Hosts | None) -> World:
    """As if its ranks were on these hosts."""
    if hosts is not None:
        world.hosts = hosts
        world.all_ranks = world.new_group(range(world.size)) or world.all_ranks
    return world


@contextmanager
def hosts_of_threads() -> Iterator[threading.local]:
    """Each thread says which host it is on: `here.name`."""
    here, real = threading.local(), rendezvous._host
    rendezvous._host = lambda: here.name  # type: ignore[assignment]
    try:
        yield here
    finally:
        rendezvous._host = real


def close_all(worlds: Sequence[World]) -> None:
    """All at once: some take their time."""
    results(*[Client(world.close) for world in worlds])


# Working.


def everywhere(worlds: Sequence[World], work: Callable[[World], Any]) -> list[Any]:
    """The same on each rank; their results, or the first error."""
    return results(*[Client(lambda world=world: work(world)) for world in worlds])


def attempts(worlds: Sequence[World], work: Callable[[World], Any]) -> list[Any]:
    """The same on each rank; the result of each, or its error."""
    return outcomes(*[Client(lambda world=world: work(world)) for world in worlds])


def fresh_groups(worlds: Sequence[World], ranks: Sequence[int] | None = None) -> list[RankGroup]:
    """The same new group on each of its ranks."""
    chosen = range(len(worlds)) if ranks is None else ranks
    made = [world.new_group(list(chosen)) for world in worlds]
    return [group for group in made if group is not None]


# Afterwards.


@cache
def _freeze() -> None:
    """Modules are no garbage: from now on it takes milliseconds to look for some."""
    gc.collect()
    gc.freeze()


def _collect() -> None:
    _freeze()
    gc.collect()


class Leftovers:
    """What this process holds now: `check` says whether it holds more later."""

    def __init__(self) -> None:
        _collect()
        self._before = self._count()

    def _count(self) -> dict[str, int]:
        links = [link_of(name) for name in os.listdir("/proc/self/fd")]
        self.links = sorted(links)
        return {
            "shared mappings": mapped(),
            "shared files": sum(link.startswith("/memfd:") for link in links),
            "descriptors": len(links),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def more(self) -> dict[str, tuple[int, int]]:
        now = self._count()
        return {name: (self._before[name], now[name]) for name in now if now[name] > self._before[name]}

    def check(self) -> None:
        """A thread that was joined may take a moment to be gone from the kernel's list."""
        deadline = time.monotonic() + 5.0
        while self.more() and time.monotonic() < deadline:
            _collect()
            threading.Event().wait(0.01)
        more = self.more()
        assert more == {}, f"{more} (before, now); {self.links}; {[thread.name for thread in threading.enumerate()]}"


class Opening:
    """Opens worlds for one test."""

    def __init__(self) -> None:
        self._worlds: list[World] = []

    def __call__(self, kind: str, size: int, hosts: Hosts | None = None, timeout: float | None = None) -> list[World]:
        worlds = open_worlds(kind, size, hosts, timeout)
        self._worlds += worlds
        return worlds

    def close(self) -> None:
        worlds, self._worlds = self._worlds, []
        close_all(worlds)
        worlds.clear()


def _clients() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, Client)}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before, hanging = Leftovers(), _clients()
    yield
    assert _clients() <= hanging
    before.check()


@pytest.fixture
def opening(nothing_left: None) -> Iterator[Opening]:
    """Opens worlds; they are closed after the test, and nothing is left of them."""
    made = Opening()
    yield made
    made.close()


class Cache:
    """Worlds that several tests use, each with groups of its own."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, int, Hosts | None], list[World]] = {}
        self.spoilt = False

    def __call__(self, kind: str, size: int, hosts: Hosts | None = None) -> list[World]:
        key = kind, size, hosts
        if key not in self._worlds:
            self._worlds[key] = open_worlds(kind, size, hosts)
        return self._worlds[key]

    def drop(self) -> list[Client]:
        """Close all, at once."""
        worlds = [world for found in self._worlds.values() for world in found]
        for found in self._worlds.values():
            found.clear()  # pytest keeps what a fixture gave for longer
        self._worlds.clear()
        return [Client(world.close) for world in worlds]


@pytest.fixture(scope="module")
def all_worlds() -> Iterator[Cache]:
    before = Leftovers()
    cache = Cache()
    yield cache
    clients = cache.drop()
    if not cache.spoilt:
        results(*clients)
        clients.clear()
        before.check()


@pytest.fixture
def worlds_of(all_worlds: Cache) -> Iterator[Cache]:
    """Worlds by kind, size and hosts; nothing is left of them after the module. If anybody hangs, new ones are made."""
    before = _clients()
    yield all_worlds
    if not _clients() <= before:
        all_worlds.spoilt = True
        all_worlds.drop()

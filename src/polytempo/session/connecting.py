"""How a worker connects: to the servers of its job (`open_client`), and to all other workers (`open_world`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polytempo.client.client import Client
from polytempo.client.key_value_store import JobStore, store_at
from polytempo.collectives.world import World, open_by_name, open_by_store, open_in_threads
from polytempo.launcher.job_facts import JobFacts
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import scheme_of
from polytempo.transport.connect import connect
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.rendezvous import KeyValueStore
from polytempo.transport.shared_memory import SharedMemoryRegistry

if TYPE_CHECKING:
    from polytempo.session.session import Session

#: Seconds to wait for servers that are still starting.
PATIENCE = 60.0
#: Seconds to wait at the rendezvous for ranks that another launcher started.
MEETING = 120.0
#: Seconds for which a rank that has lost another listens to the coordinator at a time.
LISTEN = 0.05


def open_client(
    job: JobFacts, rank: int, addresses: Sequence[str], retry: float = 5.0, timeout: float | None = None
) -> Client:
    """Connect to these servers of a job."""
    on_this_host = all(scheme_of(address) == "ipc" for address in addresses)
    pool = Pool(SharedMemoryRegistry() if on_this_host else None)
    keys = WorkerKeys(**job.keys) if job.keys else None
    identity = f"worker-{rank}-{job.incarnation}-{os.urandom(8).hex()}"  # not guessable: it names the connection
    emulated = job.emulated_host(rank)
    proxy = emulated.proxy if emulated else ""
    channels = [connect(address, identity, keys, pool, PATIENCE, proxy) for address in addresses]
    return Client(channels, rank, job.incarnation, pool, retry, job.tokens.get(rank, ""), timeout)


def open_world(session: Session, call: str) -> World:
    """Links to all other workers. `call`: that needs them, for the ranks that wait."""
    rank, size, way, timeout, watch = session.rank, session.size, session.way, session.timeout, session.watch()
    if size == 1:
        return open_in_threads(1)[0]
    life = f"-{session.life}" if session.life else ""  # ranks that are still in an earlier world must not be met
    if session.job.meeting:
        return open_by_name(session.job.meeting + life, rank, size, timeout, timeout, watch, call)
    store: KeyValueStore
    if session.client is not None:
        store = JobStore(session.client, session.lock, life)
    else:
        store = store_at(way.address, rank, size, way.agent, MEETING, life)

    def departed() -> frozenset[int] | None:
        """The workers that the coordinator says are gone, after listening for a moment; None once this one has left it."""
        client = session.client
        if client is not None and session.lock.acquire(timeout=LISTEN):  # else another thread listens
            try:
                client.ask_who_departed(LISTEN)
            finally:
                session.lock.release()
        return None if client is None else frozenset(client.departed)

    return open_by_store(
        *(store, rank, size, way.address, way.keys, way.insecure, timeout, timeout),
        emulated=way.emulated,
        host_timeout=session.job.host_timeout,
        watch=watch,
        call=call,
        word=departed if session.client is not None else None,
    )

"""Where ranks on several hosts find each other: the job's first server, or a key-value store of torch's. Only addresses.

Every process that reaches the port of torch's store can read and write it. All that this can do is keep ranks from finding
each other: with the keys of the key file they prove to each other who they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from polytempo.client.client import BackgroundWait, Client
from polytempo.errors import PeerError
from polytempo.protocol.messages import AskWhere, StoreSet
from polytempo.transport.deadline import RankWatch
from polytempo.transport.rendezvous import KeyValueStore

FIRST_PAUSE, LONGEST_PAUSE = 1e-3, 0.05
#: Seconds in which a rank tries to say that it waits no more.
LAST_WORD = 1.0


class TorchStore(KeyValueStore):
    """Any store of torch."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def find(self, key: str, seconds: float) -> str | None:
        """Asked again and again: torch's own `wait` writes two warnings for each wait that was too short."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        try:
            while not self._store.check([key]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE)
            return str(self._store.get(key).decode())
        except (RuntimeError, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0][:160]
            raise PeerError(f"the store cannot be asked for {key!r} ({why}); is the process that keeps it alive?") from None


class JobStore(KeyValueStore):
    """The first server of a job of ours. `life`: what tells the keys of a later meeting from those of earlier ones."""

    def __init__(self, client: Client, lock: threading.RLock, life: str = "") -> None:
        self._client, self._lock, self._life = client, lock, life
        self._wait = BackgroundWait(client, lock)

    def put(self, key: str, value: str) -> None:
        with self._lock:
            self._client.send(0, StoreSet(key=key + self._life, value=value))

    def find(self, key: str, seconds: float) -> str | None:
        """A wait that locks the client only for each look: a rendezvous may take as long as an epoch of another rank."""
        return self._wait.for_key(key + self._life, seconds)


class JobWatch(RankWatch):
    """Asks the coordinator of a job of ours, and does not wait for the answer: it is there at the next look.

    Args:
        client: The worker's connections to the servers.
        lock: Held whenever the client is used. A thread that has it for long is not waited for.
        life: The number of jobs that this process has left before this one.
    """

    def __init__(self, client: Client, lock: threading.RLock, life: int) -> None:
        super().__init__()
        self._client, self._lock, self._life = client, lock, life
        self._told = ""

    def look(self, call: str, ranks: Sequence[int]) -> None:
        if (call or self._told) and self._lock.acquire(timeout=0.0 if call else LAST_WORD):
            try:
                self._told = call
                self._client.send(0, AskWhere(life=self._life, call=call, ranks=tuple(ranks)))
                self._client.connections.listen()
            finally:
                self._lock.release()
            news = self._client.news
            self.ended = {rank: f"{how} before its first collective" for rank, how in news.ended.items()}
            self.calls = dict(news.calls)


_kept: list[Any] = []  # stores whose keeper this process is: ranks that join again find them where they were


def store_at(address: str, rank: int, size: int, agent: bool, patience: float, life: str = "") -> TorchStore:
    """The store at host:port: rank 0 keeps it, or, with `agent`, the launcher. `life`: as for `JobStore`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PeerError(f"expected host:port of a store that all hosts reach, got {address!r}")
    try:
        store = torch.distributed.TCPStore(
            host.strip("[]"),
            int(port),
            size,
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise PeerError(f"rank {rank} cannot reach the store at {address}: {why}; is rank 0 on that host?") from None
    if rank == 0 and not agent:
        _kept[:] = [store]
    return TorchStore(torch.distributed.PrefixStore(f"polytempo{life}", store))

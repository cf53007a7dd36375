"""From an address to a connection."""

from __future__ import annotations

from polytempo.errors import UsageError
from polytempo.transport.channel import Channel, scheme_of
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.pool import Pool
from polytempo.transport.stream import StreamChannel
from polytempo.transport.zeromq import ZmqChannel


def connect(address: str, identity: str, keys: WorkerKeys | None, pool: Pool, limit: int = 1 << 62) -> Channel:
    """Open a connection; what the address is decides how. (`memory://` is opened by who holds the endpoint.)"""
    scheme = scheme_of(address)
    if scheme == "ipc":
        return StreamChannel(address.removeprefix("ipc://"), pool, limit)
    if scheme == "tcp":
        return ZmqChannel(address, identity.encode(), keys, pool, limit)
    raise UsageError(f"{address} can only be reached from inside its process")

"""From an address to a connection."""

from __future__ import annotations

from polytempo.errors import UsageError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Channel, scheme_of
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.stream import StreamChannel
from polytempo.transport.zeromq import ZmqChannel

#: A job's servers are trusted with any size.
LIMIT = 1 << 62


def connect(
    address: str, identity: str, keys: WorkerKeys | None, pool: Pool, timeout: float = 0.0, proxy: str = ""
) -> Channel:
    """Open a connection to a server, by way of a proxy where the network is emulated. (`memory://` is opened by the owner of
    the endpoint.)"""
    scheme = scheme_of(address)
    if scheme == "ipc":
        return StreamChannel(address.removeprefix("ipc://"), pool, LIMIT, timeout)
    if scheme == "tcp":
        return ZmqChannel(address, identity.encode(), keys, pool, LIMIT, proxy)
    raise UsageError(f"{address} can only be reached from inside its process")

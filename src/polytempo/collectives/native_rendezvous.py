"""How the ranks of a group meet for a process group of torch's (gloo, NCCL): a TCPStore of torch's, which rank 0 serves.

It listens where the other ranks reach it and nowhere else: on one host at the loopback address, between hosts at the address
by which they reach this one. Nothing remains of it when its process ends, however that ends.

Rank 0 tells the others where inside a call of the group. The process group is then made in a thread: torch waits there for
all ranks, while the links are driven and a rank that is lost ends the call.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from polytempo.collectives.device_choice import Network
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.host_addresses import own_host

if TYPE_CHECKING:
    from polytempo.collectives.progress_engine import ProgressEngine

#: Seconds in which torch has to make a process group, once all ranks are there.
PATIENCE = 120.0
#: Bytes of the text that says where the store is.
TEXT = 512
LOOPBACK = "127.0.0.1"


class Meeting:
    """The store of one process group, on one rank. Kept for as long as the process group: NCCL comes back to it.

    Args:
        hosts: The number of hosts.
        network: That between the ranks.
        ranks: Those of the group, in the job; the first keeps the store.
        rank: This one.
    """

    def __init__(self, hosts: int, network: Network, ranks: Sequence[int], rank: int) -> None:
        self._several, self._network, self._ranks, self._rank = hosts > 1, network, ranks, rank
        self.store: Any = None

    def serve(self) -> str:
        """On rank 0: open the store, and say where the others find it: the port, and the host if it is known."""
        host, known = own_host(self._network.route) if self._several else (LOOPBACK, True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host if known else "", 0), family=family, backlog=len(self._ranks) + 8)
        port = int(listener.getsockname()[1])
        reached_as = host if known else ("::1" if family == socket.AF_INET6 else LOOPBACK)
        patience, descriptor = timedelta(seconds=PATIENCE), listener.detach()
        self.store = dist.TCPStore(
            reached_as, port, None, True, timeout=patience, wait_for_workers=False, master_listen_fd=descriptor
        )
        return f"{port} {host if known else ''}"

    def join(self, text: str) -> Any:
        """The store, on any rank. Blocks.

        Raises:
            PeerError: It cannot be reached; the message names the rank that keeps it.
        """
        if self.store is None:
            port, _, host = text.partition(" ")
            host = host or self._network.route.rpartition(":")[0].strip("[]")
            try:
                self.store = dist.TCPStore(host, int(port), None, False, timeout=timedelta(seconds=PATIENCE))
            except (RuntimeError, ValueError) as error:
                why = str(error).partition("\n")[0]
                where = f"the store of rank {self._ranks[0]} at {host}:{port}"
                raise PeerError(f"rank {self._rank} cannot open {where}: {why}") from None
        return self.store


def tell(inside: Any, text: str) -> Steps:
    """Steps of a call by which all ranks get the text of the group's rank 0."""
    record = torch.zeros(TEXT, dtype=torch.uint8)
    data = text.encode()
    record[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else record[:0]
    yield from inside.broadcast([record], 0)
    return bytes(record.tolist()).rstrip(b"\0").decode()


def in_thread(engine: ProgressEngine, needed: Callable[[], list[int]], action: Callable[[], Any]) -> Steps:
    """Steps that wait for an action in a thread of its own, and have its result. The call fails if a needed rank is lost.

    The thread of a call that failed is left alone: the time-outs of torch end it.
    """
    ended: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            ended.append((action(), None))
        except Exception as error:  # noqa: BLE001  the call raises it
            ended.append((None, error))
        engine.wake()

    threading.Thread(target=run, name="polytempo-native", daemon=True).start()
    yield Wait(lambda: bool(ended), needed)
    result, error = ended[0]
    if error is not None:
        raise error
    return result

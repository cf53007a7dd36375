"""The usual tutorial's parameter server: `torch.distributed.rpc` to a function that updates its part and returns it."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

from cases import bytes_of
from rigs import Rig, Round, answer

LR, GRADIENT = 0.1, 1e-3

_values: dict[str, Any] = {}
_lock = threading.Lock()


def _exchange(size: str, gradient: Any, shared: bool) -> Any:
    """On the server: one SGD step, and the new values; a copy of them where others may change them meanwhile."""
    import torch

    with _lock:
        value = _values.get(size)
        if value is None:
            value = _values[size] = torch.zeros_like(gradient)
        value.add_(gradient, alpha=-LR)
        return value.clone() if shared else value


def _init(directory: str, name: str, rank: int, size: int) -> Any:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store", rpc_timeout=120)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return rpc


def rpc_server(directory: str, index: int, size: int) -> None:
    _init(directory, f"server{index}", index, size).shutdown()


def rpc_worker(pipe: Connection, rank: int, directory: str, servers: int, size: int) -> None:
    import torch

    rpc = _init(directory, f"worker{rank}", servers + rank, size)
    shared = size - servers > 1

    def make(work: str, variant: str) -> Round:
        values = torch.zeros(bytes_of(work) // 4)
        parts = values.chunk(servers)
        gradients = [torch.full_like(part, GRADIENT) for part in parts]

        def one_round() -> None:
            asked = [rpc.rpc_async(f"server{n}", _exchange, (work, g, shared)) for n, g in enumerate(gradients)]
            for part, answered in zip(parts, asked, strict=True):
                part.copy_(answered.wait())

        return one_round

    answer(pipe, make)
    rpc.shutdown()


def start_rpc(rig: Rig, workers: int, servers: int) -> None:
    size = workers + servers
    for index in range(servers):
        rig.add_process(rpc_server, str(rig.directory), index, size)
    rig.add_workers(rpc_worker, workers, str(rig.directory), servers, size)

"""The same exchange with a Ray actor. Values travel as NumPy arrays, which Ray keeps in shared memory: its best way."""

from __future__ import annotations

import importlib.util
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cases import bytes_of
from rigs import Rig, RigFailed, Round, answer
from rpc_peer import GRADIENT, LR

OBJECT_STORE = 2 << 30


class Server:
    """Holds one value for each size."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def exchange(self, size: str, gradient: Any) -> Any:
        """One SGD step, and the new values."""
        import torch

        value = self._values.setdefault(size, torch.zeros(len(gradient)))
        value.add_(torch.from_numpy(gradient), alpha=-LR)
        return value.numpy()


def ray_worker(pipe: Connection, rank: int, directory: str) -> None:
    import logging

    import ray
    import torch

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parent)}  # the actor imports this file
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=f"{directory}/ray",
    )
    server: Any = ray.remote(num_cpus=1)(Server).remote()

    def make(size: str, variant: str) -> Round:
        values = torch.zeros(bytes_of(size) // 4)
        gradient = torch.full_like(values, GRADIENT).numpy()
        return lambda: values.copy_(torch.from_numpy(ray.get(server.exchange.remote(size, gradient))))

    try:
        answer(pipe, make)
    finally:
        ray.shutdown()


def start_ray(rig: Rig, workers: int, servers: int) -> None:
    """One worker and one server only."""
    if importlib.util.find_spec("ray") is None:
        raise RigFailed("Ray is not installed: pip install ray")
    rig.add_workers(ray_worker, 1, str(rig.directory))

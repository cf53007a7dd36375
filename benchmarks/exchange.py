"""Push and pull through a parameter server: ours and `torch.distributed.rpc`, the same work, interleaved in one run.

Every worker holds a parameter of a given size, pushes a gradient, the server takes a plain SGD step, and the new values
come back into the parameter. Ours is what a user calls, `DistributedOptimizer.step()` in mode asp over `ipc://`; the peer is
the usual tutorial's server, `rpc_sync` to a function that updates and returns. The limit is the three copies that cannot be
avoided without sharing memory: in, update, out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "10 MB": 10 << 20, "100 MB": 100 << 20}


def rounds_for(size: int) -> int:
    """Enough to be measurable, few enough to be quick."""
    return max(3, min(200, (60 << 20) // size))


@dataclass
class Rig:
    """Worker processes that wait for "so many rounds of that size" and answer with seconds a round."""

    pipes: list[Connection]
    processes: list[Any]
    end: Callable[[], None]

    def measure(self, size: str, rounds: int) -> float:
        for pipe in self.pipes:
            pipe.send((size, rounds))
        return statistics.mean(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.end()


def serve_requests(pipe: Connection, one_round: Callable[[str], None]) -> None:
    while (request := pipe.recv()) is not None:
        size, rounds = request
        one_round(size)
        start = time.perf_counter()
        for _ in range(rounds):
            one_round(size)
        pipe.send((time.perf_counter() - start) / rounds)


def our_worker(job_file: str, rank: int, pipe: Connection) -> None:
    import torch

    import polytempo as pt

    torch.set_num_threads(1)
    pt.init(job_file, rank)
    optimizers = {}
    for name, size in SIZES.items():
        parameter = torch.nn.Parameter(torch.zeros(size // 4))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizers[name] = pt.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    pipe.send("ready")
    serve_requests(pipe, lambda size: optimizers[size].step())
    pt.shutdown()


def our_rig(workers: int) -> Rig:
    from polytempo.train.job import JobFacts

    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    path = str(directory / "server-0")
    config = {
        "index": 0,
        "path": path,
        "first": f"ipc://{path}",
        "size": workers,
        "shards": 1,
        "sync": "asp",
        "limits": {},
        "checkpoint_every": 0,
        "threads": 1,
        "facts": {},
        "resumed": {},
        **dict.fromkeys(("listen", "keys", "checkpoint", "resume", "record")),
    }
    command = [sys.executable, "-m", "polytempo.launch.server_process"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert server.stdin is not None
    server.stdin.write(json.dumps(config).encode())
    server.stdin.close()
    job_file = directory / "job.json"
    JobFacts(workers, (f"ipc://{path}",), "asp").write(job_file)

    def end() -> None:
        server.kill()
        server.wait()

    return _start(our_worker, workers, str(job_file), end)


_values: dict[str, Any] = {}


def _exchange(size: str, gradient: Any, shared: bool) -> Any:
    """The peer's server: one SGD step, and the new values."""
    value = _values[size]
    with _values["lock"]:
        value.add_(gradient, alpha=-0.1)
        return value.clone() if shared else value


def _rpc_server(directory: str, size: int) -> None:
    import threading

    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _values["lock"] = threading.Lock()
    _values.update({name: torch.zeros(count // 4) for name, count in SIZES.items()})
    _init_rpc(rpc, directory, "server", 0, size)
    rpc.shutdown()


def rpc_worker(directory: str, rank: int, pipe: Connection) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    size = int((Path(directory) / "size").read_text())
    _init_rpc(rpc, directory, f"worker{rank}", rank + 1, size)
    values = {name: torch.zeros(count // 4) for name, count in SIZES.items()}
    gradients = {name: torch.full_like(value, 1e-3) for name, value in values.items()}

    def one_round(name: str) -> None:
        values[name].copy_(rpc.rpc_sync("server", _exchange, (name, gradients[name], size > 2)))

    pipe.send("ready")
    serve_requests(pipe, one_round)
    rpc.shutdown()


def _init_rpc(rpc: Any, directory: str, name: str, rank: int, size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store", rpc_timeout=120)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def rpc_rig(workers: int) -> Rig:
    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    (directory / "size").write_text(str(workers + 1))
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_rpc_server, args=(str(directory), workers + 1))
    server.start()
    return _start(rpc_worker, workers, str(directory), lambda: server.join(20))


def _start(target: Callable[..., None], workers: int, where: str, end: Callable[[], None]) -> Rig:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(where, rank, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    return Rig(pipes, processes, end)


def limit(size: int, rounds: int) -> float:
    """Copies in one thread: gradient out, gradient in, update, values out, values in, into the parameter."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.zeros(size // 4), torch.zeros(size // 4)
    start = time.perf_counter()
    for _ in range(rounds):
        b.copy_(a)
        a.add_(b, alpha=-0.1)
        b.copy_(a)
    return (time.perf_counter() - start) / rounds


def compare(quick: bool) -> list[dict[str, Any]]:
    """Medians in milliseconds a round, for one and four workers."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # the peer warns about itself
    results = []
    for workers in (1, 4):
        rigs = {"ours": our_rig(workers), "rpc": rpc_rig(workers)}
        for name, size in SIZES.items():
            times: dict[str, list[float]] = {"ours": [], "rpc": [], "limit": []}
            for _ in range(3 if quick else 7):
                for rig_name, rig in rigs.items():
                    times[rig_name].append(rig.measure(name, rounds_for(size)))
                times["limit"].append(limit(size, rounds_for(size)))
            medians = {key: statistics.median(values) * 1e3 for key, values in times.items()}
            spreads = {key: (max(v) - min(v)) / 2 / statistics.median(v) for key, v in times.items()}
            results.append({"workers": workers, "size": name, "ms": medians, "spread": spreads})
        for rig in rigs.values():
            rig.close()
    return results

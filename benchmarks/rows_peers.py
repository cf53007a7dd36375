"""What rows on our servers are compared with, and the work that all of them do: batches of ids, and row-wise Adagrad.

dict    what people write: a dict of NumPy rows in a process, asked over `multiprocessing.connection`
rpc     `torch.distributed.rpc` to functions that gather from, and add to, a dense tensor
limit   the same gathering and adding in the memory of the worker itself
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from rigs import Rig, RigFailed, Round, answer

DIM, LR, EPS, GRADIENT = 16, 0.1, 1e-10, 1e-3
BATCHES = 4  # that are used in turn
SEED = 7


@dataclass(frozen=True)
class Work:
    """`"pull 1000 1000000"`: the operation, the number of rows, and the size of the table."""

    action: str
    batch: int
    rows: int


def work_of(text: str) -> Work:
    action, batch, rows = text.split()
    return Work(action, int(batch), int(rows))


def batches(work: Work, rank: int) -> list[Any]:
    """Ids, each once and ascending as an embedding would ask for them, by Zipf's law: id k in proportion to 1 / (k + 1)."""
    import numpy

    dice = numpy.random.default_rng((SEED, rank, work.batch, work.rows))
    found = []
    for _ in range(BATCHES):
        ids, drawn = numpy.empty(0, dtype=numpy.int64), work.batch
        while len(ids) < work.batch:
            more = (float(work.rows) ** dice.random(drawn)).astype(numpy.int64) - 1
            drawn *= 2
            every = numpy.concatenate([ids, more])
            ids = every[numpy.sort(numpy.unique(every, return_index=True)[1])]
        found.append(numpy.sort(ids[: work.batch]))
    return found


def rounds(work: Work, rank: int, pull: Callable[[Any], Any], push: Callable[[Any, Any], object]) -> Round:
    """One batch after another, of tensors; every row exists before anything is measured, and pushes have an effect."""
    import torch

    every = [torch.from_numpy(ids) for ids in batches(work, rank)]
    gradient = torch.full((work.batch, DIM), GRADIENT)
    before = torch.as_tensor(pull(every[0])).clone()
    for ids in every:
        push(ids, gradient)
    after = torch.as_tensor(pull(every[0]))
    if after.shape != before.shape or not bool((after < before).all()):
        raise RigFailed("a push that did not reach its rows")
    turn: Iterator[Any] = cycle(every)
    return (lambda: pull(next(turn))) if work.action == "pull" else (lambda: push(next(turn), gradient))


def make_table(rows: int) -> tuple[Any, Any]:
    """Dense rows and the sums of Adagrad."""
    import torch

    return torch.rand(rows, DIM).sub_(0.5), torch.zeros(rows)


def adagrad(values: Any, sums: Any, slots: Any, gradient: Any) -> None:
    """Row-wise, on dense tensors, as one would write it."""
    sums.index_add_(0, slots, gradient.pow(2).mean(1))
    step = gradient * (-LR / (sums.index_select(0, slots).sqrt_() + EPS)).unsqueeze(1)
    values.index_add_(0, slots, step)


# A dict of rows.


def dict_server(path: str) -> None:
    tables: dict[int, dict[int, Any]] = {}
    lock = threading.Lock()
    with Listener(path, "AF_UNIX") as listener:
        while True:
            connection = listener.accept()
            threading.Thread(target=_serve_dict, args=(connection, tables, lock), daemon=True).start()


def _serve_dict(connection: Any, tables: dict[int, dict[int, Any]], lock: threading.Lock) -> None:
    import numpy

    while True:
        try:
            rows, ids, gradient = connection.recv()
        except EOFError:
            return
        with lock:
            table = tables.setdefault(rows, {})
            if gradient is None:
                said = numpy.stack([_row(table, key)[0] for key in ids.tolist()])
            else:
                said = _push_to_dict(table, ids, gradient)
        connection.send(said)


def _row(table: dict[int, Any], key: int) -> Any:
    """A row and its sum; it begins when it is first asked for."""
    import numpy

    row = table.get(key)
    if row is None:
        row = table[key] = [numpy.random.rand(DIM).astype(numpy.float32) - 0.5, 0.0]
    return row


def _push_to_dict(table: dict[int, Any], ids: Any, gradient: Any) -> bool:
    squares = (gradient**2).mean(1).tolist()
    for key, own, square in zip(ids.tolist(), gradient, squares, strict=True):
        row = _row(table, key)
        row[1] += square
        row[0] -= own * (LR / (row[1] ** 0.5 + EPS))
    return True


def dict_worker(pipe: Connection, rank: int, paths: list[str]) -> None:
    import numpy

    servers = [Client(path, "AF_UNIX") for path in paths]

    def ask(rows: int, ids: Any, gradient: Any) -> Any:
        places = [numpy.flatnonzero(ids % len(servers) == n) for n in range(len(servers))]
        for server, own in zip(servers, places, strict=True):
            server.send((rows, ids[own], None if gradient is None else gradient[own]))
        said = [server.recv() for server in servers]
        if gradient is not None:
            return None
        result = numpy.empty((len(ids), DIM), dtype=numpy.float32)
        for own, part in zip(places, said, strict=True):
            result[own] = part
        return result

    def make(text: str, variant: str) -> Round:
        work = work_of(text)
        return rounds(
            work,
            rank,
            lambda ids: ask(work.rows, ids.numpy(), None),
            lambda ids, gradient: ask(work.rows, ids.numpy(), gradient.numpy()),
        )

    answer(pipe, make)


def start_dict(rig: Rig, workers: int, servers: int) -> None:
    paths = [str(rig.directory / f"dict-{index}") for index in range(servers)]
    for path in paths:
        rig.add_process(dict_server, path)
    while not all(Path(path).exists() for path in paths):
        threading.Event().wait(0.05)
    rig.add_workers(dict_worker, workers, paths)


# torch rpc.

_tables: dict[int, tuple[Any, Any]] = {}
_lock = threading.Lock()


def _table(rows: int) -> tuple[Any, Any]:
    if rows not in _tables:
        _tables[rows] = make_table(rows)
    return _tables[rows]


def _pull(rows: int, slots: Any) -> Any:
    with _lock:
        return _table(rows)[0].index_select(0, slots)


def _push(rows: int, slots: Any, gradient: Any) -> None:
    with _lock:
        adagrad(*_table(rows), slots, gradient)


def rpc_rows_worker(pipe: Connection, rank: int, directory: str, servers: int, size: int) -> None:
    import torch

    from rpc_peer import _init

    rpc = _init(directory, f"worker{rank}", servers + rank, size)

    def asked(function: Any, rows: int, ids: Any, gradient: Any = None) -> tuple[list[Any], list[Any]]:
        places = [(ids % servers == n).nonzero().squeeze(1) for n in range(servers)]
        own = -(-rows // servers)
        parts = [(own, ids[place] // servers, *([] if gradient is None else [gradient[place]])) for place in places]
        futures = [rpc.rpc_async(f"server{n}", function, part) for n, part in enumerate(parts)]
        return places, [future.wait() for future in futures]

    def pull(rows: int, ids: Any) -> Any:
        if servers == 1:
            return rpc.rpc_sync("server0", _pull, (rows, ids))
        result = torch.empty(len(ids), DIM)
        for place, part in zip(*asked(_pull, rows, ids), strict=True):
            result[place] = part
        return result

    def push(rows: int, ids: Any, gradient: Any) -> None:
        if servers == 1:
            rpc.rpc_sync("server0", _push, (rows, ids, gradient))
        else:
            asked(_push, rows, ids, gradient)

    def make(text: str, variant: str) -> Round:
        work = work_of(text)
        return rounds(work, rank, lambda ids: pull(work.rows, ids), lambda ids, grad: push(work.rows, ids, grad))

    answer(pipe, make)
    rpc.shutdown()


def start_rows_rpc(rig: Rig, workers: int, servers: int) -> None:
    from rpc_peer import rpc_server

    size = workers + servers
    for index in range(servers):
        rig.add_process(rpc_server, str(rig.directory), index, size)
    rig.add_workers(rpc_rows_worker, workers, str(rig.directory), servers, size)


# The limit.


def memory_worker(pipe: Connection, rank: int) -> None:
    def make(text: str, variant: str) -> Round:
        work = work_of(text)
        values, sums = _table(work.rows)
        return rounds(
            work,
            rank,
            lambda ids: values.index_select(0, ids),
            lambda ids, gradient: adagrad(values, sums, ids, gradient),
        )

    answer(pipe, make)


def start_memory(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(memory_worker, workers)

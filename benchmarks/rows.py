"""Rows of a table on servers, pulled and pushed by id: ours, a dict of NumPy rows, torch rpc, and the memory limit.

Every worker asks for batches of ids, each once and drawn by Zipf's law, or pushes a gradient for them, which the servers
take by row-wise Adagrad (rows of 16 numbers of float32). A push has ended when its answer is there. Ours is what a user
calls: `pull` and `push` of a `KV` in mode asp. Ids come again after four batches; lists of them are not cached.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from rigs import Rig, Round, answer
from rows_peers import DIM, EPS, LR, rounds, start_dict, start_memory, start_rows_rpc, work_of

TABLES = {"1 M": 1_000_000, "10 M": 10_000_000}
BATCHES = (1_000, 10_000, 100_000)


def rows_worker(pipe: Connection, rank: int, job_file: str) -> None:
    import polytempo as pt

    arrays: dict[int, Any] = {}

    def array_of(rows: int) -> Any:
        if rows not in arrays:
            array = pt.tables.Array(rows, DIM, rule="rowwise-adagrad", lr=LR, eps=EPS, start="uniform:0.5")
            arrays[rows] = pt.tables.KV({"rows": array})["rows"]
        return arrays[rows]

    def make(text: str, variant: str) -> Round:
        work = work_of(text)
        array = array_of(work.rows)
        return rounds(
            work,
            rank,
            lambda ids: array.pull(rows=ids).result(),
            lambda ids, gradient: array.push(gradient, rows=ids).result(),
        )

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(rows_worker, workers, start_job(rig, workers, servers, "asp"))


def rows_per_second(rig: Rig, work: str, variant: str) -> float:
    """Seconds a row, of the slowest worker."""
    return rig.measure(work, variant) / work_of(work).batch


def _cells(workers: int, servers: int) -> tuple[Cell, ...]:
    who = "1 worker, 1 server" if workers == 1 else f"{workers} workers, {servers} servers"
    return tuple(
        Cell(f"{action} {batch:,} of {name}, {who}", f"{action} {batch} {rows}", workers, servers)
        for name, rows in TABLES.items()
        for action in ("pull", "push")
        for batch in BATCHES
    )


CELLS = (*_cells(1, 1), *_cells(2, 2))
ALL = tuple(cell.name for cell in CELLS)
OVER_RPC = Ratio("rpc / ours", ("rpc",), ("ours",))
OVER_DICT = Ratio("dict / ours", ("dict",), ("ours",))

CASE = Case(
    name="rows",
    title="Rows of 16 numbers by id, million rows a second of a worker; ratios of their times",
    cells=CELLS,
    subjects=(
        Subject("ours", start_ours, meter=rows_per_second),
        Subject("dict", start_dict, meter=rows_per_second),
        Subject("rpc", start_rows_rpc, meter=rows_per_second),
        Subject("limit: memory", start_memory, meter=rows_per_second),
    ),
    ratios=(OVER_DICT, OVER_RPC, Ratio("ours / limit", ("ours",), ("limit: memory",))),
    bars=(Bar(OVER_DICT, ALL, least=1), Bar(OVER_RPC, ALL, least=1)),
    unit="M rows/s",
    repeats=(5, 3),
)

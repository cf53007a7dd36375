"""Reads a trace from a file, by its suffix: step times of workers (.csv, .jsonl; `step_times.py`), or the operations of a
job's ranks from an .npz file, one array a column:

    dp_rank, stage, step    which replica, which pipeline stage, which step
    op                      index into `ops`, the names of operations
    microbatch, seq         the micro-batch of a computation; the number of a message or collective in its step
    start, duration         seconds; `start` gives the order of a stage's computations, and nothing else

These are the columns of the public artifact of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025). Every step needs every micro-batch at every stage of every replica, forward and backward.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import make
from polytempo.traces.job import BatchSeconds, JobTrace, RecordedStep, SyncSeconds
from polytempo.traces.step_times import step_times_from

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[Any]]

COLUMNS = ("dp_rank", "stage", "step", "op", "microbatch", "seq", "start", "duration", "ops")
COMPUTE = ("forward-compute", "backward-compute")
MESSAGES = (("forward-send", "forward-recv"), ("backward-recv", "backward-send"))  #: at stage s, at stage s + 1
#: What the operations beside these are.
BEFORE, TIED, REDUCE = "params-all-gather", "embedding-grads-all-reduce", "grads-reduce-scatter"
OWN = ("layernorm-grads-all-reduce", "gc")
NORM, UPDATE = "optimizer-clip-main-grad", "optimizer"
KNOWN = {*COMPUTE, *(name for pair in MESSAGES for name in pair), BEFORE, TIED, REDUCE, *OWN, NORM, UPDATE}
#: Schedules whose order of computations is recognised.
SCHEDULES = ("1f1b", "gpipe", "sequential")


def read_trace(path: Path) -> JobTrace:
    """The recorded job."""
    if path.is_dir():
        like = f"--like {shlex.quote(str(path))}"
        raise UsageError(f"{path} is a folder, expected a file; the record of a run is read by {like}")
    if not path.exists():
        raise UsageError(f"cannot read {path}: there is no such file")
    if path.suffix == ".npz":
        return _Operations(path).job()
    if path.suffix not in (".csv", ".jsonl"):
        raise UsageError(
            f"expected a trace that ends in .npz (operations of ranks), .csv or .jsonl (worker, step, seconds), got {path}"
        )
    try:
        return step_times_from(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


class _Operations:
    """The columns of a file, with ranks and steps as indices of arrays."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        self.np: Any = np
        self.path = path
        try:
            with np.load(path, allow_pickle=False) as file:
                columns: dict[str, Column] = {name: file[name] for name in file.files}
        except (OSError, ValueError, BadZipFile, EOFError) as error:
            raise UsageError(
                f"{path} cannot be read as .npz: {' '.join(str(error).split())}; write it by numpy.savez"
            ) from None
        if missing := [name for name in COLUMNS if name not in columns]:
            raise UsageError(f"{path}: expected columns {', '.join(COLUMNS)}; {missing[0]} is missing")
        self.names = [str(name) for name in columns.pop("ops")]
        if unknown := sorted(set(self.names) - KNOWN):
            raise UsageError(f"{path}: unknown operation {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
        if len({len(column) for column in columns.values()}) > 1 or not len(columns["op"]):
            raise UsageError(f"{path}: expected columns of one length, with an operation or more")
        self.op, self.stage, self.replica = (columns[name].astype(int) for name in ("op", "stage", "dp_rank"))
        self.microbatch, self.seq = columns["microbatch"].astype(int), columns["seq"].astype(int)
        self.numbers, self.step = np.unique(columns["step"].astype(int), return_inverse=True)
        self.start, self.duration = columns["start"].astype(float), columns["duration"].astype(float)
        if not (np.isfinite(self.duration).all() and self.duration.min() >= 0):
            raise UsageError(f"{path}: durations must be finite and not negative")
        if min(self.op.min(), self.stage.min(), self.replica.min(), self.seq.min()) < 0 or self.op.max() >= len(self.names):
            raise UsageError(f"{path}: op, stage, dp_rank and seq count from 0, and op is an index into ops")
        self.shape = (len(self.numbers), int(self.replica.max()) + 1, int(self.stage.max()) + 1)

    def job(self) -> JobTrace:
        """All of it."""
        steps, replicas, stages = self.shape
        times = [self.table(name, self.microbatch) for name in COMPUTE]
        if times[0].shape != times[1].shape:
            raise UsageError(f"{self.path}: expected a backward-compute for every forward-compute, and no more")
        counts = self.counts(times)
        sync = self.sync()
        return JobTrace(
            stages,
            replicas,
            tuple(
                RecordedStep(int(self.numbers[step]), self.batches(times, counts[step], step), sync[step])
                for step in range(steps)
            ),
            self.schedule(),
            self.transfer(),
        )

    def table(self, name: str, number: Column) -> Column:
        """Durations of an operation by step, replica, stage and number; NaN where there is none."""
        np = self.np
        rows: Column = self.op == self.names.index(name) if name in self.names else np.zeros(len(self.op), bool)
        table: Column = np.full((*self.shape, int(number[rows].max(initial=0)) + 1), np.nan)
        if rows.any() and number[rows].min() < 0:
            raise UsageError(f"{self.path}: expected a micro-batch from 0 on for every {name}, got {number[rows].min()}")
        keys = (self.step[rows], self.replica[rows], self.stage[rows], number[rows])
        if len(np.unique(np.ravel_multi_index(keys, table.shape))) < rows.sum():
            raise UsageError(
                f"{self.path}: a stage has {name} twice for one micro-batch of a step; interleaved stages (several parts of "
                "the model on one rank) cannot be read: give each part a stage of its own"
            )
        table[keys] = self.duration[rows]
        return table

    def counts(self, times: list[Column]) -> list[list[int]]:
        """The micro-batches of each replica in each step; none may be missing at a stage."""
        np = self.np
        there = ~np.isnan(times[0]) & ~np.isnan(times[1])
        counts = there.any(axis=2).sum(axis=2)
        wanted = np.arange(there.shape[3]) < counts[:, :, None, None]
        wrong = np.argwhere((there != wanted) | (np.isnan(times[0]) != np.isnan(times[1])) | (counts == 0)[:, :, None, None])
        if len(wrong):
            step, replica, stage, batch = wrong[0]
            raise UsageError(
                f"{self.path}: expected forward and backward of micro-batches 0, 1, ... at every stage; step "
                f"{self.numbers[step]}, replica {replica}, stage {stage} lacks one for {batch}; leave such steps out"
            )
        return [[int(count) for count in row] for row in counts]

    def batches(self, times: list[Column], counts: list[int], step: int) -> tuple[tuple[BatchSeconds, ...], ...]:
        """The micro-batches of a step."""
        pairs = self.np.stack([table[step] for table in times], axis=-1).swapaxes(1, 2)  # replica, micro-batch, stage, way
        return tuple(
            tuple(tuple((forward, backward) for forward, backward in batch) for batch in pairs[replica, :count].tolist())
            for replica, count in enumerate(counts)
        )

    def schedule(self) -> str:
        """The schedule that has the recorded order at every stage; the first step stands for all."""
        rows = (self.step == 0) & self.np.isin(self.op, [self.names.index(name) for name in COMPUTE])
        lines: dict[tuple[int, int], list[tuple[float, str]]] = {}
        for row in self.np.flatnonzero(rows):
            kind = "F" if self.names[self.op[row]] == COMPUTE[0] else "B"
            place = (int(self.replica[row]), int(self.stage[row]))
            lines.setdefault(place, []).append((self.start[row], f"{kind}{self.microbatch[row]}"))
        orders = {place: [action for _, action in sorted(line)] for place, line in lines.items()}
        for spec in SCHEDULES:
            made = {count: make(spec, self.shape[2], count) for count in {len(order) // 2 for order in orders.values()}}
            if all(
                order == [str(action) for action in made[len(order) // 2].actions[stage][0][:-1]]
                for (_, stage), order in orders.items()
            ):
                return spec
        raise UsageError(
            f"{self.path}: the order of computations is that of none of {', '.join(SCHEDULES)}; stage 0 of replica 0 begins "
            f"{' '.join(orders[0, 0][:6])}; record a job with one of these schedules"
        )

    def transfer(self) -> tuple[float, ...]:
        """Seconds of a message over each link: either end may wait for the other, so the shorter of both; the median."""
        np = self.np
        ways = []
        for here, there in MESSAGES:
            near, far = self.table(here, self.seq), self.table(there, self.seq)
            if near.shape != far.shape:
                raise UsageError(f"{self.path}: expected a {there} for every {here}, and no more")
            ways.append(np.fmin(near[:, :, :-1], far[:, :, 1:]))
        links = np.concatenate(ways, axis=3).swapaxes(0, 2).reshape(self.shape[2] - 1, -1)
        return tuple(float(np.median(link[~np.isnan(link)])) if not np.isnan(link).all() else 0.0 for link in links)

    def sync(self) -> list[SyncSeconds]:
        """What each step costs beside its micro-batches: of the ranks of a collective, the least."""
        np = self.np

        def least(name: str, axes: tuple[int, ...]) -> Column:
            table = np.where(np.isnan(found := self.once(name)), np.inf, found).min(axis=axes)
            finite: Column = np.where(np.isinf(table), 0.0, table)
            return finite

        own = sum((least(name, (1,)) for name in OWN), np.zeros((self.shape[0], self.shape[2])))
        before, reduce, update = least(BEFORE, (1,)).max(axis=1), least(REDUCE, (1,)), least(UPDATE, (1,)).max(axis=1)
        after, tied = least(NORM, (1, 2)) + update, least(TIED, (1, 2))
        return [
            SyncSeconds(
                float(before[step]),
                tuple(own[step].tolist()),
                float(tied[step]),
                tuple(reduce[step].tolist()),
                float(after[step]),
            )
            for step in range(self.shape[0])
        ]

    def once(self, name: str) -> Column:
        """Durations of an operation that a rank does once a step (several are added up): by step, replica and stage."""
        np = self.np
        table = self.table(name, self.seq)
        once: Column = np.where(np.isnan(table).all(axis=3), np.nan, np.nansum(table, axis=3))
        return once

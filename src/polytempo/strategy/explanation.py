"""The trade, in a table: what each way to spread a model costs, before anything starts.

The first table has a row for each way: data, pipeline and tensor parallelism alone, and the chosen combination. What is
impossible stands there with its reason. The second has a row for each rank of the chosen one, or, in a large job, for each
rank of one replica. `compare` puts what was measured beside what was predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import TextWrapper
from typing import Any

from polytempo.errors import counted
from polytempo.mesh import Mesh
from polytempo.strategy.costs import Machine, ModelProfile
from polytempo.strategy.parallel_plan import ParallelPlan, axes_text
from polytempo.strategy.prediction import Prediction, predict
from polytempo.strategy.search import (
    Profiles,
    SearchResult,
    SearchSpace,
    best_of_mesh,
    cuttable_layers,
    mesh_problem,
)
from polytempo.units import plain_number, written_bytes, written_seconds

#: A table has a row for each rank up to this number of ranks.
ALL_RANKS = 16
#: Columns of the terminal for which tables are made.
WIDTH = 100


@dataclass(frozen=True)
class TradeRow:
    """One way to spread the model: its figures, or the reason why it cannot be."""

    name: str
    prediction: Prediction | None = None
    problem: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Explanation:
    """What a strategy costs, predicted from measured layers and links. `print` shows tables of 100 columns.

    Args:
        model: The name of the model.
        world: The number of workers.
        batch: The samples of a step, of all replicas together.
        cores: The cores of all hosts that workers share.
        hosts: The number of hosts.
        layers: The number of layers between which the model can be cut.
        rows: The ways that are compared.
        memory: The limit of bytes for each worker; None without one.
        why: Of `auto`: the reason of the choice.
    """

    model: str
    world: int
    batch: int
    cores: int
    hosts: int
    layers: int
    rows: tuple[TradeRow, ...]
    memory: float | None = None
    why: str = ""

    @property
    def chosen(self) -> Prediction | None:
        """The prediction of the strategy itself; None where it is impossible."""
        return next((row.prediction for row in self.rows if row.chosen), None)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The tables, line by line.

        Returns:
            Lines of at most 100 columns, where names and reasons are no longer.
        """
        where = f"{counted(self.world, 'worker')} on {counted(self.hosts, 'host')} with {counted(self.cores, 'core')}"
        limit = f", {written_bytes(self.memory)} of memory each" if self.memory is not None else ""
        lines = [
            f"{self.model}: {counted(self.layers, 'layer')}; {where}{limit}; {counted(self.batch, 'sample')} a step",
            "",
        ]
        lines += _trade_table(self.rows, self.memory)
        if self.why:
            lines += ["", *_wrapped(f"why: {self.why}")]
        if self.chosen is not None:
            lines += ["", *_rank_table(self.chosen)]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values, in seconds and bytes.

        Returns:
            What `polytempo plan --strategy ... --json FILE` writes.
        """
        return {
            "model": self.model,
            "workers": self.world,
            "batch": self.batch,
            "hosts": self.hosts,
            "cores": self.cores,
            "layers": self.layers,
            "memory": self.memory,
            "why": self.why,
            "strategies": [_row_as_dict(row) for row in self.rows],
        }

    def compare(self, measured: Mapping[str, Any]) -> str:
        """Predicted beside measured, after training.

        Args:
            measured: `DistributedModel.stats` of a worker: its `rank`, `steps`, `seconds` and `bytes_sent` by axis; also
                `memory_bytes` by kind, where it was counted. What is missing is left out.

        Returns:
            A table of the figures that are in both.
        """
        chosen = self.chosen
        if chosen is None:
            return "the strategy is impossible: there is nothing to compare"
        rows = list(_compared(chosen, measured))
        if not rows:
            return "nothing was measured yet"
        heads = (f"worker {int(measured.get('rank', 0))}", "predicted", "measured", "difference")
        return "\n".join(_aligned([heads, *rows], left=1))


def explain_plan(
    space: SearchSpace,
    profiles: Profiles,
    machine: Machine,
    chosen: ParallelPlan | SearchResult,
    schedule: str = "1f1b",
) -> Explanation:
    """The explanation of one plan, or of a search's choice, beside data, pipeline and tensor parallelism alone."""
    if isinstance(chosen, SearchResult):
        best, others, why = chosen.best, [chosen.second] if chosen.second is not None else [], chosen.why
    else:
        best, others, why = predict(chosen, profiles[chosen.mesh.tensor, chosen.microbatch], machine), [], ""
    profile = next(iter(profiles.values()))
    rows = [*_alone(space, profiles, machine, best, schedule)]
    shown = {row.prediction.plan.mesh for row in rows if row.prediction is not None}
    rows += [TradeRow(str(other.plan), other) for other in others if other.plan.mesh not in shown | {best.plan.mesh}]
    rows = [row for row in rows if row.prediction is None or row.prediction.plan.mesh != best.plan.mesh]
    rows.append(TradeRow(str(best.plan), best, chosen=True))
    return _explanation(space, profile, machine, rows, why)


def explain_impossible(
    space: SearchSpace, profiles: Profiles, machine: Machine, name: str, problem: str, schedule: str = "1f1b"
) -> Explanation:
    """The explanation of a strategy that cannot be: the reason, beside the others."""
    profile = next(iter(profiles.values()))
    rows = [row for row in _alone(space, profiles, machine, None, schedule) if row.name != name]
    return _explanation(space, profile, machine, [*rows, TradeRow(name, None, problem, chosen=True)], "")


def _explanation(
    space: SearchSpace, profile: ModelProfile, machine: Machine, rows: Sequence[TradeRow], why: str
) -> Explanation:
    return Explanation(
        model=profile.model,
        world=space.world,
        batch=space.batch,
        cores=sum(machine.cores),
        hosts=len(machine.hosts),
        layers=len(profile.layers),
        rows=tuple(rows),
        memory=space.memory,
        why=why,
    )


def _alone(
    space: SearchSpace, profiles: Profiles, machine: Machine, best: Prediction | None, schedule: str
) -> Iterable[TradeRow]:
    """Data, pipeline and tensor parallelism, each alone, with the best number of microbatches."""
    layers = cuttable_layers(next(iter(profiles.values())))
    for mesh in dict.fromkeys([Mesh(space.world), Mesh(1, space.world), Mesh(1, 1, space.world)]):
        name = axes_text(mesh)
        problem = mesh_problem(space, mesh, layers)
        if problem is not None:
            yield TradeRow(name, None, problem)
        elif best is None or best.plan.mesh != mesh:
            found = best_of_mesh(space, mesh, profiles, machine, (schedule,))
            yield TradeRow(str(found.plan), found)


# Tables.


#: Columns of the first table behind the name: what is above a head, and the head.
_TRADE = (
    ("schedule", "x microbatches"),
    ("samples", "a worker"),
    ("moved by", "a worker"),
    ("moved", "by all"),
    ("memory of", "a worker"),
    ("", "balance"),
    ("step", "time"),
    ("samples", "/s"),
)


def _trade_table(rows: Sequence[TradeRow], memory: float | None) -> list[str]:
    axes = [row.name if row.prediction is None else axes_text(row.prediction.plan.mesh) for row in rows]
    names = [("", "strategy"), *((f"{'>' if row.chosen else ' '} {axis}",) for row, axis in zip(rows, axes, strict=True))]
    figures = [_figures(row.prediction, memory) for row in rows if row.prediction is not None]
    widths = [max(len(cell) for cell in (*heads, *column)) for heads, *column in zip(_TRADE, *figures, strict=True)]
    first = max(len(cell) for one in names for cell in one) + 2 * (not rows)
    lines = [
        "  ".join([("  " + (name if at else "")).ljust(first), *_right([heads[at] for heads in _TRADE], widths)])
        for at, name in enumerate(("", "strategy"))
    ]
    lines.append("-" * len(lines[0]))
    for row, name in zip(rows, names[1:], strict=True):
        if row.prediction is None:
            lines += _wrapped(f"{name[0].ljust(first)}  {row.problem}", indent=first + 2)
        else:
            lines.append("  ".join([name[0].ljust(first), *_right(_figures(row.prediction, memory), widths)]))
    if memory is not None and any(row.prediction is not None and row.prediction.largest_memory > memory for row in rows):
        lines.append(f"* more than the {written_bytes(memory)} that a worker has")
    return [line.rstrip() for line in lines]


def _figures(one: Prediction, memory: float | None) -> tuple[str, ...]:
    over = "*" if memory is not None and one.largest_memory > memory else ""
    return (
        f"{one.plan.schedule} x {one.plan.microbatches}" if one.plan.mesh.pipe > 1 else f"x {one.plan.microbatches}",
        f"{one.plan.samples}",
        written_bytes(one.most_moved),
        written_bytes(one.all_moved),
        written_bytes(one.largest_memory) + over,
        f"{one.time.balance:.2f}",
        written_seconds(one.seconds),
        plain_number(one.samples_per_second),
    )


def _rank_table(one: Prediction) -> list[str]:
    """A row for each rank; of a large job, for each rank of the first replica."""
    mesh, plan = one.plan.mesh, one.plan
    ranks = range(mesh.size if mesh.size <= ALL_RANKS else mesh.pipe * mesh.tensor)
    unit, scale = ("MB", 1e6) if max(part.total for part in one.memory) >= 1e6 else ("kB", 1e3)
    kinds = ("parameters", "gradients", "state", "activations", "buffers")
    memory_heads = ("params", "grads", "state", "activ.", "buffers", "all")
    heads = ("rank", "data", "stage", "shard", "layers", "samples", "pipe", "tensor", "data", *memory_heads, "busy")
    rows: list[tuple[str, ...]] = [heads]
    for rank in ranks:
        point, layers = mesh.point(rank), plan.stage_layers(mesh.point(rank).pipe)
        moved, memory = one.moved[rank], one.memory[rank]
        kept = [getattr(memory, kind) + (memory.stashed if kind == "parameters" else 0.0) for kind in kinds]
        figures = [_number(value / scale) for value in (moved.pipe, moved.tensor, moved.data, *kept, memory.total)]
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        place = (f"{rank}", f"{point.data}", f"{point.pipe}", f"{point.tensor}", span, f"{plan.samples}")
        rows.append((*place, *figures, f"{100 * one.time.occupied[rank] / one.seconds:.0f} %" if one.seconds else "-"))
    lines = _aligned(rows, left=0, gap=1)
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    before, moving, kept_width = (sum(widths[a:b]) + b - a for a, b in ((0, 6), (6, 9), (9, 15)))
    title = " " * before + f"bytes moved ({unit})".center(moving) + f"memory ({unit})".center(kept_width)
    more = mesh.data - 1 if mesh.size > ALL_RANKS else 0
    note = [f"and {counted(more, 'replica')} like this one"] if more else []
    return [f"{plan}: a row for each worker", "", title.rstrip(), *lines, *note]


def _number(value: float) -> str:
    """In three digits."""
    if value == 0:
        return "-"
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.005 else "0"
    )


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]


def _aligned(rows: Sequence[tuple[str, ...]], left: int, gap: int = 2) -> list[str]:
    """The first row is the head; the first `left` columns are texts."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        (" " * gap)
        .join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _wrapped(text: str, indent: int = 5) -> list[str]:
    """Lines of at most the width of a table; the first is as it is, the others are indented."""
    wrapper = TextWrapper(WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


# Plain values.


def _row_as_dict(row: TradeRow) -> dict[str, Any]:
    if row.prediction is None:
        return {"strategy": row.name, "chosen": row.chosen, "problem": row.problem}
    one, plan = row.prediction, row.prediction.plan
    return {
        "strategy": row.name,
        "chosen": row.chosen,
        "data": plan.mesh.data,
        "pipe": plan.mesh.pipe,
        "tensor": plan.mesh.tensor,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "sync": plan.sync,
        "stages": list(plan.layers),
        "samples": plan.samples,
        "seconds": one.seconds,
        "samples_per_second": one.samples_per_second,
        "balance": one.time.balance,
        "busy_seconds": list(one.time.busy),
        "bytes": [asdict(moved) for moved in one.moved],
        "memory": [asdict(memory) for memory in one.memory],
    }


def _compared(one: Prediction, measured: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    rank, steps = int(measured.get("rank", 0)), int(measured.get("steps", 0))
    moved, memory = one.moved[rank], one.memory[rank]
    if steps and measured.get("seconds"):
        yield _pair("step time", one.seconds, sum(measured["seconds"].values()) / steps, written_seconds)
    sent = measured.get("bytes_sent") or {}
    for axis in ("pipe", "tensor", "data"):
        if steps and axis in sent:
            yield _pair(f"bytes moved a step, {axis}", getattr(moved, axis), sent[axis] / steps, written_bytes)
    for kind, value in (measured.get("memory_bytes") or {}).items():
        if hasattr(memory, kind):
            yield _pair(f"memory, {kind}", getattr(memory, kind), float(value), written_bytes)


def _pair(name: str, predicted: float, measured: float, written: Any) -> tuple[str, str, str, str]:
    share = f"{100 * (predicted / measured - 1):+.1f} %" if measured else ("-" if predicted else "+0.0 %")
    return name, written(predicted), written(measured), share

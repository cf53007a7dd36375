"""`polytempo simulate --trace FILE`: what a recorded job would have done in other modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from polytempo.errors import counted
from polytempo.report.table import TextTable
from polytempo.strategy.soundness import refusal
from polytempo.sync.spec import parse_spec
from polytempo.traces.analysis import TraceAnalysis, analyse
from polytempo.traces.operations import read_trace


def analyse_file(
    path: Path, modes: Sequence[str], seed: int, progress: Callable[[float], None] | None = None
) -> TraceAnalysis:
    """Read and analyse a trace."""
    return analyse(read_trace(path), modes, seed, progress)


def trace_table(found: TraceAnalysis, name: str) -> TextTable:
    """The modes side by side."""
    rows = [
        (
            mode.mode,
            f"{mode.step_seconds:.2f}",
            f"{found.actual / mode.step_seconds:.2f}",
            f"{100 * mode.waiting:.1f}",
            f"{mode.staleness_mean:.2f}",
            f"{mode.staleness_max}",
            _shares(mode.shares),
        )
        for mode in found.modes
    ]
    stages = f" of {found.stages} stages, {found.schedule}" if found.stages > 1 else ""
    what = counted(found.replicas, "replica" if found.stages > 1 else "worker")
    title = (
        f"{name}: {what}{stages}, {counted(found.steps, 'step')}\n"
        f"a step takes {found.actual:.2f} s (re-simulated), {found.slowdown:.2f}x the ideal {found.ideal:.2f} s"
    )
    heads = (
        "mode",
        "joint batch\n(s)",
        "times\nfaster",
        "waiting\n(%)",
        "stale\nmean",
        "\nmax",
        "micro-batches\nat the end",
    )
    return TextTable(title, heads, tuple(rows))


def _shares(shares: Sequence[float]) -> str:
    """Micro-batches of each replica, where they fit in a cell."""
    if not shares:
        return "as recorded"
    if min(shares) == max(shares):
        return f"{shares[0]:g} each"
    text = " ".join(f"{share:g}" for share in shares)
    return text if len(text) <= 24 else f"{min(shares):g} to {max(shares):g}"


def refused_here(found: TraceAnalysis) -> str:
    """That Polytempo itself refuses the best mode for a model in these stages, and why; empty where it does not."""
    sync = found.best().mode.split(" ")[0]  # a prediction may add how batches are cut
    reason = refusal(parse_spec(sync), found.stages, 1)
    if reason is None:
        return ""
    return f"note: polytempo run refuses {sync} with pipe={found.stages}: {reason.reason}; there use {reason.instead}"

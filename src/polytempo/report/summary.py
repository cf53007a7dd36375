"""Numbers for reading, and the last line of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytempo.errors import counted
from polytempo.units import plain_number

#: Of the workers' time, and the figure that holds it.
SHARES = {"computing": "computing", "waiting": "waiting", "sending": "communicating"}


def percentages(parts: Mapping[str, float]) -> dict[str, int]:
    """Shares of a whole in percent, as whole numbers that add up to 100; what the parts leave over is "other".

    Parts that are measured on different clocks may come to more than the whole: then they are shares of their sum.
    """
    shares = {name: max(value, 0.0) for name, value in parts.items()}
    total = sum(shares.values())
    shares = {name: value / max(total, 1.0) for name, value in shares.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    exact = {name: 100 * value for name, value in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    largest = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in largest[: 100 - sum(whole.values())]:
        whole[name] += 1
    return whole


def summary_line(sync: str, figures: Mapping[str, Any], finished: int, size: int, seconds: float) -> str:
    """What a job did.

    Args:
        sync: The mode.
        figures: The job's and its workers', as the first server sums them up; without steps for scripts that push none (DDP,
            Horovod, KV).
        finished: Workers that finished.
        size: Workers that were started.
        seconds: From the start of the command, for jobs that push no steps.
    """
    who = counted(size, "worker") if finished == size else f"{finished} of {counted(size, 'worker')}"
    divergence = divergence_in_words(figures.get("diverged", {}))
    if not figures.get("steps"):
        return f"{who} finished after {seconds:.1f} s{f'; {divergence}' if divergence else ''}"
    percent = percentages({name: figures[key] for name, key in SHARES.items()})
    shares = ", ".join(f"{name} {share} %" for name, share in percent.items())
    parts = [
        *([divergence] if divergence else []),
        _steps(figures),
        _rate(figures),
        f"of the workers' time {shares}",
    ]
    if figures["staleness_max"]:
        mean, most = plain_number(figures["staleness_mean"]), counted(figures["staleness_max"], "update")
        parts.append(f"gradients {mean} updates stale on average, at most {most}")
    if figures["discarded"]:
        parts.append(f"{counted(figures['discarded'], 'step')} discarded")
    if figures["nonfinite"]:
        parts.append(f"{counted(figures['nonfinite'], 'gradient')} not finite")
    return f"{sync}: {'; '.join(parts)}"


def divergence_in_words(found: Mapping[str, Any]) -> str:
    """What became of a training that has diverged, by its line in meta.json; empty for one that has not."""
    if not found:
        return ""
    return (
        f"came back after it had diverged at update {found['update']}"
        if found["recovered"]
        else (f"diverged at update {found['update']}")
    )


def _steps(figures: Mapping[str, Any]) -> str:
    """Those of all workers, and of each: a worker is never at the step that is their sum."""
    each = [worker["steps"] for worker in figures["workers"] if worker["steps"]]
    made, seconds = counted(figures["steps"], "step"), f"in {figures['seconds']:.1f} s"
    if len(each) < 2:
        return f"{made} {seconds}"
    low, high = min(each), max(each)
    return f"{made} of {len(each)} workers {seconds}, {low if low == high else f'{low} to {high}'} each"


def _rate(figures: Mapping[str, Any]) -> str:
    """Samples a second where the script says how many they are, else steps; of all workers."""
    if figures["samples"] != figures["steps"]:
        return f"{plain_number(figures['samples_per_second'])} samples/s"
    together = " together" if sum(1 for worker in figures["workers"] if worker["steps"]) > 1 else ""
    return f"{plain_number(figures['steps'] / figures['seconds'] if figures['seconds'] else 0.0)} steps/s{together}"

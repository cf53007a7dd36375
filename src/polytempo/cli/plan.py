"""`polytempo plan`: where to cut a model into stages, how many devices each gets, and what that promises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polytempo.cli.planned_script import look_into
from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Profile, load_profile
from polytempo.pipeline.plan_report import bubble, explain
from polytempo.pipeline.planner import StagePlan
from polytempo.pipeline.planner import plan as search
from polytempo.pipeline.topology import parse_topology
from polytempo.units import parse_size

Option = typer.Option


def plan(
    script: Annotated[
        Path | None,
        typer.Argument(
            help="Python that defines model and example, or make_... of them, or trains a pt.Pipeline.", metavar="SCRIPT"
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after --.")] = None,
    devices: Annotated[str, Option(help="Devices and their links, such as 4x4:12GB/s,10Gb/s.")] = "4:5GB/s",
    memory: Annotated[str | None, Option(help="Of each device, such as 16GB (no limit).")] = None,
    microbatches: Annotated[
        int | None, Option(help="Between two flushes, for the idle time (those of the script's pipeline, or 8).")
    ] = None,
    repeats: Annotated[int, Option(help="How often each layer is measured; the median counts.")] = 5,
    profile: Annotated[Path | None, Option(help="Measurements instead of a script: what --json wrote.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write plan and profile to this file.")] = None,
) -> None:
    """Measure a model layer by layer, and plan pipeline stages for it."""
    topology = parse_topology(devices)
    limit = parse_size(memory, "--memory") if memory is not None else None
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"expected --microbatches of at least 1, got {microbatches}")
    if (script is None) == (profile is None):
        got = "neither" if script is None else "both"
        raise UsageError(f"expected a script to measure or --profile FILE, got {got}; try polytempo plan --help")
    own: int | None = None
    if profile is not None:
        measured = load_profile(profile)
    else:
        measured, own = _measured(script or Path(), arguments or (), repeats)
    microbatches = microbatches or own or 8
    found = search(measured, topology, limit)
    for line in explain(measured, found, microbatches=microbatches):
        typer.echo(line)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_as_dict(measured, found, devices, microbatches), indent=1) + "\n", encoding="utf-8")


def _as_dict(profile: Profile, found: StagePlan, devices: str, microbatches: int) -> dict[str, Any]:
    idle = {"microbatches": microbatches, "idle_share": bubble(found, microbatches)}
    return {"devices": devices, "plan": asdict(found), **idle, "profile": asdict(profile)}


def _measured(script: Path, arguments: Sequence[str], repeats: int) -> tuple[Profile, int | None]:
    """What was measured, and how many microbatches the script's own pipeline has, if it has one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"running {script.name} up to its model", total=None)
        from polytempo.pipeline.profiler import profile

        found = look_into(script, arguments)
        bar.update(task, description="measuring its layers", total=1.0)
        progress = lambda share: bar.update(task, completed=share)  # noqa: E731
        return profile(found.model, found.example, repeats=repeats, progress=progress), found.microbatches

"""`polytempo plan`: where to cut a model into stages, how many devices each gets, and what that promises."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polytempo.errors import PolytempoError, UsageError, nearest
from polytempo.planner.explain import bubble, explain
from polytempo.planner.profile import Profile, load_profile
from polytempo.planner.search import Plan
from polytempo.planner.search import plan as search
from polytempo.planner.topology import parse_topology
from polytempo.simulate.units import parse_size

Option = typer.Option


def plan(
    script: Annotated[
        Path | None, typer.Argument(help="Python that defines model and example, or make_... of them.")
    ] = None,
    devices: Annotated[str, Option(help="Devices and their links, such as 4x4:12GB/s,10Gb/s.")] = "4:5GB/s",
    memory: Annotated[str | None, Option(help="Of each device, such as 16GB (no limit).")] = None,
    microbatches: Annotated[int, Option(help="Between two flushes, for the idle time.")] = 8,
    profile: Annotated[Path | None, Option(help="A saved profile instead of a script: JSON.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write plan and profile to this file.")] = None,
) -> None:
    """Measure a model layer by layer, and plan pipeline stages for it."""
    topology = parse_topology(devices)
    limit = parse_size(memory, "--memory") if memory is not None else None
    if microbatches < 1:
        raise UsageError(f"expected --microbatches of at least 1, got {microbatches}")
    if (script is None) == (profile is None):
        got = "neither" if script is None else "both"
        raise UsageError(f"expected a script to measure or --profile FILE, got {got}; try polytempo plan --help")
    measured = load_profile(profile) if profile is not None else _measured(script or Path())
    found = search(measured, topology, limit)
    for line in explain(measured, found, microbatches=microbatches):
        typer.echo(line)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_as_dict(measured, found, devices, microbatches), indent=1) + "\n", encoding="utf-8")


def _as_dict(profile: Profile, found: Plan, devices: str, microbatches: int) -> dict[str, Any]:
    idle = {"microbatches": microbatches, "idle_share": bubble(found, microbatches)}
    return {"devices": devices, "plan": asdict(found), **idle, "profile": asdict(profile)}


def _measured(script: Path) -> Profile:
    from polytempo.stages.profiling import profile

    model, example = _defined(script)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=1.0)
        return profile(model, example, progress=lambda share: bar.update(task, completed=share))


# What a script defines.


def _defined(script: Path) -> tuple[Any, Any]:
    """Its model and its example. Like python, the script finds modules that lie beside it."""
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{script} is not Python: it is no text") from None
    module = ModuleType("polytempo_planned")
    module.__file__ = str(script)
    sys.modules[module.__name__] = module  # some classes look for the module that they are from
    sys.path.insert(0, str(script.resolve().parent))
    try:
        exec(compile(text, str(script), "exec"), module.__dict__)  # the user's own script, as python would run it
        return _made(script, module, "model"), _made(script, module, "example")
    except PolytempoError:
        raise
    except (Exception, SystemExit) as problem:  # it is its author's to mend
        place = f", line {_line(problem, str(script))}"
        raise UsageError(f"{script}{place}: {type(problem).__name__}: {problem}") from problem


def _made(script: Path, module: ModuleType, what: str) -> Any:
    for name in (what, f"make_{what}"):
        if hasattr(module, name):
            found = getattr(module, name)
            return found() if name.startswith("make_") else found
    known = [name for name in vars(module) if not name.startswith("__")]
    raise UsageError(f"expected {script} to define {what} or make_{what}(), got neither{nearest(what, known)}")


def _line(problem: BaseException, file: str) -> int:
    """The last line of the script that had to do with it."""
    if isinstance(problem, SyntaxError) and problem.filename == file:
        return problem.lineno or 0
    line, trace = 0, problem.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line

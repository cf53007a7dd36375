"""`polytempo plan`: where to cut a model into stages, the devices of each stage, and the expected throughput.

A script is run as Python would run it, until its model is known: the `model` and `example` that it defines, or those of the
pipeline that it trains, which stops at its first batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytempo.cli.options import Arguments, Option, progress_bar
from polytempo.errors import PolytempoError, UsageError, nearest
from polytempo.pipeline.layer_profile import Profile, load_profile
from polytempo.pipeline.plan_report import bubble, explain
from polytempo.pipeline.planner import StagePlan
from polytempo.pipeline.planner import plan as search
from polytempo.pipeline.topology import parse_topology
from polytempo.units import parse_size

if TYPE_CHECKING:
    from polytempo.pipeline.first_batch import Found


def plan(
    script: Annotated[
        Path | None,
        typer.Argument(
            help="Python that defines model and example, or make_... of them, or trains a pt.Pipeline.", metavar="SCRIPT"
        ),
    ] = None,
    arguments: Arguments = None,
    devices: Annotated[str, Option(help="Devices and their links, such as 4x4:12GB/s,10Gb/s.")] = "4:5GB/s",
    memory: Annotated[str | None, Option(help="Memory of each device, such as 16GB (no limit).")] = None,
    microbatches: Annotated[
        int | None, Option(help="Microbatches between two flushes (those of the script's pipeline, or 8).")
    ] = None,
    repeats: Annotated[int, Option(help="Number of measurements of each layer; the median counts.")] = 5,
    profile: Annotated[
        Path | None, Option(help="Read the profile from this file, written with --json, instead of a script.")
    ] = None,
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
    """The profile, and the number of microbatches of the script's own pipeline, if it has one."""
    with progress_bar() as bar:
        task = bar.add_task(f"running {script.name} up to its model", total=None)
        from polytempo.pipeline.profiler import profile

        found = look_into(script, arguments)
        bar.update(task, description="measuring its layers", total=1.0)
        progress = lambda share: bar.update(task, completed=share)  # noqa: E731
        return profile(found.model, found.example, repeats=repeats, progress=progress), found.microbatches


# The model of a script.


def look_into(script: Path, arguments: Sequence[str]) -> Found:
    """Run a script as python would, with its own arguments, until what is to be measured is known."""
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{script} is not Python: it is no text") from None
    module = ModuleType("polytempo_planned")
    module.__file__ = str(script)
    with _as_its_own_process(script, arguments, module):
        try:
            return _run(script, text, module)
        except PolytempoError:
            raise
        except (Exception, SystemExit) as problem:  # it is its author's to mend
            place = f", line {_line(problem, str(script))}"
            raise UsageError(f"{script}{place}: {type(problem).__name__}: {problem}") from problem


def _run(script: Path, text: str, module: ModuleType) -> Found:
    from polytempo.pipeline.first_batch import Found, Stepped

    try:
        exec(compile(text, str(script), "exec"), module.__dict__)  # the user's own script, as python would run it
        if not any(hasattr(module, name) for name in ("model", "make_model")) and "__main__" in text:
            module.__dict__["__name__"] = "__main__"  # it may make its pipeline there
            exec(compile(text, str(script), "exec"), module.__dict__)
    except Stepped as stepped:
        return stepped.found
    return Found(_made(script, module, "model"), _made(script, module, "example"))


@contextmanager
def _as_its_own_process(script: Path, arguments: Sequence[str], module: ModuleType) -> Iterator[None]:
    """Its arguments, the modules beside it, a job of one; afterwards all is as it was."""
    from polytempo.pipeline.first_batch import pipelines_stop_at_their_first_batch

    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sys.modules[module.__name__] = module  # some classes look for the module that they are from
    try:
        with pipelines_stop_at_their_first_batch():
            yield
    finally:
        sys.argv, sys.path[:] = before


def _made(script: Path, module: ModuleType, what: str) -> Any:
    for name in (what, f"make_{what}"):
        if hasattr(module, name):
            found = getattr(module, name)
            return found() if name.startswith("make_") else found
    known = [name for name in vars(module) if not name.startswith("__")]
    raise UsageError(
        f"expected {script} to define {what} or make_{what}(), or to train a pt.Pipeline, got neither{nearest(what, known)}"
    )


def _line(problem: BaseException, file: str) -> int:
    """The last line of the script that had to do with it."""
    if isinstance(problem, SyntaxError) and problem.filename == file:
        return problem.lineno or 0
    line, trace = 0, problem.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line

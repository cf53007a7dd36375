"""`polytempo plan`: where to cut a model into stages, the devices of each stage, and the expected throughput. With
`--strategy`: what a strategy costs for a model, measured in a short job, beside other ways to spread it.

A script is run as Python would run it, until its model is known: the `model` and `example` that it defines, or those of the
pipeline or the strategy that it trains by, or of `pt.fit`, which stop at their first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytempo.cli.options import (
    Arguments,
    DeviceOption,
    MeasuringOption,
    Module,
    OutputOption,
    StrategyOption,
    progress_bar,
    write_json,
)
from polytempo.errors import PolytempoError, UsageError, nearest
from polytempo.pipeline.layer_profile import Profile, load_profile
from polytempo.pipeline.plan_report import bubble, explain
from polytempo.pipeline.planner import parse_topology
from polytempo.pipeline.planner import plan as search
from polytempo.units import parse_size

if TYPE_CHECKING:
    from polytempo.strategy.explanation import Explanation
    from polytempo.strategy.script_probe import Found


def plan(
    script: Annotated[
        Path | None,
        typer.Argument(
            help="Python that defines model and example, or make_... of them, or trains (pt.Pipeline, a strategy, pt.fit).",
            metavar="SCRIPT",
        ),
    ] = None,
    arguments: Arguments = None,
    module: Module = False,
    devices: Annotated[str, DeviceOption(help="Devices and their links, such as 4x4:12GB/s,10Gb/s.")] = "4:5GB/s",
    memory: Annotated[str | None, DeviceOption(help="Memory of each device, such as 16GB (no limit).")] = None,
    microbatches: Annotated[
        int | None, MeasuringOption(help="Microbatches between two flushes (those of the script's pipeline, or 8).")
    ] = None,
    repeats: Annotated[int, MeasuringOption(help="Number of measurements of each layer; the median counts.")] = 5,
    profile: Annotated[
        Path | None, MeasuringOption(help="Read the profile from this file, written with --json, instead of a script.")
    ] = None,
    json_file: Annotated[Path | None, OutputOption("--json", help="Write plan and profile to this file.")] = None,
    strategy: Annotated[
        str | None,
        StrategyOption(
            help="Show what a strategy costs, such as data=2,pipe=2 or auto, beside other ways to spread the model."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        StrategyOption("--workers", "-n", help="With --strategy: the number of workers (what the strategy needs)."),
    ] = None,
    batch: Annotated[
        int | None, StrategyOption(help="With --strategy: samples of a step of the whole job (those of the script's batch).")
    ] = None,
) -> None:
    """Measure a model layer by layer, and plan pipeline stages for it; or show what a strategy costs."""
    topology = parse_topology(devices)
    limit = parse_size(memory, "--memory") if memory is not None else None
    if strategy is not None or workers is not None or batch is not None:
        if not strategy:
            raise UsageError("expected --strategy with --workers or --batch, such as --strategy data=2,pipe=2 or auto")
        if script is None or profile is not None:
            raise UsageError("--strategy measures the model of a script; give a SCRIPT and leave --profile out")
        for name, value in (("--workers", workers), ("--batch", batch)):
            if value is not None and value < 1:
                raise UsageError(f"expected {name} of at least 1, got {value}")
        shown = _strategy_cost(strategy, workers, batch, limit, microbatches, script, arguments or (), module)
        typer.echo(str(shown))
        write_json(json_file, shown.as_dict())
        return
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"expected --microbatches of at least 1, got {microbatches}")
    if (script is None) == (profile is None):
        got = "neither" if script is None else "both"
        raise UsageError(f"expected a script to measure or --profile FILE, got {got}; try polytempo plan --help")
    own: int | None = None
    if profile is not None:
        measured = load_profile(profile)
    else:
        measured, own = _measured(script or Path(), arguments or (), repeats, module)
    microbatches = microbatches or own or 8
    found = search(measured, topology, limit)
    for line in explain(measured, found, microbatches=microbatches):
        typer.echo(line)
    if json_file is not None:
        idle = {"microbatches": microbatches, "idle_share": bubble(found, microbatches)}
        write_json(json_file, {"devices": devices, "plan": asdict(found), **idle, "profile": asdict(measured)})


# Strategies.


def _strategy_cost(
    strategy: str,
    workers: int | None,
    batch: int | None,
    memory: float | None,
    microbatches: int | None,
    script: Path,
    arguments: Sequence[str],
    module: bool,
) -> Explanation:
    """Measure a script's model and the links of a short job: what a strategy costs."""
    from polytempo.pipeline.stage_message import rows
    from polytempo.strategy.strategy import Strategy

    wanted = Strategy.parse(strategy)
    if workers is None and (wanted.automatic or wanted.data is None):
        raise UsageError(f"--strategy {strategy} goes with any number of workers; give -n, such as -n 4")
    if microbatches is not None and not wanted.automatic:
        wanted = replace(wanted, microbatches=microbatches)
    with progress_bar() as bar:
        task = bar.add_task(f"running {script.name} up to its model", total=None)
        found = look_into(script, arguments, module)
        bar.update(task, description="measuring its layers, and the links of a short job")
        return wanted.explain(
            found.model,
            found.example,
            loss=found.loss,
            optimizer=found.optimizer,
            batch=batch or found.batch or rows(found.example),
            memory=memory,
            world=workers,
            target=found.target,
            tensor_plan=found.tensor_plan,
        )


def _measured(script: Path, arguments: Sequence[str], repeats: int, module: bool) -> tuple[Profile, int | None]:
    """The profile, and the number of microbatches of the script's own pipeline, if it has one."""
    with progress_bar() as bar:
        task = bar.add_task(f"running {script.name} up to its model", total=None)
        from polytempo.pipeline.profiler import profile

        found = look_into(script, arguments, module)
        bar.update(task, description="measuring its layers", total=1.0)
        progress = lambda share: bar.update(task, completed=share)  # noqa: E731
        return profile(found.model, found.example, repeats=repeats, progress=progress), found.microbatches


# The model of a script.


def look_into(script: Path, arguments: Sequence[str], is_module: bool = False) -> Found:
    """Run a script, or a module as `python -m` would, with its own arguments, until what is to be measured is known."""
    folder, package = script.resolve().parent, None
    if is_module:
        from polytempo.launcher.program import ModuleProgram

        spec = ModuleProgram(str(script)).spec()
        script, folder, package = Path(spec.origin or script), Path.cwd(), spec.parent
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{script} is not Python: it is no text") from None
    module = ModuleType("polytempo_planned")
    module.__file__, module.__package__ = str(script), package
    with _as_its_own_process(script, arguments, folder, module):
        try:
            return _run(script, text, module)
        except PolytempoError:
            raise
        except (Exception, SystemExit) as problem:  # it is its author's to mend
            place = f", line {_line(problem, str(script))}"
            raise UsageError(f"{script}{place}: {type(problem).__name__}: {problem}") from problem


def _run(script: Path, text: str, module: ModuleType) -> Found:
    from polytempo.strategy.script_probe import Found, Stepped, leave_job

    try:
        exec(compile(text, str(script), "exec"), module.__dict__)  # the user's own script, as python would run it
        if not any(hasattr(module, name) for name in ("model", "make_model")) and "__main__" in text:
            module.__dict__["__name__"] = "__main__"  # it may make its pipeline there
            leave_job()
            exec(compile(text, str(script), "exec"), module.__dict__)
    except Stepped as stepped:
        return stepped.found
    more = {name: _made(script, module, name, False) for name in ("loss", "optimizer", "target")}
    return Found(_made(script, module, "model"), _made(script, module, "example"), **more)


@contextmanager
def _as_its_own_process(script: Path, arguments: Sequence[str], folder: Path, module: ModuleType) -> Iterator[None]:
    """Its arguments, the modules in `folder`, a job of one; afterwards all is as it was."""
    from polytempo.strategy.script_probe import training_stops_at_its_first_batch

    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(folder))
    sys.modules[module.__name__] = module  # some classes look for the module that they are from
    try:
        with training_stops_at_its_first_batch():
            yield
    finally:
        sys.argv, sys.path[:] = before


def _made(script: Path, module: ModuleType, what: str, needed: bool = True) -> Any:
    for name in (what, f"make_{what}"):
        if hasattr(module, name):
            found = getattr(module, name)
            is_optimizer = what == "optimizer"  # what makes one is itself the answer
            return found() if name.startswith("make_") and not is_optimizer else found
    if not needed:
        return None
    known = [name for name in vars(module) if not name.startswith("__")]
    raise UsageError(
        f"expected {script} to define {what} or make_{what}(), or to train a pt.Pipeline, a strategy or pt.fit, got neither"
        f"{nearest(what, known)}"
    )


def _line(problem: BaseException, file: str) -> int:
    if isinstance(problem, SyntaxError) and problem.filename == file:
        return problem.lineno or 0
    line, trace = 0, problem.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line

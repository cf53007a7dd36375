"""What the commands share: their options, the text of their help, shell completion, a progress bar, files of figures.

A command's help shows its options in groups, and ends with examples to type and, where it takes `--sync`, the list of modes.
Flags are shown without a type. Completion (`polytempo --install-completion`) is typer's; here is what it does not know.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand, TyperGroup

from polytempo.door import bring_named, check_brought, read_sync
from polytempo.records.files import modes_in, read_meta
from polytempo.server.job_plan import Limits
from polytempo.sync.spec import mode_examples
from polytempo.units import parse_factors, parse_hiccup, parse_links

Option = typer.Option

#: The groups of options, in the order in which a help shows them: that of their declarations.
GROUPS: list[str] = []


def _of_group(title: str) -> Callable[..., Any]:
    GROUPS.append(title)
    return partial(typer.Option, rich_help_panel=title)


ClusterOption = _of_group("Cluster")
DeviceOption = _of_group("Devices")
MeasuringOption = _of_group("Measuring")
JobOption = _of_group("Job")
SyncOption = _of_group("Synchronisation")
StrategyOption = _of_group("Strategy")
BudgetOption = _of_group("Budget")
TrainingOption = _of_group("Training in virtual time")
ComparisonOption = _of_group("Comparison")
CheckpointOption = _of_group("Checkpoints")
FailureOption = _of_group("Failures")
HostOption = _of_group("Other hosts")
EmulationOption = _of_group("Emulation")
OutputOption = _of_group("Output")


MODE = "Load this file of modes, without choosing one; repeatable. Nothing else loads a file: no record, message or script."
Modes = Annotated[list[str] | None, SyncOption("--mode", metavar="FILE", help=MODE)]
ModesOfRecord = Annotated[
    list[str] | None,
    Option("--mode", metavar="FILE", help="Load this file of modes, where the record is of one; repeatable."),
]

Script = Annotated[str, typer.Argument(help="A training script; all that follows it belongs to it.", metavar="SCRIPT")]
Module = Annotated[
    bool,
    JobOption("--module", "-m", help="SCRIPT is a module, package.train, and is run as by python -m.", show_default=False),
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")]
Workers = Annotated[int, JobOption("--workers", "-n", help="Number of worker processes on this host.")]
StepBudget = Annotated[int | None, BudgetOption(help="Steps, summed over all workers.")]
Samples = Annotated[int | None, BudgetOption(help="Samples, as given to step(samples=...), summed over all workers.")]
Seconds = Annotated[float | None, BudgetOption(help="Seconds from the first step.")]
Slow = Annotated[str | None, EmulationOption(help="RANK:FACTOR,... slow these workers down by the factor.")]
HiccupOption = Annotated[str | None, EmulationOption(help="PROBABILITY:SECONDS of a stall in each step, seeded.")]
LinkOption = Annotated[
    str | None,
    EmulationOption(help="BANDWIDTH[,LATENCY][,RANK:BANDWIDTH] such as 100Mb/s,5ms: what each worker may send and receive."),
]
SeedOption = Annotated[int, JobOption(help="Seed of samplers and emulation.")]
Fork = Annotated[bool, JobOption("--fork", help="Import torch once, and fork all processes: a faster start.")]
ShardCount = Annotated[
    int | None,
    SyncOption(
        help="Parameter-server shards; by default 1 where the mode needs a server, or one a GPU where there are several."
    ),
]
Overwrite = Annotated[bool, OutputOption("--overwrite", help="Replace the record of an earlier job.")]
Quiet = Annotated[bool, OutputOption("--quiet", "-q", help="Show only the output of the workers, and errors.")]
OnDivergence = Annotated[
    str, FailureOption(help="When the training has diverged: warn, and name cause and last checkpoint; or stop the job.")
]
Insecure = Annotated[bool, HostOption("--insecure", help="No keys, no encryption.")]

#: Everything after SCRIPT belongs to the script.
PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": False}

#: Says, in the environment of a completion, which shell asks. The name is typer's.
ASKING = "_POLYTEMPO_COMPLETE"


def load_modes(params: MutableMapping[str, Any]) -> None:
    """Load what `--mode` and `--sync` of a command name; from here on a mode is a name without a folder."""
    for named in params.get("mode") or ():
        bring_named(named)
    sync = params.get("sync")
    if sync:
        params["sync"] = read_sync(sync) if isinstance(sync, str) else [read_sync(text) for text in sync]


class WithExamples:
    """Of a command, or a group of commands: flags are shown by their names alone, and the help ends with examples."""

    examples: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[bool] = False

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, as they are shown."""
        return grouped(bare_flags(super().get_params(ctx)))  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        """Run it, with the modes that its options name."""
        load_modes(ctx.params)
        return super().invoke(ctx)  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of typer, and ours below it, as it stands: what is typed is not broken into lines."""
        super().format_help(ctx, formatter)  # type: ignore[misc]
        lines = [" Examples:", *(f"   {line}" for line in self.examples), ""]
        if self.modes:  # what `--sync` may be
            known, width = mode_examples(), shutil.get_terminal_size((80, 24)).columns
            wide = max(map(len, known)) + 5
            lines += [" Modes:"]
            for example, meaning in known.items():
                head = f"   {example}".ljust(wide)
                lines += textwrap.wrap(meaning, max(width, 60), initial_indent=head, subsequent_indent=" " * wide)
            lines.append("")
        typer.echo("\n".join(lines))


class Command(WithExamples, TyperCommand):
    """One of the commands."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Its options; none behind a script, to which all belongs that follows it."""
        passed_on = not ctx.allow_interspersed_args and ctx.params.get("script")
        return [] if passed_on else super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: Any) -> Any:
        """Run it; say before that which of its options stand behind the script, where they are the script's."""
        script, arguments = ctx.params.get("script"), ctx.params.get("arguments")
        if script and arguments and not ctx.params.get("quiet"):
            names = [name for param in self.params if param.name in ctx.params for name in param.opts]
            try:
                source = Path(script).read_text(encoding="utf-8", errors="replace")
            except OSError:  # no such file: what is run is a module, or the check of the command says it
                source = None
            if behind := misplaced(names, arguments, source):
                stand, are, them = ("stand", "are", "them") if len(behind) > 1 else ("stands", "is", "it")
                where = f"{', '.join(behind)} {stand} behind {script} and {are} passed on to it"
                typer.echo(f"polytempo: {where}; put {them} before {script} where {ctx.command_path} is meant", err=True)
        return super().invoke(ctx)


class CommandGroup(WithExamples, TyperGroup):
    """A command with commands of its own, which also does something without them."""


class Commands(TyperGroup):
    """The list of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, as they are shown."""
        return bare_flags(super().get_params(ctx))


def bare_flags(params: list[Any]) -> list[Any]:
    """Flags take no value, so none is shown."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def grouped(params: list[Any]) -> list[Any]:
    """In the order of their groups, where a command has groups; `--help` is in the last one then."""
    groups = {getattr(param, "rich_help_panel", None) for param in params} - {None}
    if not groups:
        return params
    for param in params:
        if param.name == "help":
            param.rich_help_panel = GROUPS[-1]
    return sorted(params, key=lambda param: GROUPS.index(param.rich_help_panel) if param.rich_help_panel else -1)


def misplaced(options: Sequence[str], arguments: Sequence[str], source: str | None) -> list[str]:
    """The arguments of a script that are options of the command, and that the script's source does not mention.

    A script that reads such an option itself names it: "--steps", "steps" or `steps: int` in some place.
    """
    if source is None:
        return []
    given = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    return [name for name in given if name in options and name.startswith("-") and not _mentions(source, name)]


def _mentions(source: str, option: str) -> bool:
    if not option.startswith("--"):
        return re.search(rf"[\"']{option}\b", source) is not None
    word = option[2:].replace("-", "[-_]")
    return re.search(rf"(--|[\"']){word}\b|\b{word}\s*:", source) is not None


def add(
    app: typer.Typer,
    group: str | None,
    function: Any,
    *examples: str,
    modes: bool = False,
    passes_on: bool = False,
    name: str = "",
) -> None:
    """Make a function a command of a group, with examples in its help and, where it takes one, the modes."""
    kind = type("Command", (Command,), {"examples": examples, "modes": modes})
    settings = PASS_ON if passes_on else {}
    app.command(name or function.__name__, cls=kind, context_settings=settings, rich_help_panel=group)(function)


def add_group(app: typer.Typer, group: str, name: str, own: typer.Typer, *examples: str) -> None:
    """Make a command with commands of its own one of a group, with examples in its help."""
    kind = type("CommandGroup", (CommandGroup,), {"examples": examples})
    app.add_typer(own, name=name, cls=kind, rich_help_panel=group)


def limits_and_emulation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `RunRequest` that are made of several options, or of texts: `limits`, `slow`, `hiccup`, `link` and
    `own_links`."""
    limits = {name: given[name] for name in ("steps", "samples", "seconds") if given[name] is not None}
    slow, hiccup, link = given["slow"], given["hiccup"], given["link"]
    return {
        "limits": Limits(**limits),
        "slow": parse_factors(slow) if slow else {},
        "hiccup": parse_hiccup(hiccup) if hiccup else (0.0, 0.0),
        **(dict(zip(("link", "own_links"), parse_links(link), strict=True)) if link is not None else {}),
    }


def read_record(directory: Path) -> dict[str, Any]:
    """The meta of a record, whose modes are brought: a mode of a file is named by the command line alone.

    Raises: ModeError, one line with the option, where it is not."""
    meta = read_meta(directory)
    for warning in check_brought(f"the record {directory}", modes_in(meta)):
        typer.echo(f"polytempo: warning: {warning}", err=True)
    return meta


def progress_bar(quiet: bool = False) -> Progress:
    """A progress bar on standard error; disabled where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures to the file that was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


# Completion.


def complete_mode(incomplete: str) -> list[tuple[str, str]]:
    """What `--sync` may be, with its meaning; nothing behind a colon, where bash would not replace the name before it."""
    return [] if ":" in incomplete else list(mode_examples().items())


def join_broken_words(environment: MutableMapping[str, str]) -> None:
    """Put together what bash broke at a colon or an equals sign: typer would take the rest of `ssp:3` for the script."""
    if environment.get(ASKING) != "complete_bash":
        return
    words = [""]
    current = int(environment["COMP_CWORD"])
    place = current
    for number, word in enumerate(environment["COMP_WORDS"].split("\n")):
        if number and any(part and not part.strip(":=") for part in (word, words[-1][-1:])):
            words[-1] += word
            place -= number <= current
        else:
            words.append(word)
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(words[1:]), str(place)

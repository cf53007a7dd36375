"""The help of a command: what it is for, an example to type, the modes; flags without a type, which says nothing."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from polytempo.sync.spec import MODES

#: Everything after SCRIPT belongs to the script.
PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": False}


class Command(TyperCommand):
    """A command whose flags are shown by their names alone, and whose help ends with examples."""

    examples: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[bool] = False

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, as they are shown."""
        return bare_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of typer, and ours below it, as it stands: what is typed is not broken into lines."""
        super().format_help(ctx, formatter)
        typer.echo(last_lines(self.examples, self.modes, shutil.get_terminal_size((80, 24)).columns))


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


def last_lines(examples: tuple[str, ...], modes: bool, width: int) -> str:
    """What to type, and what `--sync` may be."""
    lines = [" Examples:", *(f"   {line}" for line in examples), ""]
    if modes:
        wide = max(len(mode.example) for mode in MODES.values()) + 5
        lines += [" Modes:"]
        for mode in MODES.values():
            head = f"   {mode.example}".ljust(wide)
            lines += textwrap.wrap(mode.meaning, max(width, 60), initial_indent=head, subsequent_indent=" " * wide)
        lines.append("")
    return "\n".join(lines)


def add(app: typer.Typer, function: Any, name: str, *examples: str, modes: bool = False, passes_on: bool = False) -> None:
    """Make a function a command, with examples in its help and, where it takes one, the modes."""
    kind = type("Command", (Command,), {"examples": examples, "modes": modes})
    app.command(name, cls=kind, context_settings=PASS_ON if passes_on else {})(function)

"""Help texts: every command shows how it is typed, those with modes list them all, flags take no value."""

from __future__ import annotations

import shlex

import pytest
import typer
from clusters import MODES

from polytempo.cli.main import app, run
from polytempo.sync.spec import parse_spec

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_examples_that_can_be_typed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    shown = capfd.readouterr().out
    assert "<bool>" not in shown
    examples = [line.strip() for line in shown.partition(" Examples:")[2].splitlines() if line.startswith("   polytempo ")]
    assert examples
    command = COMMANDS[name]
    for example in examples:
        program, typed, *arguments = shlex.split(example)
        assert (program, typed) == ("polytempo", name)
        assert command.make_context(name, arguments), "typer takes it"
    if any("--sync" in parameter.opts for parameter in command.params):
        listed = [
            line.split()[0]
            for line in shown.partition(" Modes:")[2].splitlines()
            if line.startswith("   ") and line[3] != " "
        ]
        assert {parse_spec(spec).mode.name for spec in listed} == {parse_spec(spec).mode.name for spec in MODES}

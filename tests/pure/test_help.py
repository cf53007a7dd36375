"""Help texts: each command shows how it is typed, those with modes list them, flags take no value, options have groups."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from clusters import MODES

from polytempo.cli.main import app, run
from polytempo.cli.options import GROUPS, misplaced
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


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["run", "worker", "compare", "simulate", "advise", "plan"])
def test_each_option_is_in_a_group(
    name: str, columns: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([name, "--help"]) == 0
    shown = capfd.readouterr().out
    titles = [line.strip("╭─╮ ") for line in shown.splitlines() if line.startswith("╭")]
    groups = [title for title in titles if title != "Arguments"]
    assert groups == [title for title in GROUPS if title in groups], "in one order, and none of typer's"
    assert len(groups) > 1
    assert "--help" in shown.partition(f"╭─ {groups[-1]} ")[2]
    names = [option for shown_one in COMMANDS[name].params if not shown_one.hidden for option in shown_one.opts]
    assert [option for option in names if option.startswith("-") and f" {option} " not in shown] == [], "none is cut off"
    assert "…" not in shown


def test_the_list_of_commands_is_in_groups_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capfd.readouterr().out
    groups = {part.partition(" ")[0]: part for part in shown.split("╭─ ")[1:]}
    assert list(groups) == ["Options", "Jobs", "Predictions", "Records", "Modes"]
    assert "--install-completion" in groups.pop("Options")
    listed = [name for part in groups.values() for name in re.findall(r"^│ ([a-z]+) ", part, re.MULTILINE)]
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["run", "--sycn", "bsp", "train.py"], "Try: polytempo run --help"),
        (["run"], "Missing argument 'SCRIPT'. Try: polytempo run --help"),
        (["compare", "-n", "many", "train.py"], ". Try: polytempo compare --help"),
        (["simulat"], "Did you mean 'simulate'? Try: polytempo --help"),
        (["--nothing"], "Try: polytempo --help"),
    ],
)
def test_a_mistake_is_answered_with_the_help_of_its_command(
    arguments: list[str], ends: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capfd.readouterr().err.endswith(f"{ends}\n")


READS_STEPS = 'parser.add_argument("--steps", type=int)'
READS_BUDGET = "def main(steps: int, per_host: int = 1, *, seed: int = 0) -> None:"
READS_N = "parser.add_argument('-n', type=int)"


@pytest.mark.parametrize(
    ("arguments", "source", "found"),
    [
        ("-n 4 --sync=ssp:3", "import torch", ["-n", "--sync"]),
        ("--lr 0.1 -n 4", "", ["-n"]),
        ("-n 4 --steps 10", READS_N, ["--steps"]),
        ("-n 4 --steps 10", READS_STEPS, ["-n"]),
        ("--steps 10 --per-host 2 --seed=3", READS_BUDGET, []),
        ("--steps 10", "config['steps']", []),
        ("--steps 10", "optimizer.step(samples=32)  # steps of all", ["--steps"]),
        ("n workers sync", "", []),
        ("-n 4", None, []),  # a module
    ],
)
def test_options_behind_a_script_that_does_not_know_them(arguments: str, source: str | None, found: list[str]) -> None:
    options = ["--workers", "-n", "--sync", "--steps", "--per-host", "--seed"]
    assert misplaced(options, arguments.split(), source) == found

"""Commands as the user would type them: found in what polytempo says, parsed by its parser, and checked as `run` does.

`Typed.start` goes through the real command as far as its first process.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import polytempo
from polytempo.cli.main import app
from polytempo.errors import JobEnded
from polytempo.launcher.request import CheckedRequest

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
#: What a word after a command is taken for: SCRIPT, out/job, 'my job', train.py; all else goes on with the sentence.
ARGUMENT = re.compile(r"[A-Z][A-Z:|]+|.*[/.].*\w|.*\s.*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*\w")


class Typed:
    """Commands that are typed in a folder: nothing is started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[CheckedRequest] = []
        monkeypatch.chdir(folder)
        (folder / "train.py").touch()
        stub, typed = ModuleType("local_job"), self

        class LocalJob:
            cause = None

            def __init__(self, checked: CheckedRequest, *_: object) -> None:
                typed.started.append(checked)

            def run(self) -> int:
                return 1

        stub.LocalJob = LocalJob  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "polytempo.launcher.local_job", stub)

    def start(self, command: str) -> CheckedRequest:
        """What `run` or `compare` would start; it raises what they refuse."""
        program, *words = shlex.split(command)
        assert (program, words[0] in ("run", "compare")) == ("polytempo", True)
        assert app(words, standalone_mode=False, prog_name=program) == 1
        return self.started[-1]

    def launch(self, call: str, function: Callable[[], object]) -> CheckedRequest:
        """What a `pt.launch` of this function would start, as it is written in a notebook; it raises what it refuses."""
        with pytest.raises(JobEnded):
            eval(call, {"pt": polytempo, function.__name__: function})
        return self.started[-1]


def parse(command: str) -> dict[str, Any]:
    """The parameters of a command that is typed; a SCRIPT is added where it is left out."""
    program, name, *words = shlex.split(command)
    assert program == "polytempo"
    parser = COMMANDS[name]
    takes = [param.name for param in parser.params if param.param_type_name == "argument"]
    if any(param.required for param in parser.params if param.name in takes) and not _positional(parser, words):
        words = [*words, "train.py"]
    given: dict[str, Any] = parser.make_context(name, words).params
    return given


def commands_in(text: str) -> Iterator[str]:
    """The commands that a text names, each with the options, values and arguments behind it."""
    for found in re.finditer(r"polytempo ([a-z]+)\b", text):
        if found[1] in COMMANDS:
            yield " ".join(["polytempo", found[1], *map(shlex.quote, _words(found[1], text[found.end() :]))])


def _words(name: str, rest: str) -> Iterator[str]:
    values = {option: param.nargs for param in COMMANDS[name].params for option in (*param.opts, *param.secondary_opts)}
    flags = {option for param in COMMANDS[name].params if getattr(param, "is_flag", False) for option in param.opts}
    wanted = 0
    for raw in re.findall(r"""\s+((?:'[^']*'|"[^"]*"|[^\s'"`;()])+)([`;()]?)""", rest):
        word = raw[0].strip("'\"").rstrip(",.:")
        ended = bool(raw[1]) or raw[0][-1] in ",.:"
        if not wanted and not word.startswith("-") and not ARGUMENT.fullmatch(word):
            return
        wanted = 0 if wanted or word in flags or not word.startswith("-") else values.get(word, 1)
        yield word
        if ended and not wanted:
            return


def _positional(parser: Any, words: list[str]) -> list[str]:
    flags = {option for param in parser.params if getattr(param, "is_flag", False) for option in param.opts}
    left, value = [], False
    for word in words:
        if not value and not word.startswith("-"):
            left.append(word)
        value = not value and word.startswith("-") and word not in flags
    return left


def options_of(*names: str) -> set[str]:
    """All long options of these commands; of all where none is named."""
    found = {option for name in names or COMMANDS for param in COMMANDS[name].params for option in param.opts}
    return {option for option in found if option.startswith("--")} | {"--help"}

"""What a worker runs: a script or a module (`-m`), as the command names it, or a function (`function_program.py`).

It starts a process in either way: its command line is that of a new interpreter, and a forked process (`forked_process.py`)
does what that interpreter would do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError
from polytempo.launcher.forked_process import Body


class Program(ABC):
    """What all workers of a job run."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages and the record call it."""

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot be run, before any process starts.

        Raises: UsageError."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What meta.json says of it."""

    def place(self, folder: Path) -> None:
        """Put into the job's private folder what workers need."""

    @abstractmethod
    def command(self, folder: Path) -> list[str]:
        """The command line of a worker."""

    def body(self, folder: Path, rank: int) -> Body | None:
        """What a worker does that has to be forked from this process; None for one that follows the command line."""
        return None


@dataclass(frozen=True)
class ScriptProgram(Program):
    """A file: `python train.py --lr 0.1`."""

    path: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path

    def check(self) -> None:
        if not os.path.isfile(self.path):
            raise UsageError(f"there is no script {self.path}; expected a Python file after the options")

    def facts(self) -> dict[str, Any]:
        return {"script": self.path}

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, self.path, *self.arguments]


@dataclass(frozen=True)
class ModuleProgram(Program):
    """A module: `python -m package.train --lr 0.1`. Python looks for it below the working directory first."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"-m {self.module}"

    def check(self) -> None:
        self.spec()

    def spec(self) -> ModuleSpec:
        """The module that is run: of a package its `__main__`.

        Raises: UsageError, in one line, where `python -m` would find none."""
        spec = find_module(self.module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_module(f"{self.module}.__main__")
            if spec is None:
                raise UsageError(f"{self.module} is a package without a __main__; name one of its modules after -m")
        if spec is None:
            is_file = os.path.isfile(self.module)
            fix = f"leave -m out to run the script {self.module}" if is_file else "expected a name such as package.train"
            raise UsageError(f"there is no module {self.module} below {os.getcwd()} or on Python's path; {fix}")
        return spec

    def facts(self) -> dict[str, Any]:
        return {"script": self.module, "runs": "module"}

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments]


def program_of(script: str, arguments: Sequence[str] | None, is_module: bool) -> Program:
    """What a command names by SCRIPT, ARGS and `-m`."""
    return (ModuleProgram if is_module else ScriptProgram)(script, tuple(arguments or ()))


def command_again(recorded: Mapping[str, Any], given: Mapping[str, str | int]) -> str:
    """What starts again, with these options of `run`, what a recorded job ran: a command, or a call of `pt.launch`."""
    name = str(recorded.get("script", "train.py"))
    if recorded.get("runs") == "function":
        options = ", ".join(f"{option}={json.dumps(value)}" for option, value in given.items())
        return f"pt.launch({name.removesuffix('()')}, {options})"
    flags = [("-n" if option == "n" else f"--{option}", str(value)) for option, value in given.items()]
    words = [*(word for flag in flags for word in flag), *(["-m"] if recorded.get("runs") == "module" else []), name]
    return shlex.join(["polytempo", "run", *words])


def find_module(name: str) -> ModuleSpec | None:
    """A module as `python -m` finds it, in the working directory first. Its packages are imported only where it is not
    found without that (a package may choose where its modules are): a launcher shall not load what workers load."""
    parts, places, found = name.split("."), None, None
    for number in range(1, len(parts) + 1):
        found = _look_for(".".join(parts[:number]), places)
        if found is None:
            return _after_import(name) if number > 1 else None
        places = found.submodule_search_locations
        if places is None and number < len(parts):
            return None
    return found


def _look_for(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    here = PathFinder.find_spec(name, [os.getcwd()]) if places is None and not sys.flags.safe_path else None
    if here is not None:
        return here
    looked = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in looked if spec is not None), None)


def _after_import(name: str) -> ModuleSpec | None:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name)
    except ImportError:
        return None
    finally:
        sys.path[:] = before

"""From a word to a mode: `name[:argument][,option=value]...`.

Adding a mode means one new file and one line in `MODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polytempo.errors import SpecError, nearest
from polytempo.sync.asp import ASP
from polytempo.sync.barrier import BACKUP, BSP
from polytempo.sync.delay import DELAY
from polytempo.sync.dssp import DSSP
from polytempo.sync.dssp_paper import DSSP_PAPER
from polytempo.sync.every import EVERY
from polytempo.sync.mode import Mode, Reader
from polytempo.sync.policy import Policy
from polytempo.sync.ssp import SSP

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        BSP,
        BACKUP,
        SSP,
        DSSP,
        DSSP_PAPER,
        ASP,
        EVERY,
        DELAY,
    )
}

#: Names of the contract whose mechanism is not here yet.
PLANNED = ("bsp+balance", "anytime", "local", "adacomm", "diloco", "gossip", "adpsgd", "downpour", "asup")


@dataclass(frozen=True)
class Spec:
    """A spec that was understood. `text` is how the user wrote it."""

    text: str
    mode: Mode
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def policy(self, workers: int) -> Policy:
        """A fresh policy for a job of so many initial workers."""
        return self.mode.build(workers, *self.arguments, **self.options)


def parse_spec(text: str) -> Spec:
    """Read a spec such as `ssp:3` or `every:8,wait=2`; a `SpecError` says in one line what is wrong."""
    head, *pairs = text.strip().split(",")
    name, colon, argument = head.partition(":")
    mode = MODES.get(name)
    if mode is None:
        raise SpecError(_unknown(text, name, colon + argument))
    return Spec(text.strip(), mode, _arguments(mode, head, colon, argument), _options(mode, pairs))


def _arguments(mode: Mode, head: str, colon: str, argument: str) -> tuple[Any, ...]:
    if mode.argument is None:
        if colon:
            raise SpecError(f"{mode.name} takes no argument, got {head!r}; write {mode.example}")
        return ()
    if not argument:
        raise SpecError(f"{mode.name} needs {mode.argument.expected}; write for example {mode.example}")
    return (_read(mode.argument, argument, f"in {head!r}", mode.example),)


def _options(mode: Mode, pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.strip().partition("=")
        reader = mode.options.get(name)
        if reader is None:
            known = ", ".join(mode.options) or "none"
            raise SpecError(f"{mode.name} has no option {name!r}; known: {known}{nearest(name, mode.options)}")
        if not equals or name in options:
            raise SpecError(f"option {name!r} of {mode.name} must be given once, as {name}=VALUE")
        options[name] = _read(reader, value, f"for option {name!r} of {mode.name}", f"{name}=2")
    return options


def _read(reader: Reader, text: str, where: str, example: str) -> Any:
    try:
        return reader.read(text)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    except ValueError:
        raise SpecError(f"expected {reader.expected} {where}, got {text!r}; write for example {example}") from None


def _unknown(text: str, name: str, rest: str) -> str:
    known = ", ".join(mode.example for mode in MODES.values())
    if name in PLANNED:
        return f"synchronisation mode {name!r} is planned but not available yet; known: {known}"
    near = nearest(name.lower(), MODES)
    fix = near + rest if near and rest.isprintable() else near
    return f"unknown synchronisation mode {text!r}{fix}; known: {known}"

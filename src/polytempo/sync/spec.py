"""From a word to a mode: `name[:argument][,option=value]...`.

A mode without an argument may have its options behind the colon: `downpour:push=5,fetch=5` is `downpour,push=5,fetch=5`.
Adding a mode means one new file and one line in `MODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polytempo.errors import SpecError, nearest
from polytempo.sync.asup import ASUP, DEFAULTS, Momentum
from polytempo.sync.asynchronous import ASP
from polytempo.sync.barrier import BACKUP, BSP
from polytempo.sync.corrections import OPTIONS, Corrections, corrections_from
from polytempo.sync.delay import DELAY
from polytempo.sync.downpour import DOWNPOUR, LocalSteps
from polytempo.sync.dssp import DSSP
from polytempo.sync.dssp_paper import DSSP_PAPER
from polytempo.sync.every import EVERY
from polytempo.sync.mode import ArgumentReader, Mode
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
        DOWNPOUR,
        ASUP,
    )
}

#: Names of the contract whose mechanism is not here yet.
PLANNED = ("bsp+balance", "anytime", "local", "adacomm", "diloco", "gossip", "adpsgd")


@dataclass(frozen=True)
class Spec:
    """A spec that was understood. `text` is how the user wrote it."""

    text: str
    mode: Mode
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def policy(self, workers: int) -> Policy:
        """A fresh policy for a job of so many initial workers."""
        own = {name: value for name, value in self.options.items() if name in self.mode.options}
        return self.mode.build(workers, *self.arguments, **own)

    @property
    def corrections(self) -> Corrections:
        """What is to be done about stale gradients."""
        momentum = self.options.get("momentum")
        adapts = momentum.adapts if isinstance(momentum, Momentum) else momentum is not None
        return corrections_from(self.options, adapts)

    @property
    def rule_options(self) -> dict[str, Any]:
        """Everything that the mode's own update rule is made with, beside the learning rate."""
        given = {name: value for name, value in self.options.items() if name in self.mode.rule_options}
        if isinstance(momentum := given.get("momentum"), Momentum):
            given["momentum"] = momentum.value
        return {**DEFAULTS, **given} if self.mode.rule else {}

    @property
    def local(self) -> LocalSteps | None:
        """What workers do between pushes, in modes with local steps."""
        names = ("push", "fetch", "alpha")
        options = {name: value for name, value in self.options.items() if name in names}
        return LocalSteps(**options) if self.mode is DOWNPOUR else None

    @property
    def ahead(self) -> int:
        """How many pushes of a worker may be under way while it computes the next."""
        return int(self.arguments[0]) if self.mode is DELAY else int(self.mode is DOWNPOUR)


def parse_spec(text: str) -> Spec:
    """Read a spec such as `ssp:3` or `every:8,wait=2`; a `SpecError` says in one line what is wrong."""
    head, *pairs = text.strip().split(",")
    name, colon, argument = head.partition(":")
    mode = MODES.get(name)
    if mode is None:
        raise SpecError(_unknown(text, name, colon + argument))
    if mode.argument is None and "=" in argument:
        head, colon, argument, pairs = name, "", "", [argument, *pairs]
    spec = Spec(text.strip(), mode, _arguments(mode, head, colon, argument), _options(mode, pairs))
    _ = spec.corrections  # refuses what does not go together
    return spec


def _arguments(mode: Mode, head: str, colon: str, argument: str) -> tuple[Any, ...]:
    if mode.argument is None:
        if colon:
            raise SpecError(f"{mode.name} takes no argument, got {head!r}; write {mode.example}")
        return ()
    if not argument:
        raise SpecError(f"{mode.name} needs {mode.argument.expected}; write for example {mode.example}")
    return (_read(mode.argument, argument, f"in {head!r}", mode.example),)


def _options(mode: Mode, pairs: list[str]) -> dict[str, Any]:
    known = {**mode.options, **({} if mode.barrier else OPTIONS), **mode.rule_options}
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.strip().partition("=")
        reader = known.get(name)
        if reader is None:
            names = ", ".join(known) or "none"
            raise SpecError(f"{mode.name} has no option {name!r}; known: {names}{nearest(name, known)}")
        if not equals or name in options:
            raise SpecError(f"option {name!r} of {mode.name} must be given once, as {name}=VALUE")
        options[name] = _read(reader, value, f"for option {name!r} of {mode.name}", f"{name}={reader.example}")
    return options


def _read(reader: ArgumentReader, text: str, where: str, example: str) -> Any:
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

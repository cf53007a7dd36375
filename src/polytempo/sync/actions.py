"""What a policy may order. Each action is a plain value that nobody changes, and carries its own reason."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.sync.events import Pushed

#: A hold names at most this many of those it waits for, the slowest first; it counts them all.
NAMED_AT_MOST = 8


@dataclass(slots=True)
class Admit:
    """The worker is a member from now on; its first step is `step`."""

    worker: int
    step: int


@dataclass(slots=True)
class Hold:
    """The worker may not start `step` yet."""

    worker: int
    step: int
    waiting_for: tuple[int, ...]
    waiting_count: int
    reason: str


@dataclass(slots=True)
class Release:
    """The worker may start `step`; the slowest active worker is about to push step `slowest`."""

    worker: int
    step: int
    slowest: int


@dataclass(slots=True)
class Apply:
    """Make one update of these pushes: their mean weighted by samples, at the learning rate times `rate`."""

    pushes: tuple[Pushed, ...]
    rate: float


@dataclass(slots=True)
class Discard:
    """This push is not applied, and is counted as such."""

    worker: int
    step: int
    reason: str


@dataclass(slots=True)
class Refuse:
    """This push contradicts the others' and its worker must be told to stop."""

    worker: int
    step: int
    reason: str


@dataclass(slots=True)
class Wake:
    """Hand in `Ticked` at this moment or later; what is decided may depend on it."""

    at: float


Action = Admit | Hold | Release | Apply | Discard | Refuse | Wake

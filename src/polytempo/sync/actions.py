"""The actions that a policy returns. Each is an immutable value and carries its own reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytempo.sync.directives import Directive
from polytempo.sync.events import Pushed

#: A hold names at most this many of the workers it waits for, the slowest first; it counts all of them.
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
    directive: Directive | None = None  #: what else it is told, in modes that tell more
    repeats: bool = False  #: another release of this moment says the same shares; a record has them once


@dataclass(slots=True)
class Apply:
    """Make one update of these pushes: their mean weighted by samples, at the learning rate times `rate`; where values are
    pushed, `rate` is the part of the way that the job's values go to that mean.

    Of no pushes, or where none has samples, it is a version in which nothing changes."""

    pushes: tuple[Pushed, ...]
    rate: float
    weights: tuple[float, ...] = ()  #: of the pushes, where they are not the samples
    divisor: float = 0.0  #: of the weighted sum, where it is not the sum of the weights


@dataclass(slots=True)
class Discard:
    """This push is not applied, and is counted as such."""

    worker: int
    step: int
    reason: str
    #: A correction has made it of an update: to the policy the push was applied.
    too_stale: bool = field(default=False, repr=False)


@dataclass(slots=True)
class Refuse:
    """This push contradicts the others of its round; its worker is refused."""

    worker: int
    step: int
    reason: str


@dataclass(slots=True)
class Wake:
    """Call `handle(Ticked())` at this time or later; decisions may depend on it."""

    at: float


Action = Admit | Hold | Release | Apply | Discard | Refuse | Wake

"""The actions that a policy returns. Each is an immutable value and carries its own reason."""

from __future__ import annotations

from dataclasses import dataclass

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
class Mixing:
    """The part of a mixing matrix P that concerns one worker i: values x and push-sum weights w are mixed alike.

    x_i becomes P_ii x_i + the sum of P_ij x_j over its in-neighbours j.
    """

    keep: float  #: P_ii
    send: tuple[tuple[int, float], ...]  #: out-neighbours j, and P_ji
    receive: tuple[tuple[int, float], ...]  #: in-neighbours j, and P_ij


@dataclass(slots=True)
class Release:
    """The worker may start `step`; the slowest active worker is about to push step `slowest`."""

    worker: int
    step: int
    slowest: int
    period: int = 0  #: local steps in the block that starts; 0 in modes without blocks
    mixing: Mixing | None = None  #: with which workers `step` is to be mixed, in modes with neighbours
    lost: tuple[int, ...] = ()  #: neighbours in the step before that left without pushing it
    enters: bool = False  #: in modes with neighbours: it joined and has no model yet, its push-sum weight is 0
    weights: tuple[tuple[int, float], ...] = ()  #: shares by speed: (rank, relative share), where they change or it starts
    since: tuple[int, int] | None = None  #: the first batch (pass, number) that is cut by them; None: the next
    repeats: bool = False  #: another release of this moment says the same weights; a record has them once
    deadline: float = 0.0  #: seconds until the round ends, in modes with deadlines; 0: after `micro` micro-batches
    behind: int = 0  #: rounds that closed without this worker, which it has to catch up with
    catching_up: tuple[int, ...] = ()  #: the workers of which that is so, in this round


@dataclass(slots=True)
class Apply:
    """Make one update of these pushes: their mean weighted by samples, at the learning rate times `rate`.

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

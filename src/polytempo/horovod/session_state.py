"""What this process remembers between calls: one of these for each session."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from polytempo.session import session
from polytempo.train import communication


@dataclass
class HorovodState:
    """Of one session."""

    session: session.Session
    local_ranks: tuple[int, ...] = ()  #: of all ranks; empty until `init` has asked them
    local_sizes: tuple[int, ...] = ()
    group: communication.Group | None = None  #: of all ranks, for these calls alone
    sets: list[Any] = field(default_factory=list)  #: process sets, as they were added
    sets_made: int = 0  #: with those that were removed
    negotiators: dict[int, Any] = field(default_factory=dict)  #: by the number of the process set
    reducers: list[weakref.ref[Any]] = field(default_factory=list)  #: of optimizers, in the order in which ranks make them


_state: HorovodState | None = None


def state() -> HorovodState:
    """That of the session of now: after `shutdown` and `init` it begins anew."""
    global _state
    now = session.current()
    if _state is None or _state.session is not now:
        _state = HorovodState(now)
    return _state

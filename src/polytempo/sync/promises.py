"""What a mode promises, beyond what every mode promises, as facts that can be looked at from outside.

Every mode promises: a step is released once, and after all initial workers have joined; a joiner starts at the slowest
one's step; each push is applied or discarded, once; no worker waits for ever. These are the same for all, and are looked at
for all (`proving/`, `records/check.py`). What differs is declared:

    lead     ssp:3 and dssp:1..3: 3. A worker that computes is at most this many steps ahead of the slowest one
    waits    ssp:3: 3. A worker that is at most this many steps ahead is not held: from there on waiting has a reason
    quorum   bsp+backup:1: all but one. An update has at least this number of pushes, given the number of workers
    alone    one worker trains as the script would without this library
    even     pushes of all workers, one of each, move the values as far as one step of the script: rates need no change
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Stated = TypeVar("Stated", int | None, bool)

#: For `waits`: a worker is held at no lead.
NEVER = 1 << 62


@dataclass(frozen=True)
class Promises:
    """Each may be a function of the mode's argument and options: `lead=lambda bound, **_: bound`."""

    lead: int | Callable[..., int | None] | None = None  #: None: any
    waits: int | Callable[..., int | None] | None = None  #: None: nothing is promised
    quorum: Callable[..., int] | None = None  #: `(workers, *argument, **options)`; None: nothing is promised
    alone: bool | Callable[..., bool] = True
    even: bool = True


#: Of a mode that says nothing.
USUAL = Promises()

#: Of modes in which all workers step together.
EACH_ROUND = Promises(lead=0, waits=0, quorum=lambda workers, *_, **__: workers)


def stated(promise: Stated | Callable[..., Stated], *argument: Any, **options: Any) -> Stated:
    """A promise, with the argument and options of a spec."""
    return promise(*argument, **options) if callable(promise) else promise

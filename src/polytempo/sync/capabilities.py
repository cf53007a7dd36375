"""What a mode is, for everything around it: facts that each mode declares in its own file, these four first of all.

               pushes       an update is made of     work for a push    waits
    bsp        gradients    all workers' pushes      a batch            yes
    anytime    gradients    a round's pushes         until a deadline   no
    asp        gradients    each push as it comes    a batch            yes
    downpour   gradients    each push as it comes    local steps        no
    diloco     values       all workers' pushes      local steps        yes
    gossip     nothing      its neighbours' models   a batch            yes

They are read by the table of compatibilities (`compatibility.py`), by the drivers and by the simulator. Which mode it is,
is asked in `sync/` alone. What only one reader needs to know of a mode is no capability: its price in words (`Mode.price`)
and why it does not go with a model that is split (`Mode.split`) stand beside them.

What it promises are facts that can be looked at from outside. Every mode promises: a step is released once, and after all
initial workers have joined; a joiner starts at the slowest one's step; each push is applied or discarded, once; no worker
waits for ever. These are the same for all, and are looked at for all (`proving/`, `records/check.py`). What differs is
declared, as `Promises`:

    lead     ssp:3 and dssp:1..3: 3. A worker that computes is at most this many steps ahead of the slowest one
    waits    ssp:3: 3. A worker that is at most this many steps ahead is not held: from there on waiting has a reason
    quorum   bsp+backup:1: all but one. An update has at least this number of pushes, given the number of workers
    alone    one worker trains as the script would without this library
    even     pushes of all workers, one of each, move the values as far as one step of the script: rates need no change
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property


class Pushes(Enum):
    """What a worker pushes."""

    GRADIENTS = "gradients"
    VALUES = "values, after local steps"
    NOTHING = "nothing: it has a model of its own, which it mixes with those of its neighbours"


class MadeOf(Enum):
    """What one update of the job's values is made of."""

    ALL = "the pushes of all workers: all of them hold one version between two steps"
    ROUND = "the pushes of a round, without what comes too late"
    EACH = "each push as it comes, or a few"


class PushedWork(Enum):
    """What a worker does for one push."""

    BATCH = "a batch"
    SHARE = "its share of a joint batch, by its speed"
    DEADLINE = "micro-batches, until a deadline"
    LOCAL = "local steps"


class Caution(IntEnum):
    """What a mode may cost beside time, the least first."""

    EXACT = 0
    FRESH = 1
    LOCAL = 2
    STALE = 3


@dataclass(frozen=True)
class Capabilities:
    """What a mode with its options can do and needs."""

    pushes: Pushes = Pushes.GRADIENTS
    update: MadeOf = MadeOf.EACH
    work: PushedWork = PushedWork.BATCH
    waits: bool = True  #: does a worker wait for the answer to a push before it computes on?
    ahead: int = 0  #: pushes of a worker that may be under way while it computes the next
    early: bool = False  #: may a worker be released before its push is applied or discarded?
    on_servers: bool = False  #: must servers hold the values, even if all workers hold the same? So in modes of users
    micro: int = 0  #: micro-batches in a push, on average, where a worker takes whole ones
    keeps_late: bool = False  #: does a micro-batch that is late count in the round that is open when it is done?

    @cached_property
    def rounds(self) -> bool:
        """Is an update made of a round of pushes, so that all workers step together?"""
        return self.update is not MadeOf.EACH

    @cached_property
    def common(self) -> bool:
        """Do all workers hold the same values after each push, so that no server is needed to keep them?"""
        return self.update is MadeOf.ALL

    @cached_property
    def by_speed(self) -> bool:
        """Does a worker's work follow its speed, so that pushes must say what they were made of and in what time?"""
        return self.work in (PushedWork.SHARE, PushedWork.DEADLINE)

    @cached_property
    def averages(self) -> bool:
        """Are models averaged, and not gradients?"""
        return self.pushes is Pushes.VALUES

    @cached_property
    def fetches(self) -> bool:
        """Does a worker fetch values beside its pushes, between local steps whose gradients it sums?"""
        return self.work is PushedWork.LOCAL and not self.averages

    @cached_property
    def neighbours(self) -> bool:
        """Does each worker keep a model of its own, so that no server and no other worker holds the job's?"""
        return self.pushes is Pushes.NOTHING

    @cached_property
    def reduces(self) -> bool:
        """May values stay with the workers, which reduce among themselves (all-reduce)?"""
        return (self.common or self.work is PushedWork.DEADLINE) and not self.on_servers

    @cached_property
    def caution(self) -> Caution:
        """How cautious advice must be about it: an update of one process, one that varies, local steps, or stale ones."""
        if self.averages:
            return Caution.LOCAL if self.waits else Caution.STALE
        if not self.rounds:
            return Caution.STALE
        return Caution.EXACT if self.common else Caution.FRESH


#: Of modes that apply each gradient as it comes, and whose workers wait for the answer.
SINGLE_PUSHES = Capabilities()


@dataclass(frozen=True)
class Unsound:
    """Why a mode does not go with a model that is split over several ranks."""

    reason: str
    nearest: tuple[str, ...]  #: the modes that come nearest to it; empty: the same without its options


#: Of a mode that says nothing: what has not been thought through is refused.
UNPROVED = Unsound("it is not known to be sound for a model that is split", ("bsp", "ssp:1"))


# What it promises.

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

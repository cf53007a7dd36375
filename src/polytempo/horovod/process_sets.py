"""Process sets: subsets of the ranks with collectives of their own; and what Horovod's interface keeps for a session.

All ranks add the same sets in the same order, also those that are not members.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import UsageError
from polytempo.session import session
from polytempo.train import communication


class ProcessSet:
    """A subset of the ranks; pass it as `process_set=` after `add_process_set` has registered it on all ranks.

    Args:
        ranks: The ranks of the job that are members, each once.

    Raises:
        UsageError: There is no rank, or one is given twice.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        listed = [int(rank) for rank in ranks]
        if not listed or len(set(listed)) != len(listed):
            raise UsageError(f"expected a process set to have at least one rank, and each once, got {listed}")
        self._ranks = tuple(sorted(listed))
        self.process_set_id: int | None = None
        self.group: communication.Group | None = None  #: of its collectives; None for all ranks, and in a job of one
        self.gradients: communication.Group | None = None  #: of its optimizers, apart from its collectives

    def forget(self) -> None:
        """Undo its registration."""
        self.process_set_id = self.group = self.gradients = None

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are members, ascending."""
        return list(self._ranks)

    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is a member."""
        return session.rank() in self.ranks

    def rank(self) -> int:
        """The index of this rank among the members.

        Raises:
            UsageError: This rank is not a member.
        """
        if not self.included():
            raise UsageError(f"rank {session.rank()} has no rank in process set {self.ranks}: it is not in it")
        return self.ranks.index(session.rank())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


class _AllRanks(ProcessSet):
    """All ranks of the job, whose number is known after `init`: the object is made at import."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks of the job."""
        return list(range(session.size()))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _AllRanks()
"""The process set of all ranks; the default of every call."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Collective: all ranks of the job call it, in the same order, members or not.

    Args:
        process_set: A `ProcessSet`, or its ranks.

    Returns:
        The registered set, for `process_set=`.

    Raises:
        UsageError: A rank is not one of the job, or there is a set of these ranks already.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    known = state()
    _check_new(found, known.sets)
    if session.size() > 1:
        found.group, found.gradients = communication.new_group(found.ranks), communication.new_group(found.ranks)
    known.sets.append(found)
    known.sets_made += 1
    found.process_set_id = known.sets_made
    return found


def check_sets(process_sets: Iterable[ProcessSet | Iterable[int]]) -> list[ProcessSet]:
    """Check several process sets before any of them is added."""
    listed = list(process_sets)
    found = [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in listed]
    for index, process_set in enumerate(found):
        _check_new(process_set, [*state().sets, *found[:index]])
    return found


def _check_new(found: ProcessSet, known: Iterable[ProcessSet]) -> None:
    size = session.size()
    if found is global_process_set:
        raise UsageError("all ranks are a process set already: use global_process_set")
    if found.ranks[-1] >= size or found.ranks[0] < 0:
        raise UsageError(f"expected ranks from 0 to {size - 1} in a process set, got {found.ranks}")
    if any(other.ranks == found.ranks for other in known):
        raise UsageError(f"there is a process set of {found.ranks} already; use that one")


def group_of(process_set: ProcessSet) -> communication.Group:
    """The group of a process set: one of its own, so that calls of `pt` and of Horovod's interface may interleave."""
    if process_set is not global_process_set:
        assert process_set.group is not None
        return process_set.group
    known = state()
    if known.group is None:
        known.group = communication.new_group()
    return known.group


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo `add_process_set`.

    Args:
        process_set: The set.

    Returns:
        False if it was not registered, or is the set of all ranks.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    state().sets = [other for other in state().sets if other is not process_set]
    process_set.forget()
    return True


def check_member(process_set: ProcessSet, call: str) -> None:
    """Refuse a call in a process set that is not registered, or of which this rank is not a member."""
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"expected process_set to be a ProcessSet, got {process_set!r}; make one with add_process_set")
    if process_set.process_set_id is None:
        raise UsageError(f"{process_set} is not registered; call add_process_set with it on all ranks first")
    if not process_set.included():
        raise UsageError(f"rank {session.rank()} is not in process set {process_set.ranks} and cannot call {call} there")


# The state of a session.


@dataclass
class HorovodState:
    """What Horovod's interface keeps for one session."""

    session: session.Session
    local_ranks: tuple[int, ...] = ()  #: of all ranks; empty until `init` has gathered them
    local_sizes: tuple[int, ...] = ()
    group: communication.Group | None = None  #: of all ranks, for these calls alone
    sets: list[Any] = field(default_factory=list)  #: process sets, as they were added
    sets_made: int = 0  #: sets added so far, removed ones included
    negotiators: dict[int, Any] = field(default_factory=dict)  #: by the number of the process set
    reducers: list[weakref.ref[Any]] = field(default_factory=list)  #: of optimizers, in the order of their making


_state: HorovodState | None = None


def state() -> HorovodState:
    """The state of the current session; a new one after `shutdown` and `init`."""
    global _state
    now = session.current()
    if _state is None or _state.session is not now:
        _state = HorovodState(now)
    return _state

"""Process sets: some of the ranks, who compute something among themselves.

All ranks add the same sets in the same order, also those that are not in them.
"""

from __future__ import annotations

from collections.abc import Iterable

from polytempo.errors import UsageError
from polytempo.horovod.session_state import state
from polytempo.session import session
from polytempo.train import communication


class ProcessSet:
    """Some ranks. Pass it as `process_set=` once `add_process_set` has made it known."""

    def __init__(self, ranks: Iterable[int]) -> None:
        listed = [int(rank) for rank in ranks]
        if not listed or len(set(listed)) != len(listed):
            raise UsageError(f"expected a process set to have at least one rank, and each once, got {listed}")
        self._ranks = tuple(sorted(listed))
        self.process_set_id: int | None = None
        self.group: communication.Group | None = None  #: what calls go through; None for all ranks, and for one alone
        self.gradients: communication.Group | None = None  #: what optimizers use, beside those calls

    def forget(self) -> None:
        """It is known no more."""
        self.process_set_id = self.group = self.gradients = None

    @property
    def ranks(self) -> list[int]:
        """The ranks in the job of those who are in it."""
        return list(self._ranks)

    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def included(self) -> bool:
        """Is this process one of them?"""
        return session.rank() in self.ranks

    def rank(self) -> int:
        """This process's number among them."""
        if not self.included():
            raise UsageError(f"rank {session.rank()} has no rank in process set {self.ranks}: it is not in it")
        return self.ranks.index(session.rank())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


class _Everybody(ProcessSet):
    """All ranks of the job; it is made before there is one."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All."""
        return list(range(session.size()))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _Everybody()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set known: to be called by all ranks of the job, in the same order."""
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
    """Sets that could be added, all of them; refused before any is."""
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
    """What calls of a process set go through: a group of its own, so that polytempo's own calls may come at any time."""
    if process_set is not global_process_set:
        assert process_set.group is not None
        return process_set.group
    known = state()
    if known.group is None:
        known.group = communication.new_group()
    return known.group


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; False when it is none that was added."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    state().sets = [other for other in state().sets if other is not process_set]
    process_set.forget()
    return True


def check_member(process_set: ProcessSet, call: str) -> None:
    """May this process make a call among these?"""
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"expected process_set to be a ProcessSet, got {process_set!r}; make one with add_process_set")
    if process_set.process_set_id is None:
        raise UsageError(f"{process_set} is not known; call add_process_set with it on all ranks first")
    if not process_set.included():
        raise UsageError(f"rank {session.rank()} is not in process set {process_set.ranks} and cannot call {call} there")

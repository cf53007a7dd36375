"""The ranks that take the steps of an optimizer together: all of the job, or a group.

A group of one makes plain steps. Each step is still reported to the sequencer, for the budget. In a replica of several ranks
only the main group does so: its answers say when to stop, and the replica's ranks tell each other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from polytempo.errors import UsageError
from polytempo.mesh import ReplicaRanks
from polytempo.protocol.values import name_in_group
from polytempo.records.lines import MAIN
from polytempo.session.session import Session
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.spec import Spec
from polytempo.train.communication import Group
from polytempo.train.driver import StepRequest, StepUpdate
from polytempo.train.step_clock import StepClock


@dataclass(frozen=True)
class OptimizerGroup:
    """The members, where they are not all ranks of the job."""

    members: tuple[int, ...] = ()  #: ascending; empty: all
    main: bool = True
    in_replica: bool = False  #: its rank is one of several that train a replica of the model, and stop together

    @property
    def is_alone(self) -> bool:
        """Is it a group of one?"""
        return len(self.members) == 1

    def reports(self, name: str) -> bool:
        """Does a group of one report its steps? One beside the main one, in a replica, is told by that one to stop."""
        return self.is_alone and (name == MAIN or not self.in_replica)

    def enter(self, session: Session) -> str:
        """Take part with the next optimizer; its name in the job."""
        if self.in_replica and session.client is not None:
            session.client.exchanges.heeds = MAIN  # all ranks of a replica stop by the answers of one clock
        number = session.next_optimizer_id()
        return name_in_group(number, self.members, self.main) if self.members else number


def in_scope(
    sync: str | None, via: str | None, group: Group | ReplicaRanks | None, session: Session
) -> tuple[str | None, str | None]:
    """Mode and way of an optimizer that is made inside `with strategy.scope():`, where it has none of its own."""
    scope = session.scope
    if group is not None:
        return sync, via
    if scope.is_split if scope is not None else session.job.replica > 1:
        raise UsageError(
            f"DistributedOptimizer keeps a whole model on each worker, and the strategy "
            f"{scope.text if scope is not None else session.job.strategy} splits it; use "
            "strategy.distribute(model, loss=..., optimizer=...)"
        )
    return (sync or scope.sync, via or scope.via) if scope is not None else (sync, via)


def optimizer_group(group: Group | ReplicaRanks | None, session: Session, spec: Spec) -> OptimizerGroup:
    """The members of an optimizer of this mode; `UsageError` where this rank is not one of them, or the mode needs all."""
    if group is None or group.ranks == tuple(range(session.size)):
        return OptimizerGroup()
    ranks = ", ".join(map(str, group.ranks))
    if session.rank not in group.ranks:
        raise UsageError(
            f"rank {session.rank} is not in the group of ranks {ranks}; give DistributedOptimizer the group that it is in"
        )
    if group.ranks[-1] >= session.size:
        raise UsageError(f"expected a group of ranks 0 to {session.size - 1}, got ranks {ranks}")
    check_features(spec, Feature.GROUP, size=session.size, ranks=ranks)
    if isinstance(group, ReplicaRanks):
        return OptimizerGroup(group.ranks, group.main, in_replica=True)
    return OptimizerGroup(group.ranks, main=0 in group.ranks)


class CountedSteps(StepUpdate):
    """Steps of a group of one, made by another update and reported to the sequencer."""

    def __init__(self, update: StepUpdate, session: Session, clock: StepClock) -> None:
        self._update, self._session, self._clock = update, session, clock

    @property
    def steps(self) -> int:
        return self._clock.steps

    def step(self, request: StepRequest) -> Any:
        computed = self._session.computed(time.perf_counter())
        result = self._update.step(request)
        request.measures.computed = computed
        self._clock.report(request.measures, request.skip)
        return result

    def stats(self) -> dict[str, Any]:
        return {"waited_s": self._clock.waited}

"""How a `DistributedOptimizer` is put together, from its plan (`validation.py`) to what makes its steps.

    plan     what the arguments mean: a value
    part     the optimizer's part in the job: its name, and what carries gradients or values to the other workers
    update   makes the steps: chosen by what the worker's machine brings, and by where the update is made

A mode whose machine brings one of these needs nothing here:

    gradient, share   pushed; or the wrapped optimizer runs here, on the mean or on this worker's own
    batches           the sum of micro-batches, in rounds with deadlines
    sum               of the gradients of local steps
    values            of fragments of the model
    nothing           the values go to other workers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum
from polytempo.protocol.values import OptimizerSpec, TensorInfo, beside
from polytempo.records.lines import MAIN
from polytempo.reducer.factory import BufferMean, make_reducer
from polytempo.reducer.optimizer_spec import RuleAlone
from polytempo.reducer.reducer import Reducer
from polytempo.reducer.round_exchange import ServerRounds
from polytempo.server.optimizer_state import SegmentState
from polytempo.sync.machine import Brings, LoggedMachine
from polytempo.sync.momentum import MomentumForm
from polytempo.train.deadline_rounds import DeadlineUpdate
from polytempo.train.downpour import DownpourUpdate
from polytempo.train.driver import StepUpdate
from polytempo.train.fragment import Companions, Fragment, make_fragments
from polytempo.train.local_steps import LocalStepUpdate
from polytempo.train.model_tables import ModelTables
from polytempo.train.neighbours import GossipUpdate, PairUpdate
from polytempo.train.peer_rounds import PeerRounds
from polytempo.train.script_state import GivenState, WorkerOptimizerState, registered_in
from polytempo.train.share_rounds import ShareUpdate
from polytempo.train.step_reports import CountedSteps, StepClock
from polytempo.train.update import PushChange, PushGradient, StepAlone, StepOnMean, Wrapped
from polytempo.train.validation import OptimizerPlan


class JobPart:
    """The part of one optimizer in its job.

    Args:
        plan: Of the optimizer.
        tables: Of its model.
    """

    def __init__(self, plan: OptimizerPlan, tables: ModelTables) -> None:
        arguments, session = plan.arguments, plan.arguments.session
        self.plan, self._tables = plan, tables
        self._arguments, self._session = arguments, session
        tables.mirror(plan.mirrored, arguments.params)
        self.name = plan.ranks.enter(session)
        #: The worker's half of the mode: any of those in `UPDATES`, which know more of it.
        self.machine: Any = plan.spec.machine(session.rank)
        if session.machine_log is not None:
            self.machine = LoggedMachine(self.machine, self.name, session.machine_log)
        #: Do its steps say where this worker is in its data? It is the first of its worker.
        self.deals = beside(self.name) == MAIN and (session.together or plan.spec.capabilities.by_speed)
        if plan.together and self.name == MAIN and session.client is not None:  # whose job gets advice at its end
            plan.specs.refused = arguments.refused()
        averaged = arguments.model if arguments.buffers == "mean" else None
        self.buffers: BufferMean | None = None
        if averaged is not None and not plan.spec.capabilities.averages:  # else they travel with the values
            self.buffers = BufferMean(session, averaged, self.name, plan.ranks.members)
        self.given: GivenState | None = None  #: state that another worker may have loaded, until the first step
        if plan.momentum is not MomentumForm.NONE:
            self.given = GivenState(session, self.name, WorkerOptimizerState(arguments.optimizer))
            if arguments.optimizer.state and not session.job.resumed and plan.leads:
                self.given.give()
        self.fragments: list[Fragment] = []  #: of the model, where values are averaged
        self.reducers: list[Reducer] = []  #: of all its parts; empty: it takes its steps alone
        if plan.together and self.machine.brings == "values":
            self.fragments = self._make_fragments(averaged)
            self.reducers = [fragment.reducer for fragment in self.fragments]
        elif plan.together:
            self.reducers = [self._make_reducer()]
        self.reducer = self.reducers[0] if self.reducers else None  #: counts its steps

    def _make_fragments(self, model: torch.nn.Module | None) -> list[Fragment]:
        """`model`: whose buffers are averaged, too."""
        arguments, averaging = self._arguments, self.machine.averaging
        companions = Companions(model, arguments.optimizer if averaging.state == "mean" else None)
        described = self._described(range(len(arguments.params)))
        return make_fragments(
            *(self._session, self.name, averaging, self.plan.specs, arguments.params, described, self.plan.hyper.now()),
            companions,
            on_servers=not self.plan.among_workers,
        )

    def _make_reducer(self) -> Reducer:
        arguments, plan, momentum = self._arguments, self.plan, None
        if plan.momentum is MomentumForm.GRADIENT:
            momentum = GradientMomentum(arguments.optimizer, plan.spec.looks_ahead, plan.spec.spike)
        return make_reducer(
            self._session,
            self.name,
            arguments.params,
            plan.spec,
            self._tables.dense,
            self._spec_of,
            self._take_initial_state,
            self._tables.all,
            on_servers=not plan.among_workers,
            momentum=momentum,
        )

    def _spec_of(self, special: str) -> OptimizerSpec:
        """What the job must know of this optimizer; `special` is "peers" or "mean" where servers do not hold the values."""
        chosen: Iterable[int] = range(len(self._arguments.params)) if special else self._tables.dense
        tables = () if special else tuple(table.info for table in self._tables.all)
        return self.plan.specs.build(special, self._described(chosen), self.plan.hyper.now(), tables)

    def _described(self, chosen: Iterable[int]) -> tuple[TensorInfo, ...]:
        arguments = self._arguments
        return self.plan.specs.describe(arguments.params, arguments.names, arguments.groups, chosen)

    def _take_initial_state(self, spec: OptimizerSpec) -> Sequence[SegmentState]:
        """State that the wrapped optimizer has already goes to the servers, where they keep it."""
        optimizer, plan = self._arguments.optimizer, self.plan
        if plan.apply != "server" or plan.momentum is MomentumForm.GRADIENT or not optimizer.state:
            return []
        state = self._tables.segments_of(optimizer.state_dict()["state"], spec.tensors, self._arguments.params)
        optimizer.state.clear()
        return state

    def keep_state(self) -> None:
        """State of the wrapped optimizer that no server has belongs to the checkpoints of the job."""
        reducer, job, name = self.reducer, self._session.job, f"optimizer {self.name}"
        if reducer is None or not reducer.on_servers or not (job.saves or job.resumed):
            return
        optimizer, params = self._arguments.optimizer, self._arguments.params
        if self.plan.here or self.plan.momentum is MomentumForm.GRADIENT:
            state, registered = WorkerOptimizerState(optimizer), registered_in(self._session)
            if job.resumed and (saved := reducer.saved_state()):  # servers ran it, in the mode of the checkpoint
                state.load_state_dict(self._tables.torch_state(saved, reducer.spec.tensors, params))
            registered.add(state, per_rank=True, name=name, averaged=True)
        elif job.resumed and reducer.spec.optimizer == type(optimizer).__name__:
            found = registered_in(self._session).mean(name)  # workers ran it
            if found is not None:
                reducer.load_state(self._tables.segments_of(found, reducer.spec.tensors, params))


def make_update(part: JobPart, wrapped: Wrapped) -> StepUpdate:
    """What makes the steps of an optimizer."""
    plan, session, reducer, machine = part.plan, part.plan.arguments.session, part.reducer, part.machine
    update: StepUpdate
    if reducer is None:
        update = StepAlone(wrapped, RuleAlone(plan.hyper, wrapped.optimizer) if plan.spec.mode.rule else None)
    else:
        update = UPDATES[machine.brings](part, reducer, wrapped)
    if plan.ranks.reports(part.name) and session.client is not None:
        update = CountedSteps(update, session, StepClock(session, part.name, plan.ranks.members))
    if plan.spec.capabilities.by_speed and part.deals:
        session.ledger.spec = plan.spec
    if machine.brings == "share":
        update = ShareUpdate(update, session, plan.spec, plan.arguments.params, reducer, part.deals)
    return update


def _of_gradients(part: JobPart, reducer: Reducer, wrapped: Wrapped) -> StepUpdate:
    plan = part.plan
    if reducer.mean is not None:
        return StepOnMean(wrapped, reducer, part.machine, reducer.mean)
    barrier = plan.spec.capabilities.rounds
    if plan.apply != "delta":
        return PushGradient(wrapped, reducer, part.machine, barrier)
    momentum: ChangeMomentum | None = None
    if plan.momentum is MomentumForm.CHANGE:
        joins = reducer.client_state.version > 0 and not reducer.session.job.resumed
        momentum = ChangeMomentum(wrapped.optimizer, plan.spec.looks_ahead, joins)
    return PushChange(wrapped, reducer, part.machine, barrier, momentum)


def _in_rounds(part: JobPart, reducer: Any, wrapped: Wrapped) -> StepUpdate:
    rounds = ServerRounds(reducer) if reducer.on_servers else PeerRounds(reducer, wrapped)
    return DeadlineUpdate(part.machine, rounds, wrapped, beside(part.name) == MAIN)


def _with_neighbours(part: JobPart, reducer: Any, wrapped: Wrapped) -> StepUpdate:
    if part.machine.asks:
        return PairUpdate(wrapped, reducer, part.machine)
    return GossipUpdate(wrapped, reducer, part.machine, part.machine.sends_early)


#: What makes the steps of an optimizer with other workers, by what its machine brings.
UPDATES: Mapping[Brings, Callable[[JobPart, Any, Wrapped], StepUpdate]] = {
    "gradient": _of_gradients,
    "share": _of_gradients,
    "batches": _in_rounds,
    "sum": lambda part, reducer, wrapped: DownpourUpdate(wrapped, reducer, part.machine, part.machine.local),
    "values": lambda part, reducer, wrapped: LocalStepUpdate(wrapped, part.fragments, part.machine),
    "nothing": _with_neighbours,
}

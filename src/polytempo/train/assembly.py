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

from polytempo.collectives.group import RankGroup
from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum
from polytempo.protocol.push import Measures
from polytempo.protocol.values import OptimizerSpec, TensorInfo, beside, number_of, part_of
from polytempo.records.lines import MAIN
from polytempo.reducer.coordination import ByBallot
from polytempo.reducer.deadline_peers import DeadlinePeers
from polytempo.reducer.exchange import Exchange
from polytempo.reducer.flat_buffer import describe
from polytempo.reducer.neighbours import NeighbourExchange
from polytempo.reducer.peers import PeerExchange, make_peers
from polytempo.reducer.servers import PushedParts, ServerExchange
from polytempo.server.optimizer_state import SegmentState
from polytempo.session.session import Session
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.machine import Brings, LoggedMachine
from polytempo.sync.momentum import MomentumForm
from polytempo.train.deadline_rounds import DeadlineUpdate
from polytempo.train.downpour import DownpourUpdate
from polytempo.train.driver import StepUpdate
from polytempo.train.fragment import Companions, Fragment, make_fragments
from polytempo.train.local_steps import LocalStepUpdate
from polytempo.train.model_tables import ModelTables
from polytempo.train.neighbours import GossipUpdate, PairUpdate
from polytempo.train.round_exchange import PeerRounds, ServerRounds
from polytempo.train.script_state import GivenState, WorkerOptimizerState, registered_in
from polytempo.train.share_rounds import ShareUpdate
from polytempo.train.step_reports import CountedSteps, StepClock
from polytempo.train.update import PushChange, PushGradient, RuleAlone, StepAlone, StepOnMean, Wrapped
from polytempo.train.validation import OptimizerPlan


class BufferMean:
    """The mean of all workers' floating point module buffers (running means of batch norm, and the like), of one model.
    Their exchange is made once, and used as long as names, shapes and dtypes stay."""

    def __init__(self, session: Session, model: torch.nn.Module, name: str = "", members: tuple[int, ...] = ()) -> None:
        """`name` and `members`: of the optimizer, where its steps are taken by a group."""
        self._session, self._model, self._name, self._members = session, model, name, members
        self._group: RankGroup | None = None  # without a sequencer
        self._parts = 0  # exchanges made so far, in a group
        self._reducer: ServerExchange | None = None
        self._infos: tuple[TensorInfo, ...] = ()
        self._copies: list[torch.Tensor] = []  # `model.to(...)` replaces buffers, but not these

    def average(self) -> None:
        """Make the buffers their mean. All workers must call this."""
        floating = [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]
        tensors = [buffer for _, buffer in floating]
        if not floating:
            return
        if self._session.client is None:
            if self._group is None:
                world, members = self._session.world(), self._members
                number = number_of(self._name) if members else 0
                self._group = world.group_of_optimizer(members, number, 1) if members else world.all_ranks
            self._group.all_reduce(tensors, "mean").wait()
            return
        infos = describe(tensors, [name for name, _ in floating], [0] * len(floating))
        if self._reducer is None or infos != self._infos:
            self._reducer = self._new_reducer(infos)
        torch._foreach_copy_(self._copies, tensors)
        buffer, _ = self._reducer.buffer_of(lambda copy: copy)
        self._reducer.push(buffer, (), Measures())
        torch._foreach_copy_(tensors, self._copies)

    def _new_reducer(self, infos: tuple[TensorInfo, ...]) -> ServerExchange:
        self._infos, self._parts, members = infos, self._parts + 1, self._members
        self._copies = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
        name = part_of(self._name, self._parts) if members else self._session.next_optimizer_id()
        spec = OptimizerSpec(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},), members=members)
        reducer = ServerExchange(self._session, f"{name}/mean", spec, self._copies)
        reducer.deliver_to(reducer.copier.scatter)  # values, not gradients
        return reducer


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
        self.reducers: list[Exchange] = []  #: of all its parts; empty: it takes its steps alone
        if plan.together and self.machine.brings == "values":
            self.fragments = self._make_fragments(averaged)
            self.reducers = [fragment.reducer for fragment in self.fragments]
        elif plan.together:
            self.reducers = [self._make_exchange()]
        self.reducer = self.reducers[0] if self.reducers else None  #: counts its steps
        #: The same, where servers hold the values.
        self.servers = self.reducer if isinstance(self.reducer, ServerExchange) else None

        coordination = self.reducer.coordination if isinstance(self.reducer, PeerExchange) else None
        #: Likewise, where ranks vote: one that has run out of data goes on taking part until all have.
        self.ballot = coordination if isinstance(coordination, ByBallot) else None

    def groups(self) -> list[RankGroup]:
        """The groups of ranks in which it makes its rounds, where ranks make them among themselves."""
        if self.ballot is not None:
            return [self.ballot.voters.group]
        return self.reducer.groups() if isinstance(self.reducer, DeadlinePeers) else []

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

    def _make_exchange(self) -> Exchange:
        arguments, plan, session = self._arguments, self.plan, self._session
        capabilities, params = plan.spec.capabilities, arguments.params
        has_deadlines = capabilities.work is PushedWork.DEADLINE
        if not plan.among_workers:
            momentum = None
            if plan.momentum is MomentumForm.GRADIENT:
                momentum = GradientMomentum(arguments.optimizer, plan.spec.looks_ahead, plan.spec.spike)
            spec = self._spec_of("")
            parts = PushedParts(
                hooked=spec.apply == "server" and not spec.push_filter and not has_deadlines,  # else the sum
                state=self._take_initial_state(spec),
                tables=self._tables.all,
                mean=(self._spec_of("mean"), params),
                momentum=momentum,
            )
            return ServerExchange(session, self.name, spec, [params[index] for index in self._tables.dense], parts)
        spec = self._spec_of("peers")
        if capabilities.neighbours:
            return NeighbourExchange(session, self.name, spec, params)
        if has_deadlines:
            return DeadlinePeers(session, self.name, spec, params)
        expected: Callable[[], float] | None = None
        if self.machine.brings == "share" and self.deals and not capabilities.micro:
            expected = lambda: session.ledger.samples(upcoming=True)  # noqa: E731
        return make_peers(session, self.name, spec, params, expected=expected)

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
        servers, job, name = self.servers, self._session.job, f"optimizer {self.name}"
        if servers is None or not (job.saves or job.resumed):
            return
        optimizer, params = self._arguments.optimizer, self._arguments.params
        if self.plan.here or self.plan.momentum is MomentumForm.GRADIENT:
            state, registered = WorkerOptimizerState(optimizer), registered_in(self._session)
            saved = servers.held.segments("saved state") if job.resumed else []
            if saved:  # servers ran it, in the mode of the checkpoint
                state.load_state_dict(self._tables.torch_state(saved, servers.spec.tensors, params))
            registered.add(state, per_rank=True, name=name, averaged=True)
        elif job.resumed and servers.spec.optimizer == type(optimizer).__name__:
            found = registered_in(self._session).mean(name)  # workers ran it
            if found is not None:
                servers.held.load_state(self._tables.segments_of(found, servers.spec.tensors, params))


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


def _of_gradients(part: JobPart, reducer: Exchange, wrapped: Wrapped) -> StepUpdate:
    plan = part.plan
    if isinstance(reducer, PeerExchange):
        return StepOnMean(wrapped, reducer, part.machine)
    assert isinstance(reducer, ServerExchange)  # neighbours bring nothing
    barrier = plan.spec.capabilities.rounds
    if plan.apply != "delta":
        return PushGradient(wrapped, reducer, part.machine, barrier)
    momentum: ChangeMomentum | None = None
    if plan.momentum is MomentumForm.CHANGE:
        joins = reducer.client_state.version > 0 and not reducer.session.job.resumed
        momentum = ChangeMomentum(wrapped.optimizer, plan.spec.looks_ahead, joins)
    return PushChange(wrapped, reducer, part.machine, barrier, momentum)


def _in_rounds(part: JobPart, reducer: Any, wrapped: Wrapped) -> StepUpdate:
    rounds = ServerRounds(reducer) if isinstance(reducer, ServerExchange) else PeerRounds(reducer, wrapped)
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

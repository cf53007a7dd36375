"""`DistributedOptimizer`: a torch optimizer whose `step()` is taken together with other workers.

It is a `torch.optim.Optimizer` and shares the groups of the one it wraps, so schedulers, hooks and `GradScaler` work.
Where the update is made depends on `apply`:

    "server"  the gradient is pushed; the servers run the torch.optim class; the new values come back
    "delta"   the wrapped optimizer runs here; the change it made is pushed, and the servers add it. In barrier modes the
              gradients are averaged first and every worker makes the same change, so that Adam is Adam of the mean.

With `via="allreduce"` no server holds anything: workers average gradients among themselves, and each runs the wrapped
optimizer on the mean, whatever `apply` says. Alone, without a launcher, the wrapped optimizer simply runs.

How gradients travel is the reducer's business (`reducer/reducer.py`), where the update is made the update's (`update.py`):
both are chosen once, here, and a step asks neither what it is.

In modes with blocks of local steps (`local`, `adacomm`, `diloco`) the wrapped optimizer always runs here, on this worker's
own gradients, and values are averaged at the end of each block (`local_steps.py`).

Given the model, it also carries its sparse embeddings and its `ServerEmbedding`s: their rows go with the same pushes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import OF_FAILURES
from polytempo.compression.chain import parse_compression
from polytempo.errors import UsageError
from polytempo.mesh import ReplicaRanks
from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum
from polytempo.protocol.push import Measures
from polytempo.protocol.training_troubles import Circumstances
from polytempo.protocol.values import OptimizerSpec, beside, number_of
from polytempo.records.lines import MAIN
from polytempo.reducer.factory import BufferMean, make_reducer
from polytempo.reducer.gradient_checks import DIGESTED_STEPS, FiniteWatch, OwnReport, gradient_digest
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.reducer.optimizer_spec import HyperParameters, RuleAlone
from polytempo.reducer.peer_reducer import PeerReducer
from polytempo.reducer.reducer import Reducer
from polytempo.reducer.round_exchange import ServerRounds
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.server.optimizer_state import SegmentState
from polytempo.session.session import current
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.momentum import LOOKAHEAD, MomentumForm
from polytempo.sync.spec import Spec, parse_spec
from polytempo.train.adpsgd import PairUpdate
from polytempo.train.communication import Group
from polytempo.train.companions import Companions
from polytempo.train.deadline_rounds import DeadlineUpdate
from polytempo.train.downpour import DownpourUpdate
from polytempo.train.driver import StepRequest, StepUpdate, machine_for
from polytempo.train.fragment import AveragedModel, Fragment, FragmentBuilder
from polytempo.train.gossip import GossipUpdate
from polytempo.train.input_watch import InputWatch
from polytempo.train.local_steps import LocalStepUpdate
from polytempo.train.model_tables import ModelTables
from polytempo.train.optimizer_group import CountedSteps, in_scope
from polytempo.train.peer_rounds import PeerRounds
from polytempo.train.script_state import GivenState, WorkerOptimizerState, registered_in
from polytempo.train.share_rounds import ShareUpdate
from polytempo.train.step_clock import StepClock
from polytempo.train.update import PushChange, PushGradient, StepAlone, StepOnMean, Wrapped, is_observed, unscale
from polytempo.train.validation import (
    OptimizerArguments,
    check_choices,
    check_order,
    names_of,
    weight_of,
)
from polytempo.train.vital_signs import OwnGuard, StepSigns


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose steps are taken together with the other workers of the job.

    Wrap the script's optimizer after the model is built, and use the result in its place.

    Args:
        optimizer: The script's optimizer.
        model: Its model: needed for sparse embeddings, `ServerEmbedding`s and `buffers="mean"`, and gives parameters names.
        named_parameters: Names for error messages, where no model is given.
        sync: The synchronisation mode, as `polytempo run --sync` takes it; the default is the job's.
        via: How gradients travel: "ps", "allreduce" or "auto".
        apply: Where the update is made: "server", or "delta" for an optimizer that only runs on the worker.
        compression: A compression chain for pushes, or a mapping with "push" and "pull".
        buffers: "mean" averages module buffers of floating point in `consolidate()`, and in modes with blocks of local steps
            with every average of the values; "local" leaves each worker's own.
        clip_norm: Clip the gradient to this norm: in barrier modes the agreed mean; in others, and in blocks of local steps,
            each worker's own.
        nonfinite: "count" gradients that are not finite, or "refuse" them with the parameter's name.
        group: The group whose ranks take the steps together, this rank among them; all ranks of the job by default. All
            ranks make their optimizers in the same order, those of groups side by side at the same place in it; these
            groups are disjoint, and may have different models. The job's budget and figures count the group of rank 0. A
            group does not go on without a rank that is lost: `RankLost` is raised on the others.

    Raises:
        UsageError: Arguments that do not go together, or workers whose models or arguments differ.
    """

    _step_supports_amp_scaling = True  # GradScaler then calls step() even when it would skip, and the clocks stay together

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        sync: str | None = None,
        via: str | None = None,
        apply: str = "server",
        compression: str | Mapping[str, str] | None = None,
        buffers: str = "local",
        clip_norm: float | None = None,
        nonfinite: str = "count",
        group: Group | ReplicaRanks | None = None,
    ) -> None:
        check_order(optimizer, model)
        self.inner = optimizer
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._ready = True
        self._session = session = current()
        sync, via = in_scope(sync, via, group, session)
        spec = parse_spec(sync) if sync else session.job.spec
        check_choices(apply, via, buffers, clip_norm, nonfinite)
        tables = ModelTables(model)
        self._params = [param for group in self.param_groups for param in group["params"]]
        self._on_gpu = any(param.is_cuda for param in self._params)
        self._names = names_of(self._params, named_parameters, model)
        self._groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        arguments = OptimizerArguments(
            *(session, optimizer, model, self._params, self._names, self._groups, group, via, apply),
            *(parse_compression(compression), buffers, clip_norm, bool(tables.embeddings)),
        )
        settled = arguments.settled(spec)
        _, ranks, together, among_workers, here, self._momentum, mirrored, self._specs = settled
        self._spec = spec = settled.spec
        apply = "delta" if self._momentum is MomentumForm.CHANGE else apply
        tables.mirror(mirrored, self._params)
        self._apply, self._tables = apply, tables
        self._hyper = HyperParameters(spec, optimizer, bare=self._momentum is MomentumForm.GRADIENT)
        averaged = model if buffers == "mean" else None  # the model whose buffers are averaged
        self._emulation = session.emulation
        self._agreed = False  # synchronize() was called since the last step
        self._to_digest = DIGESTED_STEPS + 1
        self._syncing = True
        self._name = ranks.enter(session)
        first = beside(self._name) == MAIN
        self._is_first = first and (
            session.together or spec.capabilities.by_speed
        )  # its steps say where this rank is in its data
        if together and self._name == MAIN and session.client is not None:  # whose job gets advice at its end
            self._specs.refused = arguments.refused()
        self._buffers: BufferMean | None = None
        if averaged is not None and not spec.capabilities.averages:  # else they travel with the values
            self._buffers = BufferMean(session, averaged, self._name, ranks.members)
        self._displaced = ""  # a parameter that a later DistributedOptimizer has taken
        self._reducer: Reducer | None = None
        self._reducers: list[Reducer] = []  # of all its parts
        self._given: GivenState | None = None  # until the first step
        if self._momentum is not MomentumForm.NONE:
            self._given = GivenState(session, self._name, WorkerOptimizerState(optimizer))
            if optimizer.state and not session.job.resumed and session.rank == min(ranks.members, default=0):
                self._given.give()
        fragments = self._take_part(averaged, among_workers) if together else []
        report = OwnReport(session.rank, self._params, self._circumstances) if together and session.client is None else None
        finite = FiniteWatch(self._names, session.rank, nonfinite, report)
        self._signs = StepSigns(session, self._params) if self._reducer is not None else None
        first = session.rank == min(ranks.members, default=0)
        self._guard = OwnGuard(report) if report is not None and first else None
        self._wrapped = Wrapped(optimizer, self._params, self._hyper.now, finite, tables, clip_norm)
        tables.attach(self._reducer, lambda: optimizer.param_groups[0]["lr"])
        looks_ahead = spec.worker_momentum == LOOKAHEAD
        joins = self._reducer is not None and self._reducer.client_state.version > 0 and not session.job.resumed
        change = ChangeMomentum(optimizer, looks_ahead, joins) if self._momentum is MomentumForm.CHANGE else None
        self._update = _make_update(self._wrapped, self._reducer, spec, apply, self._hyper, fragments, change)
        if ranks.reports(self._name) and session.client is not None:
            self._update = CountedSteps(self._update, session, StepClock(session, self._name, ranks.members))
        if spec.capabilities.by_speed and self._is_first:
            session.ledger.spec = spec
        if spec.capabilities.work is PushedWork.SHARE:
            self._update = ShareUpdate(self._update, session, spec, self._params, self._reducer, self._is_first)
        self._keep_state(here or self._momentum is MomentumForm.GRADIENT)
        told = model is not None and self._reducer is not None and session.client is not None  # to a sequencer
        self._input = InputWatch(model) if model is not None and told else None
        if self._input is not None:
            session.flushing.append(self._input.stop)
        session.computing_from(time.perf_counter())

    def _take_part(self, averaged: torch.nn.Module | None, among_workers: bool) -> list[Fragment]:
        """Make what travels to the other workers; the fragments, in modes that average values."""
        session = self._session
        fragments = _make_fragments(self, averaged, not among_workers)
        self._reducer = fragments[0].reducer if fragments else self._make_reducer(among_workers)
        _take_over(self, self._params, self._names)
        self._reducers = [fragment.reducer for fragment in fragments] or [self._reducer]
        for reducer in self._reducers:
            session.watches.add(reducer.copier.watch)
        if self._reducer.needs_join:
            session.before_leaving(self.join)
        return fragments

    def _keep_state(self, here: bool) -> None:
        """State of the wrapped optimizer that no server has belongs to the checkpoints of the job."""
        reducer, job, name = self._reducer, self._session.job, f"optimizer {self._name}"
        if not isinstance(reducer, ServerReducer) or not (job.saves or job.resumed):
            return
        if here:
            state, registered = WorkerOptimizerState(self.inner), registered_in(self._session)
            if job.resumed and (saved := reducer.saved_state()):  # servers ran it, in the mode of the checkpoint
                state.load_state_dict(self._tables.torch_state(saved, reducer.spec.tensors, self._params))
            registered.add(state, per_rank=True, name=name, averaged=True)
        elif job.resumed and reducer.spec.optimizer == type(self.inner).__name__:
            found = registered_in(self._session).mean(name)  # workers ran it
            if found is not None:
                reducer.load_state(self._tables.segments_of(found, reducer.spec.tensors, self._params))

    def _make_reducer(self, among_workers: bool) -> Reducer:
        return make_reducer(
            self._session,
            self._name,
            self._params,
            self._spec,
            self._tables.dense,
            self._spec_of,
            self._take_initial_state,
            self._tables.all,
            on_servers=not among_workers,
            momentum=self._gradient_momentum(),
        )

    def _gradient_momentum(self) -> GradientMomentum | None:
        looks_ahead = self._spec.worker_momentum == LOOKAHEAD
        return (
            GradientMomentum(self.inner, looks_ahead, self._spec.spike) if self._momentum is MomentumForm.GRADIENT else None
        )

    def _spec_of(self, special: str) -> OptimizerSpec:
        """What the job must know of this optimizer; `special` is "peers" or "mean" where servers do not hold the values."""
        chosen = range(len(self._params)) if special else self._tables.dense
        tables = () if special else tuple(table.info for table in self._tables.all)
        described = self._specs.describe(self._params, self._names, self._groups, chosen)
        return self._specs.build(special, described, self._hyper.now(), tables)

    def _take_initial_state(self, spec: OptimizerSpec) -> Sequence[SegmentState]:
        """State that the wrapped optimizer has already goes to the servers, where they keep it."""
        if self._apply != "server" or self._momentum is MomentumForm.GRADIENT or not self.inner.state:
            return []
        state = self._tables.segments_of(self.inner.state_dict()["state"], spec.tensors, self._params)
        self.inner.state.clear()
        return state

    def failure_groups(self) -> list[RankGroup]:
        """The groups in which ranks that take the steps together tell each other why one of them cannot go on.

        Returns:
            The groups of this rank; none where it takes its steps alone.
        """
        if self._reducer is None:
            return []
        world, members = self._session.world(), self._reducer.spec.members or range(self._session.size)
        return [*self._reducer.groups(), world.group_of_optimizer(members, number_of(self._name), OF_FAILURES)]

    @property
    def spec(self) -> Spec:
        """The synchronisation mode."""
        return self._spec

    # It shares everything with the optimizer it wraps.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups themselves."""
        return self.inner.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state: empty where the servers keep it."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._ready:
            self.inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after wrapping: servers and peers know the parameters by then.

        Args:
            param_group: The group.

        Raises:
            UsageError: The optimizer is wrapped; add groups before.
        """
        if self._ready:
            raise UsageError("add parameter groups before wrapping the optimizer: the job knows its parameters by now")

    # A step.

    def step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None, loss: Any = None) -> Any:
        """Push, wait as the mode says, pull.

        Args:
            closure: Evaluates the loss, as torch's optimizers take it.
            samples: Weighs this worker's gradient, a number of any kind; with 0 it counts for nothing, whatever it holds.
                The default weighs all workers equally.
            loss: The loss of this step, for `adacomm`, which otherwise takes what `backward()` was called on.

        Returns:
            What the closure returned.

        Raises:
            UsageError: The step is inside `no_sync()`, parameters were replaced or given to another optimizer, or workers
                of a barrier mode differ in their hyper-parameters.
        """
        step = _observed_step if is_observed(self) else DistributedOptimizer._step
        return step(self, closure, samples=samples, loss=loss)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler, which costs 40 us a step

    def _step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None, loss: Any = None) -> Any:
        if not self._syncing:
            raise UsageError("step() inside no_sync(); accumulate there, and step outside")
        if self._on_gpu and self._reducer is not None and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"worker {self._session.rank}: step() was called inside the capture of a CUDA graph, which cannot hold an "
                "exchange with other processes; capture forward and backward, and call step() after each replay"
            )
        samples = None if samples is None else weight_of(samples)
        self.inner._opt_called = True  # a scheduler made before wrapping looks for it there
        value = None
        if closure is not None and type(self.inner) is not torch.optim.LBFGS:
            with torch.enable_grad():
                value = closure()
            closure = None
        if self._is_first and self._session.registered is not None:
            self._session.registered.mark()
        if self._given is not None:
            self._given.take()
            self._given = None
        with torch.no_grad():
            measures = Measures(samples=1.0 if samples is None else samples)
            request = StepRequest(measures, self._unscale(), self._agreed, closure)
            request.weighed = samples is not None
            request.loss, request.scale = value if loss is None else loss, getattr(self, "grad_scale", None)
            request.unscaled = request.scale is None and getattr(self, "found_inf", None) is not None
            self._look_at_signs(request)  # before its time is taken: from there on a round may end without it
            measures.computed = self._begin_step(self._reducer) if self._reducer is not None else 0.0
            self._look_at_input(measures)
            self._look_at_data(measures, samples)
            result = self._update.step(request)
        self._agreed = False
        self._session.computing_from(time.perf_counter())
        if self._input is not None and not (self._session.client and self._session.client.stop):
            self._input.watch()
        return result if value is None else value

    def _look_at_signs(self, request: StepRequest) -> None:
        """What this step shows of the training, for the guard against divergence."""
        if self._signs is not None:
            signs = self._signs.look(request)
            request.measures.vital_signs = () if signs is None else (signs,)
            if self._guard is not None:
                self._guard.look(signs, self._update.steps)

    def _circumstances(self) -> Circumstances:
        """How this worker trains, where no server does."""
        return Circumstances(self._spec.text, float(self.param_groups[0]["lr"]), local=self._spec.capabilities.averages)

    def _begin_step(self, reducer: Reducer) -> float:
        """Check the parameters; the seconds that this worker has computed."""
        now = [param for group in self.param_groups for param in group["params"]]
        if self._displaced:
            raise UsageError(
                f"{self._displaced} was given to another DistributedOptimizer after this one, and would lose updates; "
                "give each parameter to one"
            )
        self._update.look(reducer, [now[i] for i in self._tables.dense] if len(now) == len(self._params) else now)
        self._tables.check_unchanged()
        self._emulation.slow_down(self._session.computed(time.perf_counter()))
        return self._session.computed(time.perf_counter())

    def _look_at_input(self, measures: Measures) -> None:
        """How long this worker has waited for data, and the work of the step as the model saw it."""
        if self._input is None:
            return
        measures.input, work = self._input.take(self._session.computed, measures.computed)
        if not self._spec.capabilities.by_speed:  # there the sampler says what the work is
            measures.work = work

    def _look_at_data(self, measures: Measures, samples: float | None) -> None:
        """Where this worker is in its data and, in the first steps, a digest of its gradient."""
        if not self._is_first:
            return
        self._to_digest -= self._to_digest > 0
        if self._to_digest and not self._agreed:  # the mean is alike
            measures.gradient_digest = gradient_digest(self._params)
        ledger = self._session.ledger
        measures.positions = ledger.trained(samples)
        if not self._spec.capabilities.by_speed:
            measures.size = samples if samples is not None else ledger.counted

    def _unscale(self) -> bool:
        """Undo a GradScaler's scale; is this step to be skipped?"""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None:
            return False
        if scale is None and self._tables.embeddings:
            raise UsageError("scaler.unscale_() does not see the rows of a ServerEmbedding; leave it out, step() unscales")
        if scale is not None:
            on_gpu = isinstance(scale, torch.Tensor) and scale.is_cuda and not self._tables.all
            factor = (
                scale.double().reciprocal().float() if on_gpu else float(1.0 / scale)
            )  # on a GPU, without waiting for it
            unscale([param.grad for param in self._params if param.grad is not None], factor)
            if not on_gpu:
                self._tables.scale(factor)
        return bool(found) or not self._tables.is_finite()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, those of table rows too; buckets that were sent without a `step()` are dropped.

        Args:
            set_to_none: As in torch.
        """
        super().zero_grad(set_to_none)
        self._tables.drop()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of several batches: nothing is sent inside.

        Raises:
            UsageError: The mode deals out batches by speed: it accumulates micro-batches by itself.
        """
        check_features(self._spec, Feature.NO_SYNC)
        self._set_syncing(False)
        try:
            yield
        finally:
            self._set_syncing(True)

    def _set_syncing(self, syncing: bool) -> None:
        self._syncing = syncing
        if self._reducer is not None:
            self._reducer.set_sending(syncing)

    # Agreement with the other workers.

    def synchronize(self, samples: float | None = None) -> None:
        """Make `.grad` the agreed mean now, to be looked at or clipped before `step()`.

        Args:
            samples: As for `step()`.

        Raises:
            UsageError: The mode has no barrier.
        """
        check_features(self._spec, Feature.SYNCHRONIZE)
        dealt = self._update.samples() if isinstance(self._update, ShareUpdate) else 1.0
        weight = dealt if samples is None else weight_of(samples)
        if self._reducer is not None:
            with self._not_computing(), torch.no_grad():
                self._reducer.renew()
                self._tables.check_unchanged()
                self._reducer.agree(self._hyper.now(), weight, skip=False)
        self._agreed = True

    def join(self) -> None:
        """This worker has no more data for now: take part with weight zero until all others have none either.

        For the end of an epoch where workers have different numbers of batches, without a sequencer (torchrun, mpirun);
        leaving the job calls it. Under `polytempo run` on one host it does nothing: a worker that ends is left out.
        """
        self._update.join()

    def push_parameters(self) -> None:
        """Make the values of this worker's parameters the job's: after changes that cannot be seen (through `.data`), or, in
        modes without a barrier, after any change.

        Under `bsp` every worker must call it before the same `step()`, with the same values. In other modes one worker calls
        it: its values replace the job's, with all updates that were made before. In a job of one there is nothing to do.

        Raises:
            UsageError: under `downpour` and with compressed answers; a parameter has another shape or dtype than before.
        """
        if self._reducer is not None:
            check_features(self._spec, Feature.PUSH_PARAMETERS)
            with self._not_computing(), torch.no_grad():
                self._update.push_values(self._reducer)
                self._tables.check_unchanged()

    @contextmanager
    def _not_computing(self) -> Iterator[None]:
        """The time inside is communication, not the worker's computing."""
        began = time.perf_counter()
        yield
        self._session.not_computing(time.perf_counter() - began)

    # What the job holds.

    def consolidate(self) -> None:
        """Load the job's model: the servers' newest values.

        With `buffers="mean"` also the mean of all workers' buffers: then all workers must call it. Under `local`, `adacomm`
        and `diloco` it ends this worker's block of local steps; the average comes when the other workers' blocks end. With a
        quorum it needs no other worker: local steps that were not pushed yet go with this worker's next push. Under `gossip`
        and `adpsgd` it shows the mean of all workers' models, to be evaluated or saved; any worker may call it alone, and
        its next `step()` goes on from its own model.
        """
        if self._reducer is None:
            return
        with self._not_computing(), torch.no_grad():
            self._update.consolidate(self._reducer)
            if self._buffers is not None:
                self._buffers.average()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, from the servers where they keep it.

        Returns:
            One state of the whole job, as torch's `state_dict()` has it; a call on this rank alone is enough. Where workers
            keep momentum of their own (the default of modes without rounds), this worker's own state.
        """
        state: dict[str, Any] = self.inner.state_dict()
        reducer = self._reducer
        if isinstance(self._update, LocalStepUpdate):
            return state | ({"outer": outer} if (outer := self._update.outer_state()) else {})
        if reducer is not None and reducer.holds_state:
            state["state"] = self._tables.torch_state(reducer.read_state(), reducer.spec.tensors, self._params)
        if reducer is not None and (residual := reducer.residual()):
            state["filters"] = residual
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, for the whole job where the servers keep it. Where each worker has its own, a state that one rank
        loads before its first step is also what the others start from, unless they have loaded one or made a step.

        Args:
            state_dict: What `state_dict()` returned, here or of a plain torch optimizer.
        """
        self.inner.load_state_dict(state_dict)
        reducer = self._reducer
        if isinstance(self._update, LocalStepUpdate):
            self._update.load_outer_state(state_dict.get("outer", []))
            return
        if self._given is not None:
            self._given.give()
        elif reducer is not None and reducer.holds_state:
            state = self.inner.state_dict()["state"]  # as torch takes it in: numbered and cast as its parameters are
            self.inner.state.clear()
            reducer.load_state(self._tables.segments_of(state, reducer.spec.tensors, self._params))
        if reducer is not None:
            reducer.load_residual(state_dict.get("filters", {}))

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of this worker so far: step, waited_s, staleness, bytes_sent, bytes_received, nonfinite, spread; also
        bytes_handed: those of values, for other workers, sent or in shared memory, or exchanged with servers; in modes with
        blocks of local steps also period and averages, with a quorum also left_out: turns at which nothing was sent, because
        the push before was not merged yet; under `bsp+balance` share: of the joint batch, relative to an even one.
        Under `anytime` step counts micro-batches; rounds, abandoned (micro-batches that were late and whose samples are used
        again), late (those that counted a round later, `late=keep`), deadline: seconds of the round, 0 where it has none.
        device_bytes: GPU memory that this optimizer has taken in this process for exchanges, beside parameters and
        gradients."""
        reducer = self._reducer
        if reducer is not None:
            with self._not_computing():
                reducer.take_answer()
                self._wrapped.finite.take()
        known = reducer.client_state if reducer is not None else ClientState("")
        sent, received = reducer.traffic() if reducer is not None else (0, 0)
        return {
            "step": self._update.steps,
            "waited_s": known.waited,
            "staleness": known.staleness,
            "bytes_sent": sent,
            "bytes_received": received,
            "bytes_handed": sum(one.handed() for one in self._reducers),
            "nonfinite": self._wrapped.finite.seen,
            "spread": known.answer.spread,
            "device_bytes": sum(one.device_bytes for one in self._reducers),
            **self._update.stats(),
        }


def _make_fragments(optimizer: DistributedOptimizer, model: torch.nn.Module | None, on_servers: bool) -> list[Fragment]:
    """The parts in which the values are averaged, in modes that do; `model`: its buffers too."""
    averaging, params, specs = optimizer._spec.averaging, optimizer._params, optimizer._specs
    if averaging is None:
        return []
    companions = Companions(model, optimizer.inner if averaging.state == "mean" else None)
    described = specs.describe(params, optimizer._names, optimizer._groups, range(len(params)))
    averaged = AveragedModel(params, described, optimizer._hyper.now(), companions)
    return FragmentBuilder(optimizer._session, averaging, specs, on_servers).fragments(averaged, optimizer._name)


def _make_update(
    wrapped: Wrapped,
    reducer: Reducer | None,
    spec: Spec,
    apply: str,
    hyper: HyperParameters,
    fragments: Sequence[Fragment],
    momentum: ChangeMomentum | None,
) -> StepUpdate:
    """Where the update is made, by the mode, `apply` and the reducer."""
    if reducer is None:
        return StepAlone(wrapped, RuleAlone(hyper, wrapped.optimizer) if spec.mode.rule else None)
    if fragments:
        return LocalStepUpdate(reducer.session, wrapped, fragments, spec, machine_for(spec, reducer))
    if isinstance(reducer, NeighbourReducer) and spec.gossip is not None:
        gossip = spec.gossip
        machine = machine_for(spec, reducer)
        if gossip.asynchronous:
            return PairUpdate(wrapped, reducer, machine)
        return GossipUpdate(wrapped, reducer, machine, gossip.overlap)
    if isinstance(reducer, ServerReducer | PeerReducer) and spec.anytime is not None:
        rounds = ServerRounds(reducer) if isinstance(reducer, ServerReducer) else PeerRounds(reducer, wrapped)
        return DeadlineUpdate(machine_for(spec, reducer), rounds, wrapped, beside(reducer.name) == MAIN)
    if reducer.mean is not None:
        return StepOnMean(wrapped, reducer, machine_for(spec, reducer), reducer.mean)
    if spec.local is not None:
        return DownpourUpdate(wrapped, reducer, machine_for(spec, reducer), spec.local)
    if apply == "delta":
        return PushChange(wrapped, reducer, machine_for(spec, reducer), spec.capabilities.rounds, momentum)
    return PushGradient(wrapped, reducer, machine_for(spec, reducer), spec.capabilities.rounds)


def _take_over(optimizer: DistributedOptimizer, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Of several optimizers with the same parameter only the last made may step: servers hold values for each."""
    owners, mine = optimizer._session.owners, weakref.ref(optimizer)
    for param, name in zip(params, names, strict=True):
        before = owners.get(id(param), mine)()
        if before is not None and before is not optimizer:
            before._displaced = before._displaced or name
        owners[id(param)] = mine


_observed_step = torch.optim.Optimizer.profile_hook_step(DistributedOptimizer._step)

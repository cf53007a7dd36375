"""`DistributedOptimizer`: a torch optimizer whose `step()` is taken together with other workers.

It is a `torch.optim.Optimizer` and shares the groups of the one it wraps, so schedulers, hooks and `GradScaler` work.
Where the update is made depends on `apply`:

    "server"  the gradient is pushed; the servers run the torch.optim class; the new values come back
    "delta"   the wrapped optimizer runs here; the change it made is pushed, and the servers add it. In barrier modes the
              gradients are averaged first and every worker makes the same change, so that Adam is Adam of the mean.

With `via="allreduce"` no server holds anything: workers average gradients among themselves, and each runs the wrapped
optimizer on the mean, whatever `apply` says. Alone, without a launcher, the wrapped optimizer simply runs.

How gradients travel is the exchange's business (`reducer/exchange.py`), where the update is made the update's (`update.py`):
both are chosen once (`assembly.py`), and a step asks neither what it is.

In modes with blocks of local steps (`local`, `adacomm`, `diloco`) the wrapped optimizer always runs here, on this worker's
own gradients, and values are averaged at the end of each block (`local_steps.py`).

Given the model, it also carries its sparse embeddings and its `ServerEmbedding`s: their rows go with the same pushes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import OF_FAILURES
from polytempo.compression.chain import parse_compression
from polytempo.errors import UsageError
from polytempo.mesh import ReplicaRanks
from polytempo.protocol.push import Measures
from polytempo.protocol.training_troubles import Circumstances
from polytempo.protocol.values import number_of
from polytempo.reducer.exchange import Exchange
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import current
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec
from polytempo.train.assembly import JobPart, make_update
from polytempo.train.communication import Group
from polytempo.train.driver import StepRequest
from polytempo.train.model_tables import ModelTables
from polytempo.train.observers import StepObservers
from polytempo.train.update import FiniteWatch, OwnReport, Wrapped, is_observed, unscale, weight_of
from polytempo.train.validation import (
    OptimizerArguments,
    OptimizerPlan,
    check_choices,
    check_order,
    in_scope,
    names_of,
)


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose steps are taken together with the other workers of the job.

    Wrap the script's optimizer after the model is built, and use the result in its place.

    Args:
        optimizer: The script's optimizer.
        model: Its model: needed for sparse embeddings, `ServerEmbedding`s and `buffers="mean"`, and gives parameters names.
        named_parameters: Names for error messages, where no model is given.
        sync: The synchronisation mode, as `polytempo run --sync` takes it, or an object; the default is the job's. Servers
            that are processes must have it, too: a file of modes is named by `--sync` or `--mode`.
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
        sync: str | Mode | Spec | None = None,
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
        spec, via = in_scope(sync, via, group, session)
        check_choices(apply, via, buffers, clip_norm, nonfinite)
        self._tables = tables = ModelTables(model)
        self._params = [param for group in self.param_groups for param in group["params"]]
        self._names = names_of(self._params, named_parameters, model)
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        arguments = OptimizerArguments(
            *(session, optimizer, model, self._params, self._names, groups, group, via, apply),
            *(parse_compression(compression), buffers, clip_norm, bool(tables.embeddings)),
        )
        plan = arguments.settled(spec)
        self._spec = plan.spec
        self._part = JobPart(plan, tables)
        self._reducer = self._part.reducer
        self._take_part()
        self._make_steps(plan, nonfinite)
        self._part.keep_state()
        session.computing_from(time.perf_counter())

    def _take_part(self) -> None:
        """Take the parameters over, and go on with the job's rounds until the end."""
        self._displaced = ""  # a parameter that a later DistributedOptimizer has taken
        if self._reducer is None:
            return
        session, mine = self._session, weakref.ref(self)
        for param, name in zip(self._params, self._names, strict=True):  # servers hold values for each optimizer
            before = session.owners.get(id(param), mine)()
            if before is not None and before is not self:
                before._displaced = before._displaced or name
            session.owners[id(param)] = mine
        for reducer in self._part.reducers:
            session.watches.add(reducer.copier.watch)
        if self._part.ballot is not None:
            session.on_leave(LeavingStep.JOIN, self.join)

    def _make_steps(self, plan: OptimizerPlan, nonfinite: str) -> None:
        """Make what makes the steps, and what looks at them."""
        session, given = self._session, plan.arguments
        alone = plan.together and session.client is None  # no coordinator tells how the training goes
        report = OwnReport(session.rank, self._params, self._circumstances) if alone else None
        finite = FiniteWatch(self._names, session.rank, nonfinite, report)
        self._wrapped = Wrapped(self.inner, self._params, plan.hyper.now, finite, self._tables, given.clip_norm)
        self._tables.attach(self._part.servers, lambda: self.inner.param_groups[0]["lr"])
        self._update = make_update(self._part, self._wrapped)
        self._observers = StepObservers(
            session,
            self._params,
            by_speed=plan.spec.capabilities.by_speed,
            deals=self._part.deals,
            exchanges=self._reducer is not None,
            model=given.model if self._reducer is not None and session.client is not None else None,
            report=report if plan.leads else None,
        )
        self._emulation = session.emulation
        self._on_gpu = any(param.is_cuda for param in self._params)
        self._syncing = True
        self._agreed = False  # synchronize() was called since the last step

    def failure_groups(self) -> list[RankGroup]:
        """The groups in which ranks that take the steps together tell each other why one of them cannot go on.

        Returns:
            The groups of this rank; none where it takes its steps alone.
        """
        if self._reducer is None:
            return []
        world, members = self._session.world(), self._reducer.spec.members or range(self._session.size)
        return [*self._part.groups(), world.group_of_optimizer(members, number_of(self._part.name), OF_FAILURES)]

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
        if self._part.deals and self._session.registered is not None:
            self._session.registered.mark()
        if self._part.given is not None:
            self._part.given.take()
            self._part.given = None
        with torch.no_grad():
            measures = Measures(samples=1.0 if samples is None else samples)
            request = StepRequest(measures, self._unscale(), self._agreed, closure)
            request.weighed = samples is not None
            request.loss, request.scale = value if loss is None else loss, getattr(self, "grad_scale", None)
            request.unscaled = request.scale is None and getattr(self, "found_inf", None) is not None
            # Before its time is taken: from there on a round may end without it.
            self._observers.look_at_signs(request, self._update)
            measures.computed = self._begin_step(self._reducer) if self._reducer is not None else 0.0
            self._observers.look_at_data(measures, samples, self._agreed)
            result = self._update.step(request)
        self._agreed = False
        self._session.computing_from(time.perf_counter())
        self._observers.end_step()
        return result if value is None else value

    def _circumstances(self) -> Circumstances:
        """How this worker trains, where no server does."""
        return Circumstances(self._spec.text, float(self.param_groups[0]["lr"]), local=self._spec.capabilities.averages)

    def _begin_step(self, reducer: Exchange) -> float:
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
        weight = self._update.samples() if samples is None else weight_of(samples)
        if self._reducer is not None:
            with self._not_computing(), torch.no_grad():
                self._reducer.renew()
                self._tables.check_unchanged()
                self._reducer.agree(self._wrapped.hyper(), weight, skip=False)
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
            if self._part.buffers is not None:
                self._part.buffers.average()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, from the servers where they keep it.

        Returns:
            One state of the whole job, as torch's `state_dict()` has it; a call on this rank alone is enough. Where workers
            keep momentum of their own (the default of modes without rounds), this worker's own state.
        """
        state: dict[str, Any] = self.inner.state_dict()
        reducer, servers = self._reducer, self._part.servers
        if reducer is None:
            return state
        if servers is not None and servers.holds_state:
            state["state"] = self._tables.torch_state(servers.held.segments(), servers.spec.tensors, self._params)
        return state | self._update.state(reducer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, for the whole job where the servers keep it. Where each worker has its own, a state that one rank
        loads before its first step is also what the others start from, unless they have loaded one or made a step.

        Args:
            state_dict: What `state_dict()` returned, here or of a plain torch optimizer.
        """
        self.inner.load_state_dict(state_dict)
        reducer, servers = self._reducer, self._part.servers
        if self._part.given is not None:
            self._part.given.give()
        elif servers is not None and servers.holds_state:
            state = self.inner.state_dict()["state"]  # as torch takes it in: numbered and cast as its parameters are
            self.inner.state.clear()
            servers.held.load_state(self._tables.segments_of(state, servers.spec.tensors, self._params))
        if reducer is not None:
            self._update.load_state(reducer, state_dict)

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
                if self._part.servers is not None:
                    self._part.servers.take_answer()
                self._wrapped.finite.take()
        known = reducer.client_state if reducer is not None else ClientState("")
        traffic = [one.traffic() for one in self._part.reducers]
        return {
            "step": self._update.steps,
            "waited_s": known.waited,
            "staleness": known.staleness,
            "bytes_sent": traffic[0].sent if traffic else 0,
            "bytes_received": traffic[0].received if traffic else 0,
            "bytes_handed": sum(one.handed for one in traffic),
            "nonfinite": self._wrapped.finite.seen,
            "spread": known.answer.spread,
            "device_bytes": sum(one.device_bytes for one in traffic),
            **self._update.stats(),
        }


_observed_step = torch.optim.Optimizer.profile_hook_step(DistributedOptimizer._step)

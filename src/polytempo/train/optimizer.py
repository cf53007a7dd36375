"""`DistributedOptimizer`: a torch optimizer whose `step()` is taken together with other workers.

It is a `torch.optim.Optimizer` and shares the groups of the one it wraps, so schedulers, hooks and `GradScaler` work.
Where the update is made depends on `apply`:

    "server"  the gradient is pushed; the servers run the torch.optim class; the new values come back
    "delta"   the wrapped optimizer runs here; the change it made is pushed, and the servers add it. In barrier modes the
              gradients are averaged first and every worker makes the same change, so that Adam is Adam of the mean.

With `via="allreduce"` no server holds anything: workers average gradients among themselves, and each runs the wrapped
optimizer on the mean, whatever `apply` says.

Alone, without a launcher, the wrapped optimizer simply runs.

Given the model, it also carries its sparse embeddings and its `ServerEmbedding`s: their rows go with the same pushes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.compression.chain import parse_compression
from polytempo.errors import UsageError
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.buffer_mean import BufferMean
from polytempo.reducer.collective_reducer import CollectiveReducer
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.gradient_checks import LOOKS, FiniteWatch, gradient_digest
from polytempo.reducer.mean_reducer import MeanReducer
from polytempo.reducer.optimizer_spec import HyperParameters, RuleAlone, SpecBuilder
from polytempo.reducer.server_reducer import ServerReducer, change_of
from polytempo.reducer.shared_memory_reducer import SharedMemoryReducer
from polytempo.session.session import current
from polytempo.sync.spec import parse_spec
from polytempo.train.downpour import DownpourWorker
from polytempo.train.model_tables import ModelTables
from polytempo.train.profiler_hooks import is_watched, step_plainly, unscale
from polytempo.train.validation import asked_way, check_choices, check_once, check_order, goes_via_peers, names_of, weight_of


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Wrap an optimizer after the model is built; use it in its place."""

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
    ) -> None:
        check_order(optimizer, model)
        self.inner = optimizer
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._ready = True
        self._session = current()
        self._spec = parse_spec(sync or self._session.job.sync)
        self._apply, self._clip_norm = apply, clip_norm
        check_choices(apply, via, buffers, clip_norm, nonfinite)
        compressed = parse_compression(compression)
        via = asked_way(via, compressed, self._session)
        if buffers == "mean" and model is None:
            raise UsageError("buffers='mean' needs the model: DistributedOptimizer(optimizer, model, buffers='mean')")
        together = self._session.together
        tables = ModelTables(model)
        peers = together and goes_via_peers(self._spec, via, self._session, bool(tables.embeddings))
        here = apply == "delta" or peers
        if here and self._spec.mode.barrier and type(optimizer) is torch.optim.LBFGS:
            raise UsageError("LBFGS evaluates the loss as often as each worker likes, so rounds cannot fit; use sync='asp'")
        self._emulation = self._session.emulation
        self._params = [param for group in self.param_groups for param in group["params"]]
        self._names = names_of(self._params, named_parameters, model)
        self._buffers = BufferMean(self._session, model) if buffers == "mean" and model is not None else None
        self._groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        mirrors = together and not here and self._spec.local is None
        tables.find(model if mirrors else None, optimizer, self._params, self._groups)
        self._tables, self._dense = tables, tables.dense
        if clip_norm is not None and tables.all:
            raise UsageError("clip_norm sees dense gradients only, and this model has tables; leave it out")
        self._hyper = HyperParameters(self._spec, optimizer)
        self._proposing = SpecBuilder(self._spec, apply, optimizer, compressed, clip_norm)
        self._proposing.check(here, together)
        self._watch = FiniteWatch(self._names, self._session.rank, nonfinite)
        self._agreed = False  # synchronize() was called since the last step
        self._alone_steps = 0
        self._looks = LOOKS + 1
        self._syncing = True
        self._name = self._session.next_track()
        self._displaced = ""  # a parameter that a later DistributedOptimizer has taken
        if together:
            check_once(self._params, self._names, on_servers=not peers)
        self._exchange = self._join(via) if together else None
        self._own()
        self._downpour: DownpourWorker | None = None
        if isinstance(self._exchange, ServerReducer) and self._spec.local is not None:
            self._downpour = DownpourWorker(self._exchange, self._spec.local, lambda: self.param_groups, self._hyper, tables)
        tables.attach(self._exchange, lambda: self.param_groups[0]["lr"])
        self._rule = RuleAlone(self._spec, self._hyper, self) if self._exchange is None and self._spec.mode.rule else None
        self._mean: ServerReducer | SharedMemoryReducer | None = None
        self._session.computing_from(time.perf_counter())

    def _join(self, via: str | None) -> ServerReducer | MeanReducer:
        """Take part in the job. State the wrapped optimizer already has goes with the values the job starts from."""
        if goes_via_peers(self._spec, via, self._session, bool(self._tables.embeddings)):
            if self._session.client is not None and self._session.job.meeting:
                return SharedMemoryReducer(self._session, self._name, self._proposal(peers=True), self._params)
            self._session.before_leaving(self.join)
            return CollectiveReducer(self._session, self._name, self._proposal(peers=True), self._params)
        proposal, runs = self._proposal(), []
        if self._apply == "server" and self.inner.state:
            runs = self._tables.runs_of(self.inner.state_dict()["state"], proposal.tensors, self._params)
            self.inner.state.clear()
        staged = self._apply == "server" and not proposal.push_filter
        params = [self._params[index] for index in self._dense]
        return ServerReducer(self._session, self._name, proposal, params, runs, staged=staged, tables=self._tables.all)

    def _own(self) -> None:
        """Of several optimizers with the same parameter only the last made may step: servers hold values for each."""
        if self._exchange is None:
            return
        owners, mine = self._session.owners, weakref.ref(self)
        for param, name in zip(self._params, self._names, strict=True):
            before = owners.get(id(param), mine)()
            if before is not None and before is not self:
                before._displaced = before._displaced or name
            owners[id(param)] = mine
        self._session.watches.add(self._exchange.copier.watch)

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
        """Only before it is wrapped."""
        if self._ready:
            raise UsageError("add parameter groups before wrapping the optimizer: the job knows its parameters by now")

    # A step.

    def step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None) -> Any:
        """Push, wait as the mode says, pull.

        Args:
            closure: Evaluates the loss, as torch's optimizers take it.
            samples: Weighs this worker's gradient, a number of any kind; with 0 it counts for nothing, whatever it holds.

        Returns:
            What the closure returned.
        """
        step = _watched_step if is_watched(self) else DistributedOptimizer._step
        return step(self, closure, samples=samples)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler, which costs 40 us a step

    def _step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None) -> Any:
        if not self._syncing:
            raise UsageError("step() inside no_sync(); accumulate there, and step outside")
        samples = None if samples is None else weight_of(samples)
        self.inner._opt_called = True  # a scheduler made before wrapping looks for it there
        loss = None
        if closure is not None and type(self.inner) is not torch.optim.LBFGS:
            with torch.enable_grad():
                loss = closure()
            closure = None
        with torch.no_grad():
            if self._exchange is None:
                loss = self._step_alone(closure, loss, samples)
            else:
                result = self._step_together(self._exchange, closure, samples)
                loss = result if loss is None else loss
        self._agreed = False
        self._session.computing_from(time.perf_counter())
        return loss

    def _step_alone(self, closure: Callable[[], Any] | None, loss: Any, samples: float | None) -> Any:
        self._alone_steps += 1
        if self._unscale() or samples == 0:
            return loss
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        self._tables.step_alone()
        if self._rule is not None:
            self._rule.step()
            return loss
        result = self.inner.step(closure)
        return loss if closure is None else result

    def _step_with_peers(self, exchange: MeanReducer, skip: bool, samples: float, **about: Any) -> None:
        flat: FlatBuffer | None = None
        if not skip:
            flat, absent = exchange.gradients()
            about |= {"absent": absent, "nonfinite": self._watch.look_at(flat, exchange.step)}
        exchange.push(flat, self._hyper.of(self.param_groups), average=not self._agreed, samples=samples, **about)
        self._apply_mean(exchange)

    def _apply_mean(self, exchange: MeanReducer) -> None:
        if exchange.line.skipped:
            return
        in_place = self._clip_norm is None and exchange.may_read_in_place(self.inner)
        with nullcontext() if self._agreed else exchange.reading_mean(in_place):
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
            step_plainly(self.inner)
        exchange.copier.watch.record()

    def _step_together(
        self, exchange: ServerReducer | MeanReducer, closure: Callable[[], Any] | None, samples: float | None
    ) -> Any:
        now = [param for group in self.param_groups for param in group["params"]]
        if self._displaced:
            raise UsageError(
                f"{self._displaced} was given to another DistributedOptimizer after this one, and would lose updates; "
                "give each parameter to one"
            )
        exchange.check_same([now[i] for i in self._dense] if len(now) == len(self._params) else now)
        self._look_at_params()
        exchange.carry_changes()
        self._emulation.slow_down(self._session.computed(time.perf_counter()))
        computed = self._session.computed(time.perf_counter())
        skip = self._unscale()
        weight = 1.0 if samples is None else samples
        if isinstance(exchange, MeanReducer):
            return self._step_with_peers(exchange, skip, weight, computed=computed, **self._position(samples))
        if self._downpour is not None:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
            self._downpour.step(skip or weight == 0, samples=weight, computed=computed, **self._position(samples))
            return None
        if self._apply == "delta" and self._spec.mode.barrier and not self._agreed:
            skip = self._agree(weight, skip)
        flat: FlatBuffer | None = None
        self._closure_loss = None
        about: dict[str, Any] = {}
        if not skip:
            flat, about = self._change(exchange, closure) if self._apply == "delta" else self._gradient(exchange)
        exchange.push(
            flat, self._hyper.of(self.param_groups), samples=weight, computed=computed, **about, **self._position(samples)
        )
        return self._closure_loss

    def _gradient(self, exchange: ServerReducer) -> tuple[FlatBuffer, dict[str, Any]]:
        if self._clip_norm is not None and not self._spec.mode.barrier:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        flat, absent = exchange.gradients()
        return flat, {"absent": absent, "nonfinite": self._watch.look_at(flat, exchange.step, self._tables.is_finite())}

    def _change(self, exchange: ServerReducer, closure: Callable[[], Any] | None) -> tuple[FlatBuffer, dict[str, Any]]:
        """Run the wrapped optimizer; what it changed is what is pushed."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        kind = "value" if self._spec.mode.barrier else "delta"
        flat, self._closure_loss = change_of(exchange, self.inner, closure, kind)
        return flat, {"kind": kind, "nonfinite": self._watch.look_at(flat, exchange.step)}

    def _position(self, samples: float | None) -> dict[str, Any]:
        """Where this worker is in its data and, in the first steps, a digest of what it made of it."""
        if self._name != "0":
            return {}
        self._looks -= self._looks > 0
        digest = gradient_digest(self._params) if self._looks else 0
        return {"positions": self._session.positions.pushed(samples), "likeness": digest}

    def _unscale(self) -> bool:
        """Undo a GradScaler's scale; is this step to be skipped?"""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None:
            return False
        if scale is None and self._tables.embeddings:
            raise UsageError("scaler.unscale_() does not see the rows of a ServerEmbedding; leave it out, step() unscales")
        if scale is not None:
            unscale([param.grad for param in self._params if param.grad is not None], float(1.0 / scale))
            self._tables.scale(float(1.0 / scale))
        return bool(found) or not self._tables.is_finite()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, of rows too."""
        super().zero_grad(set_to_none)
        self._tables.drop()

    # What the script does to parameters.

    def _look_at_params(self, compare: bool = True) -> None:
        for exchange in (self._exchange, self._mean):
            if exchange is not None:
                exchange.renew(compare)
        self._tables.check_unchanged()

    def push_parameters(self) -> None:
        """Make the values of this worker's parameters the job's: after changes that cannot be seen (through `.data`), or, in
        modes without a barrier, after any change.

        Under `bsp` every worker must call it before the same `step()`, with the same values. In other modes one worker calls
        it: its values replace the job's, with all updates that were made before. In a job of one there is nothing to do.

        Raises:
            UsageError: under `downpour` and with compressed answers; a parameter has another shape or dtype than before.
        """
        if self._exchange is not None:
            began = time.perf_counter()
            with torch.no_grad():
                self._look_at_params(compare=False)
                self._exchange.push_values()
            self._session.not_computing(time.perf_counter() - began)

    # Agreeing on gradients.

    def synchronize(self, samples: float | None = None) -> None:
        """Make `.grad` the agreed mean now, to be looked at or clipped before `step()`. Barrier modes only."""
        if not self._spec.mode.barrier:
            raise UsageError(f"synchronize() needs a barrier mode, this is {self._spec.text}; clip before step() instead")
        samples = None if samples is None else weight_of(samples)
        if self._exchange is not None:
            began = time.perf_counter()
            with torch.no_grad():
                self._look_at_params()
                self._agree(1.0 if samples is None else samples, skip=False)
            self._session.not_computing(time.perf_counter() - began)
        self._agreed = True

    def _agree(self, samples: float, skip: bool) -> bool:
        """Average the gradients in the side clock; was the round skipped?"""
        assert self._exchange is not None
        if isinstance(self._exchange, CollectiveReducer):
            absent = () if skip else self._exchange.gradients()[1]
            self._exchange.agree(skip, self._hyper.of(self.param_groups), samples, absent)
            if not self._exchange.line.skipped:
                self._exchange.take_mean()
            return self._exchange.line.skipped
        if self._mean is None and isinstance(self._exchange, SharedMemoryReducer):
            name = f"{self._name}/mean"
            self._mean = SharedMemoryReducer(self._session, name, self._proposal(peers=True), self._params, self._exchange)
        if self._mean is None:
            staged = self._apply == "delta"  # else the gradients live in the other exchange's bucket
            self._mean = ServerReducer(
                self._session, f"{self._name}/mean", self._proposal(mean=True), self._params, staged=staged
            )
        if skip:
            self._mean.push(None, (), samples=samples)
        else:
            flat, absent = self._mean.gradients()
            self._mean.push(flat, (), absent=absent, samples=samples)
            if isinstance(self._mean, SharedMemoryReducer):
                self._mean.take_mean()
        return self._mean.line.skipped

    def join(self) -> None:
        """This worker has no more data for now: take part with weight zero until all others have none either.

        For the end of an epoch where workers have different numbers of batches, without a sequencer (torchrun, mpirun);
        leaving the job does it by itself. Under `polytempo run` on one host nobody needs it: who ends is left out.
        """
        exchange = self._exchange
        if isinstance(exchange, CollectiveReducer):
            with torch.no_grad():
                while not exchange.join():
                    self._apply_mean(exchange)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of several batches: nothing is sent inside."""
        self._syncing = False
        self._send_ahead(False)
        try:
            yield
        finally:
            self._syncing = True
            self._send_ahead(True)

    def _send_ahead(self, sending: bool) -> None:
        for exchange in (self._exchange, self._mean):
            if isinstance(exchange, ServerReducer | CollectiveReducer):
                exchange.sending = sending

    # What the job holds.

    def consolidate(self) -> None:
        """Load the job's model: the servers' newest values.

        With `buffers="mean"` also the mean of everybody's buffers: then all workers must call it.
        """
        if self._exchange is None:
            return
        began = time.perf_counter()
        with torch.no_grad():
            self._exchange.read_values()
            if self._buffers is not None:
                self._buffers.take()
        self._session.not_computing(time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, from the servers where they keep it: one state of the job, on this rank alone."""
        state: dict[str, Any] = self.inner.state_dict()
        exchange = self._exchange
        if isinstance(exchange, ServerReducer) and self._apply == "server":
            state["state"] = self._tables.torch_state(exchange.read_state(), exchange.proposal.tensors, self._params)
            state |= {"filters": held} if (held := exchange.filters.state()) else {}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, for the whole job where the servers keep it."""
        self.inner.load_state_dict(state_dict)
        exchange = self._exchange
        if isinstance(exchange, ServerReducer) and self._apply == "server":
            state = self.inner.state_dict()["state"]  # as torch takes it in: numbered and cast as its parameters are
            self.inner.state.clear()
            exchange.load_state(self._tables.runs_of(state, exchange.proposal.tensors, self._params))
            exchange.filters.load(state_dict.get("filters", {}))

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of this worker so far."""
        exchange, local = self._exchange, self._downpour
        line = exchange.line if exchange is not None else ClientState("")
        sent, received = exchange.traffic() if exchange is not None else (0, 0)
        return {
            "step": self._alone_steps if exchange is None else exchange.step if local is None else local.steps,
            "waited_s": line.waited,
            "staleness": line.staleness,
            "bytes_sent": sent,
            "bytes_received": received,
            "nonfinite": self._watch.seen,
            "spread": line.answer.spread,
        }

    def _proposal(self, mean: bool = False, peers: bool = False) -> OptimizerSpec:
        chosen = range(len(self._params)) if mean or peers else self._dense
        tables = () if mean or peers else tuple(table.info for table in self._tables.all)
        described = self._proposing.describe(self._params, self._names, self._groups, chosen)
        hyper = self._hyper.of(self.param_groups)
        return self._proposing.propose("mean" if mean else "peers" if peers else "", described, hyper, tables)


_watched_step = torch.optim.Optimizer.profile_hook_step(DistributedOptimizer._step)

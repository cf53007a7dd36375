"""Downpour SGD at the worker: local steps, accumulated pushes, asynchronous fetches (`sync/downpour.py`).

    step     local: w -= alpha * g, and g is added to what the next push will hold
    push     after P local steps; it waits only while the push before is unanswered
    fetch    after F local steps; when it has come, at the end of a step, its values are taken, and the local steps that
             they cannot contain yet are made again on top

The servers' answer to a fetch names the last of this worker's pushes that the values contain: a read has one place in
their log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polytempo.client.requests import Reading
from polytempo.protocol.push import no_steps
from polytempo.reducer.reducer import Reducer
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.sync.actions import Release
from polytempo.sync.downpour import LocalSteps
from polytempo.sync.machine import (
    Begin,
    Computed,
    EndBlock,
    Fetched,
    Install,
    RequestValues,
    SendPush,
    StepHere,
    WorkerMachine,
)
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest, nothing
from polytempo.train.gradient_sums import GradientSum
from polytempo.train.update import Wrapped

#: A sum of gradients, by parameter.
Gradients = dict[int, torch.Tensor]
#: Local steps that fetched values lack: the rate and the sum of gradients of each parameter.
Missing = tuple[dict[int, float], Gradients]


@dataclass(frozen=True)
class Basis:
    """The servers' values that local steps start from."""

    version: int
    contained: int  # the last of this worker's pushes that is in them


class DownpourUpdate(MachineUpdate):
    """Local steps of one optimizer."""

    _reducer: ServerReducer

    def __init__(self, wrapped: Wrapped, reducer: Reducer, machine: WorkerMachine, local: LocalSteps) -> None:
        assert isinstance(reducer, ServerReducer)  # the mode has no other: values are fetched
        self._wrapped, self._local = wrapped, local
        self._steps = 0
        self._sum: GradientSum | None = None  # what the next push will hold
        self._sum_basis = Basis(0, 0)  # of its first gradient
        self._made = no_steps()  # since the last push, skipped ones included
        self._sent: list[tuple[int, Missing]] = []  # pushes that fetched values may not contain yet
        self._fetch: Reading | None = None
        self._fetched = False  # has the machine been told that it is here?
        self._basis = Basis(reducer.client_state.version, reducer.step - 1)
        reducer.pulls = False  # values are fetched; those of an answer would undo local steps
        reducer.client_state.take = lambda parts, absent: None
        super().__init__(machine, reducer)
        reducer.session.flushing.append(self.flush)
        reducer.before_read = self.flush
        self.start()

    def performs(self) -> LivePerforms:
        return {
            Begin: nothing,
            StepHere: self._step_here,
            SendPush: self._push,
            RequestValues: self._request_values,
            Install: self._install,
        }

    @property
    def steps(self) -> int:
        return self._steps

    def step(self, request: StepRequest) -> None:
        """One local step, and what is due after it."""
        self._request = request
        self._look_for_values()
        self._tell(Computed(empty=request.skip or not request.measures.samples))

    def _step_here(self, order: StepHere) -> None:
        request = self._request
        self._wrapped.clip()
        self._steps += 1
        if not request.skip and request.measures.samples:
            self._accumulate()
            self._wrapped.tables.collect()
        self._made.add(request.measures)

    def _accumulate(self) -> None:
        copier = self._reducer.copier
        params = copier.params
        if self._sum is None:
            self._sum, self._sum_basis = GradientSum(copier, copier.next_buffer()), self._basis
        self._sum.add()
        for index, rate in self._rates().items():
            if params[index].grad is not None:
                params[index].add_(_dense(params[index].grad), alpha=-rate)
        copier.watch.record()

    def _rates(self) -> dict[int, float]:
        infos = self._reducer.spec.tensors
        own, groups = self._local.alpha, self._wrapped.optimizer.param_groups
        return {i: float(groups[info.group]["lr"]) if own is None else own for i, info in enumerate(infos)}

    def flush(self) -> None:
        """Push what was accumulated so far: at the end, and before a read."""
        self._tell(EndBlock())

    def _push(self, order: SendPush) -> None:
        total, basis, self._sum = self._sum, self._sum_basis, None
        assert total is not None
        reducer, made, self._made = self._reducer, self._made, no_steps()
        made.fields = order.measured
        if self._fetch is None:  # the next fetch will contain what is answered now
            self._sent = [sent for sent in self._sent if sent[0] in reducer.client_state.outstanding]
        reducer.client_state.version = basis.version
        gradients = {index: view.clone() for index, view in total.had().items()}
        self._sent.append((reducer.step, (self._rates(), gradients)))
        reducer.own = reducer.step - 1 - basis.contained
        made.nonfinite = self._wrapped.finite.check(total.buffer, self._steps)
        reducer.push(total.buffer, self._wrapped.hyper(), made, sorted(total.absent))
        self._tell(Release(reducer.session.rank, reducer.client_state.released, reducer.step))

    def _request_values(self, order: RequestValues) -> None:
        client = self._reducer.client
        with self._reducer.session.lock:
            self._fetch = client.requests.start(Reading(self._reducer.name, "params", client.rank))

    def _look_for_values(self) -> None:
        with self._reducer.session.lock:
            self._reducer.client.poll()
            if self._fetch is not None and self._fetch.answers is not None and not self._fetched:
                self._fetched = True
                self._tell(Fetched())

    def _install(self, order: Install) -> None:
        """Take the values that have come, and make again what they lack."""
        reducer, fetch = self._reducer, self._fetch
        assert fetch is not None
        answers = fetch.in_order()
        self._fetch, self._fetched = None, False
        reducer.copier.scatter({shard: buffers for shard, (_, buffers) in enumerate(answers)})
        reducer.client_state.version, contained = answers[0][0].version, answers[0][0].exchange
        self._basis = Basis(reducer.client_state.version, contained)
        self._sent = [(number, missing) for number, missing in self._sent if number > contained]
        unsent = [(self._rates(), self._sum.had())] if self._sum else []
        params = reducer.copier.params
        for rates, gradients in [missing for _, missing in self._sent] + unsent:  # in their order, at the rates of then
            for index, gradient in gradients.items():
                params[index].add_(gradient.to(params[index].device), alpha=-rates[index])
        reducer.copier.watch.record()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()

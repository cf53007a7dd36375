"""Downpour SGD at the worker: local steps, accumulated pushes, asynchronous fetches (`sync/downpour.py`).

    step     local: w -= alpha * g, and g is added to what the next push will hold
    push     after P local steps; it waits only while the push before is unanswered
    fetch    after F local steps; when it has come, at the end of a step, its values are taken, and the local steps that
             they cannot contain yet are made again on top

The servers' answer to a fetch names the last of this worker's pushes that the values contain: a read has one place in
their log.
"""

from __future__ import annotations

import torch

from polytempo.client.requests import Reading
from polytempo.reducer.exchange import Exchange
from polytempo.reducer.servers import ServerExchange
from polytempo.session.leaving import LeavingStep
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
from polytempo.train.gradient_sums import FlatSum
from polytempo.train.update import Wrapped

#: A sum of gradients, by parameter.
Gradients = dict[int, torch.Tensor]
#: Local steps that fetched values lack: the rate and the sum of gradients of each parameter.
Missing = tuple[dict[int, float], Gradients]


class DownpourUpdate(MachineUpdate):
    """Local steps of one optimizer."""

    _reducer: ServerExchange

    def __init__(self, wrapped: Wrapped, reducer: Exchange, machine: WorkerMachine, local: LocalSteps) -> None:
        assert isinstance(reducer, ServerExchange)  # the mode has no other: values are fetched
        self._wrapped, self._local = wrapped, local
        self._steps = 0
        self._sum: FlatSum | None = None  # what the next push will hold
        self._sent: list[tuple[int, Missing]] = []  # pushes that fetched values may not contain yet
        self._fetch: Reading | None = None
        self._fetched = False  # has the machine been told that it is here?
        # Of the servers' values that local steps start from: their version, and the last of this worker's pushes in them.
        self._version, self._contained = reducer.client_state.version, reducer.step - 1
        self._sum_contains = self._contained  # that push, of the values that the sum was begun on
        reducer.fetch_apart(self.flush)  # values of an answer would undo local steps
        super().__init__(machine, reducer)
        reducer.session.on_leave(LeavingStep.FLUSH, self.flush)
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
        with self._reducer.session.lock:
            self._reducer.client.poll()
        if self._fetch is not None and self._fetch.answers is not None and not self._fetched:
            self._fetched = True
            self._tell(Fetched())
        self._tell(Computed(empty=request.skip or not request.measures.samples))

    def _step_here(self, order: StepHere) -> None:
        request, copier = self._request, self._reducer.copier
        self._wrapped.clip()
        self._steps += 1
        if self._sum is None:
            self._sum = FlatSum(copier, copier.next_buffer())
        if not request.skip and request.measures.samples:
            self._accumulate(self._sum)
            self._wrapped.tables.collect()
        self._sum.measures.add(request.measures)  # skipped ones, too: they count as steps

    def _accumulate(self, total: FlatSum) -> None:
        copier = self._reducer.copier
        params = copier.params
        if not total.count:
            self._sum_contains = self._contained
        total.add(version=self._version)
        for index, rate in self._rates().items():
            grad = params[index].grad
            if grad is not None:
                params[index].add_(grad if grad.layout == torch.strided else grad.to_dense(), alpha=-rate)
        copier.watch.record()

    def _rates(self) -> dict[int, float]:
        infos = self._reducer.spec.tensors
        own, groups = self._local.alpha, self._wrapped.optimizer.param_groups
        return {i: float(groups[info.group]["lr"]) if own is None else own for i, info in enumerate(infos)}

    def flush(self) -> None:
        """Push what was accumulated so far: at the end, and before a read."""
        self._tell(EndBlock())

    def _push(self, order: SendPush) -> None:
        total, self._sum, reducer = self._sum, None, self._reducer
        assert total is not None  # the machine orders no push of nothing
        assert total.version is not None
        made = total.measures
        made.fields = order.measured
        if self._fetch is None:  # the next fetch will contain what is answered now
            self._sent = [sent for sent in self._sent if sent[0] in reducer.client_state.outstanding]
        reducer.client_state.version = total.version
        gradients = {index: view.clone() for index, view in total.had().items()}
        self._sent.append((reducer.step, (self._rates(), gradients)))
        reducer.own = reducer.step - 1 - self._sum_contains
        made.nonfinite = self._wrapped.finite.check(total.buffer, self._steps)
        reducer.push(total.buffer, self._wrapped.hyper(), made, sorted(total.absent))
        self._tell(Release(reducer.session.rank, reducer.client_state.released, reducer.step))

    def _request_values(self, order: RequestValues) -> None:
        client = self._reducer.client
        with self._reducer.session.lock:
            self._fetch = client.requests.start(Reading(self._reducer.name, "params", client.rank))

    def _install(self, order: Install) -> None:
        """Take the values that have come, and make again what they lack."""
        reducer = self._reducer
        assert self._fetch is not None
        answers = self._fetch.in_order()
        self._fetch, self._fetched = None, False
        reducer.copier.scatter({shard: buffers for shard, (_, buffers) in enumerate(answers)})
        reducer.client_state.version = self._version = answers[0][0].version
        self._contained = answers[0][0].exchange
        self._sent = [(number, missing) for number, missing in self._sent if number > self._contained]
        unsent = [(self._rates(), self._sum.had())] if self._sum else []
        params = reducer.copier.params
        for rates, gradients in [missing for _, missing in self._sent] + unsent:  # in their order, at the rates of then
            for index, gradient in gradients.items():
                params[index].add_(gradient.to(params[index].device), alpha=-rates[index])
        reducer.copier.watch.record()

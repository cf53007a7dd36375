"""Blocks of local steps at the worker: `local:k`, `adacomm:k`, `diloco:k`.

    step         the wrapped optimizer runs here, on this worker's own gradients; nothing is sent
    block end    after the local steps that the policy has said: values travel, their average is taken (`fragment.py`), and
                 the policy says how many local steps the next block has
    fragments    of P, number p is sent after step p k / P of each k (number 0 after k), and taken `overlap` steps later
    consolidate  ends this worker's block now, if it has local steps; the average comes when the other workers' blocks end
    the end      a worker that leaves sends the block that it has not finished, and takes the average with the workers that
                 are there; no worker waits for one that has left

The first fragment's clock is the job's: its pushes count all local steps and samples of this worker, once. Optimizer state
at an average: "keep" leaves it, "mean" averages it with the values, "reset" drops it, so that momentum starts from zero.
Module buffers are each worker's own, or with `buffers="mean"` averaged with the values.

What the script writes to parameters inside a block is this worker's progress, like a local step. What it writes between an
average and the first step after it replaces the anchor of an outer step, and must then be the same on all workers.

`adacomm` learns the loss from `backward()` (`observers.py`). With `hold=1` a fall of the learning rate waits while blocks
have more than one step: local steps are made at the rate before it. A rise is not held.

Which fragment is sent when, what is waited for, and what is taken when, the machine says (`sync/blocks.py`). Where no
worker waits for a merge, answers are looked for between two steps: when one is there, x = anchor' + (x - x at the sending),
and anchor' is what the next push is a difference to. A push or an answer that was lost on its way is found by asking: when
no byte has moved for a while, the servers say what they know, as they do while a worker waits. `consolidate` then takes the
servers' newest values without a merge and without other workers; what this worker has not pushed yet is not in them, and
goes with the next push.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.push import Measures
from polytempo.reducer.coordination import ByBallot, period_of
from polytempo.reducer.exchange import Exchange, GroupValues
from polytempo.reducer.peers import PeerExchange
from polytempo.reducer.servers import ServerExchange
from polytempo.session.leaving import LeavingStep
from polytempo.sync.actions import Admit, Release
from polytempo.sync.blocks import BlockMachine
from polytempo.sync.machine import (
    Asked,
    EndBlock,
    Install,
    SatOut,
    SendPush,
    StepHere,
)
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest
from polytempo.train.fragment import Fragment
from polytempo.train.observers import BlockLoss, LossWatch
from polytempo.train.update import Wrapped, left_as_shown


class LocalStepUpdate(MachineUpdate):
    """Blocks of one optimizer."""

    _machine: BlockMachine

    def __init__(self, wrapped: Wrapped, fragments: Sequence[Fragment], machine: BlockMachine) -> None:
        super().__init__(machine, fragments[0].reducer)
        session, averaging = self._reducer.session, machine.averaging
        self._wrapped, self._averaging = wrapped, averaging
        self._loss = BlockLoss(LossWatch(session)) if averaging.loss else None
        self._held: list[float] = []  # the learning rates of the last local step, where a fall of them waits
        self.fragments = list(fragments)
        self._steps = 0
        self._averages = 0
        self._exchanged = 0.0  # seconds since the main fragment was sent
        self._hyper: GroupValues = ()  # of the last local step
        self._watch = None if averaging.waits else AnswerWatch([fragment.reducer for fragment in fragments])
        for number, fragment in enumerate(self.fragments):
            self._tell(Admit(session.rank, fragment.reducer.step), number)
        for number in range(len(self.fragments)):
            self._hear(number)
        session.on_leave(LeavingStep.FLUSH, self.flush)

    def performs(self) -> LivePerforms:
        return {
            StepHere: self._step_here,
            SendPush: self._send,
            Install: self._install,
        }

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def period(self) -> int:
        return period_of(self.fragments[0].reducer.directive)

    def stats(self) -> dict[str, Any]:
        left_out = {} if self._watch is None else {"left_out": self._machine.left_out}
        return {"period": self.period, "averages": self._averages, **left_out}

    # The machine.

    def _hear(self, number: int = 0) -> None:
        reducer = self.fragments[number].reducer
        self._tell(Release(reducer.session.rank, reducer.step, reducer.step, reducer.directive), number)

    def _wait(self) -> None:
        """For an answer without which nothing more can be done."""
        if self._watch is not None:
            self._watch.settle()
            self._hear_answers()
            return
        (number,) = self._machine.awaited
        with profiled("average"):
            self.fragments[number].reducer.finish()
            self._hear(number)

    def _hear_answers(self) -> None:
        for number, fragment in enumerate(self.fragments):
            if fragment.is_answered():
                fragment.reducer.finish()
                self._hear(number)

    # Local steps.

    def step(self, request: StepRequest) -> Any:
        for fragment in self.fragments:
            fragment.restore()
        if self._watch is not None and any(fragment.sent_at is not None for fragment in self.fragments):
            self._watch.poll()
            self._hear_answers()
        return super().step(request)

    def _step_here(self, order: StepHere) -> None:
        began, request, wrapped = time.perf_counter(), self._request, self._wrapped
        measures = request.measures
        skipped = request.skip or measures.samples == 0
        with self._held_rates():
            self._hyper = wrapped.hyper()
            if not skipped:
                wrapped.clip()
                self._result = wrapped.step(request.closure)
        if self._loss is not None and skipped:
            self._loss.skip()
        elif self._loss is not None:
            given = self._result if request.loss is None else request.loss
            self._loss.add(given, measures.samples, request.scale, request.unscaled)
        measures.computed += time.perf_counter() - began
        self._steps += 1
        main, *others = self.fragments
        main.made.add(measures)
        for fragment in others:  # what is said of a step is said once
            fragment.made.add(Measures(samples=measures.samples))

    @contextmanager
    def _held_rates(self) -> Iterator[None]:
        """Inside, a fall of the learning rate waits, where the mode says so and blocks have more than one step."""
        if not self._averaging.holds_lr:
            yield
            return
        groups = self._wrapped.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        now = [float(lr) for lr in scheduled]
        held = self._held if self._held and self.period > 1 else now
        self._held = [max(one, other) for one, other in zip(held, now, strict=True)]
        for group, lr in zip(groups, self._held, strict=True):
            group["lr"] = lr
        try:
            yield
        finally:
            for group, lr in zip(groups, scheduled, strict=True):
                group["lr"] = lr

    def look(self, reducer: Exchange, params: Sequence[torch.Tensor]) -> None:
        own = self._wrapped.params
        if len(params) != len(own) or any(one is not other for one, other in zip(params, own, strict=True)):
            raise UsageError("the optimizer's parameters were changed after it was made distributed; wrap it after that")
        for fragment in self.fragments:
            fragment.look()

    # Rounds.

    def _send(self, order: SendPush) -> None:
        fragment = self.fragments[order.part]
        fragment.made.fields = order.measured
        hyper = self._hyper or self._wrapped.hyper()
        if fragment is self.fragments[0]:
            made = fragment.made
            made.exchanged, self._exchanged = self._exchanged, 0.0
            if self._averaging.lr:
                made.lr = float(hyper[0]["lr"])
            if self._loss is not None and made.count:
                made.loss = self._loss.take(self._reducer.spec.sync)
        fragment.send(self._steps, hyper, self._wrapped.finite)

    def _install(self, order: Install) -> None:
        fragment = self.fragments[order.part]
        if fragment.sent_at is None:  # the values that all start with are here already
            return
        fragment.install(order.pull)
        self._count_average(fragment)

    def _count_average(self, fragment: Fragment) -> None:
        self._exchanged += fragment.reducer.waited
        if fragment is self.fragments[0]:
            self._averages += 1
            if self._averaging.state == "reset":
                drop_state(self._wrapped.optimizer)

    def flush(self, restarts: bool = False) -> None:
        """Send what was not sent yet, and take all that is under way; `restarts`: all workers do so now."""
        shows = any(fragment.shows_the_jobs for fragment in self.fragments)
        with left_as_shown(self._wrapped.params, shows), torch.no_grad():
            for fragment in self.fragments:
                fragment.restore()
            self._tell(EndBlock(restarts))
            while not self._machine.computes:
                self._wait()
        if self._watch is not None:
            self._watch.forget()  # pushes of no change: this worker need not know of their merge

    def consolidate(self, reducer: Exchange) -> None:
        if self._averaging.own:  # the job's model is another than this worker's, which goes on from its own
            for fragment in self.fragments:
                assert isinstance(fragment.reducer, ServerExchange)  # the mode has no other
                fragment.show_beside(fragment.reducer.held.newest())
            return
        if self._watch is None:
            self.flush(restarts=True)
            return
        for number, fragment in enumerate(self.fragments):
            newest = self._watch.reducers[number].held.newest()
            self._watch.poll()  # an answer may have come meanwhile
            self._hear_answers()
            self._tell(Asked())
            fragment.show(newest)

    def push_values(self, reducer: Exchange) -> None:
        for fragment in self.fragments:
            fragment.carry()

    def join(self) -> None:
        peers = [one.reducer for one in self.fragments if isinstance(one.reducer, PeerExchange)]
        if not peers or not isinstance(peers[0].coordination, ByBallot):
            return
        self.flush()
        with torch.no_grad():
            while not peers[self._machine.upcoming].join():
                fragment = self.fragments[self._machine.upcoming]
                fragment.use_rates(self._wrapped.hyper())
                fragment.install()
                self._count_average(fragment)
                number = self.fragments.index(fragment)
                self._hear(number)
                self._tell(SatOut(), number)
        self.flush(restarts=True)

    def state(self, reducer: Exchange) -> dict[str, Any]:
        outer = [momentum for fragment in self.fragments if (momentum := fragment.momentum())]
        return {"outer": outer} if outer else {}

    def load_state(self, reducer: Exchange, state: dict[str, Any]) -> None:
        for fragment, momentum in zip(self.fragments, state.get("outer", []), strict=False):
            fragment.load_momentum(momentum)


class AnswerWatch:
    """Answers that no worker waits for, of all fragments."""

    def __init__(self, reducers: Sequence[Exchange]) -> None:
        self.reducers = [reducer for reducer in reducers if isinstance(reducer, ServerExchange)]
        assert len(self.reducers) == len(reducers)  # the mode has no other way
        self._client, self._session = self.reducers[0].client, self.reducers[0].session

    def poll(self) -> None:
        with self._session.lock:
            self._client.poll()

    def settle(self) -> None:
        """Wait until one more is there."""
        with self._session.lock:
            self._client.settle(*(reducer.name for reducer in self.reducers), enough=any)

    def forget(self) -> None:
        """No further answer is looked for."""
        for reducer in self.reducers:
            self._client.exchanges.forget(reducer.client_state)


def drop_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state what it was before the first step."""
    if isinstance(optimizer, torch.optim.Adagrad):  # the one that makes its state with itself
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["step"].zero_()
                optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])
        return
    optimizer.state.clear()

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

`adacomm` learns the loss from `backward()` (`loss_watch.py`). With `hold=1` a fall of the learning rate waits while blocks
have more than one step: local steps are made at the rate before it. A rise is not held.

In decoupled DiLoCo the turns of the fragments are others (`decoupled_turns.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.protocol.push import Measures
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.session.session import Session
from polytempo.sync.spec import Spec
from polytempo.train.decoupled_turns import DecoupledTurns
from polytempo.train.driver import StepRequest, StepUpdate
from polytempo.train.fragment import Fragment
from polytempo.train.loss_watch import BlockLoss, LossWatch
from polytempo.train.update import Wrapped, step_unwrapped


class LocalStepUpdate(StepUpdate):
    """Blocks of one optimizer."""

    def __init__(self, session: Session, wrapped: Wrapped, fragments: Sequence[Fragment], spec: Spec) -> None:
        assert spec.averaging is not None
        self._session, self._wrapped, self._spec, self._averaging = session, wrapped, spec, spec.averaging
        self._loss = BlockLoss(LossWatch(session)) if spec.averaging.loss else None
        self._held: list[float] = []  # the learning rates of the last local step, where a fall of them waits
        self.fragments = list(fragments)
        self._steps = 0
        self._averages = 0
        self._exchanged = 0.0  # seconds since the main fragment was sent
        self._hyper: GroupValues = ()  # of the last local step
        self._start_turns()
        waits = self._averaging.waits
        self._decoupled = None if waits else DecoupledTurns(self.fragments, self._send, self._count)
        session.flushing.append(self.flush)

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def period(self) -> int:
        """Local steps in the block that runs."""
        return self.fragments[0].reducer.period

    def stats(self) -> dict[str, Any]:
        left_out = {} if self._decoupled is None else {"left_out": self._decoupled.left_out}
        return {"period": self.period, "averages": self._averages, **left_out}

    # Local steps.

    def step(self, request: StepRequest) -> Any:
        """One local step, and what is due after it."""
        began = time.perf_counter()
        result = self._make(request)
        request.measures.computed += time.perf_counter() - began
        self._steps += 1
        main, *others = self.fragments
        main.made.add(request.measures)
        for fragment in others:  # what is said of a step is said once
            fragment.made.add(Measures(samples=request.measures.samples))
        self._take_turns()
        return result

    def _make(self, request: StepRequest) -> Any:
        wrapped, result = self._wrapped, None
        with self._held_rates():
            self._hyper = wrapped.hyper()
            if request.skip or request.measures.samples == 0:
                if self._loss is not None:
                    self._loss.skip()
                return None
            wrapped.clip()
            if request.closure is None:
                step_unwrapped(wrapped.optimizer)
            else:
                result = wrapped.optimizer.step(request.closure)
        if self._loss is not None:
            given = result if request.loss is None else request.loss
            self._loss.add(given, request.measures.samples, request.scale, request.unscaled)
        return result

    @contextmanager
    def _held_rates(self) -> Iterator[None]:
        """Inside, a fall of the learning rate is held back, where the mode does and blocks have more than one step."""
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

    def look(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None:
        own = self._wrapped.params
        if len(params) != len(own) or any(one is not other for one, other in zip(params, own, strict=True)):
            raise UsageError("the optimizer's parameters were changed after it was made distributed; wrap it after that")
        for fragment in self.fragments:
            fragment.look()

    # Rounds.

    def _start_turns(self) -> None:
        """A new cycle starts with the next step."""
        count = len(self.fragments)
        for number, fragment in enumerate(self.fragments):
            fragment.due = self._steps + (number * self.period // count or self.period)

    def _in_turn(self) -> list[Fragment]:
        """The fragments, the next to be sent first: all workers begin and finish rounds in this order."""
        return sorted(self.fragments, key=lambda fragment: fragment.due)

    def _take_turns(self) -> None:
        if self._decoupled is not None:
            self._decoupled.after_step(self._steps)
            return
        overlap = self._averaging.overlap
        for fragment in self.fragments:
            if fragment.sent_at is not None and fragment.sent_at + overlap == self._steps:
                self._take(fragment)
        for fragment in self.fragments:
            if fragment.due == self._steps:
                self._send(fragment)
                if not overlap:
                    self._take(fragment)

    def _send(self, fragment: Fragment) -> None:
        hyper = self._hyper or self._wrapped.hyper()
        rates = [float(group["lr"]) for group in hyper]
        if fragment is self.fragments[0]:
            made = fragment.made
            made.exchanged, self._exchanged = self._exchanged, 0.0
            if self._averaging.lr:
                made.lr = rates[0]
            if self._loss is not None and made.count:
                made.loss = self._loss.take(self._spec.text)
        fragment.send(self._steps, hyper, rates, self._wrapped.finite)

    def _take(self, fragment: Fragment) -> None:
        fragment.take()
        self._took(fragment)

    def _took(self, fragment: Fragment) -> None:
        fragment.due += max(fragment.reducer.period, 1)  # from when it was due: fragments keep their order
        self._count(fragment)

    def _count(self, fragment: Fragment) -> None:
        """The average of a fragment was taken."""
        self._exchanged += fragment.reducer.waited
        if fragment is self.fragments[0]:
            self._averages += 1
            if self._averaging.state == "reset":
                drop_state(self._wrapped.optimizer)

    def flush(self) -> None:
        """Send what was not sent yet, and take all that is under way."""
        with torch.no_grad():
            if self._decoupled is not None:
                self._decoupled.flush()
                return
            self._finish_block()

    def _finish_block(self) -> None:
        """Take what is under way, then send and take what was changed since: one fragment after another, as in a block, so
        that workers which are in one follow the same order."""
        for fragment in self._in_turn():
            if fragment.sent_at is not None:
                self._take(fragment)
        for fragment in self._in_turn():
            if fragment.made.count:
                self._send(fragment)
                self._take(fragment)

    def consolidate(self, reducer: Reducer) -> None:
        if self._decoupled is not None:
            self._decoupled.consolidate()
            return
        self._finish_block()
        self._start_turns()

    def push_values(self, reducer: Reducer) -> None:
        for fragment in self.fragments:
            fragment.carry()

    def join(self) -> None:
        if not self.fragments[0].reducer.needs_join:
            return
        self.flush()
        with torch.no_grad():
            while not (fragment := self._in_turn()[0]).reducer.join():
                fragment.use_rates([float(group["lr"]) for group in self._wrapped.hyper()])
                fragment.install()
                self._took(fragment)
        self._start_turns()

    # Optimizer state beside the wrapped optimizer's.

    def outer_state(self) -> list[Any]:
        """The outer momentum of each fragment."""
        return [momentum for fragment in self.fragments if (momentum := fragment.momentum())]

    def load_outer_state(self, state: Sequence[Any]) -> None:
        """Go on from it."""
        for fragment, momentum in zip(self.fragments, state, strict=False):
            fragment.load_momentum(momentum)


def drop_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state what it was before the first step."""
    if isinstance(optimizer, torch.optim.Adagrad):  # the one that makes its state with itself
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["step"].zero_()
                optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])
        return
    optimizer.state.clear()

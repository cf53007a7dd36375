"""`bsp+balance` on the worker: steps on this worker's share of the joint batch, made by another update.

A push says what it was made of: samples, which weigh it, their cost, the places of the epoch's order, and the last batch
that the sampler has handed out. Nothing is drawn until the answer is here, which may bring new weights
(`session/ledger.py`).

With `micro=M` a share is several micro-batches, one in each call of `step()`. Gradients are summed, weighted by samples, and
the mean is pushed with the last of the share; calls before that change no parameter. A micro-batch that a `GradScaler` has
found not finite is left out. Hyper-parameters are those at the push: workers take different numbers of micro-batches in a
round, so a scheduler that is stepped with each of them differs between workers, which the barrier refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.protocol.push import no_steps
from polytempo.reducer.reducer import Reducer
from polytempo.session.ledger import united
from polytempo.session.session import Session
from polytempo.sync.spec import Spec
from polytempo.train.driver import StepRequest, StepUpdate

#: Sums of narrow gradients are kept wider: a sum over samples is larger than a mean.
NARROW = (torch.float16, torch.bfloat16)

#: What the barrier says of workers that stand at different steps of a schedule.
DIFFER = "hyper-parameters differ"


class MicroBatchSum:
    """The gradients of several micro-batches, weighted by samples."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._sums: list[torch.Tensor | None] = [None] * len(params)
        self.samples = 0.0

    def add(self, samples: float) -> None:
        """Add the gradients as they are now."""
        self.samples += samples
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None or not samples:
                continue
            if grad.layout != torch.strided:
                raise UsageError(
                    f"micro-batches cannot be summed for gradients of layout {grad.layout}; use sparse=False, or "
                    "sync='bsp+balance' with pt.DistributedBatchSampler"
                )
            total = self._sums[index]
            if total is None:
                wide = torch.float32 if grad.dtype in NARROW else grad.dtype
                self._sums[index] = grad.to(wide, copy=True).mul_(samples)
            else:
                total.add_(grad, alpha=samples)

    def assign_mean(self) -> None:
        """Make `.grad` the mean, and start over."""
        for index, (param, total) in enumerate(zip(self._params, self._sums, strict=True)):
            if total is None:
                param.grad = None
                continue
            total.div_(self.samples)
            if param.grad is None:
                param.grad = total.to(param.dtype)
            else:
                param.grad.copy_(total)
            self._sums[index] = None
        self.samples = 0.0

    def drop(self) -> None:
        """Start over."""
        self._sums, self.samples = [None] * len(self._params), 0.0


class ShareUpdate(StepUpdate):
    """Steps on shares of joint batches.

    Args:
        update: Makes the steps.
        session: The job.
        spec: The mode.
        params: The parameters.
        reducer: Brings the answers; None in a job of one.
        deals: Is it the first optimizer of its worker? Steps of others are made of the same batches.
    """

    def __init__(
        self,
        update: StepUpdate,
        session: Session,
        spec: Spec,
        params: Sequence[torch.Tensor],
        reducer: Reducer | None,
        deals: bool,
    ) -> None:
        if spec.micro and not deals:
            raise UsageError(f"{spec.text} sums the micro-batches of one optimizer; make one, or use sync='bsp+balance'")
        self._update, self._session, self._spec, self._reducer, self._deals = update, session, spec, reducer, deals
        self._ledger = session.ledger
        self._sum = MicroBatchSum(params)
        self._measures = no_steps()  # of the micro-batches in the sum
        if deals:
            self._ledger.resume(reducer.directive if reducer is not None else None)
        if spec.micro and reducer is not None:
            reducer.set_sending(False)
        elif deals and reducer is not None:
            reducer.expect(lambda: self._ledger.samples(upcoming=True))

    @property
    def steps(self) -> int:
        return self._update.steps

    def step(self, request: StepRequest) -> Any:
        if not self._deals:
            if not request.weighed:
                request.measures.samples = self.samples()
            return self._update.step(request)
        batches = self._ledger.batches
        if not batches and self._session.together:
            raise UsageError(self._why_not_dealt())
        if not request.weighed:
            request.measures.samples = self._ledger.samples(upcoming=False)
        request.measures.work = float(sum(batch.cost for batch in batches))
        if not self._spec.micro:
            return self._push(request)
        self._collect(request)
        return self._push_sum(request) if all(batch.ends_share for batch in batches) else None

    def _collect(self, request: StepRequest) -> None:
        """Add a micro-batch to the sum."""
        if request.agreed:
            raise UsageError(
                f"worker {self._session.rank}: synchronize() averages one batch, and a step of {self._spec.text} is "
                "several; use clip_norm= of DistributedOptimizer"
            )
        if not request.skip:
            self._sum.add(request.measures.samples)
        self._measures.add(request.measures)
        self._measures.vital_signs = request.measures.vital_signs  # the last: those before were made on the same values

    def _push_sum(self, request: StepRequest) -> Any:
        """This worker's share is done."""
        request.measures, self._measures = self._measures, no_steps()
        request.measures.positions = united(request.measures.positions)
        request.measures.samples, request.skip = self._sum.samples, not self._sum.samples
        if request.skip:
            self._sum.drop()
        else:
            self._sum.assign_mean()
        return self._push(request)

    def _push(self, request: StepRequest) -> Any:
        directive, request.measures.drawn = None, self._ledger.freeze()
        try:
            result = self._update.step(request)
            directive = self._reducer.directive if self._reducer is not None else None
        except PolytempoError as error:
            if self._spec.micro and DIFFER in str(error):
                raise UsageError(
                    f"{error}; workers take different numbers of micro-batches in a round: call scheduler.step() once a "
                    "round, when optimizer.stats['step'] has grown, or once an epoch"
                ) from error
            raise
        finally:
            self._ledger.resume(directive)
        return result

    def _why_not_dealt(self) -> str:
        size = "batch_size" if self._spec.micro else "the mean batch of a worker"
        batches = f"DataLoader(data, batch_sampler=pt.DistributedBatchSampler(data, {size}))"
        micro = "sampler=pt.DistributedSampler(data, batch_size=...) and"
        other = micro if self._spec.micro else f"--sync bsp+balance,micro=8 with {micro}"
        return (
            f"worker {self._session.rank}: {self._spec.text} found no batch that was dealt by speed, and drawn after the "
            f"optimizer was made; use {batches}, or {other} the loader's batch_size"
        )

    def samples(self) -> float:
        """Samples of the next batch; of other optimizers than the first, of the batch that the first has trained on."""
        return self._ledger.samples(upcoming=self._deals)

    def join(self) -> None:
        self._update.join()

    def look(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None:
        self._update.look(reducer, params)

    def push_values(self, reducer: Reducer) -> None:
        self._update.push_values(reducer)

    def consolidate(self, reducer: Reducer) -> None:
        self._update.consolidate(reducer)

    def stats(self) -> dict[str, Any]:
        return {**self._update.stats(), "share": self._ledger.share()}

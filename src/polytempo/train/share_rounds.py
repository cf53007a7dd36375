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

from polytempo.errors import HyperDiffer, UsageError
from polytempo.reducer.exchange import Exchange
from polytempo.session.ledger import united
from polytempo.session.session import Session
from polytempo.sync.spec import Spec
from polytempo.train.driver import StepRequest, StepUpdate
from polytempo.train.gradient_sums import WideSum


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
        reducer: Exchange | None,
        deals: bool,
    ) -> None:
        micro = spec.capabilities.micro
        if micro and not deals:
            raise UsageError(f"{spec.text} sums the micro-batches of one optimizer; make one, or use sync='bsp+balance'")
        self._update, self._session, self._mode, self._deals = update, session, spec.text, deals
        self._ledger, self._params = session.ledger, params
        self._sum = WideSum(params) if micro else None  # of this worker's share
        if micro and reducer is not None:
            reducer.set_sending(False)

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
        total = self._sum
        if total is None:
            return self._push(request)
        if request.agreed:
            raise UsageError(
                f"worker {self._session.rank}: synchronize() averages one batch, and a step of {self._mode} is "
                "several; use clip_norm= of DistributedOptimizer"
            )
        if not request.skip and request.measures.samples:
            total.add(request.measures.samples)
        total.say(request.measures)
        if not all(batch.ends_share for batch in batches):
            return None
        self._sum = WideSum(self._params)
        return self._push_sum(request, total)

    def _push_sum(self, request: StepRequest, total: WideSum) -> Any:
        request.measures, request.skip = total.measures, not total.count
        request.measures.positions, request.measures.samples = united(total.measures.positions), total.samples
        if total.count:
            total.assign_mean()
        try:
            return self._push(request)
        except HyperDiffer as error:
            raise UsageError(
                f"{error}; workers take different numbers of micro-batches in a round: call scheduler.step() once a "
                "round, when optimizer.stats['step'] has grown, or once an epoch"
            ) from error

    def _push(self, request: StepRequest) -> Any:
        """Nothing is drawn until the answer is here, which may bring new weights."""
        request.measures.drawn = self._ledger.freeze()
        try:
            return self._update.step(request)
        finally:
            self._ledger.resume()

    def _why_not_dealt(self) -> str:
        size = "the mean batch of a worker" if self._sum is None else "batch_size"
        batches = f"DataLoader(data, batch_sampler=pt.DistributedBatchSampler(data, {size}))"
        micro = "sampler=pt.DistributedSampler(data, batch_size=...) and"
        other = f"--sync bsp+balance,micro=8 with {micro}" if self._sum is None else micro
        return (
            f"worker {self._session.rank}: {self._mode} found no batch that was dealt by speed, and drawn after the "
            f"optimizer was made; use {batches}, or {other} the loader's batch_size"
        )

    def samples(self) -> float:
        """Samples of the next batch; of other optimizers than the first, of the batch that the first has trained on."""
        return self._ledger.samples(upcoming=self._deals)

    def join(self) -> None:
        self._update.join()

    def look(self, reducer: Exchange, params: Sequence[torch.Tensor]) -> None:
        self._update.look(reducer, params)

    def push_values(self, reducer: Exchange) -> None:
        self._update.push_values(reducer)

    def consolidate(self, reducer: Exchange) -> None:
        self._update.consolidate(reducer)

    def stats(self) -> dict[str, Any]:
        return {**self._update.stats(), "share": self._ledger.share()}

"""The engine for `bsp+balance`: each worker computes its share of the joint batch.

A share of half a batch takes half the time of a step (of its fixed time all); stalls take what they take. The joint batch is
a batch for each member; at the end of an epoch of real data it is what is left. It is dealt out when the first worker begins
the round: by the newest weights that hold for it. A worker that joins in the middle of a round has no share in it and pushes
nothing.

Loaders that read ahead are a number here, `prefetch`: batches that are drawn and keep their cut.
"""

from __future__ import annotations

from array import array
from typing import Any

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.dealing import DealtSamples, MicroBatch
from polytempo.simulate.engine import SimulationEngine
from polytempo.simulate.links import Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import DealtTrainer, Worker
from polytempo.sync.actions import Apply, Discard, Refuse, Release
from polytempo.sync.directives import NextShares
from polytempo.sync.events import Pushed
from polytempo.sync.policy import Policy
from polytempo.sync.shares import ShareWeights, cut


class BalanceEngine(SimulationEngine):
    """One run of `bsp+balance`.

    Args:
        micro: Shares are whole micro-batches, this number of them on average; 0: whole samples.
        prefetch: Batches that each worker's loader has drawn beyond the one that is computed.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        route: Route | None,
        budget: Budget,
        micro: int = 0,
        trainer: DealtTrainer | None = None,
        prefetch: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(cluster, policy, route, budget, trainer=trainer, **options)
        self._learner, self._micro, self._prefetch = trainer, micro, prefetch
        self._samples = DealtSamples(None if trainer is None else trainer.length)
        self._weights: list[tuple[int, ShareWeights]] = []  # and the first round that is cut by them
        self._round = -1  # the one that is dealt out
        self._deal: dict[int, list[MicroBatch]] = {}  # of it, what no worker has begun yet
        self._begun: dict[int, list[MicroBatch]] = {}  # what each worker computes, or has in flight
        for worker in self.workers:
            worker.hiccups, worker.samples = array("d"), 0

    def _release(self, release: Release, now: float) -> None:
        told = release.directive
        if isinstance(told, NextShares) and told.weights and (not self._weights or self._weights[-1][1] != told.weights):
            self._weights.append((told.since[1] if told.since else release.step, told.weights))
        super()._release(release, now)

    def _compute(self, now: float, worker: Worker, step: int, version: int) -> None:
        if step != self._round:
            self._deal_out(step)
        share = self._begun[worker.rank] = self._deal.pop(worker.rank, [])
        samples = sum(batch.samples for batch in share)
        if not samples:
            worker.step_times.append(0.0)
        else:
            if not worker.step_times:
                worker.draw()
            stall = worker.hiccups.pop() if worker.hiccups else 0.0
            worker.step_times[-1] = worker.seconds_for(samples, worker.step_times[-1], len(share)) + stall
        super()._compute(now, worker, step, version)

    def _deal_out(self, step: int) -> None:
        """Cut the joint batch of a round; what is left of the one before, of workers that are gone, is dealt out again."""
        for rank, share in self._deal.items():
            self._samples.give_back(rank, share)
        while len(self._weights) > 1 and self._weights[1][0] <= step:
            del self._weights[0]
        weights = self._weights[0][1]
        unit = max(1, self._cluster.batch // self._micro) if self._micro else 1
        wanted = unit * self._micro * len(weights) if self._micro else sum(self.workers[rank].batch for rank, _ in weights)
        parts = cut(-(-self._samples.left(wanted) // unit), weights)
        size = {rank: unit if self._micro else count for rank, count in parts.items()}
        self._round, self._deal = step, {
            rank: [self._samples.take(rank, size[rank]) for _ in range(count if self._micro else count > 0)]
            for rank, count in parts.items()
        }  # fmt: skip

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        share = self._begun.pop(worker.rank)
        samples = sum(batch.samples for batch in share)
        computed = now - worker.since if self._route is None else worker.spent
        drawn = None if self._micro else (0, step + self._prefetch)
        self._samples.pushed(worker.rank, step, share)
        push = Pushed(worker.rank, step, samples, (), len(share), None, None, samples, computed, drawn)
        super()._pushed(now, worker, step, version, push)

    def _apply(self, apply: Apply, now: float) -> None:
        for push in apply.pushes:
            worker = self.workers[push.worker]
            worker.samples = (worker.samples or 0) + int(push.samples)
        if not self._learner:
            self._samples.applied(apply.pushes)
        super()._apply(apply, now)

    def _learn(self, apply: Apply, used: list[int]) -> None:
        assert self._learner is not None
        made_of = self._samples.applied(apply.pushes)
        self._learner.apply_dealt(apply.pushes, made_of, used, apply.rate, apply.divisor)

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        self._samples.dropped(action.worker, action.step)
        super()._drop(action, now)

    def _end_life(self, worker: Worker) -> None:
        super()._end_life(worker)
        self._samples.give_back(worker.rank, self._begun.pop(worker.rank, []))

"""One weight, plain Python: what modes without rounds must come to, worked out a second time without torch.

The problem is a regression of one weight in double precision, so that every trajectory can be followed to the last digits.
Times are constant and have no common multiple in reach: no two things happen at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from polytempo.simulate.cluster import Cluster, Constant, Link
from polytempo.simulate.replicas import Shards
from polytempo.simulate.virtual_training import TrainingRun, train_virtually

BATCH = 4
START = 0.25
SPEEDS = (1.0, 1.3717, 2.1131)
DATA = torch.Generator().manual_seed(5)
INPUTS = torch.randn(240, 1, generator=DATA, dtype=torch.float64)
TARGETS = 1.5 * INPUTS + 0.3 * torch.randn(240, 1, generator=DATA, dtype=torch.float64)

Update = Callable[[float, float, float, int], float | None]


def gradients(workers: int) -> Callable[[int, int, float], float]:
    """The gradient of a worker's step at a weight."""
    shards = Shards(len(INPUTS), workers, [BATCH] * workers, seed=0)

    def gradient(worker: int, step: int, weight: float) -> float:
        index = shards.batch(worker, step)
        pairs = zip(INPUTS[index, 0].tolist(), TARGETS[index, 0].tolist(), strict=True)
        return sum((weight * x - y) * x for x, y in pairs) / BATCH

    return gradient


def model() -> nn.Module:
    line = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(line.weight, START)
    return line


def halved(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean() / 2


def train(sync: str, optimizer: Callable[[list[nn.Parameter]], Any], *speeds: float, latency: float = 0.0, **options: Any):
    """The run, and the weight it came to."""
    cluster = Cluster(
        workers=len(speeds),
        batch=BATCH,
        step_times={rank: Constant(seconds) for rank, seconds in enumerate(speeds)},
        link=Link(latency),
    )
    data = (INPUTS, TARGETS), (INPUTS, TARGETS)
    run: TrainingRun = train_virtually(
        model(),
        data,
        halved,
        sync=sync,
        cluster=cluster,
        optimizer=optimizer,
        metric=lambda output, target: float(halved(output, target)),
        evaluate_every=1e9,
        **options,
    )
    return run, run.model.weight.item()


def asynchronous(speeds: tuple[float, ...], seconds: float, update: Update) -> float:
    """Every push is applied when it comes. `update(weight, gradient, read, staleness)`; None: it is not applied."""
    gradient = gradients(len(speeds))
    weight, version = START, 0
    read = dict.fromkeys(range(len(speeds)), (START, 0))
    heap = [(seconds_of_step, worker, 0) for worker, seconds_of_step in enumerate(speeds)]
    heapq.heapify(heap)
    while heap[0][0] <= seconds:
        now, worker, step = heapq.heappop(heap)
        old, made = read[worker]
        new = update(weight, gradient(worker, step, old), old, version - made)
        if new is not None:
            weight, version = new, version + 1
        read[worker] = (weight, version)
        heapq.heappush(heap, (now + speeds[worker], worker, step + 1))
    return weight


class Downpour:
    """Replicas that step by themselves, a master that adds up, and messages that take `latency` each way."""

    def __init__(self, speeds: tuple[float, ...], push: int, fetch: int, rate: float, alpha: float, latency: float) -> None:
        self.speeds, self.push, self.fetch, self.rate, self.alpha = speeds, push, fetch, rate, alpha
        self.latency, self.master, self.gradient = latency, START, gradients(len(speeds))
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.replicas = [
            SimpleNamespace(
                local=START, log=[], sent=0, applied=0, pushes=0, allowed=1, idle=True, due=False, came=None, under_way=False
            )
            for _ in speeds
        ]

    def run(self, seconds: float) -> float:
        for worker in range(len(self.speeds)):
            self.later(0.0, self.latency, self.boundary, worker)
        while self.heap and self.heap[0][0] <= seconds:
            now, _, act, args = heapq.heappop(self.heap)
            act(now, *args)
        return self.master

    def later(self, now: float, delay: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (now + delay, next(self.order), act, args))

    def boundary(self, now: float, worker: int) -> None:
        me = self.replicas[worker]
        me.idle = len(me.log) == me.sent and me.pushes > me.allowed
        if me.idle:
            return
        if me.came is not None:
            me.local, known = me.came
            for g in me.log[known:]:
                me.local -= self.alpha * g
            me.came = None
        me.due = me.due or (len(me.log) > 0 and len(me.log) % self.fetch == 0)
        if me.due and not me.under_way:
            me.due, me.under_way = False, True
            self.later(now + self.latency, self.latency, self.fetched, worker, (self.master, me.applied))
        self.later(now, self.speeds[worker], self.stepped, worker)

    def fetched(self, now: float, worker: int, what: tuple[float, int]) -> None:
        self.replicas[worker].came, self.replicas[worker].under_way = what, False

    def stepped(self, now: float, worker: int) -> None:
        me = self.replicas[worker]
        me.log.append(self.gradient(worker, len(me.log), me.local))
        me.local -= self.alpha * me.log[-1]
        if len(me.log) - me.sent == self.push:
            self.later(now, self.latency, self.arrived, worker, me.log[me.sent :])
            me.sent, me.pushes = len(me.log), me.pushes + 1
        self.later(now, 0.0, self.boundary, worker)

    def arrived(self, now: float, worker: int, pushed: list[float]) -> None:
        self.master -= self.rate * sum(pushed)
        self.replicas[worker].applied += len(pushed)
        self.later(now, self.latency, self.permitted, worker)

    def permitted(self, now: float, worker: int) -> None:
        self.replicas[worker].allowed += 1
        if self.replicas[worker].idle:
            self.boundary(now, worker)

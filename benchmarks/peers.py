"""What we are compared with: the same job written by hand in SimPy, a bare event heap, a plain training loop."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator
from random import Random
from typing import Any

STEP = (1.0, 0.3)  # mean and spread of a step, in all of these


def bare_heap(workers: int, steps: int) -> int:
    """The limit: take the next event, plan another, decide nothing."""
    random = Random(0)
    times = [random.lognormvariate(0, STEP[1]) for _ in range(4096)]
    heap = [(times[rank % 4096], rank) for rank in range(workers)]
    heapq.heapify(heap)
    for number in range(workers * steps):
        now, rank = heap[0]
        heapq.heapreplace(heap, (now + times[number % 4096], rank))
    return workers * steps


def simpy_ssp(workers: int, steps: int, bound: int) -> int:
    """Bounded staleness as one would write it in SimPy: no members that come and go, no reasons, no figures."""
    import simpy

    env = simpy.Environment()
    random = Random(0)
    times = [random.lognormvariate(0, STEP[1]) for _ in range(4096)]
    at = Counter({0: workers})
    state: dict[str, Any] = {"slowest": 0, "moved": env.event()}

    def work(rank: int) -> Generator[Any, Any, None]:
        for step in range(steps):
            while step - state["slowest"] > bound:
                yield state["moved"]
            yield env.timeout(times[(rank * 31 + step) % 4096])
            at[step] -= 1
            at[step + 1] += 1
            if at[state["slowest"]] == 0:
                state["slowest"] += 1
                moved, state["moved"] = state["moved"], env.event()
                moved.succeed()

    for rank in range(workers):
        env.process(work(rank))
    env.run()
    return workers * steps


def plain_training(steps: int) -> int:
    """The limit of training in virtual time: one model, one gradient and one optimizer step after another."""
    import copy

    import torch

    from polytempo.simulate.replicas import Shards
    from polytempo.tasks import digits

    task = digits()
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (inputs, targets), _ = task.data
    shards = Shards(len(inputs), 4, [32] * 4, seed=0)
    for number in range(steps):
        index = shards.batch(number % 4, number // 4)
        optimizer.zero_grad()
        task.loss(model(inputs[index]), targets[index]).backward()
        optimizer.step()
    return steps

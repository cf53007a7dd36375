"""Momentum at each worker: a live job in the order of a simulated one comes to the same weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from polytempo.records.lines import RecordLine
from polytempo.session.session import Session
from polytempo.simulate.cluster import Cluster, Constant
from polytempo.simulate.replicas import Shards
from polytempo.simulate.virtual_training import train_virtually
from polytempo.tasks import digits
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(20)

WORKERS, BATCH = 3, 16
CLUSTER = Cluster(
    workers=WORKERS, batch=BATCH, step_times={rank: Constant(seconds) for rank, seconds in enumerate((1.0, 1.37, 2.11))}
)
TASK = digits()
MODEL = copy.deepcopy(TASK.model).double()
INPUTS, TARGETS = TASK.data[0][0].double(), TASK.data[0][1]

Optimizer = Callable[..., torch.optim.Optimizer]


def simulated(sync: str, optimizer: Optimizer) -> tuple[str, list[int], list[torch.Tensor]]:
    """The spec with its defaults, who pushes when, and the weights in the end."""
    lines: list[RecordLine] = []
    data = (INPUTS, TARGETS), (TASK.data[1][0].double(), TASK.data[1][1])
    run = train_virtually(
        MODEL, data, TASK.loss, sync=sync, cluster=CLUSTER, optimizer=optimizer, steps=30, record=lines.append
    )
    assert bool(run.outcome.discarded) == ("drop" in sync)
    order = [line["worker"] for line in lines if line["kind"] == "push"]
    return run.outcome.sync, order, [p.detach() for p in run.model.parameters()]


def live(sync: str, optimizer: Optimizer, order: list[int]) -> tuple[set[str], list[torch.Tensor]]:
    """The spec that the job came to, and its weights, with pushes in this order."""
    turns = [threading.Event() for _ in range(len(order) + 1)]
    turns[0].set()
    specs: set[str] = set()
    ends: list[list[torch.Tensor]] = []
    shards = Shards(len(INPUTS), WORKERS, [BATCH] * WORKERS, seed=0)
    done = threading.Barrier(WORKERS)

    def work(session: Session) -> None:
        model = copy.deepcopy(MODEL)
        wrapped = DistributedOptimizer(optimizer(model.parameters()), model)
        specs.add(wrapped.spec.text)
        step = 0
        for number, worker in enumerate(order):
            if worker == session.rank:
                assert turns[number].wait(20)
                index = shards.batch(worker, step)
                wrapped.zero_grad()
                TASK.loss(model(INPUTS[index]), TARGETS[index]).backward()
                wrapped.step()
                step += 1
                turns[number + 1].set()
        assert turns[-1].wait(20)
        wrapped.consolidate()
        ends.append([p.detach().clone() for p in model.parameters()])
        done.wait(20)  # who leaves changes the others' rate

    with ThreadJob(WORKERS, 2, sync) as job:
        job.run(work)
    return specs, ends[0]


SGD: Any = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("sync", "optimizer"),
    [
        ("asp", SGD),
        ("asp", partial(SGD, weight_decay=0.01)),
        ("asp,momentum=worker", SGD),
        ("asp,momentum=server", SGD),
        ("asp,drop=1", SGD),
        ("ssp:9,lr=staleness", SGD),
        ("asp", partial(torch.optim.Adam, lr=0.003)),
        ("asp", partial(torch.optim.AdamW, lr=0.003, weight_decay=0.1)),
        ("asp", partial(torch.optim.RMSprop, lr=0.001, momentum=0.8)),
    ],
)
def test_virtual_training_is_a_live_job(sync: str, optimizer: Optimizer) -> None:
    text, order, expected = simulated(sync, optimizer)
    specs, found = live(sync, optimizer, order)
    assert specs == {text}
    assert order[:6] == [0, 1, 0, 2, 1, 0]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

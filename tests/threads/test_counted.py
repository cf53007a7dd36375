"""Predicted bytes and memory against those counted by the transport and by hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from polytempo.mesh import Mesh
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session
from polytempo.strategy.costs import Machine, MeasuredLink
from polytempo.strategy.counting import ByteCounter, counted_memory
from polytempo.strategy.measure import measure_model
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.prediction import predict
from polytempo.testing.threads import GroupJob

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

LINK = MeasuredLink(0.0, 0.0)
BATCH = 8


def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide = [nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16), nn.Tanh()]
        return nn.Sequential(nn.Embedding(10, 16), *wide, nn.Dropout(0.1), nn.Linear(16, 10))


INPUTS, TARGETS = torch.arange(BATCH) % 10, (torch.arange(BATCH) + 1) % 10
MODEL = model()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "gpipe,recompute=0"])
@pytest.mark.parametrize(("layers", "microbatches"), [((8,), 2), ((3, 5), 4), ((2, 2, 1, 3), 8), ((1, 3, 2, 2), 2)])
def test_a_pipeline(layers: tuple[int, ...], microbatches: int, schedule: str) -> None:
    stages = len(layers)
    mesh = Mesh(pipe=stages)
    plan = ParallelPlan(mesh, layers, BATCH, microbatches, schedule)
    profile = measure_model(
        MODEL, INPUTS, microbatch=plan.microbatch, optimizer=torch.optim.Adam, loss=functional.cross_entropy,
        target=TARGETS, repeats=1,
    )  # fmt: skip
    machine = Machine((tuple(range(stages)),), (1,), LINK, reduce_inside=LINK)
    predicted = predict(plan, profile, machine)
    models = [copy.deepcopy(MODEL) for _ in range(stages)]

    def work(session: Session) -> tuple[object, object]:
        pipe = Pipeline(
            models[session.rank], loss=functional.cross_entropy, optimizer=torch.optim.Adam, stages=list(layers),
            schedule=schedule, microbatches=microbatches,
        )  # fmt: skip
        pipe.step(INPUTS, TARGETS)
        counter = ByteCounter([pipe._built.group], [], lambda: 0)
        with counted_memory(pipe.stage) as memory:
            pipe.step(INPUTS, TARGETS)
        return counter.read(), memory.read()

    with GroupJob(stages) as job:
        counted = job.run(work)
    assert [moved for moved, _ in counted] == list(predicted.moved)
    assert [memory for _, memory in counted] == list(predicted.memory)

"""Predicted bytes and memory against those counted by the transport and by hooks, for every way to use four ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spreading import cross_entropy, part_of, sentences, transformer
from torch import nn

from polytempo.pipeline.partition import cut
from polytempo.session.session import Session
from polytempo.strategy.bytes_moved import RankBytes
from polytempo.strategy.costs import Machine, MeasuredLink
from polytempo.strategy.measure import measure_model
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.prediction import Prediction, RankMemory, predict
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import GroupJob, ThreadJob

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from counting import ByteCounter, counted_memory

pytestmark = [pytest.mark.timeout(60), pytest.mark.long]

LINK = MeasuredLink(0.0, 0.0)
MACHINE = Machine(((0, 1, 2, 3),), (1,), LINK, reduce_inside=LINK)
BATCH = sentences(1)[0]
FACTORISATIONS = [(data, pipe, 4 // data // pipe) for data in (4, 2, 1) for pipe in (4, 2, 1) if 4 % (data * pipe) == 0]
MAKE = torch.optim.Adam
#: Of a model of a few hundred bytes, the votes that end a step of the data axis; of a job over a coordinator there are none.
BALLOTS = 64


def tied_model() -> nn.Module:
    model = transformer()
    model[-1].weight = model[0].weight
    return model


def predicted(strategy: Strategy, model: nn.Module) -> Prediction:
    mesh = strategy.mesh(4)
    parts = cut(model, mesh.pipe)
    layers = tuple(len(part.names) for part in parts)
    microbatches = strategy.microbatches or mesh.pipe
    plan = ParallelPlan(mesh, layers, len(BATCH[0]), microbatches, strategy.schedule)
    profile = measure_model(
        model, BATCH[0], microbatch=plan.microbatch, tensor=mesh.tensor, optimizer=MAKE, loss=cross_entropy,
        target=BATCH[1], repeats=1,
    )  # fmt: skip
    return predict(plan, profile, MACHINE)


def counted(strategy: Strategy, model: nn.Module) -> Callable[[Session], tuple[RankBytes, RankMemory]]:
    def work(session: Session) -> tuple[RankBytes, RankMemory]:
        own = strategy.distribute(models[session.rank], loss=cross_entropy, optimizer=MAKE)
        mine = part_of(BATCH, own.point.data, own.mesh.data)
        for _ in range(4):  # the first steps also compare what must be alike
            own.step(*mine)
        counter = ByteCounter(lambda: own.stats["bytes_sent"])
        with counted_memory(own.pipeline.stage) as memory:
            own.step(*mine)
        return counter.read(), memory.read()

    models = [_copied(model) for _ in range(4)]
    return work


def _copied(model: nn.Module) -> Any:
    made = tied_model() if model[-1].weight is model[0].weight else transformer()
    made.load_state_dict(model.state_dict())
    return made


def check(found: list[tuple[RankBytes, RankMemory]], wanted: Prediction, ballots: int = 0, facts: int = 0) -> None:
    for (moved, memory), bytes_wanted, memory_wanted in zip(found, wanted.moved, wanted.memory, strict=True):
        assert (moved.pipe - facts, moved.tensor) == (bytes_wanted.pipe, bytes_wanted.tensor)
        assert 0 <= moved.data - bytes_wanted.data <= ballots
        held = [(one.parameters, one.gradients, one.state, one.activations) for one in (memory, memory_wanted)]
        assert held[0] == held[1]


@pytest.mark.parametrize(
    ("data", "pipe", "tensor", "schedule"),
    [(*sizes, schedule) for sizes in FACTORISATIONS for schedule in ("1f1b", "gpipe") if sizes[1] > 1 or schedule == "1f1b"],
)
def test_every_factorisation(data: int, pipe: int, tensor: int, schedule: str) -> None:
    strategy = Strategy(data=data, pipe=pipe, tensor=tensor, schedule=schedule, microbatches=4)
    model = transformer()
    with GroupJob(4) as job:
        check(job.run(counted(strategy, model)), predicted(strategy, model), BALLOTS)


@pytest.mark.both_wires
def test_with_a_coordinator() -> None:
    strategy, model = Strategy(data=2, pipe=2), transformer()
    with ThreadJob(4, via="allreduce") as job:
        check(job.run(counted(strategy, model)), predicted(strategy, model))


def test_tied_weights_in_several_stages() -> None:
    strategy, model = Strategy(data=2, pipe=2), tied_model()
    with GroupJob(4) as job:
        check(job.run(counted(strategy, model)), predicted(strategy, model), BALLOTS, facts=16)  # who has a gradient

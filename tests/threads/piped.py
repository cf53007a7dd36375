"""Pipelines whose stages are threads, and what they are compared with: the same model in one piece."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.pipeline import runtime
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.stage import MakeOptimizer, Stage
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob

Batch = tuple[Any, Any]
SGD: MakeOptimizer = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
PLAIN: MakeOptimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
ADAM: MakeOptimizer = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731
mse = nn.functional.mse_loss


@dataclass
class Outcome:
    """What one rank has at the end."""

    losses: list[float | None]
    state: dict[str, torch.Tensor]
    pipe: Pipeline


def layered(layers: int = 5, width: int = 6) -> nn.Sequential:
    """So many layers, of which every second one has parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(layers)
        made = [nn.Linear(width, width) if index % 2 == 0 else nn.Tanh() for index in range(layers)]
    return nn.Sequential(*made).double()


def batches(count: int, size: int, width: int = 6, out: int = 6, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(make(size, width), make(size, out)) for _ in range(count)]


def everywhere(ranks: int, work: Callable[[Session], Any]) -> list[Any]:
    """The result of each rank, or its error."""

    def one(session: Session) -> Any:
        try:
            with as_current(session):
                result = work(session)
        except BaseException as error:  # noqa: BLE001  it is looked at by the test
            session.abandon()
            return error
        session.close()
        return result

    with GroupJob(ranks) as job, ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, job.sessions))


def piped(model: Any, data: Sequence[Batch], ranks: int, optimizer: MakeOptimizer = SGD, **options: Any) -> list[Outcome]:
    """Train copies of a model; what each rank has at the end."""
    loss = options.pop("loss", mse)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(session: Session) -> Outcome:
        pipe = Pipeline(models[session.rank], loss=loss, optimizer=optimizer, **options)
        losses = [pipe.step(x, y) for x, y in data]
        losses += [pipe.flush()] if pipe.schedule.flushes is False else []
        return Outcome(losses, pipe.state_dict(), pipe)

    with GroupJob(ranks) as job:
        return job.run(work)


def alone(
    model: nn.Module,
    data: Sequence[Batch],
    optimizer: MakeOptimizer = SGD,
    microbatches: int = 1,
    loss: Callable[..., torch.Tensor] = mse,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in one piece: losses, and the state it ends with."""
    model = copy.deepcopy(model)
    stepper, losses = optimizer(list(model.parameters())), []
    for x, y in data:
        stepper.zero_grad()
        found = [loss(model(a), b) / microbatches for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)]
        for one in found:
            one.backward()
        stepper.step()
        losses.append(sum(one.item() for one in found))
    return losses, model.state_dict()


def assert_same(outcomes: Sequence[Outcome], wanted: tuple[list[float], dict[str, torch.Tensor]], atol: float) -> None:
    """Every rank has the losses and the state of the model in one piece."""
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        torch.testing.assert_close(outcome.losses, wanted[0], rtol=0, atol=atol)
        assert list(outcome.state) == list(wanted[1])
        for name, value in wanted[1].items():
            torch.testing.assert_close(
                outcome.state[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


_drawing = threading.Lock()


@pytest.fixture
def one_draws_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share one random generator, which processes do not."""
    compute = Stage._compute

    def alone(*arguments: Any) -> Any:
        with _drawing:
            return compute(*arguments)

    monkeypatch.setattr(Stage, "_compute", alone)
    monkeypatch.setattr(runtime, "drawing_apart", lambda device: nullcontext())

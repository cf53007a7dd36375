"""Forwards alone, through all stages, beside the model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from piped import PLAIN, batches, everywhere, layered, mse, piped
from torch import nn
from torch.nn import functional

from polytempo.errors import PeerError, UsageError
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]


def evaluated(model: Any, ranks: int, work: Callable[[Pipeline], Any], **options: Any) -> list[Any]:
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def one(session: Session) -> Any:
        return work(Pipeline(models[session.rank], loss=mse, optimizer=PLAIN, **options))

    return everywhere(ranks, one)


@pytest.mark.parametrize("size", [1, 3, 8, 11])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"microbatches": 4}),
        (3, {"microbatches": 4}),
        (3, {"stages": 2, "replicas": (1, 2), "microbatches": 4}),
        (3, {"stages": 2, "replicas": (2, 1), "microbatches": 4}),
        (2, {"schedule": "pipedream"}),
        (2, {"schedule": "gpipe", "microbatches": 4}),
    ],
    ids=["one", "three", "replicas-last", "replicas-first", "pipedream", "gpipe"],
)
def test_losses_and_outputs_are_those_of_the_whole_model(ranks: int, options: dict[str, Any], size: int) -> None:
    """Batches of any size, also of fewer examples than pieces."""
    model, data = layered(5), batches(3, size)

    def work(pipe: Pipeline) -> tuple[list[float], list[Any]]:
        return [pipe.evaluate(x, y) for x, y in data], [pipe.predict(x) for x, _ in data]

    outcomes = evaluated(model, ranks, work, **options)
    with torch.no_grad():
        wanted = [model(x) for x, _ in data]
    losses = [mse(out, y).item() for out, (_, y) in zip(wanted, data, strict=True)]
    last = ranks - options.get("replicas", (1,))[-1]  # the first replica of the last stage
    for rank, (found, outputs) in enumerate(outcomes):
        assert found == outcomes[0][0]
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)
        assert (outputs == [None] * 3) == (rank != last)
    torch.testing.assert_close(outcomes[last][1], wanted, rtol=0, atol=1e-12)


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    model, data = layered(5), batches(4, 8)

    def work(pipe: Pipeline) -> Any:
        losses = []
        for x, y in data:
            pipe.evaluate(x[:3], y[:3])
            losses.append(pipe.step(x, y))
            pipe.predict(x)
        return losses, pipe.state_dict()

    wanted = piped(model, data, 2, PLAIN, microbatches=4)[0]
    for losses, state in evaluated(model, 2, work, microbatches=4):
        assert losses == wanted.losses
        assert all(torch.equal(state[name], value) for name, value in wanted.state.items())


def test_dropout_and_batch_norm_evaluate_and_their_modes_come_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    model[1].eval()  # frozen by the user
    x, y = batches(1, 8)[0]

    def work(pipe: Pipeline) -> Any:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        loss = pipe.evaluate(x, y)
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items()), "nothing is counted"
        return loss, [member.training for _, part in pipe.stage.part.members for member in part.modules()]

    outcomes = evaluated(model, 2, work, stages=[2, 2], microbatches=2)
    modes = [mode for _, found in outcomes for mode in found]
    assert modes.count(False) == 1
    model.eval()
    assert [loss for loss, _ in outcomes] == [pytest.approx(mse(model(x), y).item(), abs=1e-12)] * 2


def test_pipedream_evaluates_between_flushes_with_the_newest_weights() -> None:
    model, data = layered(5), batches(5, 4)

    def work(pipe: Pipeline) -> Any:
        for x, y in data:
            pipe.step(x, y)
        with pytest.raises(UsageError, match=r"evaluate\(\) while 5 minibatches may be in flight; call flush\(\) first"):
            pipe.evaluate(*data[0])
        pipe.flush()
        state = pipe.state_dict()
        return pipe.evaluate(*data[0]), state

    outcomes = evaluated(model, 2, work, schedule="pipedream")
    model.load_state_dict(outcomes[0][1])
    assert outcomes[0][0] == pytest.approx(mse(model(data[0][0]), data[0][1]).item(), abs=1e-12)


class Functional(nn.Module):
    """Has no module to tell its mode to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(functional.dropout(self.a(x), 0.5, self.training))


def test_a_mode_that_was_traced_is_refused_before_anything_and_training_goes_on() -> None:
    x, y = batches(1, 8)[0]

    def work(pipe: Pipeline) -> Any:
        with pytest.raises(UsageError, match="dropout was traced in training mode and cannot be switched to evaluation"):
            pipe.evaluate(x, y)
        with pytest.raises(UsageError, match="traced in training mode"):
            pipe.predict(x)
        return pipe.step(x, y)

    losses = evaluated(Functional().double(), 2, work, microbatches=2)
    assert losses[0] == losses[1] > 0


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, x * 2


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x}


def test_outputs_may_be_tuples_and_nothing_else() -> None:
    x, _ = batches(1, 5)[0]
    outcome = evaluated(nn.Sequential(nn.Tanh(), Two()), 2, lambda pipe: pipe.predict(x), stages=[1, 1], microbatches=2)[1]
    torch.testing.assert_close(outcome, (torch.tanh(x) + 1, 2 * torch.tanh(x)))
    first, second = evaluated(nn.Sequential(nn.Tanh(), Named()), 2, lambda pipe: pipe.predict(x), stages=[1, 1])
    assert isinstance(second, UsageError)
    assert "predict() joins outputs that are tensors or tuples of tensors; got dict" in str(second)
    assert isinstance(first, PeerError)
    assert "stage 1 (rank 1) failed" in str(first)

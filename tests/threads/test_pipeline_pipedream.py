"""Pipelines without flushes: what PipeDream published, and nothing else."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import ADAM, PLAIN, SGD, Batch, Outcome, alone, batches, everywhere, layered, mse, piped
from torch import nn
from torch.func import functional_call

from polytempo.pipeline.check import check
from polytempo.pipeline.partition import cut
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.schedules import in_flight, make
from polytempo.pipeline.stage import MakeOptimizer
from polytempo.session.session import Session

pytestmark = pytest.mark.timeout(120)

Weights = dict[str, torch.Tensor]


class Recurrence:
    """The published rule, in one process: every version of every stage's weights is kept, and each update is of the
    gradients at the versions that the minibatch used."""

    def __init__(self, model: nn.Module, stages: int, make_optimizer: MakeOptimizer) -> None:
        self.parts = [part.module for part in cut(copy.deepcopy(model), stages)]
        self.params = [dict(part.named_parameters()) for part in self.parts]
        self.optimizers = [make_optimizer(list(params.values())) if params else None for params in self.params]
        self.versions: list[list[Weights]] = [[self.now(stage)] for stage in range(stages)]
        self.losses: list[float] = []

    def now(self, stage: int) -> Weights:
        return {name: param.detach().clone() for name, param in self.params[stage].items()}

    def gradients(self, batch: Batch, used: Sequence[int]) -> list[Weights]:
        """At these versions, one for each stage."""
        leaves = [
            {name: value.clone().requires_grad_() for name, value in versions[number].items()}
            for versions, number in zip(self.versions, used, strict=True)
        ]
        value, target = batch
        for part, weights in zip(self.parts, leaves, strict=True):
            value = functional_call(part, weights, (value,))
        loss = mse(value, target)
        loss.backward()
        self.losses.append(loss.item())
        return [{name: leaf.grad for name, leaf in weights.items()} for weights in leaves]  # type: ignore[misc]

    def update(self, stage: int, gradients: Sequence[Weights]) -> None:
        """With the mean of these."""
        for name, param in self.params[stage].items():
            param.grad = sum(one[name] for one in gradients) / len(gradients)  # type: ignore[assignment]
        optimizer = self.optimizers[stage]
        if optimizer is not None:
            optimizer.step()
        self.versions[stage].append(self.now(stage))

    def weights(self) -> list[torch.Tensor]:
        return [value for versions in self.versions for value in versions[-1].values()]


def straight(
    model: nn.Module, data: Sequence[Sequence[Batch]], stages: int, optimizer: MakeOptimizer, vertical: bool
) -> Recurrence:
    """A straight pipeline; it is empty after each of the lists."""
    rule = Recurrence(model, stages, optimizer)
    start = 0
    for batch_list in data:
        for t, batch in enumerate(batch_list):
            used = [start + max(0, t - stages + 1 + (0 if vertical else stage)) for stage in range(stages)]
            for stage, gradients in enumerate(rule.gradients(batch, used)):
                rule.update(stage, [gradients])
        start += len(batch_list)
    return rule


def trained(
    model: nn.Module, data: Sequence[Sequence[Batch]], ranks: int, optimizer: MakeOptimizer, **options: Any
) -> list[Outcome]:
    """With a flush after each of the lists; losses are those that steps and flushes gave."""
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(session: Session) -> Outcome:
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=optimizer, **options)
        losses: list[float | None] = []
        for batch_list in data:
            losses += [pipe.step(x, y) for x, y in batch_list]
            losses.append(pipe.flush())
        return Outcome(losses, pipe.state_dict(), pipe)

    outcomes = everywhere(ranks, work)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def assert_follows(outcomes: Sequence[Outcome], rule: Recurrence, lists: Sequence[int], lag: int) -> None:
    """The weights of the rule, and its losses as they become known."""
    start, wanted = 0, list[float | None]()
    for length in lists:
        found = rule.losses[start : start + length]
        wanted += [*[None] * min(lag, length), *found[: max(0, length - lag)], found[-1] if lag else None]
        start += length
    for outcome in outcomes:
        assert [loss is None for loss in outcome.losses] == [loss is None for loss in wanted]
        for got, expected in zip(outcome.losses, wanted, strict=True):
            assert got == pytest.approx(expected, abs=1e-12)
        for got, expected in zip(outcome.state.values(), rule.weights(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    stages=st.integers(1, 4),
    lists=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    vertical=st.booleans(),
    recompute=st.booleans(),
    optimizer=st.sampled_from([PLAIN, SGD, ADAM]),
)
def test_a_straight_pipeline_is_the_published_recurrence(stages, lists, vertical, recompute, optimizer) -> None:  # type: ignore[no-untyped-def]
    model = layered(7)
    data = [batches(length, 4, seed=index) for index, length in enumerate(lists)]
    spec = f"pipedream,vertical_sync={int(vertical)},recompute={int(recompute)}"
    outcomes = trained(model, data, stages, optimizer, schedule=spec)
    assert_follows(outcomes, straight(model, data, stages, optimizer, vertical), lists, stages - 1)


def test_a_long_run_goes_on_in_the_same_way() -> None:
    model, data = layered(), [batches(60, 2)]
    outcomes = trained(model, data, 3, PLAIN, schedule="pipedream")
    assert_follows(outcomes, straight(model, data, 3, PLAIN, False), [60], 2)


def test_minibatches_may_change_their_size() -> None:
    sizes = [4, 4, 2, 6, 4, 1, 1, 8]
    model, data = layered(), [[batches(1, size, seed=index)[0] for index, size in enumerate(sizes)]]
    outcomes = trained(model, data, 3, PLAIN, schedule="pipedream")
    assert_follows(outcomes, straight(model, data, 3, PLAIN, False), [len(sizes)], 2)


@pytest.mark.parametrize("optimizer", [PLAIN, SGD, ADAM])
def test_one_stage_is_plain_training_bit_for_bit(optimizer: MakeOptimizer) -> None:
    model, data = layered(), batches(6, 4)
    outcome = piped(model, data, 1, optimizer, schedule="pipedream")[0]
    losses, state = alone(model, data, optimizer)
    assert outcome.losses[:-1] == losses
    assert all(torch.equal(outcome.state[name], value) for name, value in state.items())


@pytest.mark.parametrize("vertical", [0, 1])
def test_versions_are_those_of_the_checker(vertical: int) -> None:
    facts = check(make(f"pipedream,vertical_sync={vertical}", 4, 12))
    outcomes = piped(layered(7), batches(12, 2), 4, schedule=f"pipedream,vertical_sync={vertical}")
    for stage, outcome in enumerate(outcomes):
        for kind in "FB":
            log = {done.action.microbatch: done.version for done in outcome.pipe.log if done.action.kind == kind}
            assert [log[number] for number in range(12)] == [*facts.used[stage]]
        held = outcome.pipe.stage
        assert held.peak_in_flight == facts.in_flight[stage] == in_flight((1,) * 4, stage)
        assert held.peak_versions <= facts.versions_kept[stage] + vertical
        assert vertical or held.peak_versions <= held.peak_in_flight
        assert held.versions == 1
        assert not held.in_flight


# What is really read, seen from inside autograd.


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


class Noted(torch.autograd.Function):
    """A product that says which weights its forward and its backward read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, notes: dict[str, list[str]]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.notes = notes
        notes["forward"].append(digest(weight))
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.notes["backward"].append(digest(weight))
        return gradients[0] @ weight, gradients[0].T @ x, None


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.notes: dict[str, list[str]] = {"forward": [], "backward": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Noted.apply(x, self.weight, self.notes))


@pytest.mark.parametrize("vertical", [0, 1])
def test_a_backward_reads_exactly_the_weights_of_its_forward(vertical: int) -> None:
    model, data = nn.Sequential(*[Noting() for _ in range(4)]), batches(10, 2)
    outcomes = piped(model, data, 4, schedule=f"pipedream,vertical_sync={vertical}", stages=4)
    for stage, outcome in enumerate(outcomes):
        notes = outcome.pipe.stage.part.members[0][1].notes
        assert len(notes["forward"]) == 10
        assert notes["forward"] == notes["backward"]
        used = [max(0, t - 3 + (0 if vertical else stage)) for t in range(10)]
        assert len(set(notes["forward"])) == len(set(used))
        assert [notes["forward"].index(one) for one in notes["forward"]] == [used.index(one) for one in used]


# Replicas.


@settings(max_examples=25, deadline=None)
@given(
    replicas=st.sampled_from([(2, 1), (1, 2), (3, 1), (2, 2), (1, 2, 1), (2, 1, 1)]),
    minibatches=st.integers(3, 11),
    optimizer=st.sampled_from([PLAIN, SGD]),
    vertical=st.booleans(),
)
def test_replicated_stages_update_with_the_mean_of_what_they_had(replicas, minibatches, optimizer, vertical) -> None:  # type: ignore[no-untyped-def]
    vertical = vertical and len(set(replicas)) == 1
    spec = f"pipedream,vertical_sync={int(vertical)}"
    model, data = layered(7), batches(minibatches, 4)
    outcomes = trained(model, [data], sum(replicas), optimizer, schedule=spec, replicas=replicas)
    facts = check(make(spec, len(replicas), minibatches, replicas))
    rule = Recurrence(model, len(replicas), optimizer)
    found: list[list[Weights]] = []
    for t, batch in enumerate(data):
        found.append(rule.gradients(batch, [used[t] for used in facts.used]))
        for stage, updates in enumerate(facts.updates):
            for members in updates:
                if members[-1] == t:
                    rule.update(stage, [found[member][stage] for member in members])
    lag = (in_flight(replicas, 0) - 1) * replicas[0]
    assert_follows(outcomes, rule, [minibatches], lag)
    assert outcomes[0].pipe.stage.version == len(facts.updates[0])


@settings(max_examples=20, deadline=None)
@given(
    spec=st.sampled_from(["sequential", "gpipe", "1f1b", "1f1b,recompute=1"]),
    replicas=st.sampled_from([(2,), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3, 1)]),
    microbatches=st.integers(3, 7),
)
def test_replicated_stages_with_flushes_are_the_model_in_one_piece(spec, replicas, microbatches) -> None:  # type: ignore[no-untyped-def]
    model, data = layered(), batches(3, 2 * microbatches)
    outcomes = piped(model, data, sum(replicas), schedule=spec, replicas=replicas, microbatches=microbatches)
    losses, state = alone(model, data)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(losses, abs=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(outcome.state[name], value, rtol=0, atol=1e-10)


def test_replicas_start_equal_and_stay_equal() -> None:
    models = [layered() for _ in range(3)]
    for rank, model in enumerate(models):
        for param in model.parameters():
            param.data += rank

    def work(session: Session) -> list[torch.Tensor]:
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=SGD, schedule="pipedream", replicas=(2, 1))
        for x, y in batches(5, 4):
            pipe.step(x, y)
        pipe.flush()
        return [param.detach().clone() for param in pipe.stage.params]

    first, second, _ = everywhere(3, work)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Idle(nn.Module):
    """A layer with a parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("spec", ["1f1b", "pipedream"])
def test_what_nobody_has_a_gradient_for_is_left_alone(spec: str) -> None:
    """Though its optimizer would make weights decay."""
    model, data = nn.Sequential(Idle(), nn.Tanh(), Idle()).double(), batches(4, 6)
    decay: MakeOptimizer = lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)  # noqa: E731
    outcomes = piped(model, data, 3, decay, schedule=spec, replicas=(2, 1), stages=[2, 1])
    for name in ("0.unused", "2.unused"):
        assert torch.equal(outcomes[0].state[name], torch.ones(3, dtype=torch.float64))
    assert not torch.equal(outcomes[0].state["0.used.weight"], model[0].used.weight)


def test_replicas_of_a_single_stage_do_not_wait_for_each_others_losses() -> None:
    """They meet at the update, so a loss can only be told once all of them have come so far."""
    results = piped(layered(), batches(6, 12), 3, stages=1, replicas=(3,), schedule="pipedream")
    assert len({tuple(result.losses) for result in results}) == 1
    assert results[0].losses[:2] == [None, None]
    assert None not in results[0].losses[2:]

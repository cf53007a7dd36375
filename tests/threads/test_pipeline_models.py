"""What models may have: dropout, tied weights, BatchNorm, branches, tuples, integers, layers in place, frozen ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from piped import PLAIN, SGD, Outcome, alone, assert_same, batches, everywhere, layered, mse, one_draws_at_a_time, piped
from torch import nn

from polytempo.pipeline.partition import cut
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.stage import mixed
from polytempo.session.session import Session

__all__ = ["one_draws_at_a_time"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

FLUSHING = ["sequential", "gpipe", "gpipe,recompute=0", "1f1b", "1f1b,recompute=1"]


def seeded_model(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: nn.Module = make().double()
    return model


def stage_by_stage(model: nn.Module, data: Any, stages: int, microbatches: int, seed: int = 0) -> Any:
    """In one process: each microbatch through all stages, each with the generator that the pipeline gives it."""
    model = copy.deepcopy(model)
    parts = cut(model, stages)
    stepper, losses = SGD(list(model.parameters())), []
    for step, (x, y) in enumerate(data):
        stepper.zero_grad()
        for number, (a, b) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)):
            with torch.random.fork_rng():
                for stage, part in enumerate(parts):
                    torch.manual_seed(mixed(seed, step * microbatches + number, stage))
                    a = part.module(a)
            loss = mse(a, b) / microbatches
            loss.backward()
            losses.append(loss.item())
        stepper.step()
    sums = [sum(losses[at : at + microbatches]) for at in range(0, len(losses), microbatches)]
    return sums, model.state_dict()


# Random numbers.


@pytest.mark.usefixtures("one_draws_at_a_time")
@pytest.mark.parametrize("spec", FLUSHING)
def test_dropout_draws_for_each_microbatch_and_stage(spec: str) -> None:
    model = seeded_model(lambda: nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Dropout(0.4))]))
    data = batches(3, 8)
    wanted = stage_by_stage(model, data, 3, 4, seed=7)
    assert_same(piped(model, data, 3, schedule=spec, microbatches=4, seed=7), wanted, 1e-12)
    other = piped(model, data, 3, schedule=spec, microbatches=4, seed=8)
    assert other[0].losses != wanted[0]


@pytest.mark.usefixtures("one_draws_at_a_time")
def test_a_forward_that_is_made_again_draws_the_same() -> None:
    model = seeded_model(lambda: nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Dropout(0.4))]))
    data = batches(3, 8)
    kept, again = (piped(model, data, 2, schedule=f"gpipe,recompute={on}", microbatches=4) for on in (0, 1))
    assert kept[0].losses == again[0].losses
    assert all(torch.equal(kept[0].state[name], again[0].state[name]) for name in kept[0].state)


def test_dropout_of_one_stage_without_any_help() -> None:
    model = seeded_model(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6)))
    data = batches(3, 8)
    outcomes = piped(model, data, 1, schedule="gpipe", microbatches=4, seed=7)
    assert_same(outcomes, stage_by_stage(model, data, 1, 4, seed=7), 1e-12)


def test_seeds_differ_by_everything() -> None:
    assert len({mixed(seed, number, stage) for seed in range(4) for number in range(40) for stage in range(4)}) == 4 * 40 * 4


def test_the_callers_random_numbers_go_on_as_if_nothing_was_drawn() -> None:
    model = seeded_model(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)))
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    piped(model, batches(2, 4), 1, microbatches=2)
    assert torch.equal(torch.rand(3), wanted)


# Weights in two stages.


class Tied(nn.Module):
    """The first and the last layer have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.embed(x)))  # type: ignore[no-any-return]


def words(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, 9, (size,), generator=generator) for _ in range(2)) for _ in range(steps)]  # type: ignore[misc]


@pytest.mark.parametrize("spec", FLUSHING)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_tied_weights_get_the_gradients_of_both_and_stay_equal(spec: str, replicas: tuple[int, ...]) -> None:
    model, data, loss = seeded_model(Tied), words(4, 8), nn.functional.cross_entropy
    outcomes = piped(model, data, sum(replicas), loss=loss, schedule=spec, microbatches=4, replicas=replicas)
    assert_same(outcomes, alone(model, data, loss=loss), 1e-10)
    assert torch.equal(outcomes[0].state["embed.weight"], outcomes[0].state["out.weight"])


def test_tied_weights_within_a_stage_are_one_parameter() -> None:
    model, data, loss = seeded_model(Tied), words(3, 8), nn.functional.cross_entropy
    assert_same(piped(model, data, 1, loss=loss, microbatches=2), alone(model, data, loss=loss), 1e-10)


def test_a_layer_that_comes_twice() -> None:
    shared = nn.Linear(6, 6).double()
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 6).double(), nn.Tanh(), shared)
    data = batches(3, 8)
    assert_same(piped(model, data, 3, stages=[1, 3, 1], microbatches=2), alone(model, data), 1e-10)


# BatchNorm.


@pytest.mark.parametrize("spec", FLUSHING)
def test_batch_norm_sees_microbatches_and_counts_each_once(spec: str) -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))  # noqa: E731
    model, data = seeded_model(make), batches(3, 16)
    outcomes = piped(model, data, 2, schedule=spec, microbatches=4, stages=2)
    assert_same(outcomes, alone(model, data, microbatches=4), 1e-10)
    assert outcomes[0].state["1.num_batches_tracked"] == 12


# Modules that are traced.


class Branching(nn.Module):
    """Values that pass several layers by, weights of its own, and a number that depends on the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size(0)
        first = torch.tanh(self.one(x))
        second = self.two(first) * self.scale + self.shift
        third = self.norm(self.three(second) + x)
        return self.four(third * first).reshape(size, 6) * self.scale


class Blocks(nn.Module):
    """Residual blocks: between them one value passes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.parametrize("spec", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_a_branching_module_is_traced_and_cut(spec: str, stages: int) -> None:
    model, data = seeded_model(Branching), batches(3, 4)
    outcomes = piped(model, data, stages, schedule=spec, microbatches=2)
    assert_same(outcomes, alone(model, data), 1e-10)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_blocks_are_cut_where_one_value_passes(stages: int) -> None:
    model, data = seeded_model(Blocks), batches(3, 4)
    outcomes = piped(model, data, stages, microbatches=2)
    assert_same(outcomes, alone(model, data), 1e-10)
    first = outcomes[1].pipe.stage.part.module.graph
    assert len([node for node in first.nodes if node.op == "placeholder"]) == 1


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.left(a)) + self.right(b))  # type: ignore[no-any-return]


def test_a_module_with_two_inputs() -> None:
    model, data = seeded_model(TwoInputs), batches(3, 4)
    both = [((x, x.flip(1)), y) for x, y in data]
    outcomes = piped(model, both, 3, microbatches=2)
    model = copy.deepcopy(model)
    stepper = SGD(list(model.parameters()))
    for (a, b), y in both:
        stepper.zero_grad()
        mse(model(a, b), y).backward()
        stepper.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(outcomes[2].state[name], value, rtol=0, atol=1e-12)


class Depends(nn.Module):
    """Its code asks for a value, which symbols do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 3:
            x = torch.tanh(self.one(x))
        return self.two(x)  # type: ignore[no-any-return]


def test_an_example_helps_where_symbols_do_not() -> None:
    model, data = seeded_model(Depends), batches(3, 8)
    outcomes = piped(model, data, 2, microbatches=2, example=(data[0][0],))
    assert_same(outcomes, alone(model, data), 1e-10)


# What passes.


class Forks(nn.Module):
    """Hands on a tuple: floats with and without a gradient, integers, and one that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(x)
        return y, x.detach() * 2, (x > 0).sum(1), x > 0, y * 3


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        y, twice, counts, positive, _ = values
        assert not counts.is_floating_point()
        assert positive.dtype == torch.bool
        return self.inner(y * positive + twice) / (1 + counts.unsqueeze(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("spec", FLUSHING)
def test_tuples_pass_between_stages(spec: str) -> None:
    model, data = seeded_model(lambda: nn.Sequential(Forks(), Joins(), nn.Tanh(), nn.Linear(6, 6))), batches(3, 8)
    outcomes = piped(model, data, 3, stages=[1, 2, 1], schedule=spec, microbatches=4)
    assert_same(outcomes, alone(model, data), 1e-10)


@pytest.mark.parametrize("spec", FLUSHING)
def test_layers_that_work_in_place_at_a_cut(spec: str) -> None:
    make = lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))  # noqa: E731
    model, data = seeded_model(make), batches(2, 8)
    copies = copy.deepcopy(data)
    outcomes = piped(model, copies, 2, stages=[2, 2], schedule=spec, microbatches=4)
    assert_same(outcomes, alone(model, data), 1e-10)


@pytest.mark.parametrize("spec", FLUSHING)
def test_a_first_stage_that_is_frozen(spec: str) -> None:
    model, data = layered(), batches(2, 8)
    model[0].requires_grad_(False)
    outcomes = piped(model, data, 3, stages=[1, 2, 2], schedule=spec, microbatches=4)
    assert_same(outcomes, alone(model, data, lambda p: SGD([q for q in p if q.requires_grad])), 1e-10)
    assert torch.equal(outcomes[0].state["0.weight"], model[0].weight)


def test_a_stage_without_parameters() -> None:
    model, data = layered(), batches(2, 8)
    outcomes = piped(model, data, 3, stages=[1, 1, 3], microbatches=2)
    assert outcomes[1].pipe.optimizer is None
    assert_same(outcomes, alone(model, data), 1e-12)


def test_a_list_of_layers_and_sequences_in_sequences() -> None:
    data, whole = batches(2, 8), layered(6)
    nested = nn.Sequential(
        nn.Sequential(whole[0], whole[1]), nn.Sequential(whole[2], nn.Sequential(whole[3], whole[4])), whole[5]
    )
    assert_same(piped(nested, data, 3, microbatches=2), alone(nested, data), 1e-12)
    outcomes: list[Outcome] = piped(list(whole), data, 3, microbatches=2)
    assert_same(outcomes, alone(whole, data), 1e-12)


# The whole model.


def test_state_goes_from_one_cut_to_another() -> None:
    model, data = layered(), batches(2, 8)
    first = piped(model, data, 3, PLAIN, microbatches=2)[0].state
    fresh = layered()
    fresh.load_state_dict(first)
    wanted = alone(fresh, data, PLAIN)

    models = [layered() for _ in range(2)]

    def work(session: Session) -> Outcome:
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=PLAIN, microbatches=2)
        pipe.load_state_dict(first)
        return Outcome([pipe.step(x, y) for x, y in data], pipe.state_dict(), pipe)

    assert_same(everywhere(2, work), wanted, 1e-12)

"""A model spread over data x pipe x tensor trains as the same model in one process: float64, 1e-8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spreading import (
    OPTIMIZERS,
    assert_same,
    everywhere,
    sentences,
    size_of,
    spread,
    train,
    trained_alone,
    transformer,
)
from torch import nn

from polytempo.session.session import Session
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import ThreadJob

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]


def factorisations(size: int) -> list[str]:
    counts = [(d, k, size // d // k) for d in range(1, size + 1) for k in range(1, size + 1) if size % (d * k) == 0]
    return [f"data={d},pipe={k},tensor={t}" for d, k, t in counts if k <= 5 and t <= 4]


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        pytest.param(name, clip, marks=[] if (clip is None) == (number % 2 == 0) else pytest.mark.proof)
        for number, name in enumerate(OPTIMIZERS)
        for clip in (None, 0.5)
    ],
)
def test_two_by_two_by_two_is_one_process_after_20_steps(optimizer: str, clip: float | None) -> None:
    make, data = OPTIMIZERS[optimizer], sentences(20)
    model, plain = trained_alone(data, make, clip)
    wanted = model.state_dict()

    def work(session: Session) -> Any:
        spreaded = spread("data=2,pipe=2,tensor=2,microbatches=2", make, clip_norm=clip)
        losses = train(spreaded, data)
        return losses, spreaded.state_dict(), spreaded.optimizer_state_dict()

    found = everywhere(8, work)
    names = [name for name, _ in model.named_parameters()]
    for losses, state, optimizer_state in found:
        assert_same(state, wanted)
        for number, name in enumerate(names):
            own = plain.state_dict()["state"][number]
            for key, value in own.items():
                torch.testing.assert_close(optimizer_state["state"][name][key], value, rtol=0, atol=1e-8)
        assert losses == found[0][0] or losses == found[4][0], "the ranks of a replica get its loss"
    assert found[0][0] == found[3][0] != found[4][0] == found[7][0]


@pytest.mark.parametrize("strategy", [*factorisations(4), *factorisations(8)])
def test_every_factorisation_of_4_and_8_is_one_process(strategy: str) -> None:
    data = sentences(3)
    wanted = trained_alone(data, clip=0.5)[0].state_dict()

    def work(session: Session) -> Any:
        model = spread(f"{strategy},microbatches=2,schedule=gpipe", clip_norm=0.5)
        train(model, data)
        return model.state_dict()

    for state in everywhere(size_of(strategy), work):
        assert_same(state, wanted)


@pytest.mark.parametrize("strategy", ["data=4", "data=2,pipe=2", "data=2,tensor=2"])
@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_under_a_launcher_too(strategy: str, via: str) -> None:
    """Over servers, and in shared memory with a sequencer."""
    data = sentences(3)
    wanted = trained_alone(data, clip=0.5)[0].state_dict()

    def work(session: Session) -> Any:
        model = spread(f"{strategy},via={via}", clip_norm=0.5)
        train(model, data)
        return model.state_dict()

    with ThreadJob(4, servers=2, via=via) as job:
        for state in job.run(work):
            assert_same(state, wanted)
    assert job.notices == [], "clipped means are alike on all replicas, and no reason to warn"


def test_all_ranks_start_from_the_weights_of_rank_0() -> None:
    found = everywhere(4, lambda session: spread("data=2,pipe=2", seed=session.rank).state_dict())
    for state in found:
        assert_same(state, transformer(seed=0).state_dict(), atol=0)


def test_evaluate_and_predict_are_those_of_the_whole_model() -> None:
    model, ((x, y),) = transformer().eval(), sentences(1, 7)
    with torch.no_grad():
        out = model(x)
    wanted = float(nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()))

    def work(session: Session) -> Any:
        spreaded = spread("pipe=2,tensor=2,microbatches=2")
        return spreaded.evaluate(x, y), spreaded.predict(x)

    for loss, outputs in everywhere(4, work):
        assert loss == pytest.approx(wanted, abs=1e-12)
        torch.testing.assert_close(outputs, out, rtol=0, atol=1e-12)


def test_the_split_cross_entropy_is_the_loss_of_a_vocabulary_that_is_split() -> None:
    """`F.cross_entropy` itself: the output layer stays split, and the logits are never gathered but to be predicted."""
    data = [(x[:, 0], y[:, 0]) for x, y in sentences(3)]

    def flat() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16)).double()

    plain, make = flat(), OPTIMIZERS["momentum"]
    optimizer = make(list(plain.parameters()))
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    start = flat()

    def work(session: Session) -> Any:
        options: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": make, "tensor_plan": {"0": "vocab"}}
        model = Strategy(1, 2, 2).distribute(copy.deepcopy(start), **options)
        train(model, data)
        return model.state_dict(), model._made.plan.logits, model.predict(data[0][0])

    for state, logits, outputs in everywhere(4, work):
        assert logits == ("3", 16)
        assert_same(state, plain.state_dict())
        torch.testing.assert_close(outputs, plain(data[0][0]).detach(), rtol=0, atol=1e-8)

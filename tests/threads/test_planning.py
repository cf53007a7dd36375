"""Strategies chosen and explained in a job: all ranks get the same, and what is chosen trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spreading import MOMENTUM, assert_same, cross_entropy, everywhere, part_of, sentences, trained_alone, transformer
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.strategy import planning
from polytempo.strategy.fit import fit
from polytempo.strategy.strategy import Strategy

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BUDGET", 0.1)
    monkeypatch.setattr(planning, "LEAST", 0.01)


def test_auto_is_the_same_on_all_ranks_and_trains_as_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    data = sentences(3)
    wanted = trained_alone(data)[0].state_dict()

    def work(session: Session) -> Any:
        x, y = data[0]
        model = Strategy.auto().distribute(transformer(), loss=cross_entropy, optimizer=MOMENTUM, example=(x,), target=y)
        for batch in data:
            model.step(*part_of(batch, model.point.data, model.mesh.data))
        return str(model.strategy), model.state_dict()

    found = everywhere(4, work)
    assert len({strategy for strategy, _ in found}) == 1
    assert "auto" not in found[0][0]
    for _, state in found:
        assert_same(state, wanted)
    said = capsys.readouterr().out
    assert said.count("strategy auto: ") == 1
    assert "second is" in said


def test_an_explanation_is_the_same_on_all_ranks_and_rank_0_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = sentences(1)[0]
    options: dict[str, Any] = {"loss": cross_entropy, "optimizer": MOMENTUM, "batch": 16, "target": y}

    def work(session: Session) -> Any:
        model = transformer()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = Strategy.parse("data=2,pipe=2").explain(model, x, memory="1MB", **options)
        assert_same(model.state_dict(), before)
        return found

    found = everywhere(4, work)
    assert all(one == found[0] for one in found)
    assert capsys.readouterr().out == f"{found[0]}\n"
    first, second = [row.name for row in found[0].rows][:2]
    assert first == "data=4"
    assert second.startswith("pipe=4,")  # the schedule and the microbatches are the fastest, as measured
    chosen = found[0].chosen
    assert chosen is not None
    parameters = sum(value.nbytes for value in transformer().state_dict().values())
    assert sum(one.parameters for one in chosen.memory) == 2 * parameters  # two replicas, each in two stages


def test_what_is_impossible_is_said_on_all_ranks() -> None:
    x = sentences(1)[0][0]

    def work(session: Session) -> Any:
        strategy = Strategy.auto(memory="1kB")
        with pytest.raises(UsageError, match="fits into memory=1 kB; the least that any needs is") as little:
            strategy.distribute(transformer(), loss=cross_entropy, optimizer=MOMENTUM, example=(x,))
        impossible = Strategy.parse("tensor=3").explain(transformer(), x, batch=15)
        uneven = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
        empty = Strategy.parse("pipe=3").explain(uneven, torch.ones(15, 3), batch=15, stages=(1, 2, 2))
        assert empty.rows[-1].problem.startswith("stage 1 of 3 has no parameters to train")
        with pytest.raises(UsageError, match="give an example") as nothing:
            Strategy.auto().distribute(transformer(), loss=cross_entropy, optimizer=MOMENTUM)
        with pytest.raises(UsageError, match="layer '0' cannot be run on the example") as wrong:
            Strategy.auto().distribute(transformer(), loss=cross_entropy, optimizer=MOMENTUM, example=(torch.ones(6, 3),))
        return str(little.value), str(nothing.value), str(wrong.value), impossible.rows[-1].problem

    found = everywhere(3, work)
    assert all(one == found[0] for one in found)
    assert "3" in found[0][3]
    assert "tensor=" in found[0][3]


def test_auto_keeps_what_is_given_and_fit_trains_by_it() -> None:
    """A schedule and a number of microbatches; all ranks end with the values of one process."""
    data = sentences(2)
    wanted = trained_alone(data)[0].state_dict()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))

    def work(session: Session) -> Any:
        model = transformer()
        strategy = "auto,schedule=gpipe,microbatches=2"
        history = fit(
            model, (x, y), cross_entropy, optimizer=MOMENTUM, strategy=strategy, batch_size=16, shuffle=False, progress=False
        )
        assert history.model is not None
        return str(history.model.strategy), model.state_dict()

    for strategy, state in everywhere(2, work):
        assert "microbatches=2" in strategy
        assert "schedule=gpipe" in strategy
        assert_same(state, wanted)

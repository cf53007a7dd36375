"""What filters hold back is part of a job's state: in checkpoints, and in a rank's `state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.kv import KV, Array
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.both_wires

GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(64, 5, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :3].clone()
MODEL = nn.Linear(5, 3, dtype=torch.float64)
for parameter in MODEL.parameters():
    nn.init.constant_(parameter, 0.1)

Work = Callable[[Session], Any]
Chains = str | dict[str, str]


def train(start: int, stop: int, compression: Chains = "topk:0.2") -> Work:
    """Steps `start` to `stop` of the same training, however often it is broken off."""

    def work(session: Session) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, compression=compression)
        assert optimizer.stats["step"] == start
        for step in range(start, stop):
            batch = slice((step * 2 + session.rank) % 4 * 16, (step * 2 + session.rank) % 4 * 16 + 16)
            optimizer.zero_grad()
            ((model(X[batch]) - Y[batch]) ** 2).mean().backward()
            optimizer.step()
        return model.weight.detach().clone(), optimizer.state_dict()["filters"]

    return work


@pytest.mark.parametrize("compression", ["topk:0.2", "sign", {"push": "bf16"}], ids=str)
def test_training_goes_on_as_if_it_had_not_been_broken_off(tmp_path: Path, compression: Chains) -> None:
    with ThreadJob(2, 2, "bsp") as job:
        whole = job.run(train(0, 16, compression))
    with ThreadJob(2, 2, "bsp", checkpoint=tmp_path, checkpoint_every=8) as job:
        job.run(train(0, 8, compression))
    kept = sorted(path.name for path in tmp_path.glob("step-*/filters-*"))
    assert kept == ["filters-0-worker-0.safetensors", "filters-0-worker-1.safetensors"]
    with ThreadJob(2, 2, "bsp", resume=tmp_path) as job:
        rest = job.run(train(8, 16, compression))
    for (weight, held), (again, held_again) in zip(whole, rest, strict=True):
        assert torch.equal(weight, again)
        assert torch.equal(held["float64"], held_again["float64"])


def test_what_is_held_back_is_shared_out_anew_with_another_number_of_servers(tmp_path: Path) -> None:
    with ThreadJob(1, 3, "bsp", checkpoint=tmp_path, checkpoint_every=8) as job:
        ((_, held),) = job.run(train(0, 8))
    assert held["float64"].abs().sum() > 0
    with ThreadJob(1, 2, "bsp", resume=tmp_path) as job:
        ((_, again),) = job.run(train(8, 8))
    assert torch.equal(held["float64"], again["float64"])


def test_a_worker_that_the_checkpoint_does_not_know_begins_with_nothing(tmp_path: Path) -> None:
    with ThreadJob(1, 1, "bsp", checkpoint=tmp_path, checkpoint_every=8) as job:
        job.run(train(0, 8))
    with ThreadJob(2, 1, "bsp", resume=tmp_path) as job:
        (_, known), (_, new) = job.run(train(8, 8))
    assert known["float64"].any()
    assert not new["float64"].any()


def test_without_a_filter_nothing_is_kept(tmp_path: Path) -> None:
    def work(session: Session) -> list[str]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, via="ps")
        for _ in range(8):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        return list(optimizer.state_dict())

    with ThreadJob(2, 1, "bsp", checkpoint=tmp_path, checkpoint_every=4) as job:
        assert job.run(work)[0] == ["state", "param_groups"]
    assert not list(tmp_path.glob("step-*/filters-*"))


def test_a_state_dict_brings_a_ranks_filters_back() -> None:
    def work(session: Session) -> None:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        made = [
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, compression="sign") for model in models
        ]
        models[0](X).sum().backward()
        made[0].step()
        made[1].load_state_dict(made[0].state_dict())
        assert torch.equal(made[1].state_dict()["filters"]["float64"], made[0].state_dict()["filters"]["float64"])
        assert made[1].state_dict()["filters"]["float64"].any()

    with ThreadJob(1, 2, "bsp") as job:
        job.run(work)


def test_arrays_give_and_take_what_they_hold_back() -> None:
    def work(session: Session) -> None:
        first, second = (KV({"w": Array(6, dtype=torch.float64, compression="topk:0.2")}) for _ in range(2))
        first["w"].push(torch.arange(6.0)).result()
        state = first.state_dict()
        assert state["w"].tolist() == [0, 1, 2, 3, 0, 0]  # the two largest went
        second.load_state_dict(state)
        assert torch.equal(second.state_dict()["w"], state["w"])

    with ThreadJob(1, 2, "asp") as job:
        job.run(work)

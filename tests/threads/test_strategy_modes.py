"""Modes on the data axis of a model that is split: gradients of weights that were read, local steps, budgets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spreading import (
    OPTIMIZERS,
    assert_same,
    cross_entropy,
    part_of,
    sentences,
    spread,
    train,
    trained_alone,
    transformer,
)
from torch import nn

import polytempo as pt
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.strategy.distributed_model import DistributedModel
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import ThreadJob

pytestmark = [pytest.mark.timeout(60), pytest.mark.long]
Seen = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def plain_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def watched(model: DistributedModel, data: list[Any]) -> list[Seen]:
    """Train; for each step the weights of this rank's part before it, and the gradients that its optimizer got."""
    seen, gradients = [], dict[str, torch.Tensor]()

    def capture(*_: object) -> None:
        found = {name: param.grad for name, param in model.pipeline.stage.part.parameters()}
        gradients.update({name: grad.clone() for name, grad in found.items() if grad is not None})

    model.optimizer.register_step_pre_hook(capture)
    for batch in data:
        weights = {name: value.clone() for name, value in model.pipeline.stage.state().items()}
        model.step(*part_of(batch, model.point.data, model.mesh.data))
        seen.append((weights, dict(gradients)))
    return seen


@pytest.mark.parametrize("sync", ["ssp:1", "asp", "dssp:1..3", "every:2", "delay:1"])
def test_gradients_are_those_of_the_unsplit_model_at_the_weights_that_were_read(sync: str) -> None:
    data = sentences(5)
    with ThreadJob(4, servers=2, sync=sync) as job:
        found = job.run(lambda session: watched(spread("data=2,pipe=2,microbatches=4", plain_sgd), data))
    versions = 0
    for replica in range(2):
        first, last = found[2 * replica], found[2 * replica + 1]
        for batch, one, other in zip(data, first, last, strict=True):
            whole = transformer()
            whole.load_state_dict(one[0] | other[0])
            x, y = part_of(batch, replica, 2)
            cross_entropy(whole(x), y).backward()
            gradients = one[1] | other[1]
            for name, param in whole.named_parameters():
                torch.testing.assert_close(gradients[name], param.grad, rtol=0, atol=1e-10)
            versions += not torch.equal(one[0]["0.weight"], transformer().state_dict()["0.weight"])
    assert versions > 4, "they train"


@pytest.mark.parametrize("strategy", ["data=2,pipe=2", "data=2,tensor=2"])
@pytest.mark.parametrize("sync", ["local:2", "diloco:2"])
def test_blocks_of_local_steps_are_those_of_whole_models(sync: str, strategy: str) -> None:
    data = sentences(4)

    def work(session: Session) -> Any:
        model = spread(f"{strategy},sync={sync}", OPTIMIZERS["adamw"])
        train(model, data)
        model.consolidate()
        return model.state_dict()

    def whole(session: Session) -> Any:
        model = transformer()
        optimizer = pt.DistributedOptimizer(OPTIMIZERS["adamw"](list(model.parameters())), sync=sync)
        for batch in data:
            x, y = part_of(batch, session.rank, 2)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate()
        return model.state_dict()

    with ThreadJob(4, sync=sync) as job:
        found = job.run(work)
    with ThreadJob(2, sync=sync) as job:
        wanted = job.run(whole)[0]
    for state in found:
        assert_same(state, wanted)


def test_replicas_agree_after_consolidate() -> None:
    def work(session: Session) -> Any:
        model = spread("data=2,pipe=2,sync=asp", plain_sgd)
        train(model, sentences(3, seed=1 + session.rank // 2))
        model.consolidate()
        return model.state_dict()

    with ThreadJob(4, servers=2, sync="asp") as job:
        found = job.run(work)
    for state in found:
        assert_same(state, found[0], atol=0)


def normed() -> nn.Sequential:
    torch.manual_seed(6)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def test_running_statistics_are_averaged() -> None:
    """Each replica has its own until then."""
    start, draw = normed(), torch.Generator().manual_seed(1)
    data = [torch.randn(8, 3, generator=draw).double() * (1 + replica) for replica in range(2)]

    def work(session: Session) -> Any:
        model = Strategy(2, 2).distribute(copy.deepcopy(start), loss=nn.functional.mse_loss, optimizer=plain_sgd)
        x = data[model.point.data]
        model.step(x, x[:, :1])
        before = model.state_dict()
        model.consolidate()
        return before, model.state_dict()

    with ThreadJob(4, via="allreduce") as job:
        found = job.run(work)
    for name in ("1.running_var", "4.running_mean"):
        one, other = (found[rank][0][name] for rank in (0, 2))
        assert not torch.equal(one, other)
        for _, state in found:
            torch.testing.assert_close(state[name], (one + other) / 2, rtol=0, atol=1e-12)


def test_stages_that_are_measured_are_the_same_in_all_lanes(capfd: pytest.CaptureFixture[str]) -> None:
    data = sentences(2)
    wanted = trained_alone(data)[0].state_dict()

    def work(session: Session) -> Any:
        model = spread("data=2,pipe=2", stages="auto", example=(data[0][0][:8],))
        train(model, data)
        return [list(stage) for stage in model.pipeline._built.tensors], model.state_dict()

    with ThreadJob(4, via="allreduce") as job:
        found = job.run(work)
    for stages, state in found:
        assert stages == found[0][0]
        assert_same(state, wanted)
    assert capfd.readouterr().out.count("stage 0") <= 2, "one lane measures"


# Budgets.


def until_stopped(strategy: str, data: int = 40) -> Any:
    model = spread(strategy)
    for batch in sentences(data):
        if pt.should_stop():
            break
        model.step(*part_of(batch, model.point.data, model.mesh.data))
    return model.steps, pt.should_stop()


@pytest.mark.parametrize("strategy", ["data=2,pipe=2", "pipe=2,tensor=2", "data=2,tensor=2", "pipe=4", "tensor=4"])
@pytest.mark.parametrize("limits", [Limits(steps=6), Limits(samples=96)])
def test_a_budget_stops_all_ranks_at_the_same_step(strategy: str, limits: Limits) -> None:
    """Steps and samples count once for each replica, not for each rank."""
    with ThreadJob(4, via="allreduce", limits=limits) as job:
        found = job.run(lambda session: until_stopped(strategy))
    replicas = 2 if "data=2" in strategy else 1
    steps = 6 // replicas if limits.steps == 6 else 6
    assert found == [(steps, True)] * 4


def test_a_budget_stops_the_ranks_of_a_replica_together_without_a_barrier() -> None:
    with ThreadJob(4, servers=2, sync="asp", limits=Limits(steps=8)) as job:
        found = job.run(lambda session: until_stopped("data=2,pipe=2"))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert 8 <= found[0][0] + found[2][0] <= 9


# Figures.


def test_figures() -> None:
    def work(session: Session) -> Any:
        model = spread("data=2,pipe=2,tensor=2,microbatches=2")
        train(model, sentences(3))
        return model.stats

    with ThreadJob(8, via="allreduce") as job:
        found = job.run(work)
    for stats in found:
        assert (stats["steps"], stats["samples"]) == (3, 24)
        sent = stats["bytes_sent"]
        assert min(sent.values()) > 0
        assert sent["all"] >= sent["data"] + sent["pipe"] + sent["tensor"]
        assert stats["seconds"]["computing"] > 0
        assert stats["seconds"]["waiting"] > 0

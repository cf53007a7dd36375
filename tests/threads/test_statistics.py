"""Three ways to evaluate a model whose workers have running statistics of their own: with servers, and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import made_from_seed
from sessions import under
from torch import nn

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.optim.several_workers import norm_layers
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.evaluation_statistics import evaluation_statistics
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

WORKERS = 3
Run = Callable[[Callable[[Session], Any]], list[Any]]


@pytest.fixture(params=["asp", "bsp", "without servers"])
def run(request: pytest.FixtureRequest) -> Run:
    def of_all(work: Callable[[Session], Any]) -> list[Any]:
        alone = request.param == "without servers"
        with GroupJob(WORKERS) if alone else ThreadJob(WORKERS, sync=request.param) as job:
            return job.run(work)

    return of_all


def new_model() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(first, nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Linear(5, 2))


MODEL = made_from_seed(3, new_model)  # once: threads share torch's chance


def made_model() -> nn.Module:
    return copy.deepcopy(MODEL)


def batch_of(rank: int, step: int, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return rank + torch.randn(size, 1, 4, 4, generator=generator)


def kept(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def seen_one_batch() -> nn.Module:
    model = made_model()
    model[0][3].eval()  # dropout is chance
    model(batch_of(1, 0))
    return model


def trained(session: Session, steps: int = 4) -> nn.Module:
    model = made_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(session.rank, step)).square().mean().backward()
        own = kept(model)
        optimizer.step()
        assert same(kept(model), own), "an exchange has changed the statistics"
    return model


def test_each_worker_keeps_its_own_through_training(run: Run) -> None:
    found = run(lambda session: kept(trained(session)))
    for other in (1, 2):
        assert not torch.equal(found[0][0], found[other][0])
    assert [int(buffers[2]) for buffers in found] == [4, 4, 4]


@pytest.mark.parametrize("worker", [0, 2])
def test_those_of_one_worker_for_all(run: Run, worker: int) -> None:
    def work(session: Session) -> tuple[list[torch.Tensor], ...]:
        model = trained(session)
        own = kept(model)
        with evaluation_statistics(model, "worker", worker=worker):
            inside = kept(model)
        return own, inside, kept(model)

    found = run(work)
    for own, inside, after in found:
        assert same(inside, found[worker][0])
        assert same(after, own)


def test_merged_is_the_formula(run: Run) -> None:
    def work(session: Session) -> tuple[list[torch.Tensor], ...]:
        model = trained(session)
        own = kept(model)
        with evaluation_statistics(model, "merged"):
            inside = kept(model)
        return own, inside, kept(model)

    found = run(work)
    for place in (0, 3):
        means = torch.stack([own[place].double() for own, _, _ in found])
        variances = torch.stack([own[place + 1].double() for own, _, _ in found])
        mean = means.mean(0)
        variance = (variances + means**2).mean(0) - mean**2
        for _, inside, _ in found:
            torch.testing.assert_close(inside[place], mean.float())
            torch.testing.assert_close(inside[place + 1], variance.float())
            assert int(inside[place + 2]) == 12
    assert all(same(after, own) for own, _, after in found)
    assert all(same(inside, found[0][1]) for _, inside, _ in found)


def test_a_worker_that_has_seen_no_batch_is_left_out_of_the_merged() -> None:
    def work(session: Session) -> list[torch.Tensor]:
        model = seen_one_batch() if session.rank == 1 else made_model()
        with evaluation_statistics(model, "merged"):
            return kept(model)

    with GroupJob(2) as job:
        found = job.run(work)
    assert same(found[0], kept(seen_one_batch()))
    assert same(found[1], found[0])


def test_recalibrated_over_one_batch_of_all_data_is_a_forward_over_it() -> None:
    model = made_model()
    model(batch_of(1, 0))
    data = batch_of(0, 0, 64)
    reference = made_model().eval()
    for layer in norm_layers(reference):
        layer.momentum = 1.0
        layer.train()
    reference(data)
    with evaluation_statistics(model, "recalibrated", batches=[(data, torch.zeros(64))]):
        found = kept(model)
    for place in (0, 1, 3, 4):
        torch.testing.assert_close(found[place], kept(reference)[place])
    assert int(found[2]) == 1


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, momentum=0.01), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_recalibrated_over_batches_counts_them_alike(layer: nn.Module) -> None:
    batches = [torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(seed)) + seed for seed in range(4)]
    instances = isinstance(layer, nn.InstanceNorm1d)
    spread = [batch.var(2).mean(0) if instances else batch.transpose(0, 1).reshape(3, -1).var(1) for batch in batches]
    with evaluation_statistics(nn.Sequential(layer), "recalibrated", batches=iter(batches)):
        torch.testing.assert_close(layer.running_mean, torch.stack([batch.mean((0, 2)) for batch in batches]).mean(0))
        torch.testing.assert_close(layer.running_var, torch.stack(spread).mean(0))


@pytest.mark.parametrize("training", [True, False])
def test_modes_momenta_gradients_and_chance_are_as_before(training: bool) -> None:
    model = made_model().train(training)
    model[0][3].eval()
    own, modes = kept(model), [module.training for module in model.modules()]
    chance, places = torch.get_rng_state(), [buffer.data_ptr() for buffer in model.buffers()]
    with evaluation_statistics(model, "recalibrated", batches=[batch_of(0, 0)]):
        assert torch.equal(torch.get_rng_state(), chance)
        assert [module.training for module in model.modules()] == modes
        assert [layer.momentum for layer in norm_layers(model)] == [0.1, 0.3]
        assert not same(kept(model), own)
        model.train()(batch_of(0, 1))  # overwrites them; they come back all the same
    assert same(kept(model), own)
    assert all(p.grad is None for p in model.parameters())
    assert [buffer.data_ptr() for buffer in model.buffers()] == places


class Broken(RuntimeError):
    pass


def broken() -> Any:
    yield batch_of(0, 0)
    raise Broken


@pytest.mark.parametrize("where", ["inside", "batches", "no batches"])
def test_after_an_error_everything_is_as_before(where: str) -> None:
    model = made_model()
    own, modes = kept(model), [module.training for module in model.modules()]
    batches: Any = {"inside": [batch_of(0, 0)], "batches": broken(), "no batches": []}[where]
    with (
        pytest.raises(UsageError if where == "no batches" else Broken),
        evaluation_statistics(model, "recalibrated", batches=batches),
    ):
        raise Broken
    assert same(kept(model), own)
    assert [module.training for module in model.modules()] == modes
    assert [layer.momentum for layer in norm_layers(model)] == [0.1, 0.3]


def alone() -> Session:
    return Session(None, JobFacts(1, ()), 0)


@pytest.mark.parametrize("how", ["worker", "merged"])
def test_alone_they_are_the_own(how: str) -> None:
    model = made_model()
    model(batch_of(0, 0))
    own = kept(model)
    with under(alone(), evaluation_statistics, model, how):
        assert same(kept(model), own)


def test_a_model_without_such_layers_is_left_alone(run: Run) -> None:
    def work(session: Session) -> None:
        model = nn.Linear(2, 2)
        for how in ("worker", "merged", "recalibrated"):
            with evaluation_statistics(model, how, batches=[torch.ones(1, 2)]):
                pass

    run(work)


def test_mistakes_are_refused_at_the_call() -> None:
    model = made_model()
    with pytest.raises(UsageError, match="unknown statistics 'merge'; known: worker, merged, recalibrated; nearest: merged"):
        under(alone(), evaluation_statistics, model, "merge")
    with pytest.raises(UsageError, match="needs batches="):
        evaluation_statistics(model, "recalibrated")
    for worker in (1, -1):
        with pytest.raises(UsageError, match=f"one of the ranks 0 to 0, not {worker}"):
            under(alone(), evaluation_statistics, model, "worker", worker=worker)

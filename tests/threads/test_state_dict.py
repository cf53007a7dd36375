"""state_dict() on one rank alone is one state of the job, as torch writes it; load_state_dict() gives one to the job."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from by_hand import STATEFUL, assert_same_state
from helpers import (
    MakeOptimizer,
    assert_close,
    copied,
    joined,
    loss_of,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained,
    weights,
)
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

MAKERS: dict[str, MakeOptimizer] = {
    **STATEFUL,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[2:]}, {"params": p[:2], "lr": 0.03}], lr=0.01, amsgrad=True),
}


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: list) -> None:
    for step in data:
        optimizer.zero_grad()
        loss_of(model, joined(step)).backward()
        optimizer.step()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("maker", MAKERS)
def test_under_bsp_the_state_read_by_one_rank_is_the_plain_optimizers(maker: str, servers: int) -> None:
    model, data = small_model(), small_batches(7, (4, 4))

    def work(session: Session) -> dict[str, Any] | None:
        _, optimizer = trained(session, model, MAKERS[maker], data)
        return optimizer.state_dict() if session.rank == 1 else None

    alone = copy.deepcopy(model)
    optimizer = MAKERS[maker](list(alone.parameters()))
    plain_steps(alone, optimizer, data)
    with ThreadJob(2, servers) as job:
        _, got = job.run(work)
    assert got is not None
    assert_same_state(got, optimizer.state_dict())


def test_a_state_read_in_the_middle_of_asp_is_one_cut_and_loads_into_a_plain_optimizer() -> None:
    """Rank 1 reads again and again while the others push: every parameter has made equally many steps."""
    shapes = [(5, 3), (7,), (2, 9)]
    start, gradients = made_params(shapes), made_gradients(shapes, 1)[0]
    reading = threading.Event()

    def work(session: Session) -> list[dict[str, Any]]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.Adam(params, lr=0.01))
        states = []
        if session.rank == 1:
            set_gradients(params, gradients)
            optimizer.step()
            states = [optimizer.state_dict() for _ in range(20)]
            reading.set()
        while session.rank != 1 and not reading.is_set():
            set_gradients(params, gradients)
            optimizer.step()
        return states

    with ThreadJob(3, 3, "asp,momentum=server") as job:
        _, states, _ = job.run(work)
    counts = []
    for state in states:
        steps = {float(own["step"]) for own in state["state"].values()}
        assert len(steps) == 1
        assert set(state["state"]) == {0, 1, 2}
        counts.append(steps.pop())
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]  # the others went on meanwhile
    params = copied(start)
    fresh = torch.optim.Adam(params, lr=0.5)
    fresh.load_state_dict(states[-1])
    set_gradients(params, gradients)
    fresh.step()
    assert fresh.param_groups[0]["lr"] == 0.01
    assert float(fresh.state[params[0]]["step"]) == counts[-1] + 1


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_loaded_state_is_gone_on_from(maker: str, servers: int) -> None:
    model, data = small_model(), small_batches(8, (4, 4))
    alone = copy.deepcopy(model)
    optimizer = MAKERS[maker](list(alone.parameters()))
    plain_steps(alone, optimizer, data[:4])
    halfway, saved = copy.deepcopy(alone), copy.deepcopy(optimizer.state_dict())
    plain_steps(alone, optimizer, data[4:])

    def work(session: Session) -> tuple[list[torch.Tensor], dict[str, Any]]:
        mine = copy.deepcopy(halfway)
        distributed = DistributedOptimizer(MAKERS[maker](list(mine.parameters())))
        distributed.load_state_dict(copy.deepcopy(saved))
        for step in data[4:]:
            distributed.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            distributed.step()
        return weights(mine), distributed.state_dict()

    with ThreadJob(2, servers) as job:
        results = job.run(work)
    for values, state in results:
        assert_close(values, weights(alone), rtol=1e-9)
        assert_same_state(state, optimizer.state_dict())


def test_a_state_that_every_worker_loads_is_loaded_once_though_one_is_late() -> None:
    """Without a barrier a slow worker loads when others have made steps: these must not be lost."""
    model = small_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, small_batches(1, (4,))[0][0]).backward()
    plain.step()
    saved, made = copy.deepcopy(plain.state_dict()), threading.Event()

    def work(session: Session) -> list[float]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.Adam(mine.parameters(), lr=0.01))
        if session.rank:
            assert made.wait(20)
        optimizer.load_state_dict(saved)
        for _ in range(0 if session.rank else 3):
            optimizer.zero_grad()
            loss_of(mine, small_batches(1, (4,))[0][0]).backward()
            optimizer.step()
        made.set()
        return [float(state["step"]) for state in optimizer.state_dict()["state"].values()]

    with ThreadJob(workers=2, servers=2, sync="asp") as job:
        early, late = job.run(work)
    assert set(early) == set(late) == {4.0}


def test_a_state_loaded_before_wrapping_is_gone_on_from_too() -> None:
    """As a script does that loads its own checkpoint, then makes the optimizer distributed."""
    model, data = small_model(), small_batches(8, (4, 4))
    alone = copy.deepcopy(model)
    optimizer = STATEFUL["adam"](list(alone.parameters()))
    plain_steps(alone, optimizer, data[:4])
    halfway, saved = copy.deepcopy(alone), copy.deepcopy(optimizer.state_dict())
    plain_steps(alone, optimizer, data[4:])

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(halfway)
        inner = STATEFUL["adam"](list(mine.parameters()))
        inner.load_state_dict(copy.deepcopy(saved))
        distributed = DistributedOptimizer(inner)
        for step in data[4:]:
            distributed.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            distributed.step()
        return weights(mine)

    with ThreadJob(2) as job:
        results = job.run(work)
    for values in results:
        assert_close(values, weights(alone), rtol=1e-9)


# The worker's own optimizer: apply="delta" without a barrier.


def lbfgs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def closure_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, steps: int) -> list[Any]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(steps)]  # type: ignore[arg-type]


def test_lbfgs_runs_on_the_worker_and_a_job_of_one_is_plain_lbfgs() -> None:
    model, ((batch,),) = small_model(), small_batches(1, (12,))

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        closure_steps(mine, DistributedOptimizer(lbfgs(list(mine.parameters())), apply="delta"), batch, 5)
        return weights(mine)

    alone = copy.deepcopy(model)
    closure_steps(alone, lbfgs(list(alone.parameters())), batch, 5)
    with ThreadJob(1, 2, "asp") as job:
        (got,) = job.run(work)
    assert_close(got, weights(alone), rtol=1e-6)


def test_a_step_with_a_closure_returns_the_loss() -> None:
    model, ((batch,),) = small_model(), small_batches(1, (12,))
    makers: list[MakeOptimizer] = [lambda p: torch.optim.SGD(p, lr=0.1), lbfgs]

    def work(session: Session) -> list[list[Any]]:
        losses = []
        for make in makers:
            mine = copy.deepcopy(model)
            optimizer = DistributedOptimizer(make(list(mine.parameters())), apply="delta")
            losses.append(closure_steps(mine, optimizer, batch, 3))
        return losses

    with ThreadJob(1, 1, "asp") as job:
        (losses,) = job.run(work)
    for own in losses:
        assert None not in own
        values = [float(loss.detach()) for loss in own]
        assert values[0] == pytest.approx(float(loss_of(model, batch).detach()))
        assert values[2] < values[0]


def test_lbfgs_of_several_workers_lowers_the_joint_loss() -> None:
    model = made_from_seed(6, lambda: nn.Linear(5, 3)).double()
    (step,) = small_batches(1, (12, 12))
    with torch.no_grad():
        before = float(loss_of(model, joined(step)))

    def work(session: Session) -> float:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(lbfgs(list(mine.parameters())), apply="delta")
        closure_steps(mine, optimizer, joined(step), 6)
        optimizer.consolidate()
        with torch.no_grad():
            return float(loss_of(mine, joined(step)))

    with ThreadJob(2, 2, "asp") as job:
        losses = job.run(work)
    assert max(losses) < 0.95 * before


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad", "ASGD", "Adafactor"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_state_of_scalars_and_single_elements_is_loaded_as_it_was(name: str, servers: int) -> None:
    """Beside numbers that torch keeps for a whole parameter, such as the count of steps, which look alike."""
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (1, 1)]
    start, gradients = made_params(shapes), made_gradients(shapes, 6)
    settings = {"SGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {"lr": 0.1})

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, **settings)
        return optimizer

    params = copied(start)
    plain = make(params)
    for step in gradients[:3]:
        set_gradients(params, step)
        plain.step()
    halfway, saved = copied(params), copy.deepcopy(plain.state_dict())
    params = copied(halfway)
    plain = make(params)
    plain.load_state_dict(copy.deepcopy(saved))  # which casts what torch keeps in its default dtype
    for step in gradients[3:]:
        set_gradients(params, step)
        plain.step()

    def work(session: Session) -> tuple[list[torch.Tensor], dict[str, Any]]:
        mine = copied(halfway)
        optimizer = DistributedOptimizer(make(mine))
        optimizer.load_state_dict(copy.deepcopy(saved))
        for step in gradients[3:]:
            set_gradients(mine, step)
            optimizer.step()
        return [param.detach().clone() for param in mine], optimizer.state_dict()

    with ThreadJob(1, servers) as job:
        ((values, state),) = job.run(work)
    assert_close(values, [param.detach() for param in params], rtol=1e-12)
    assert_same_state(state, plain.state_dict())


@pytest.mark.parametrize("way", ["ps", "allreduce"])
def test_a_scripts_own_checkpoint_loaded_before_wrapping_is_where_the_job_goes_on(way: str) -> None:
    """As docs/script.md has it: saved by one rank after consolidate(), loaded by all before the optimizer is wrapped."""
    model, data = small_model(), small_batches(6, (4, 4))

    def part(saved: dict[str, Any] | None, steps: list) -> dict[str, Any]:
        def work(session: Session) -> dict[str, Any] | None:
            own = copy.deepcopy(model)
            inner = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
            if saved is not None:
                own.load_state_dict(saved["model"])
                inner.load_state_dict(copy.deepcopy(saved["optimizer"]))  # a file of its own for each process
            optimizer = DistributedOptimizer(inner, own)
            for step in steps:
                optimizer.zero_grad()
                loss_of(own, step[session.rank]).backward()
                optimizer.step()
            optimizer.consolidate()
            if session.rank:
                return None
            return copy.deepcopy({"model": own.state_dict(), "optimizer": optimizer.state_dict()})

        with ThreadJob(2, via=way) as job:
            found = job.run(work)[0]
        assert found is not None
        return found

    whole, resumed = part(None, data), part(part(None, data[:3]), data[3:])
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name])

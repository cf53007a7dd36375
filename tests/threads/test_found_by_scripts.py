"""What random scripts (`tests/fuzzed`) have found, each as small as it could be made."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_equal, copied, made_gradients, made_params, set_gradients
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)


def stepped(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: list[list[torch.Tensor]]) -> None:
    for step in gradients:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_a_state_that_is_loaded_is_cast_as_torch_casts_it(name: str) -> None:
    """Single numbers of these classes are float32 until they are loaded, then of the parameter's dtype."""
    start, gradients = made_params([(3, 2), (4,)]), made_gradients([(3, 2), (4,)], 6)

    def train(optimizer: Any, params: list[nn.Parameter]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        stepped(params, optimizer, gradients[:3])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        stepped(params, optimizer, gradients[3:])
        return [param.detach() for param in params], optimizer.state_dict()["state"]

    def work(session: Session) -> tuple[list[torch.Tensor], dict[str, Any]]:
        params = copied(start)
        return train(DistributedOptimizer(getattr(torch.optim, name)(params, lr=0.01)), params)

    params = copied(start)
    wanted, state = train(getattr(torch.optim, name)(params, lr=0.01), params)
    with ThreadJob(1, 2) as job:
        [(got, kept)] = job.run(work)
    assert_equal(got, wanted)
    for index, values in state.items():
        assert {key: value.dtype for key, value in kept[index].items()} == {key: v.dtype for key, v in values.items()}


def test_the_state_of_a_job_with_a_parameter_without_elements_loads_into_plain_torch() -> None:
    """Adagrad makes its state when it is built, and does not miss any later."""
    shapes = [(3, 2), (0, 4), (2,)]
    start, gradients = made_params(shapes), made_gradients(shapes, 4)

    def work(session: Session) -> tuple[list[nn.Parameter], dict[str, Any]]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.Adagrad(params, lr=0.1))
        stepped(params, optimizer, gradients[:2])
        return params, optimizer.state_dict()

    with ThreadJob(1, 2) as job:
        [(params, state)] = job.run(work)
    assert state["state"][1]["sum"].shape == (0, 4)
    plain = torch.optim.Adagrad(params, lr=0.1)
    plain.load_state_dict(state)
    stepped(params, plain, gradients[2:])
    alone = copied(start)
    stepped(alone, torch.optim.Adagrad(alone, lr=0.1), gradients)
    assert_equal([param.detach() for param in params], [param.detach() for param in alone])


@pytest.mark.parametrize("way", ["ps", "allreduce", "group"])
def test_what_weighs_nothing_is_not_left_in_a_gradient_that_was_synchronized(way: str) -> None:
    """Only the rank whose samples weigh 0 has a gradient of the second parameter: its replica must not move alone."""
    start, (gradient,) = made_params([(3,), (2,)]), made_gradients([(3,), (2,)], 1)

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.5))
        params[0].grad = gradient[0].clone()
        params[1].grad = gradient[1].clone() if session.rank == 0 else None
        weight = float(session.rank)
        optimizer.synchronize(samples=weight)
        assert params[1].grad is None
        optimizer.step(samples=weight)
        return [param.detach() for param in params]

    with GroupJob(2) if way == "group" else ThreadJob(2, 2, via=way) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, [start[0].detach() - 0.5 * gradient[0], start[1].detach()], rtol=1e-12)


def test_local_steps_of_downpour_are_clipped() -> None:
    start, gradients = made_params([(3, 2)]), made_gradients([(3, 2)], 4)

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), clip_norm=0.2)
        stepped(params, optimizer, gradients)
        optimizer.consolidate()
        return [param.detach() for param in params]

    alone = copied(start)
    plain = torch.optim.SGD(alone, lr=0.1)
    for step in gradients:
        set_gradients(alone, step)
        assert nn.utils.clip_grad_norm_(alone, 0.2) > 0.2
        plain.step()
    with ThreadJob(1, sync="downpour:push=2,fetch=2") as job:
        [got] = job.run(work)
    assert_close(got, [param.detach() for param in alone], rtol=1e-12)


@pytest.mark.parametrize("way", ["allreduce", "group"])
def test_replicas_that_would_begin_with_different_states_are_refused(way: str) -> None:
    """Values come from rank 0; each worker's state is its own, and they would drift apart without a word."""
    start, gradients = made_params([(3,)]), made_gradients([(3,)], 2)

    def work(session: Session, differs: bool) -> None:
        params = copied(start)
        inner = torch.optim.Adam(params, lr=0.1)
        stepped(params, inner, gradients[session.rank : session.rank + 1] if differs else gradients[:1])
        stepped(params, DistributedOptimizer(inner), gradients)

    for differs in (False, True):
        with GroupJob(2) if way == "group" else ThreadJob(2, via=way) as job:
            if not differs:
                job.run(lambda session: work(session, False))
                continue
            with pytest.raises(UsageError, match="Adam with state") as refused:
                job.run(lambda session: work(session, True))
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("way", ["ps", "allreduce", "group"])
def test_a_model_that_is_reordered_again_trains_as_before(way: str) -> None:
    """`.grad`, a view of the bucket, goes along with its parameter; then it is dropped, and the next one is another's."""
    start = made_params([(2, 2, 3, 3)])[0]
    gradients = made_gradients([(2, 2, 3, 3)], 3)

    def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> torch.Tensor:
        holder = nn.ParameterList(params)
        for (gradient,) in gradients:
            optimizer.zero_grad()
            (params[0] * gradient).sum().backward()
            optimizer.step()
            holder.to(memory_format=torch.channels_last)
        return params[0].detach()

    def work(session: Session) -> torch.Tensor:
        params = copied([start])
        return train(params, DistributedOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9)))

    alone = copied([start])
    wanted = train(alone, torch.optim.SGD(alone, lr=0.1, momentum=0.9))
    with GroupJob(2) if way == "group" else ThreadJob(2, via=way) as job:
        for got in job.run(work):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


def test_a_sparse_embedding_that_is_given_other_memory_is_refused_unless_its_values_are_the_same() -> None:
    def work(session: Session) -> str:
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for factor in (1.0, 0.5):
            model.weight.data = model.weight.data * factor
            model(torch.tensor([1])).sum().backward()
            try:
                optimizer.step()
            except UsageError as error:
                return f"{factor} {error}"
        return "not refused"

    with ThreadJob(1) as job:
        [said] = job.run(work)
    assert said.startswith("0.5 weight was changed in place, and of a sparse embedding")


def test_values_that_are_pushed_are_what_the_next_gradient_is_compensated_for() -> None:
    """Alone nothing is stale: delay compensation has nothing to do, whatever was pushed."""
    start, gradients = made_params([(4,)]), made_gradients([(4,)], 2)

    def train(params: list[nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
        stepped(params, optimizer, gradients[:1])
        with torch.no_grad():
            params[0].mul_(0.5)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.push_parameters()
        stepped(params, optimizer, gradients[1:])
        return [param.detach() for param in params]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        return train(params, DistributedOptimizer(torch.optim.SGD(params, lr=0.1)))

    alone = copied(start)
    wanted = train(alone, torch.optim.SGD(alone, lr=0.1))
    with ThreadJob(1, sync="asp,dc=0.5") as job:
        [got] = job.run(work)
    assert_equal(got, wanted)


def test_consolidate_in_rounds_does_not_see_what_another_workers_script_has_changed_for_the_next_step() -> None:
    """All ranks evaluate, then scale their weights, then step. The slower one must not scale what is scaled already."""
    start, gradients = made_params([(4,)]), made_gradients([(4,)], 2)
    pushed = threading.Event()

    def train(params: list[nn.Parameter], optimizer: Any, rank: int) -> torch.Tensor:
        stepped(params, optimizer, gradients[:1])
        if rank == 1:
            assert pushed.wait(20)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.consolidate()
        with torch.no_grad():
            params[0].mul_(0.5)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.push_parameters()
            pushed.set()
        stepped(params, optimizer, gradients[1:])
        return params[0].detach()

    def work(session: Session) -> torch.Tensor:
        params = copied(start)
        return train(params, DistributedOptimizer(torch.optim.SGD(params, lr=0.1)), session.rank)

    alone = copied(start)
    wanted = train(alone, torch.optim.SGD(alone, lr=0.1), 0)
    with ThreadJob(2) as job:
        results = job.run(work)
    assert_close(results, [wanted, wanted], rtol=1e-12)


def test_rates_of_local_steps_are_those_of_now_after_a_state_was_loaded() -> None:
    """Loading gives an optimizer new groups; those of before are nobody's."""
    start, gradients = made_params([(3, 2)]), made_gradients([(3, 2)], 4)

    def train(params: list[nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
        stepped(params, optimizer, gradients[:2])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.01
        stepped(params, optimizer, gradients[2:])
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.consolidate()
        return [param.detach() for param in params]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        return train(params, DistributedOptimizer(torch.optim.SGD(params, lr=0.1)))

    alone = copied(start)
    wanted = train(alone, torch.optim.SGD(alone, lr=0.1))
    with ThreadJob(1, sync="downpour:push=1,fetch=1") as job:
        [got] = job.run(work)
    assert_close(got, wanted, rtol=1e-12)

"""Steps whose own gradients are not all numbers are counted, or refused, however the gradients came to be so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import copied, made_gradients, made_params, set_gradients
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]


def poison_data(param: nn.Parameter) -> None:
    param.grad.data[0] = torch.nan


def poison_in_place(param: nn.Parameter) -> None:
    param.grad[1] = torch.inf


def poison_by_scaling(param: nn.Parameter) -> None:
    torch._foreach_mul_([param.grad], torch.inf)


def poison_by_assigning(param: nn.Parameter) -> None:
    param.grad = torch.full_like(param, -torch.inf)


POISONS = [poison_data, poison_in_place, poison_by_scaling, poison_by_assigning]


@pytest.mark.parametrize("poison", [poison for poison in POISONS if poison is not poison_data])  # seen only by "refuse"
@pytest.mark.parametrize("way", ["backward", "by hand"])
def test_exactly_the_steps_with_numbers_that_are_none_are_counted(way: str, poison: Callable[[nn.Parameter], None]) -> None:
    """Steps 1 and 4 are bad; step 2 repeats the gradients of step 1, step 5 has the same memory with good ones."""
    start, gradients = made_params([(4,), (3,)]), made_gradients([(4,), (3,)], 6)

    def work(session: Session) -> list[int]:
        params, counts = copied(start), []
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        for number, step in enumerate(gradients):
            if number != 2 and way == "by hand":
                set_gradients(params, step)
            elif number != 2:
                optimizer.zero_grad(set_to_none=number != 5)
                made = [torch.nan_to_num(param.detach()) + param - param.detach() for param in params]
                sum((param * grad).sum() for param, grad in zip(made, step, strict=True)).backward()
            if number in (1, 4):
                poison(params[1])
            if number == 5:
                params[1].grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
            counts.append(optimizer.stats["nonfinite"])
        return counts

    with ThreadJob(1) as job:
        assert job.run(work) == [[0, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize("poison", POISONS)
def test_numbers_that_are_none_are_refused_with_the_parameters_name(poison: Callable[[nn.Parameter], None]) -> None:
    start, gradients = made_params([(4,), (3,)]), made_gradients([(4,), (3,)], 2)

    def work(session: Session) -> None:
        params = copied(start)
        named = [("good", params[0]), ("bad", params[1])]
        inner = torch.optim.SGD(params, lr=0.1)
        optimizer = DistributedOptimizer(inner, named_parameters=named, nonfinite="refuse")
        for number, step in enumerate(gradients):
            optimizer.zero_grad()
            sum((param * grad).sum() for param, grad in zip(params, step, strict=True)).backward()
            if number == 1:
                poison(params[1])
            optimizer.step()

    with ThreadJob(1) as job, pytest.raises(UsageError, match="worker 0, step 1: bad has a gradient that is not finite"):
        job.run(work)

"""f, g, gather and split: their gradients, and what a group communicates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from splitting import on_ranks
from torch import Tensor

from polytempo.tensor_parallel.group import CountingGroup, RankTensorGroup, TensorGroup
from polytempo.tensor_parallel.mappings import copy_to, gather_from, reduce_from, split_to

pytestmark = pytest.mark.timeout(60)

Region = Callable[[Tensor, TensorGroup], Tensor]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


#: From a whole tensor to a whole tensor, through what differs on each rank.
REGIONS: dict[str, Region] = {
    "f then g": lambda x, group: reduce_from(copy_to(x, group) * numbers(group.rank, 3, 4), group),
    "f then gather": lambda x, group: gather_from((copy_to(x, group) * numbers(group.rank, 3, 4)).sin(), group),
    "f then gather along 0": lambda x, group: gather_from((copy_to(x, group) * numbers(group.rank, 3, 4)).sin(), group, 0),
    "split then g": lambda x, group: reduce_from(split_to(x, group).exp() @ numbers(group.rank, 4 // group.size, 3), group),
    "split then gather": lambda x, group: gather_from(split_to(x, group) ** (group.rank + 2), group),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_gradients_are_those_of_differences(region: Region, size: int) -> None:
    def work(group: RankTensorGroup) -> bool:
        x = numbers(7, 3, 4).requires_grad_()
        return torch.autograd.gradcheck(lambda value: region(value, group), (x,))

    assert all(on_ranks(size, work))


def test_g_does_not_divide_and_f_adds() -> None:
    def work(group: RankTensorGroup) -> tuple[Tensor, Tensor]:
        x = torch.ones(2, requires_grad=True)
        y = torch.ones(2, requires_grad=True)
        copy_to(x, group).sum().backward()
        reduce_from(y, group).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        return x.grad, y.grad

    for of_f, of_g in on_ranks(4, work):
        assert of_f.tolist() == [4, 4]
        assert of_g.tolist() == [1, 1]


def test_neither_inputs_nor_gradients_are_overwritten() -> None:
    def work(group: RankTensorGroup) -> tuple[list[float], list[float]]:
        x, given = torch.ones(2, requires_grad=True), torch.ones(2)
        reduce_from(x * 1, group)
        copy_to(x, group).backward(given)
        return x.tolist(), given.tolist()

    assert on_ranks(2, work) == [([1, 1], [1, 1])] * 2


def test_a_counting_group_notes_calls_and_keeps_values() -> None:
    group = CountingGroup(4, rank=1)
    x = torch.ones(2, 8, requires_grad=True)
    total = reduce_from(copy_to(x, group), group)
    gathered = gather_from(split_to(x, group), group)
    (total.sum() + gathered.sum()).backward()
    assert total.tolist() == x.tolist()
    assert gathered.shape == (2, 8)
    assert sorted(group.calls) == [
        ("all_gather", 64, False),
        ("all_gather", 64, True),
        ("all_reduce", 64, False),
        ("all_reduce", 64, True),
    ]


def test_a_group_of_one_makes_no_calls() -> None:
    group = CountingGroup(1)
    x = torch.ones(2, requires_grad=True)
    assert gather_from(split_to(reduce_from(copy_to(x, group), group), group), group) is x
    assert group.calls == []

"""A sum of gradients means the same wherever it lies: what its batches weigh, how many have a gradient in it, on which
values they were computed, and which parameters have none."""

from __future__ import annotations

import pytest
import torch

from polytempo.errors import UsageError
from polytempo.protocol.layout import lay_out
from polytempo.protocol.push import Measures
from polytempo.protocol.values import VitalSigns
from polytempo.reducer.copier import Copier
from polytempo.reducer.flat_buffer import FlatBuffer, describe
from polytempo.train.gradient_sums import FlatSum, GradientSum, WideSum
from polytempo.transport.buffer_pool import Pool

SHAPES = [(3, 2), (4,), (2,)]
WEIGHTS = (3.0, 1.0, 2.0)


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def flat_sum(params: list[torch.Tensor]) -> FlatSum:
    layout = lay_out(describe(params, [str(i) for i in range(len(params))], [0] * len(params)), 2)
    buffer = FlatBuffer(layout, Pool())
    for flat in buffer.tensors.values():
        flat.fill_(7.0)  # of the round before
    return FlatSum(Copier(params, layout, Pool()), buffer)


def add_three(params: list[torch.Tensor], total: GradientSum) -> list[torch.Tensor]:
    """Three batches; the second has no gradient for the first parameter, and none has one for the last. The sums of those
    that have."""
    wanted = [torch.zeros_like(param) for param in params[:2]]
    for number, weight in enumerate(WEIGHTS):
        for index, param in enumerate(params[:2]):
            param.grad = None if (number, index) == (1, 0) else torch.randn_like(param)
            wanted[index] += 0 if param.grad is None else weight * param.grad
        total.add(weight, version=(5, 4, 6)[number])
    return wanted


def test_both_mean_the_same() -> None:
    for make in (flat_sum, WideSum):
        params = parameters()
        total = make(params)
        assert (total.samples, total.count, total.version) == (0.0, 0, None)
        add_three(params, total)
        assert (total.samples, total.count, total.version) == (6.0, 3, 4)


def test_in_a_flat_buffer_nothing_is_left_of_what_was_there() -> None:
    params = parameters()
    total = flat_sum(params)
    assert total.had() == {}, "before the first gradient the buffer has what it had"
    wanted = add_three(params, total)
    assert total.absent == {2}
    assert torch.equal(total.buffer.views[2], params[2])
    for index, one in total.had().items():
        torch.testing.assert_close(one, wanted[index])
    assert sorted(total.had()) == [0, 1]


def test_the_mean_becomes_the_gradient_and_a_parameter_without_one_has_none() -> None:
    params = parameters()
    total = WideSum(params)
    wanted = add_three(params, total)
    params[2].grad = torch.ones_like(params[2])  # of a batch that was left out
    total.assign_mean()
    for param, one in zip(params, wanted, strict=False):
        torch.testing.assert_close(param.grad, one / 6)
    assert params[2].grad is None


def test_narrow_gradients_are_added_up_wider() -> None:
    param = torch.zeros(1, dtype=torch.float16)
    total = WideSum([param])
    for _ in range(3):
        param.grad = torch.full_like(param, 40000.0)
        total.add(32.0)
    total.assign_mean()
    assert param.grad is not None
    assert param.grad.dtype == torch.float16
    assert float(param.grad) == 40000.0


def test_sparse_gradients_are_refused_with_a_remedy() -> None:
    param = torch.zeros(4, 2)
    param.grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(UsageError, match="use sparse=False"):
        WideSum([param]).add(1.0)


def test_what_is_said_counts_all_batches_and_of_vital_signs_the_last() -> None:
    total = WideSum(parameters())
    for number in range(3):
        total.say(Measures(samples=2.0, computed=1.0, vital_signs=(VitalSigns(float(number), 1.0, 0.1, 1.0),)))
    assert (total.measures.samples, total.measures.count, total.measures.computed) == (6.0, 3, 3.0)
    assert [one.loss for one in total.measures.vital_signs] == [2.0]
    assert (total.samples, total.count) == (0.0, 0), "no gradient was added"

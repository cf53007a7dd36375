"""Cross-entropy of split logits is `F.cross_entropy` of all of them: values and gradients, with every option."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import TOLERANCE, on_ranks
from torch import Tensor, nn
from torch.nn import functional

from polytempo.errors import UsageError
from polytempo.tensor_parallel.cross_entropy import cross_entropy, parallel_loss, split_logits
from polytempo.tensor_parallel.group import CountingGroup, RankTensorGroup
from polytempo.tensor_parallel.sharding import Sharding

pytestmark = pytest.mark.timeout(60)


def numbers(*shape: int, seed: int = 9, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def split_loss(logits: Tensor, target: Tensor, size: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Loss and joined gradient on each rank."""
    classes, last = logits.shape[-1], logits.dim() - 1
    sharding = Sharding(tuple(logits.shape), last, padded=True)

    def work(group: RankTensorGroup) -> tuple[Tensor, Tensor]:
        mine = sharding.shard(logits, group.rank, size).requires_grad_()
        with split_logits(group, classes):
            loss = cross_entropy(mine, target, dim=-1, **options)
        (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)).sum().backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad

    results = on_ranks(size, work)
    whole = sharding.join([grad for _, grad in results])
    padding = torch.cat([grad for _, grad in results], last).narrow(last, classes, sharding.rows(size) * size - classes)
    assert not padding.any()
    return [(loss, whole) for loss, _ in results]


def whole_loss(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = functional.cross_entropy(logits.movedim(-1, 1) if logits.dim() > 1 else logits, target, **options)
    (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.integers(4, 9),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
    st.sampled_from([(5,), (2, 3), (2, 1, 3)]),
    st.sampled_from([-100, 1]),
)
def test_it_equals_the_whole_with_every_option(
    size: int, classes: int, reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...], ignored: int
) -> None:
    logits = numbers(*shape, classes)
    target = torch.randint(classes, shape, generator=torch.Generator().manual_seed(classes))
    target.view(-1)[0] = ignored
    weight = numbers(classes, seed=1).abs() if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    wanted, grad = whole_loss(logits, target, **options)
    for loss, joined in split_loss(logits, target, size, **options):
        torch.testing.assert_close(loss, wanted, **TOLERANCE)
        torch.testing.assert_close(joined, grad, **TOLERANCE)


def test_large_logits_do_not_overflow() -> None:
    logits, target = numbers(4, 6, scale=1e4), torch.tensor([0, 5, 2, 3])
    wanted, grad = whole_loss(logits, target)
    for loss, joined in split_loss(logits, target, 2):
        torch.testing.assert_close(loss, wanted, **TOLERANCE)
        torch.testing.assert_close(joined, grad, **TOLERANCE)


def test_one_sample_without_a_batch() -> None:
    logits, target = numbers(6), torch.tensor(4)
    wanted, grad = whole_loss(logits, target)
    for loss, joined in split_loss(logits, target, 2):
        torch.testing.assert_close(loss, wanted, **TOLERANCE)
        torch.testing.assert_close(joined, grad, **TOLERANCE)


def test_half_precision_is_summed_in_single() -> None:
    logits, target = numbers(4, 8).bfloat16(), torch.tensor([0, 5, 2, 3])
    wanted, _ = whole_loss(logits, target)
    for loss, _ in split_loss(logits, target, 2):
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(loss, wanted)


LOSSES = {
    "F.cross_entropy": functional.cross_entropy,
    "nn.CrossEntropyLoss": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2),
    "ours": cross_entropy,
    "partial": partial(functional.cross_entropy, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_users_are_known(name: str) -> None:
    logits, target, loss = numbers(4, 6), torch.tensor([0, 5, 2, 3]), LOSSES[name]

    def work(group: RankTensorGroup) -> Tensor:
        return parallel_loss(loss, group, 6)(Sharding((4, 6), 1).shard(logits, group.rank, 2), target)

    for result in on_ranks(2, work):
        torch.testing.assert_close(result, loss(logits, target), **TOLERANCE)


def test_without_split_logits_it_is_torchs() -> None:
    logits, target = numbers(4, 6, 3), torch.randint(6, (4, 3), generator=torch.Generator().manual_seed(1))
    assert torch.equal(cross_entropy(logits, target), functional.cross_entropy(logits, target))
    assert torch.equal(cross_entropy(logits.movedim(1, -1), target, dim=-1), functional.cross_entropy(logits, target))


def test_mistakes_are_refused() -> None:
    logits, target = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with split_logits(CountingGroup(2), 8):
        with pytest.raises(UsageError, match="classes along the last dimension, got dim=1"):
            cross_entropy(logits, target)
        with pytest.raises(UsageError, match="got probabilities"):
            cross_entropy(logits, torch.zeros(2, 3, 8), dim=-1)
        with pytest.raises(UsageError, match="expected reduction to be one of mean, sum, none, got 'average'"):
            cross_entropy(logits, target, reduction="average", dim=-1)
        with pytest.raises(IndexError, match="expected ids from 0 to 7, got 8"):
            cross_entropy(logits, target + 8, dim=-1)
    with pytest.raises(UsageError, match=r"expected F.cross_entropy, .* got mse_loss; name the layer 'column-gather'"):
        parallel_loss(functional.mse_loss, CountingGroup(2), 8)

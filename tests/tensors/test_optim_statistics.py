"""Statistics of several workers as one, against those of all samples together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.several_workers import merged, norm_layers

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def samples(sizes: list[int], seed: int, shift: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [index * shift + torch.randn(n, 3, generator=generator).double() for index, n in enumerate(sizes)]


def described(parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [part.mean(0) for part in parts], [part.var(0, unbiased=False) for part in parts]


@moderately
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 1000), st.floats(0, 10))
def test_with_equal_counts_it_is_all_samples_together(workers: int, size: int, seed: int, shift: float) -> None:
    parts = samples([size] * workers, seed, shift)
    mean, variance = merged(*described(parts))
    together = torch.cat(parts)
    torch.testing.assert_close(mean, together.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance, together.var(0, unbiased=False), rtol=1e-9, atol=1e-9)


@moderately
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
def test_counts_weigh(sizes: list[int], seed: int) -> None:
    parts = samples(sizes, seed, 3.0)
    mean, variance = merged(*described(parts), counts=sizes)
    together = torch.cat(parts)
    torch.testing.assert_close(mean, together.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance, together.var(0, unbiased=False), rtol=1e-9, atol=1e-9)


@moderately
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=6), st.floats(0, 2.0**-90, width=32))
def test_a_variance_is_never_negative(means: list[float], variance: float) -> None:
    found = merged([torch.tensor([m]) for m in means], [torch.tensor([variance])] * len(means))[1]
    assert found.item() >= 0
    assert found.dtype == torch.float32


def test_large_means_keep_small_variances() -> None:
    mean, variance = merged([torch.tensor([1e4])] * 3, [torch.tensor([1e-3])] * 3)
    assert mean.item() == 1e4
    assert variance.item() == pytest.approx(1e-3)


def test_a_count_of_zero_leaves_one_out() -> None:
    mean, variance = merged([torch.tensor([5.0]), torch.tensor([0.0])], [torch.tensor([2.0]), torch.tensor([1.0])], [3, 0])
    assert (mean.item(), variance.item()) == (5.0, 2.0)


@pytest.mark.parametrize("counts", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_counts_that_make_no_sense_are_refused(counts: list[float]) -> None:
    with pytest.raises(UsageError, match="counts must be 2 numbers"):
        merged([torch.ones(1)] * 2, [torch.ones(1)] * 2, counts)


def test_as_many_variances_as_means() -> None:
    with pytest.raises(UsageError, match="not 1 and 2"):
        merged([torch.ones(1)] * 2, [torch.ones(1)])
    with pytest.raises(UsageError, match="not 0 and 0"):
        merged([], [])


def test_layers_that_track_are_found_and_others_are_not() -> None:
    tracking = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.InstanceNorm1d(3, track_running_stats=True)]
    others = [nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 3)]
    model = nn.Sequential(nn.Sequential(*tracking[:2]), tracking[2], *others)
    assert norm_layers(model) == tracking
    assert norm_layers(nn.Linear(2, 2)) == []

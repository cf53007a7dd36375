"""Running statistics of normalisation layers that several workers have collected, as one.

    mean = mean of mean_i;  variance = mean of (variance_i + mean_i^2) - mean^2

Written as the mean of variance_i + (mean_i - mean)^2, which is the same, cannot come out negative and loses no digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.errors import UsageError


def merged(
    means: Sequence[torch.Tensor], variances: Sequence[torch.Tensor], counts: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all samples together; `counts` says how many each has, else they count alike."""
    if not means or len(means) != len(variances):
        raise UsageError(f"as many variances as means are needed, at least one, not {len(variances)} and {len(means)}")
    weights = _weights(counts, len(means), means[0].device)
    every_mean = torch.stack(tuple(means)).to(torch.float64)
    mean = torch.tensordot(weights, every_mean, 1)
    spread = torch.stack(tuple(variances)).to(torch.float64) + (every_mean - mean) ** 2
    return mean.to(means[0].dtype), torch.tensordot(weights, spread, 1).to(variances[0].dtype)


def _weights(counts: Sequence[float] | None, size: int, device: torch.device) -> torch.Tensor:
    given = [1.0] * size if counts is None else [float(count) for count in counts]
    if len(given) != size or min(given) < 0 or sum(given) <= 0:
        raise UsageError(f"counts must be {size} numbers, none negative and not all zero, not {counts}")
    weights = torch.tensor(given, dtype=torch.float64, device=device)
    return weights / weights.sum()


def with_merged_buffers(model: torch.nn.Module, every: Sequence[Sequence[torch.Tensor]]) -> torch.nn.Module:
    """Give a model the buffers that several workers have collected, as one: running means and variances are merged as those
    of one population, other buffers are averaged. Without any it keeps its own."""
    names = [name for name, _ in model.named_buffers()]
    of = dict(zip(names, zip(*every, strict=True), strict=True)) if every else {}
    for name, buffer in model.named_buffers() if of else ():
        layer, _, kind = name.rpartition("running_")
        mean, variance = f"{layer}running_mean", f"{layer}running_var"
        if kind in ("mean", "var") and mean in of and variance in of:
            value = merged(of[mean], of[variance])[kind == "var"]
        else:
            value = torch.stack([one.to(torch.float64) for one in of[name]]).mean(0)
        buffer.copy_(value.to(buffer.dtype))
    return model


def norm_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that keep a running mean and variance (batch norm, and whatever is built like it)."""
    return [module for module in model.modules() if _tracks(module)]


def _tracks(module: torch.nn.Module) -> bool:
    kept = all(isinstance(getattr(module, name, None), torch.Tensor) for name in ("running_mean", "running_var"))
    return kept and hasattr(module, "momentum") and hasattr(module, "reset_running_stats")

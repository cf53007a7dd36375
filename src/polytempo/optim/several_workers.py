"""What several workers have, as one: sums with weights, statistics of normalisation layers, how far gradients differ.

Running statistics of normalisation layers that several workers have collected:

    mean = mean of mean_i;  variance = mean of (variance_i + mean_i^2) - mean^2

Written as the mean of variance_i + (mean_i - mean)^2, which is the same, cannot come out negative and loses no digits.

Gradient divergence between workers is large when their shards of the data differ:

    sqrt(mean over i of |g_i - mean|^2) / |mean|        over the latest gradient g_i of each worker

It is taken from two workers on, once for as many new gradients as there are workers, from at most 1,024 coordinates that lie
evenly over the parameters. Its mean over the run is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from polytempo.errors import UsageError

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)
#: Of a gradient, from which divergence is taken.
COORDINATES = 1024


def weighted_sum(terms: Iterable[tuple[Sequence[MaybeTensor], float]]) -> list[MaybeTensor]:
    """Add up lists of tensors, each times its weight, in their order.

    Args:
        terms: Lists of one form, with a weight each. They are taken one by one, and none is changed. A list that counts
            alone and whole gives its own tensors, bit for bit.

    Returns:
        The sums; None where all terms have None, which is what an unused parameter has for a gradient.
    """
    total: list[MaybeTensor] = []
    for tensors, weight in terms:
        part = [tensor if tensor is None or weight == 1 else tensor * weight for tensor in tensors]
        total = [_plus(one, other) for one, other in zip(total, part, strict=True)] if total else part
    return total


def _plus(one: MaybeTensor, other: MaybeTensor) -> MaybeTensor:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def with_change(
    values: Sequence[torch.Tensor], new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Values that were `old`, and became others, with the change from `old` to `new` on top. Where they are still `old`,
    they become `new`, bit for bit."""
    return [
        after if torch.equal(value, before) else value + (after - before)
        for value, after, before in zip(values, new, old, strict=True)
    ]


def merged(
    means: Sequence[torch.Tensor], variances: Sequence[torch.Tensor], counts: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all samples together; `counts` says how many each has, else they count alike."""
    if not means or len(means) != len(variances):
        raise UsageError(f"as many variances as means are needed, at least one, not {len(variances)} and {len(means)}")
    given = [1.0] * len(means) if counts is None else [float(count) for count in counts]
    if len(given) != len(means) or min(given) < 0 or sum(given) <= 0:
        raise UsageError(f"counts must be {len(means)} numbers, none negative and not all zero, not {counts}")
    weights = torch.tensor(given, dtype=torch.float64, device=means[0].device)
    weights /= weights.sum()
    every_mean = torch.stack(tuple(means)).to(torch.float64)
    mean = torch.tensordot(weights, every_mean, 1)
    spread = torch.stack(tuple(variances)).to(torch.float64) + (every_mean - mean) ** 2
    return mean.to(means[0].dtype), torch.tensordot(weights, spread, 1).to(variances[0].dtype)


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

    def tracks(module: torch.nn.Module) -> bool:
        kept = all(isinstance(getattr(module, name, None), torch.Tensor) for name in ("running_mean", "running_var"))
        return kept and hasattr(module, "momentum") and hasattr(module, "reset_running_stats")

    return [module for module in model.modules() if tracks(module)]


class GradientDivergence:
    """Keeps the latest gradient of each worker, and measures their divergence on request.

    On a GPU a look is counted by `settle`, which waits for the GPU; until then its figures stay there.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._stride = max(1, math.ceil(sum(sizes) / COORDINATES))
        self._firsts = [-sum(sizes[:index]) % self._stride for index in range(len(sizes))]  # of each parameter
        self._latest: dict[int, torch.Tensor] = {}
        self._new = 0  # gradients since the last look
        self._total, self._looks = 0.0, 0
        self._open: list[tuple[torch.Tensor, int]] = []  # looks that are not counted yet

    @property
    def mean(self) -> float:
        """Over all looks that are counted; 0 when there were never two workers."""
        return self._total / self._looks if self._looks else 0.0

    def take(self, worker: int, gradient: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> None:
        """A worker's new gradient, in the place of the one before; where there is none, the parameter was not used."""
        self._new += 1
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(gradient, parameters, strict=True)]
        self._latest[worker] = torch.cat(
            [g.reshape(-1)[f :: self._stride] for g, f in zip(given, self._firsts, strict=True)]
        )

    def look(self) -> None:
        """Count the spread as it is now, if it is time."""
        if self._new < len(self._latest) or len(self._latest) < 2:
            return
        self._new = 0
        every = torch.stack(list(self._latest.values())).to(torch.float64)
        mean = every.mean(0)
        self._open.append((torch.stack([mean.norm(), (every - mean).norm()]), len(every)))
        if every.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Count the looks that are not counted yet."""
        looks, self._open = self._open, []
        for norms, workers in looks:
            size, deviation = norms.tolist()
            if size > 0 and math.isfinite(size):
                self._total += deviation / math.sqrt(workers) / size
                self._looks += 1

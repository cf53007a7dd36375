"""The KKT filter of Li et al. (OSDI 2014) for L1 problems: what would not move a weight away from zero need not be sent.

With a penalty of lambda * |w|, a weight that is zero stays zero as long as |gradient| <= lambda. A worker knows its own
gradient only, so `delta` is below lambda: how far is the caller's choice, and what is skipped is skipped for good.
"""

from __future__ import annotations

import math

import torch

from polytempo.errors import UsageError
from polytempo.filters.forms import round_down


def kkt_keep(weights: torch.Tensor, gradient: torch.Tensor, delta: float) -> torch.Tensor:
    """A mask of the entries to send: all but those with a weight of zero and a gradient of at most `delta`."""
    if weights.shape != gradient.shape:
        shapes = f"{list(weights.shape)} and {list(gradient.shape)}"
        raise UsageError(f"expected weights and gradient of the same shape, got {shapes}; pull the weights of the same keys")
    if not 0 <= delta < math.inf:
        raise UsageError(f"expected a delta of at least 0, got {delta}; it is a bound of the gradient, below the penalty")
    small = gradient.abs() <= round_down(float(delta), gradient.dtype)  # NaN is not small
    return ~((weights == 0) & small)

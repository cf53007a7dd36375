"""Sums and weighted means of flat tensors, block by block: the second pass over a block finds it in the cache.

The order of the terms is the order given, in every block, so the result does not depend on how the work is cut up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Elements of a block: three of them fit into a core's own cache.
BLOCK = 1 << 16


def weighted_mean(terms: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
    """The mean of the terms, each as heavy as its weight, into `out`, which may be the first of them.

    A term of weight 0 is not looked at: it may hold anything. Equal weights of float16 go the long way: their sum may be
    larger than float16 can be, where their mean is not.
    """
    if 0 in weights:
        pairs = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight != 0]
        terms, weights = [term for term, _ in pairs], [weight for _, weight in pairs]
    if all(weight == weights[0] for weight in weights) and out.dtype != torch.float16:
        reduce_into(terms, out, 1 / len(terms))
        return
    total = sum(weights)
    shares = [weight / total for weight in weights]
    for start in range(0, out.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        mean = _wide(terms[0][block]) * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            mean.add_(_wide(term[block]), alpha=share)
        out[block] = mean


def _wide(term: torch.Tensor) -> torch.Tensor:
    """Numbers of two bytes are added up in four: rounded once, and alike whether torch takes them singly or by the dozen."""
    return term.float() if term.element_size() == 2 else term


def reduce_into(terms: Sequence[torch.Tensor], out: torch.Tensor, factor: float = 1.0) -> None:
    """The sum of the terms times a factor, into `out`, which may be the first of them."""
    first, *others = terms
    for start in range(0, out.numel(), BLOCK):
        target = out[start : start + BLOCK]
        if not others:
            target.copy_(first[start : start + BLOCK])
        for index, other in enumerate(others):
            torch.add(target if index else first[start : start + BLOCK], other[start : start + BLOCK], out=target)
        if factor != 1.0:
            target.mul_(factor)

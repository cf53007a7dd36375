"""Numbers as scripts have them (of NumPy, in tensors, booleans, fractions) as those that a message can carry."""

from __future__ import annotations

import numbers
from typing import Any

import numpy
import torch

from polytempo.errors import UsageError

_SMALL = 1 << 63


def plain_figures(values: dict[str, Any]) -> dict[str, float | int | str]:
    """What `log` was given, as plain numbers and texts; the first that is neither is refused by name."""
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        shape = list(value.shape)
        if any(length != 1 for length in shape):
            raise UsageError(
                f"log({name}=...) expected one number, got {len(shape)}-d data of shape {shape}; log its mean()"
            )
        value = value.item()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral) and -_SMALL <= int(value) < _SMALL:
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    kind = "None" if value is None else f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
    raise UsageError(f"log({name}=...) expected a number or a text, got {kind}; leave it out, or make it one")

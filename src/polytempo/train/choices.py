"""The arguments of a `DistributedOptimizer`, checked, and its hyper-parameters as they travel."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from polytempo.errors import UsageError, nearest

#: What a hyper-parameter may be to travel in a header, beside tuples of these and tensors of one element.
PLAIN = (bool, int, float, str, type(None))


class Hyper:
    """The hyper-parameters of all groups as they travel. They seldom change; what was looked at is not looked at again."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._plain: tuple[dict[str, Any], ...] = ()

    def of(self, groups: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """As they are now."""
        groups = list(groups)
        seen = [value for group in groups for name, value in group.items() if name != "params"]
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same or any(isinstance(value, torch.Tensor | list) for value in seen):  # these may change inside
            self._plain = tuple(
                {name: _plain(name, value) for name, value in group.items() if name not in ("params", "param_names")}
                for group in groups
            )
            self._seen = seen
        return self._plain


def _plain(name: str, value: Any) -> Any:
    """A hyper-parameter as it can travel."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(_plain(name, item) for item in value)
    raise UsageError(f'hyper-parameter {name!r} is {type(value).__name__}; a server takes numbers; use apply="delta"')


def names_of(
    params: list[torch.nn.Parameter],
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
    model: torch.nn.Module | None,
) -> list[str]:
    """What each parameter is called in messages to people."""
    pairs = list(named) if named is not None else list(model.named_parameters()) if model is not None else []
    known = {id(param): name for name, param in pairs}
    return [known.get(id(param), f"parameter {index}") for index, param in enumerate(params)]


def check_choices(
    apply: str, via: str | None, compression: object | None, buffers: str, clip_norm: float | None, nonfinite: str
) -> None:
    """Refuse arguments that cannot be."""
    choices = {
        "apply": (apply, ("server", "delta")),
        "buffers": (buffers, ("local", "mean")),
        "nonfinite": (nonfinite, ("count", "refuse")),
        "via": (via or "auto", ("auto", "ps", "allreduce")),
    }
    for name, (given, known) in choices.items():
        if given not in known:
            raise UsageError(f"expected {name} to be {' or '.join(known)}, got {given!r}{nearest(given, known)}")
    if compression is not None:
        raise UsageError("compression is planned but not available yet; leave it out")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"expected clip_norm above 0, got {clip_norm}")

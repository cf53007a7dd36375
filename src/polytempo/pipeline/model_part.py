"""A part of a model: the very parameters of the model, under its names. A parameter may be in two parts: it is then tied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ModelPart:
    """What one stage computes. `members`: modules that hold its tensors, and where they stood in the whole model."""

    module: nn.Module
    members: tuple[tuple[str, nn.Module], ...]
    #: A tuple of values is spread over the module's arguments, and not handed over as one.
    spreads: bool = False
    #: What of its tensors the model's `state_dict` has, where modules do not know (None: all).
    known: frozenset[str] | None = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole model, and parameter; one that has several names comes as often."""
        for prefix, member in self.members:
            yield from member.named_parameters(prefix, remove_duplicate=False)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the whole model: what its `state_dict` would have of them."""
        found: dict[str, Tensor] = {}
        for prefix, member in self.members:
            found |= member.state_dict(prefix=f"{prefix}." if prefix else "")
        known = found if self.known is None else self.known
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and name in known}

    def changes_its_input(self) -> bool:
        """Might its first layer work in place? For a traced part: might any?"""
        return any(getattr(module, "inplace", False) for module in self.members[0][1].modules())


def tied(parts: Sequence[ModelPart]) -> dict[tuple[int, ...], list[nn.Parameter]]:
    """The parameters that several parts hold: which parts, and the parameters in the order of the model."""
    holders: dict[nn.Parameter, list[int]] = {}
    for stage, part in enumerate(parts):
        for _, param in part.parameters():
            held = holders.setdefault(param, [])
            if stage not in held:
                held.append(stage)
    found: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for param, stages in holders.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), []).append(param)
    return found

"""The ways to split a module, and how a user's dict names them.

    column          nn.Linear by outputs, which stay split; "column:3": they are 3 blocks (q, k and v)
    column-gather   nn.Linear by outputs, which are gathered
    row             nn.Linear by inputs, which are split already
    row-split       nn.Linear by inputs, which are whole and split here
    heads           nn.MultiheadAttention by heads
    vocab           nn.Embedding by rows, or an output layer (nn.Linear) by classes; padded where that does not divide
    dropout         nn.Dropout between split layers: each rank drops other elements
    replicate       the module and all inside it stay whole

Torch's `ColwiseParallel()` and `RowwiseParallel()` mean column and row, with their layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from polytempo.errors import UsageError, nearest
from polytempo.tensor_parallel.sharding import Sharding

KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "column-gather": (nn.Linear,),
    "row": (nn.Linear,),
    "row-split": (nn.Linear,),
    "heads": (nn.MultiheadAttention,),
    "vocab": (nn.Embedding, nn.Linear),
    "dropout": (nn.Dropout,),
    "replicate": (nn.Module,),
}


@dataclass(frozen=True)
class Style:
    """How one module is split."""

    word: str
    blocks: int = 1  #: of the outputs of a column-parallel layer
    gathers: bool = False  #: an output layer by classes whose logits are gathered

    def __str__(self) -> str:
        return f"{self.word}:{self.blocks}" if self.blocks > 1 else self.word


REPLICATE = Style("replicate")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Is it a module of torch, or of a subclass that computes the same?"""
    return isinstance(module, kind) and type(module).forward is kind.forward


def obstacle(module: nn.Module, style: Style) -> str:
    """Why the module cannot be split in this way at any number of ranks; empty if it can."""
    kinds = KINDS[style.word]
    kind = next((kind for kind in kinds if kind is nn.Module or is_plain(module, kind)), None)
    if kind is None:
        return f"{style} is for {' and '.join(f'nn.{kind.__name__}' for kind in kinds)}, and it is {type(module).__name__}"
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "attention with add_bias_kv or add_zero_attn cannot be split"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split"
    if isinstance(module, nn.Linear) and module.out_features % style.blocks:
        return f"{module.out_features} outputs are not {style.blocks} blocks"
    if isinstance(module, (nn.Linear, nn.Embedding)) and not module._parameters.keys() <= {"weight", "bias"}:
        return "a layer with other parameters than weight and bias cannot be split"
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in module.parameters()):
        return "a lazy layer has no weights before it has been called once"
    if getattr(module, "parametrizations", None):
        return "a layer with parametrizations (weight_norm and its kin) cannot be split"
    return ""


def divided(module: nn.Module, style: Style) -> tuple[int, str]:
    """The figure that the number of ranks must divide, and what it counts; 0 where there is none."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, "heads"
    if isinstance(module, nn.Linear) and style.word in ("column", "column-gather"):
        return module.out_features // style.blocks, "output features"
    if isinstance(module, nn.Linear) and style.word in ("row", "row-split"):
        return module.in_features, "input features"
    return 0, ""


def shardings(module: nn.Module, style: Style) -> dict[str, Sharding]:
    """Its parameters that are cut, by their names inside it."""
    if style.word in ("dropout", "replicate"):
        return {}
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    if isinstance(module, nn.MultiheadAttention):
        found = {name: Sharding(shape) for name, shape in shapes.items() if name.endswith("_proj_weight")}
        found |= {name: Sharding(shapes[name], 0, 3) for name in ("in_proj_weight", "in_proj_bias") if name in shapes}
        return found | {"out_proj.weight": Sharding(shapes["out_proj.weight"], 1)}
    if style.word in ("row", "row-split"):
        return {"weight": Sharding(shapes["weight"], 1)}
    padded = style.word == "vocab"
    return {name: Sharding(shape, 0, style.blocks, padded) for name, shape in shapes.items()}


# A user's dict.


def read_styles(model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, Style]:
    """The style of each module that a pattern names. The first pattern that matches a module counts."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, Style] = {}
    for pattern, value in wanted.items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                f"expected a name or pattern of a module in the tensor plan, got {pattern!r}, which matches none"
                f"{nearest(pattern, modules)}"
            )
        for name in names:
            style = _read_style(pattern, value, modules[name])
            inside = [other for other in modules if other.startswith(f"{name}.")] if style == REPLICATE else []
            for each in (name, *inside):
                chosen.setdefault(each, style)
    for name, style in chosen.items():
        problem = obstacle(modules[name], style)
        if problem:
            raise UsageError(f"the tensor plan names {name}: {problem}; use 'replicate'")
    return chosen


def _read_style(pattern: str, value: Any, module: nn.Module) -> Style:
    if isinstance(value, str):
        word, _, blocks = value.partition(":")
        if word not in KINDS or (blocks and (word != "column" or not blocks.isdigit() or blocks == "0")):
            known = ", ".join(KINDS)
            raise UsageError(f"expected a style for {pattern!r} ({known}), got {value!r}{nearest(word, KINDS)}")
        return Style(word, int(blocks or 1))
    if type(value).__module__.startswith("torch.distributed.tensor"):
        return _of_torch(pattern, value, module)
    raise UsageError(f"expected a word or torch's ColwiseParallel() or RowwiseParallel() for {pattern!r}, got {value!r}")


def _of_torch(pattern: str, value: Any, module: nn.Module) -> Style:
    kind = type(value).__name__
    if kind not in ("ColwiseParallel", "RowwiseParallel"):
        raise UsageError(f"expected ColwiseParallel() or RowwiseParallel() for {pattern!r}, got {kind}; use a word of ours")
    layouts = [*value.input_layouts, *value.output_layouts]
    words = tuple("whole" if x.is_replicate() else "split" if x.is_shard(-1) else str(x) for x in layouts)
    if isinstance(module, nn.Embedding):
        known: dict[tuple[str, ...], str] = {("RowwiseParallel", "whole", "whole"): "vocab"}
    else:
        known = {
            ("ColwiseParallel", "whole", "split"): "column",
            ("ColwiseParallel", "whole", "whole"): "column-gather",
            ("RowwiseParallel", "split", "whole"): "row",
            ("RowwiseParallel", "whole", "whole"): "row-split",
        }
    found = known.get((kind, *words))
    if found is None:
        can = "; ".join(f"{name} from {given} to {made}" for name, given, made in known)
        raise UsageError(
            f"expected layouts that can be used for {pattern!r} ({can}), got {kind} from {words[0]} to {words[1]}"
        )
    return Style(found)

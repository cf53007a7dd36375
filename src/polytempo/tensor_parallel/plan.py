"""Which layers of a model are split over T ranks and how: found by itself, or named by a short dict.

    find_plan(model, size, styles, loss) -> TensorPlan
    limits(model, styles)                -> the T that are possible
    parallelize(module, plan, group)        makes this rank's shards of a model, or of a part of it, in place

Everything is checked here, before any rank starts: what does not divide is refused with its name and the nearest T.
Shards are cut from the whole initial weights, so that they do not depend on T. A split module is the module itself with
another class (as torch's `fully_shard` does it) and shards as the data of its parameters: names, hooks, references to it and
tied parameters stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from polytempo.errors import UsageError
from polytempo.tensor_parallel.cross_entropy import as_cross_entropy
from polytempo.tensor_parallel.discovery import Discovery
from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.layers import ColumnLinear, HeadsAttention, RowLinear, ShardDropout, VocabularyEmbedding
from polytempo.tensor_parallel.sharding import Sharding
from polytempo.tensor_parallel.styles import Style, divided, obstacle, read_styles, shardings

#: The largest T that `limits` names.
MOST = 1024
#: Names that an error lists.
SHOWN = 3


@dataclass(frozen=True)
class TensorPlan:
    """What is split over `size` ranks, and how.

    Attributes:
        size: The number of ranks, T.
        styles: How each module that is split is split.
        sharding: How each parameter that is split is cut, by its name in the model, by each of its names if it is tied. All
            others are replicated.
        whole: Why modules that might have been split are not.
        logits: The name of the output layer whose logits stay split, and the number of classes; None: the model's output is
            whole on all ranks.
    """

    size: int
    styles: dict[str, Style] = field(default_factory=dict)
    sharding: dict[str, Sharding] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    logits: tuple[str, int] | None = None

    def words(self) -> list[str]:
        """What is split, and what stays whole for which reason; layers alike in one line."""
        lines: dict[str, int] = {}
        for name, style in self.styles.items():
            gathered = ", gathered" if style.gathers else ""
            kept = ", logits stay split" if self.logits is not None and self.logits[0] == name else ""
            line = f"{_alike(name)}: {style}{gathered}{kept}"
            lines[line] = lines.get(line, 0) + 1
        for name, reason in self.whole.items():
            line = f"{_alike(name)}: whole ({reason})"
            lines[line] = lines.get(line, 0) + 1
        return [line if count == 1 else f"{line} ({count} modules)" for line, count in lines.items()]


def _alike(name: str) -> str:
    """Without the numbers of layers."""
    return re.sub(r"\b\d+\b", "*", name)


def find_plan(
    model: nn.Module, size: int, styles: Mapping[str, Any] | None = None, loss: object | None = None
) -> TensorPlan:
    """The plan of a model for `size` ranks.

    `styles`: names or patterns of modules, and a style for each (`styles.py`), or torch's `ColwiseParallel()` and
    `RowwiseParallel()`; modules that no pattern matches are found by themselves (`"*": "replicate"` at the end: none).
    `loss`: with a cross-entropy the output layer stays split; with others its outputs are gathered.
    """
    fixed = read_styles(model, styles or {})
    if size == 1:
        return TensorPlan(1)
    modules = dict(model.named_modules(remove_duplicate=False))
    found, whole = _styles(model, modules, fixed, size, as_cross_entropy(loss) is not None)
    wrong = _not_divided(modules, found, size, fixed)
    if wrong:
        raise UsageError(
            f"expected figures that divide by tensor={size}, but {wrong}; "
            f"nearest: tensor={_possible(model, modules, fixed, size)[-1]}"
        )
    sharding = _shardings(modules, found, whole, fixed)
    if not sharding:
        raise UsageError(
            f"expected layers that tensor={size} can split (nn.Linear, nn.MultiheadAttention, nn.Embedding), got "
            f"{type(model).__name__} with none; nearest: tensor=1, or name layers in the tensor plan"
        )
    kept = [name for name in found if _is_head(modules[name], found[name]) and not found[name].gathers]
    logits = (kept[0], int(modules[kept[0]].out_features)) if kept else None
    return TensorPlan(size, found, sharding, whole, logits)


def limits(model: nn.Module, styles: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The numbers of ranks over which a model can be split, 1 among them, up to `MOST`."""
    return _possible(model, dict(model.named_modules(remove_duplicate=False)), read_styles(model, styles or {}), MOST)


def _possible(model: nn.Module, modules: Mapping[str, nn.Module], fixed: dict[str, Style], most: int) -> tuple[int, ...]:
    found, _ = _styles(model, modules, fixed, 1, False)
    needed = _needed(modules, found, fixed)
    optional = [divided(modules[name], style)[0] for name, style in found.items()]
    rows = [_rows(modules[name]) for name, style in found.items() if style.word == "vocab"]
    largest = min([most, *(_rows(modules[name]) for name in fixed if fixed[name].word == "vocab")])

    def is_possible(size: int) -> bool:
        splits = any(figure and figure % size == 0 for figure in optional) or any(count >= size for count in rows)
        return splits and not any(figure % size for _, figure, _ in needed)

    return (1, *(size for size in range(2, largest + 1) if is_possible(size)))


def _styles(
    model: nn.Module, modules: Mapping[str, nn.Module], fixed: dict[str, Style], size: int, keeps_logits: bool
) -> tuple[dict[str, Style], dict[str, str]]:
    """The style of each module that is split, in the order of the model; and why others are not."""
    named = [name for name, style in fixed.items() if _is_head(modules[name], style)]
    search = Discovery(model, fixed, size, keeps_logits and not named)
    chosen = search.styles | {name: style for name, style in fixed.items() if style.word != "replicate"}
    for name in named:
        chosen[name] = replace(fixed[name], gathers=not keeps_logits or len(named) > 1)
    return {name: chosen[name] for name in modules if name in chosen}, dict(search.whole)


def _is_head(module: nn.Module, style: Style) -> bool:
    return isinstance(module, nn.Linear) and style.word == "vocab"


def _rows(module: nn.Module) -> int:
    count: int = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
    return count


def _needed(
    modules: Mapping[str, nn.Module], found: Mapping[str, Style], fixed: Mapping[str, Style]
) -> list[tuple[str, int, str]]:
    """The figures that T must divide: name, figure, what it counts. A lone Linear that does not divide stays whole."""
    every = [(name, *divided(modules[name], style)) for name, style in found.items()]
    return [
        (name, figure, what)
        for name, figure, what in every
        if figure and (name in fixed or found[name].word != "column-gather")
    ]


def _not_divided(modules: Mapping[str, nn.Module], found: Mapping[str, Style], size: int, fixed: Mapping[str, Style]) -> str:
    """The modules whose figures do not allow this number of ranks, in words."""
    wrong = [(name, figure, what) for name, figure, what in _needed(modules, found, fixed) if figure % size]
    tables = [(name, _rows(modules[name]), "rows") for name, style in found.items() if style.word == "vocab"]
    wrong += [(name, rows, what) for name, rows, what in tables if rows < size]
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return ", ".join(f"{name} has {figure} {what}" for name, figure, what in wrong[:SHOWN]) + more


def _shardings(
    modules: Mapping[str, nn.Module], found: dict[str, Style], whole: dict[str, str], fixed: Mapping[str, Style]
) -> dict[str, Sharding]:
    """How each parameter is cut. Modules that hold a parameter which another holds in another way stay whole."""
    holders = Counter(id(param) for module in set(modules.values()) for param in module._parameters.values())
    while True:
        cut: dict[int, dict[str, Sharding]] = {}
        for name, style in found.items():
            for inside, sharding in shardings(modules[name], style).items():
                cut.setdefault(id(modules[name].get_parameter(inside)), {})[name] = sharding
        split = [names for param, names in cut.items() if len(set(names.values())) > 1 or len(names) < holders[param]]
        if not split:
            break
        for name in split[0]:
            if name in fixed or found[name].word in ("column", "row"):
                others = [other for other in split[0] if other != name]
                raise UsageError(
                    f"expected one split for the parameter that {name} shares with {', '.join(others) or 'another module'}, "
                    f"got {found[name]} and another; name both in the tensor plan ('vocab' or 'replicate')"
                )
            del found[name]
            whole[name] = "it shares a parameter with a module that is not split in the same way"
    styled = {id(modules[name]): style for name, style in found.items()}
    return {
        f"{name}.{inside}" if name else inside: sharding
        for name, module in modules.items()
        if id(module) in styled
        for inside, sharding in shardings(module, styled[id(module)]).items()
    }


# Making the shards.


def parallelize(module: nn.Module, plan: TensorPlan, group: TensorGroup, prefix: str = "") -> None:
    """Make the modules of a model, or of the part of it that is called `prefix`, this rank's shards, in place."""
    if group.size != plan.size:
        raise UsageError(f"expected a group of {plan.size} ranks as in the plan, got {group.size}")
    if plan.size == 1:
        return
    modules = dict(module.named_modules(prefix=prefix, remove_duplicate=False))
    changed = {name: style for name, style in plan.styles.items() if name in modules}
    for name, style in changed.items():
        problem = obstacle(modules[name], style)
        if problem:
            raise UsageError(
                f"{name} cannot be split in this part of the model ({problem}); give its layers as nn.Sequential"
            )
    instances = {id(modules[name]) for name in changed}
    _check_holders(modules, instances, plan)
    for name, param in module.named_parameters(prefix=prefix, remove_duplicate=False):
        sharding = plan.sharding.get(name)
        if sharding is not None and tuple(param.shape) != sharding.shard_shape(plan.size):  # else it is tied, and done
            param.data = sharding.shard(param.data, group.rank, plan.size)
            param.grad = None
    for name, style in changed.items():
        _become_shard(modules[name], style, group)
    for member in module.modules():
        _leave_fast_path(member, instances)


def _check_holders(modules: Mapping[str, nn.Module], instances: set[int], plan: TensorPlan) -> None:
    """Parameters that are cut belong to modules that know it. An exported graph holds them without their modules."""
    known = {id(member) for module in modules.values() if id(module) in instances for member in module.modules()}
    for name, module in modules.items():
        for key in module._parameters:
            full = f"{name}.{key}" if name else key
            if full in plan.sharding and id(module) not in known:
                raise UsageError(
                    f"{full} is split, and this part of the model uses it without its module; give the model's layers as "
                    f"nn.Sequential, or name {name} 'replicate' in the tensor plan"
                )


def _become_shard(module: nn.Module, style: Style, group: TensorGroup) -> None:
    """Change the class of a module to that of its split form."""
    if isinstance(module, nn.MultiheadAttention):
        module.__class__ = HeadsAttention
    elif isinstance(module, nn.Embedding):
        module.__class__ = VocabularyEmbedding
    elif isinstance(module, nn.Dropout):
        module.__class__ = ShardDropout
    elif style.word in ("row", "row-split"):
        module.__class__ = RowLinear
        module.splits = style.word == "row-split"
    else:
        module.__class__ = ColumnLinear
        module.gathers = style.word == "column-gather" or style.gathers
    module.group = group


def _leave_fast_path(module: nn.Module, changed: set[int]) -> None:
    """Torch's fast path for inference reads weights of transformer layers directly, and would take shards for the whole."""
    stack, layer = isinstance(module, nn.TransformerEncoder), isinstance(module, nn.TransformerEncoderLayer)
    if (stack or layer) and any(id(member) in changed for member in module.modules()):
        setattr(module, "use_nested_tensor" if stack else "activation_relu_or_gelu", False)

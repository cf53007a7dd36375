"""Which modules of a model can be split, found from its structure alone.

Certain are: Linear, what works element by element, Linear in a chain (`nn.Sequential`) as column and row; torch's
transformer layers; `nn.MultiheadAttention` by heads; large `nn.Embedding`s by rows; and any other Linear by columns with its
outputs gathered, which is right wherever it is called. A Linear at the end of a chain that is the whole model is the output
layer. Custom modules are searched inside. What their code reads directly (`self.wte.weight`) stays whole, and the layers of
a chain that it takes apart (`for layer in self.layers`) are split one by one.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator
from types import CodeType

from torch import nn
from torch.nn import functional

from polytempo.tensor_parallel.styles import Style, is_plain, obstacle

#: Modules that work element by element, without parameters.
ELEMENTWISE = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Threshold, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink),
)
ACTIVATIONS = (functional.relu, functional.gelu, functional.silu, functional.mish, functional.leaky_relu, functional.elu)
#: Elements from which on splitting an embedding is worth an all-reduce of its output.
LARGE_TABLE = 1 << 16

COLUMN, ROW, GATHERED, HEADS, DROPOUT = (Style(word) for word in ("column", "row", "column-gather", "heads", "dropout"))


class Discovery:
    """The styles that were found, and why other modules stay whole. `fixed`: modules about which the user has decided."""

    def __init__(self, model: nn.Module, fixed: dict[str, Style], size: int, keeps_logits: bool) -> None:
        self.styles: dict[str, Style] = {}
        self.whole: dict[str, str] = {}
        self._fixed, self._size, self._keeps_logits = fixed, size, keeps_logits
        modules = list(model.modules())
        self._places = Counter(id(child) for module in modules for child in module._modules.values())
        holders = Counter(id(param) for module in modules for param in module._parameters.values() if param is not None)
        self._tied = {param for param, count in holders.items() if count > 1}
        self._seen = set[int]()
        self._visit(model, "", True)

    def _visit(self, module: nn.Module, name: str, is_model: bool = False) -> None:
        if name in self._fixed or id(module) in self._seen:
            return
        self._seen.add(id(module))
        if type(module) is nn.Sequential:
            self._chain(list(self._flattened(module, name)), is_model)
        elif isinstance(module, nn.Linear):
            self._lone(module, name)
        elif isinstance(module, nn.Embedding):
            self._embedding(module, name)
        elif isinstance(module, nn.MultiheadAttention):
            self._try(module, name, HEADS)
        elif is_plain(module, nn.TransformerEncoderLayer) or is_plain(module, nn.TransformerDecoderLayer):
            self._transformer_layer(module, name)
        else:
            self._custom(module, name)

    def _flattened(self, chain: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        """The members, with those of chains inside that have no other place and no hooks."""
        for key, child in chain._modules.items():
            name = _joined(prefix, key)
            assert child is not None
            hooked = child._forward_hooks or child._forward_pre_hooks
            if type(child) is nn.Sequential and name not in self._fixed and not hooked and self._places[id(child)] == 1:
                self._seen.add(id(child))
                yield from self._flattened(child, name)
            else:
                yield name, child

    def _chain(self, members: list[tuple[str, nn.Module]], is_model: bool) -> None:
        at = 0
        while at < len(members):
            name, module = members[at]
            end = at + 1
            while end < len(members) and type(members[end][1]) in ELEMENTWISE and members[end][0] not in self._fixed:
                end += 1
            if self._pairable(*members[at]) and end < len(members) and self._pairable(*members[end]):
                self._pair(members[at], members[end], members[at + 1 : end])
                at = end + 1
                continue
            is_head = is_model and at == len(members) - 1 and is_plain(module, nn.Linear) and self._places[id(module)] == 1
            if is_head and name not in self._fixed and id(module) not in self._seen:
                self._seen.add(id(module))
                self._head(module, name)
            else:
                self._visit(module, name)
            at += 1

    def _pairable(self, name: str, module: nn.Module) -> bool:
        """A Linear that is called here only, with weights of its own."""
        return (
            is_plain(module, nn.Linear)
            and not obstacle(module, COLUMN)
            and name not in self._fixed
            and id(module) not in self._seen
            and self._places[id(module)] == 1
            and not any(id(param) in self._tied for param in module.parameters())
        )

    def _pair(
        self, first: tuple[str, nn.Module], second: tuple[str, nn.Module], between: list[tuple[str, nn.Module]]
    ) -> None:
        self.styles[first[0]], self.styles[second[0]] = COLUMN, ROW
        self._seen |= {id(first[1]), id(second[1])}
        for name, module in between:
            if type(module) is nn.Dropout and self._places[id(module)] == 1:
                self.styles[name] = DROPOUT
                self._seen.add(id(module))

    def _transformer_layer(self, layer: nn.Module, name: str) -> None:
        members = {key: (_joined(name, key), child) for key, child in layer._modules.items() if child is not None}
        activation = getattr(layer, "activation", None)
        plain = activation in ACTIVATIONS or type(activation) in ELEMENTWISE
        first, second, dropout = members["linear1"], members["linear2"], members["dropout"]
        if plain and self._pairable(*first) and self._pairable(*second):
            self._pair(first, second, [] if dropout[0] in self._fixed else [dropout])
        for key, child in members.values():
            self._visit(child, key)

    def _head(self, module: nn.Module, name: str) -> None:
        """The output layer: by classes, since few numbers of classes divide."""
        assert isinstance(module, nn.Linear)
        if module.out_features < self._size:
            self.whole[name] = f"{module.out_features} outputs are fewer than {self._size} ranks"
        else:
            self._try(module, name, Style("vocab", gathers=not self._keeps_logits))

    def _lone(self, module: nn.Linear, name: str) -> None:
        if any(id(param) in self._tied for param in module.parameters()) and module.out_features >= self._size:
            self._try(module, name, Style("vocab", gathers=True))
        elif module.out_features % self._size:
            self.whole[name] = f"{module.out_features} output features do not divide by {self._size}"
        else:
            self._try(module, name, GATHERED)

    def _embedding(self, module: nn.Embedding, name: str) -> None:
        if module.num_embeddings < self._size:
            self.whole[name] = f"{module.num_embeddings} rows are fewer than {self._size} ranks"
        elif module.weight.numel() < LARGE_TABLE and id(module.weight) not in self._tied:
            self.whole[name] = f"a table of {module.num_embeddings} x {module.embedding_dim} is small; 'vocab' splits it"
        else:
            self._try(module, name, Style("vocab"))

    def _custom(self, module: nn.Module, name: str) -> None:
        # Does its forward, or a method that that calls, read an attribute `weight`?
        reads = any({"weight", "in_proj_weight"} & set(code.co_names) for code in _codes(type(module)))
        for inside, child in _held(module, name):
            if reads and isinstance(child, (nn.Linear, nn.Embedding, nn.MultiheadAttention)):
                self._seen.add(id(child))
                self.whole[inside] = f"the code of {type(module).__name__} may read its weight directly; a dict can split it"
            elif type(child) is nn.Sequential and inside not in self._fixed and _takes_apart(type(module), inside):
                self._seen.add(id(child))
                for name_of_step, step in _held(child, inside):  # which may be called one by one: each by itself
                    self._visit(step, name_of_step)
            else:
                self._visit(child, inside)

    def _try(self, module: nn.Module, name: str, style: Style) -> None:
        problem = obstacle(module, style)
        if problem:
            self.whole[name] = problem
        else:
            self.styles[name] = style


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _held(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Its children, and those of lists and dicts of modules, which have no code of their own."""
    for key, child in module._modules.items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _held(child, _joined(name, key))
        elif child is not None:
            yield _joined(name, key), child


def _takes_apart(kind: type[nn.Module], name: str) -> bool:
    """May a custom class call the members of its chain one by one: does it read the chain other than to call it?"""
    attribute = name.rpartition(".")[2]
    return any(
        step.argval == attribute and step.opname == "LOAD_ATTR" and "NULL" not in step.argrepr  # with it, it is called
        for code in _codes(kind)
        for step in dis.get_instructions(code)
    )


def _codes(kind: type[nn.Module]) -> Iterator[CodeType]:
    """The code of the forward of a custom class, and of its methods that are named there."""
    code = getattr(kind.forward, "__code__", None)
    if kind.__module__.startswith("torch.nn.") or code is None:
        return
    codes = list(_nested(code))
    named = {name for each in codes for name in each.co_names}
    for method in [getattr(kind, name, None) for name in named]:
        called = getattr(method, "__code__", None)
        codes += _nested(called) if isinstance(called, CodeType) else ()
    yield from codes


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)

"""A process that compiles nothing starts twice as fast without torch's compiler, which making an optimizer loads.

Torch marks some methods of optimizers "not to be compiled" when they are first called, and imports torch._dynamo for it:
over a second. Here they are marked beforehand, for servers, and for workers whose steps the servers make (an optimizer's own
`step` imports it in any case). When the compiler is loaded later, they are as without this; a torch version that works
differently is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polytempo.lazy_imports import when_imported

COMPILER = "torch._dynamo"
MARK = "__dynamo_disable"
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def spare_compiler() -> None:
    """Keep torch's optimizers from importing its compiler."""
    if COMPILER in sys.modules or any(getattr(method, MARK, None) is method for method in _marked_later()):
        return
    for method in _marked_later():
        setattr(method, MARK, method)

    def take_back(compiler: object) -> None:
        for method in _marked_later():
            if getattr(method, MARK, None) is method:
                delattr(method, MARK)

    when_imported(COMPILER, take_back)


def _marked_later() -> Iterator[Callable[..., Any]]:
    """Torch puts its mark on the function that it has wrapped."""
    for name in METHODS:
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None:
            yield plain

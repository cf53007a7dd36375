"""Methods that torch's compiler leaves alone.

Torch calls a group and its `Work` from C++, also while a model is compiled (`torch.compile(DDP(model))`). The compiler then
takes these calls for the user's code, and fails at the first attribute of a group, which is an opaque object to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import TypeVar

from polytempo.lazy_imports import when_imported

Class = TypeVar("Class", bound=type)

#: The compiler, which most scripts load with their first optimizer, and some never.
COMPILER = "torch._dynamo"


def leave_uncompiled(made: Class, also: Sequence[str] = ()) -> Class:
    """Keep the compiler out of the public methods of a class, as soon as it is loaded.

    Args:
        made: The class.
        also: Names with an underscore that torch calls.

    Returns:
        The class.
    """

    def mark(compiler: ModuleType) -> None:
        for name, method in list(vars(made).items()):
            if isinstance(method, FunctionType) and (not name.startswith("_") or name in also):
                setattr(made, name, compiler.disable(method))

    when_imported(COMPILER, mark)
    return made

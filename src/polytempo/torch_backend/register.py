"""Tells torch the word "polytempo". This loads neither torch nor the rest of this room: both come when they are used.

Torch has no list in which a package could leave a word. So: if torch is here already, it is told at once; if not, the import
of its module is watched for, and it is told then. Either order of `import torch` and `import polytempo` will do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

NAME = "polytempo"
DEVICES = ("cpu", "cuda")
#: Where torch keeps its back ends.
AWAITED = "torch.distributed.distributed_c10d"


def register() -> None:
    """Tell torch, now or as soon as it is loaded."""
    module = sys.modules.get(AWAITED)
    if module is not None and hasattr(module, "Backend"):
        _tell(module)
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _tell(module: ModuleType) -> None:
    if NAME not in module.Backend.backend_list:
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, group_options: Any) -> Any:
    """What torch calls to make a group."""
    from polytempo.torch_backend.opening import open_group

    return open_group(options, group_options)


class _Watcher:
    """A finder that finds nothing by itself: it only sees what is looked for."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AWAITED or self._looking:
            return None
        self._looking = True
        try:
            return self._watched(find_spec(name))
        finally:
            self._looking = False

    def _watched(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            load = loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _tell(module)

            loader.exec_module = load_and_tell
        return spec

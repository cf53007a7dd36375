"""To do something when a module is imported, by whomever, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

OnImport = Callable[[ModuleType], object]


def when_imported(name: str, act: OnImport) -> None:
    """Call this with the module: now, if it is here already, or as soon as it is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher:
    """A finder that finds nothing by itself: it only sees what is looked for."""

    def __init__(self, awaited: str, act: OnImport) -> None:
        self._awaited, self._act, self._looking = awaited, act, False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._awaited or self._looking:
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

            def load_and_act(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._act(module)

            loader.exec_module = load_and_act
        return spec

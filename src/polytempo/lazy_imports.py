"""Imports on demand: names of a package that are loaded on first use, and calls that wait for the import of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from polytempo.errors import nearest

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

OnImport = Callable[[ModuleType], object]


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]], elsewhere: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names are imported when they are first used.

    Args:
        package: the package's `__name__`.
        modules: module (full name, or relative to the package) -> the public names that it defines.
        elsewhere: what to write here -> names that other libraries have for it, which an error answers with it.
    """
    here = {name: answer for answer, names in elsewhere.items() for name in names}
    home = {
        name: module if module.startswith("polytempo.") else f"{package}.{module}"
        for module, names in modules.items()
        for name in names
    }

    def load(name: str) -> Any:
        if name not in home:
            meant = f"; write {here[name]}" if name in here else nearest(name, home)
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{meant or f'; dir({package}) names all it has'}"
            )
        return getattr(import_module(home[name]), name)

    return load, lambda: sorted(home)


def when_imported(name: str, act: OnImport) -> None:
    """Call `act` with the module: now if it is imported already, else as soon as it is. Does not import it."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher:
    """A meta-path finder that wraps the loader of one module, and leaves all other modules to the finders behind it."""

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

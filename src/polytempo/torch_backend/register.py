"""Registers the back end "polytempo" with `torch.distributed`, without importing torch or the rest of this package.

Torch has no entry point for back ends. If torch is imported already, the back end is registered at once; otherwise when
torch's module is imported. Either order of `import torch` and `import polytempo` works.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from polytempo.lazy_imports import when_imported

NAME = "polytempo"
DEVICES = ("cpu", "cuda")
#: The module of torch that keeps the list of back ends.
AWAITED = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the back end now, or as soon as torch is imported."""
    when_imported(AWAITED, _register)


def _register(module: ModuleType) -> None:
    if NAME not in module.Backend.backend_list:
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, group_options: Any) -> Any:
    """Torch calls this to make a group."""
    from polytempo.torch_backend.process_group import open_group

    return open_group(options, group_options)

"""Tells torch the word "polytempo". This loads neither torch nor the rest of this room: both come when they are used.

Torch has no list in which a package could leave a word. So: if torch is here already, it is told at once; if not, the import
of its module is watched for, and it is told then. Either order of `import torch` and `import polytempo` will do.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from polytempo.lazy_imports import when_imported

NAME = "polytempo"
DEVICES = ("cpu", "cuda")
#: Where torch keeps its back ends.
AWAITED = "torch.distributed.distributed_c10d"


def register() -> None:
    """Tell torch, now or as soon as it is loaded."""
    when_imported(AWAITED, _tell)


def _tell(module: ModuleType) -> None:
    if NAME not in module.Backend.backend_list:
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, group_options: Any) -> Any:
    """What torch calls to make a group."""
    from polytempo.torch_backend.rendezvous import open_group

    return open_group(options, group_options)

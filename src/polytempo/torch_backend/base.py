"""A process group of torch that is made in Python: its links, its names, how its calls are started, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from polytempo.collectives.endings import at_exit
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import PolytempoError, UsageError
from polytempo.torch_backend.errors import as_torch_error
from polytempo.torch_backend.register import DEVICES, NAME
from polytempo.torch_backend.work import TaskWork


class BaseGroup(ProcessGroup):  # type: ignore[misc]
    """What does not depend on the operation. Torch asks a group for its back end: that is the group itself."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, store: Any, world: World, ranks: Sequence[int]) -> None:
        super().__init__(world.rank, world.size)
        self._store, self._name, self._description = store, "", ""
        self.world, self.group, self.ranks = world, world.everybody, ranks
        self._forget_exit = at_exit(world.close)

    # What torch asks.

    # ruff: noqa: N802  torch's names for them

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend_name(self) -> str:
        return NAME

    def _get_backend(self, _: Any) -> BaseGroup:
        return self

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES if device == "cpu" or torch.cuda.is_available()]

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    # Time and the end.

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls from now on."""
        self.group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave: what the others still need of this rank has been sent."""
        self._forget_exit()
        self.world.close()

    def abort(self) -> None:
        """Leave at once: whoever still needs this rank learns that it is gone."""
        self._forget_exit()
        self.world.close(politely=False)

    # Calls.

    def _start(self, results: list[Any], touched: Sequence[Any], opts: Any, start: Callable[[], Task | list[Task]]) -> Any:
        """Start tasks that touch these tensors; their handle."""
        try:
            _check_dense(touched)
            started = start()
        except PolytempoError as error:
            raise as_torch_error(error, self.ranks) from None
        tasks = started if isinstance(started, list) else [started]
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout > timedelta(0):  # torch's "not given" is less
            for task in tasks:
                task.timeout = timeout.total_seconds()
        return TaskWork(tasks, results, self.ranks)


def _check_dense(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise UsageError(f"expected dense tensors, got layout {tensor.layout}; use .to_dense() (DDP: sparse=False)")

"""Single messages between two ranks, and a barrier made of them that names who has not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch

from polytempo.collectives.single import receive, send
from polytempo.collectives.world import World
from polytempo.errors import PeerError, PolytempoError, UsageError
from polytempo.torch_backend.base import BaseGroup
from polytempo.torch_backend.errors import as_torch_error

#: Tags of the barrier's own messages go down from here, one for each barrier: who comes too late finds its answer.
BARRIERS = -1000


class MessagingGroup(BaseGroup):
    """What is not a collective."""

    def __init__(self, store: Any, world: World, ranks: Sequence[int]) -> None:
        super().__init__(store, world, ranks)
        self._barriers = count()

    def send(self, tensors: list[Any], to: int, tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: send(self.group, tensor, to, tag, background=True))

    def recv(self, tensors: list[Any], source: int, tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: receive(self.group, tensor, source, tag, background=True))

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Any:
        tensor = self._ready(tensors)
        return self._start([tensor], [tensor], None, lambda: receive(self.group, tensor, None, tag, background=True))

    def _ready(self, tensors: list[Any]) -> Any:
        """Messages are in no lane: nothing but the caller can wait for what the GPU still does."""
        if len(tensors) != 1:
            raise as_torch_error(UsageError(f"expected one tensor in a message, got {len(tensors)}"), self.ranks)
        if tensors[0].device.type == "cuda":
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return tensors[0]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here. On those who are, all who are not are named, in the words that gloo uses."""
        tag, seconds = BARRIERS - next(self._barriers), self.group.timeout
        if timeout is not None and timeout >= timedelta(0):  # torch's "not given" is less
            seconds = timeout.total_seconds()
        try:
            missing = self._count_heads(tag, seconds) if self.rank() == 0 else self._report(tag, seconds)
            if missing:
                raise PeerError(f"{self._plaint(seconds)}: {_named(missing, wait_all_ranks)}")
        except PolytempoError as error:
            raise as_torch_error(error, self.ranks) from None

    def _plaint(self, seconds: float | None) -> str:
        if self.rank() == 0:
            return "Rank 0 timed out in monitoredBarrier" + ("" if seconds is None else f" after {1000 * seconds:.0f} ms")
        here = f"Rank {self.rank()} successfully reached monitoredBarrier"
        return f"{here}, but received errors while waiting for send/recv from rank 0"

    def _count_heads(self, tag: int, seconds: float | None) -> list[int]:
        """Rank 0 hears from everybody, and tells those who came who did not."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        others = range(1, self.size())
        tasks = [receive(self.group, torch.empty(1, dtype=torch.uint8), rank, tag, background=True) for rank in others]
        absent = torch.zeros(self.size(), dtype=torch.uint8)
        for rank, task in zip(others, tasks, strict=True):
            try:
                task.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except PeerError:
                absent[rank] = 1
        for rank in others:
            send(self.group, absent, rank, tag, background=True)
        return [int(rank) for rank in absent.nonzero().flatten()]

    def _report(self, tag: int, seconds: float | None) -> list[int]:
        send(self.group, torch.ones(1, dtype=torch.uint8), 0, tag, background=True).wait(seconds)
        absent = torch.zeros(self.size(), dtype=torch.uint8)
        # Rank 0 gives up after the same time, counted from when it came: its answer is waited for a little longer.
        receive(self.group, absent, 0, tag, background=True).wait(None if seconds is None else seconds + 1.0)
        return [int(rank) for rank in absent.nonzero().flatten()]


def _named(missing: list[int], together: bool) -> str:
    """Those who are missing; without `together`, in a sentence that begins with the first."""
    others = ", ".join(map(str, missing[1:]))
    if not others:
        return f"Rank {missing[0]} failed to pass monitoredBarrier"
    if together:
        return f"Ranks {missing[0]}, {others} failed to pass monitoredBarrier"
    return f"Rank {missing[0]} failed to pass monitoredBarrier, and so did {others}"

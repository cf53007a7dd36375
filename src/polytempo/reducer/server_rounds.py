"""Rounds with deadlines over parameter servers: a sum of gradients is pushed, and the newest values come back.

The servers divide a round's sum by its divisor and run the optimizer (`server/shard.py`). An answer brings their values of
now, however many rounds were missed: they are copied aside in the thread that takes the answer, and the newest are put into
the parameters by the script's thread. Parameters on a GPU pass through the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from polytempo.client.background_wait import BackgroundWait
from polytempo.errors import JobEnded, UsageError
from polytempo.protocol.push import Measures
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.reducer import GroupValues
from polytempo.reducer.round_exchange import RoundExchange, RoundOutcome, deadline_of
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes


class ServerRounds(RoundExchange):
    """The rounds of one optimizer whose values servers hold."""

    def __init__(self, reducer: ServerReducer) -> None:
        super().__init__(reducer)
        self._server_reducer = reducer
        self._wait = BackgroundWait(reducer.client, reducer.session.lock)
        self._buffers = FlatBuffer(reducer.layout, reducer.client.pool), FlatBuffer(reducer.layout, reducer.client.pool)
        self._newest = FlatBuffer(reducer.layout, Pool())  # values that were not installed yet
        self._access = threading.Lock()  # one thread writes them, another reads
        reducer.taker.install = self._keep

    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        return self._buffers

    def exchange(
        self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]
    ) -> RoundOutcome:
        reducer = self._server_reducer
        if total is not None:
            views = list(total.views.values())
            torch._foreach_div_(views, measures.samples)  # servers weigh means by samples
        with torch.no_grad():
            reducer.begin(total, hyper, measures, absent)
            if not self._wait.for_release(reducer.client_state, reducer.step + 1, lambda: self.given_up):
                raise JobEnded("this worker has left its job")
            reducer.answered()
        answer = reducer.client_state.answer
        return RoundOutcome(reducer.step, deadline_of(reducer), answer.closed, answer.version)

    def _keep(self, parts: dict[int, list[Bytes]]) -> None:
        """Values of an answer, copied: their memory is received into again."""
        layout = self._server_reducer.layout
        with self._access, torch.no_grad():
            for shard, buffers in parts.items():
                for stretch, data in zip(layout.shards[shard], buffers, strict=True):
                    flat = self._newest.tensors[stretch.dtype]
                    flat[stretch.start : stretch.stop].copy_(as_tensor(data, stretch.dtype))

    def install(self, outcomes: Sequence[RoundOutcome]) -> None:
        with self._access:
            self._server_reducer.copier.scatter(dict(enumerate(self._newest.parts)))

    def look(self) -> None:
        watch = self._server_reducer.copier.watch
        if watch.touched:
            raise UsageError(
                f"{watch.touched} was changed in place since the last step(), and in {self.reducer.spec.sync} the values of "
                "each round are the servers'; change values before DistributedOptimizer(), or call consolidate() to "
                "take the servers' again"
            )

    def reload(self) -> None:
        reducer = self._server_reducer
        newest = reducer.newest()
        if newest is not None:
            reducer.copier.scatter(newest)

"""How a worker takes part in rounds with deadlines (`sync/anytime.py`): `RoundExchange`, and `ServerRounds` over parameter
servers; among workers it is `train/peer_rounds.py`.

Two threads of a worker meet here. The script's thread adds up gradients of micro-batches; the communication thread of
`train/deadline_rounds.py` hands the sum over and hears how the round ended, also while the script computes:

    exchange    communication thread: this worker's part of a round goes out, and the answer is waited for
    install     script's thread, inside `step()`: what rounds brought goes into the parameters, never under a backward

Sums are made in flat buffers of the reducer's layout. A buffer that was handed over is left alone until `exchange` returns;
so there are two, used in turn.

Servers divide a round's sum by its divisor and run the optimizer (`server/shard.py`). An answer brings their values of now,
however many rounds were missed: they are copied aside in the thread that takes the answer, and the newest are put into the
parameters by the script's thread. Parameters on a GPU pass through the host.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from polytempo.client.client import BackgroundWait
from polytempo.errors import JobEnded, UsageError
from polytempo.protocol.push import Measures
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes


class RoundExchange(ABC):
    """The rounds of one optimizer.

    Args:
        reducer: The optimizer's reducer, with which this worker takes part in the job.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.given_up = False  #: this worker leaves the job: no answer is waited for any more

    @property
    def has_room(self) -> bool:
        """May this worker take part in another round before `install` is called? If not, it lets rounds pass without it,
        and catches up."""
        return True

    @abstractmethod
    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        """The two flat buffers in which sums of gradients are made, in turn."""

    @abstractmethod
    def exchange(self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]) -> None:
        """Take part in a round, and wait until it has ended. Called in the communication thread, once for each round.

        Args:
            total: The sum of `samples * gradient` over the micro-batches; it may be written to. None where there is none.
            hyper: The hyper-parameters of all groups, as of the last micro-batch.
            measures: Of all micro-batches; with None there are no samples.
            absent: The indices of the parameters for which none has a gradient, ascending.

        Raises:
            PolytempoError: The job has ended or this worker was refused; the script's next `step()` raises it.
        """

    @abstractmethod
    def install(self) -> None:
        """Bring the parameters to the values after the last round. Called in the script's thread, inside `step()`, where no
        round is under way and at least one has ended since the last call."""

    def look(self) -> None:
        """Before a step, in the script's thread: `UsageError` where the script has written to parameters and may not."""

    def reload(self) -> None:
        """Put the newest values that were installed into the parameters again: the script has written to them. Called in the
        script's thread."""

    def close(self) -> None:
        """No further round comes."""


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

    def exchange(self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]) -> None:
        reducer = self._server_reducer
        if total is not None:
            views = list(total.views.values())
            torch._foreach_div_(views, measures.samples)  # servers weigh means by samples
        with torch.no_grad():
            reducer.begin(total, hyper, measures, absent)
            if not self._wait.for_release(reducer.client_state, reducer.step + 1, lambda: self.given_up):
                raise JobEnded("this worker has left its job")
            reducer.answered()

    def _keep(self, parts: dict[int, list[Bytes]]) -> None:
        """Values of an answer, copied: their memory is received into again."""
        layout = self._server_reducer.layout
        with self._access, torch.no_grad():
            for shard, buffers in parts.items():
                for stretch, data in zip(layout.shards[shard], buffers, strict=True):
                    flat = self._newest.tensors[stretch.dtype]
                    flat[stretch.start : stretch.stop].copy_(as_tensor(data, stretch.dtype))

    def install(self) -> None:
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

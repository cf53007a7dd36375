"""k-batch-sync: a round ends with the first k pushes, of any workers (Dutta et al. 2018, "K-batch-sync SGD").

    round r     the job's values are w_r; every worker computes gradients on them, one batch after another
    push        it counts in the round if it was computed on w_r; the worker goes on at once, on w_r again or on w_(r+1)
    close       with the k-th push: their mean is applied once, and makes w_(r+1)
    late        a push that was computed on older values is discarded; its worker goes on with the newest

No worker waits, and no gradient is stale. A fast worker may have several pushes in a round, a slow one none; what a slow one
computes in vain is the price. With k = n and equal workers it is `bsp`.

    polytempo modes check examples/own_mode.py:K_BATCH:2
    polytempo simulate --workers 8 --slow 7:3 --train digits --sync bsp --sync examples/own_mode.py:K_BATCH:6
    polytempo run -n 4 --slow 3:3 --sync examples/own_mode.py:K_BATCH:3 --samples 30000 examples/digits.py

docs/write-a-mode.md builds this file step by step.
"""

from __future__ import annotations

from polytempo.modes import (
    Action,
    Apply,
    Capabilities,
    Discard,
    MadeOf,
    Mode,
    Policy,
    Promises,
    Pushed,
    Release,
    whole_number,
)


class KBatchSync(Policy):
    """The coordinator's half. A worker's half is that which pushes in each step: a mode has it unless it says otherwise."""

    def __init__(self, workers: int, k: int) -> None:
        super().__init__(workers)
        self.k = k
        self.round = 0
        self.reads: dict[int, int] = {}  # the round whose values each worker computes on
        self.arrived: list[Pushed] = []

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        self.reads[worker] = self.round
        return super().on_start(worker, step, now)

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker = push.worker
        self.progress.move(worker, push.step + 1)
        actions: list[Action] = []
        if self.reads[worker] < self.round:
            reason = f"late: computed on the values of round {self.reads[worker]}, the job is at round {self.round}"
            actions.append(Discard(worker, push.step, reason))
        else:
            self.arrived.append(push)
            if len(self.arrived) == self.k:
                actions.append(self._close())
        self.reads[worker] = self.round
        return [*actions, Release(worker, push.step + 1, self.progress.slowest)]

    def _close(self) -> Apply:
        pushes = tuple(sorted(self.arrived, key=lambda push: (push.worker, push.step)))
        self.arrived, self.round = [], self.round + 1
        return Apply(pushes, rate=1.0)  # the mean, weighted by samples

    def on_leave(self, worker: int, now: float) -> list[Action]:
        del self.reads[worker]  # its pushes stay in the round: what was accepted is applied once
        return [self._close()] if self.arrived and not self.members else []  # the last one ends the round


K_BATCH = Mode(
    name="k-batch",
    example="k-batch:3",
    meaning="a round ends with the first K pushes, of any workers; late ones are discarded",
    build=lambda workers, k: KBatchSync(workers, k),
    argument=whole_number("K", at_least=1),
    capabilities=Capabilities(update=MadeOf.ROUND, early=True),  # a worker goes on before its push is applied
    promises=Promises(alone=False),  # one worker makes updates of k batches
)

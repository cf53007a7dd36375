"""The data axis of a stage: its optimizer is a `DistributedOptimizer`, whose steps replicas of the model take together.

A gradient may leave this rank as soon as it is complete: in the last backward of an update, or, where parts of it are
deferred (`weight_gradients.py`), when the last of them is added. It leaves once, however many microbatches there are. Where
it still changes after that (tied copies, clipping), nothing leaves before the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from polytempo.pipeline.weight_gradients import WeightGradient, call_hooks
from polytempo.train.optimizer import DistributedOptimizer


class DataAxis:
    """Of one stage. `defers`: its backwards may leave weight gradients for later."""

    def __init__(self, optimizer: DistributedOptimizer, defers: bool) -> None:
        self.optimizer, self._defers = optimizer, defers
        self.sends_early = True  #: may gradients leave before the step?
        # After the last backward of an update: how many deferred pieces are still to be added to each gradient.
        self._waiting: Counter[nn.Parameter] = Counter()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """The context of a backward: no gradient leaves in it but in the `last` of an update, if autograd completes all."""
        return nullcontext() if last and self.sends_early and not self._defers else self.optimizer.no_sync()

    def last_backward_done(self, params: Sequence[nn.Parameter], deferred: Iterable[WeightGradient]) -> None:
        """Gradients to which no deferred piece is to be added are complete."""
        if not self.sends_early or not self._defers:
            return
        self._waiting = Counter(leaf for piece in deferred for leaf in piece.leaves)
        for param in params:
            if param.grad is not None and param not in self._waiting:
                call_hooks(param)

    def added(self, piece: WeightGradient) -> None:
        """A deferred piece was added to its gradients."""
        for leaf in piece.leaves if self._waiting else ():
            self._waiting[leaf] -= 1
            if not self._waiting[leaf]:
                del self._waiting[leaf]
                call_hooks(leaf)

    def average(self, samples: float) -> None:
        """Make the gradients the mean over the replicas, where the mode averages gradients."""
        can = self.optimizer.spec.capabilities
        if can.rounds and not can.averages:
            self.optimizer.synchronize(samples)

"""What a simulated run asks of the models beside it: the orders of machines, and the decisions of policies.

A run without training has no trainer. A version is that of the weights on the servers; they are numbered 0, 1, 2, ... by
update. Models that are each worker's own have no readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polytempo.simulate.dealing import MicroBatch
from polytempo.sync.actions import Apply
from polytempo.sync.directives import Mixing


class Trainer:
    """Does nothing: each kind of model overrides what concerns it."""

    length = 0  #: the number of training samples

    def __init__(self) -> None:
        self.observers: list[Callable[[float], None]] = []

    def observe(self, now: float) -> None:
        """Call the observers, which evaluate the model."""
        for observer in self.observers:
            observer(now)

    # Versions of the weights.

    def keep(self, version: int) -> None:
        """One reader of this version more; it is the newest, or has readers already."""

    def drop(self, version: int) -> None:
        """One reader of this version less."""

    # A worker, and its orders.

    def begin(self, worker: int, empty: bool = False) -> None:
        """A worker is given the newest values, or none; what it has already, it keeps."""

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left, with all its steps made or not; what it alone had is dropped."""

    def snapshot(self, worker: int) -> None:
        """A worker's next step is made on its values of now."""

    def step(self, worker: int, number: int) -> None:
        """A local step, this one of the worker's data."""

    def add_step(self, worker: int) -> None:
        """The step on a snapshot is added to a worker's values."""

    def send(self, worker: int, part: int) -> Any:
        """What a worker has made of a fragment since it last sent is under way, as it is now."""

    def send_model(self, worker: int, step: int) -> None:
        """A worker sends its values to its out-neighbours of this step."""

    def fetch(self, worker: int, part: int) -> None:
        """The newest values are sent to a worker."""

    def install(self, worker: int, part: int) -> None:
        """They have arrived: the worker goes on from them, with its own steps that they lack."""

    def mix(self, worker: int, step: int, row: Mixing, lost: tuple[int, ...]) -> None:
        """A worker has what its in-neighbours of this step sent."""

    def forget(self, step: int) -> None:
        """Nothing that was sent in this step is needed any more."""

    def average(self, asker: int, partner: int) -> None:
        """Two workers take the mean of both."""

    # Decisions.

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[Any], part: int) -> None:
        """Make the next version.

        Args:
            apply: The pushes, and how they count.
            versions: Of each, that of the weights on which it was computed; each of them has then one reader less.
            contents: Of each, what `send` has made, or the micro-batches that it is made of.
            part: The fragment.
        """

    def lose(self, worker: int, step: int, version: int) -> None:
        """A push, computed on this version, is not applied; the version has one reader less."""

    def close(self) -> None:
        """The run has ended."""


#: What `Trainer.apply` gets of a push of micro-batches.
Batches = list[MicroBatch]

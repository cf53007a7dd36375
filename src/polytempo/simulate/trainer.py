"""What an engine asks of whoever computes real gradients beside a run. Versions are numbered 0, 1, 2, ... by update."""

from __future__ import annotations

from typing import Protocol

from polytempo.sync.events import Pushed


class Trainer(Protocol):
    """Trains for real, on the versions of the weights that workers would have held."""

    def keep(self, version: int) -> None:
        """One reader of this version more; it is the newest, or has readers already."""

    def drop(self, version: int) -> None:
        """One reader of this version less."""

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """Make the next version from gradients taken at these versions; each of them has then one reader less."""

    def observe(self, now: float) -> None:
        """Evaluate."""


class LocalTrainer(Trainer, Protocol):
    """The same with local steps: each worker has weights of its own, and versions have no readers."""

    def begin(self, worker: int) -> None:
        """A worker is given the newest weights."""

    def fetch(self, worker: int) -> None:
        """A worker asks for the newest weights, as they are now."""

    def install(self, worker: int) -> None:
        """What it asked for is there: from here on it steps from that, with what it lacks of its own."""

    def step(self, worker: int, step: int) -> None:
        """A local step, this one of the worker's data."""

    def send(self, worker: int) -> None:
        """The gradients since the last push are under way."""

    def lose(self, worker: int) -> None:
        """The oldest push under way is not applied."""

    def end(self, worker: int) -> None:
        """A worker is gone, with all it had."""

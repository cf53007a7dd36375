"""`--slow` and `--hiccup`: emulates workers of unequal speed on one machine."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field


@dataclass
class Emulation:
    """Delays of a worker: in proportion to its compute time, and random stalls."""

    factor: float = 1.0
    probability: float = 0.0
    seconds: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def delay(self, computed: float) -> float:
        """Seconds to sleep after a step that took `computed`."""
        hiccup = self.seconds if self.probability and self.dice.random() < self.probability else 0.0
        return (self.factor - 1) * computed + hiccup

    def slow_down(self, computed: float) -> None:
        """Sleep for `delay(computed)` seconds."""
        delay = self.delay(computed)
        if delay > 0:
            time.sleep(delay)


def emulation_for(rank: int, slow: dict[int, float], hiccup: tuple[float, float], seed: int) -> Emulation:
    """A worker's emulation: its hiccups are the same in every run with the same seed."""
    return Emulation(slow.get(rank, 1.0), *hiccup, random.Random(f"{seed}/{rank}"))

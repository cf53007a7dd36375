"""`asp`: asynchronous parallel. Nobody ever waits; how stale a gradient may be is not bounded."""

from __future__ import annotations

import math

from polytempo.sync.eager import Eager, Gate
from polytempo.sync.mode import SCALE, Mode


class Open(Gate):
    """A gate that is never closed."""

    def required(self, step: int) -> float:
        return -math.inf


ASP = Mode("asp", "asp", "no barrier", lambda workers, scale=None: Eager(workers, Open(), scale), options=SCALE)

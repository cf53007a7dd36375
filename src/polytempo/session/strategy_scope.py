"""What a session knows of the strategy that is in force (`Strategy.scope`): the strategy itself lies in a room above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrategyScope:
    """The strategy of a `with strategy.scope():` block."""

    text: str
    sync: str | None
    via: str | None
    is_split: bool  #: a replica of the model is on several workers
    strategy: Any = None  #: the `Strategy`

"""What the sequencer orders; the first server's desk carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polytempo.protocol.log import LogEntry
from polytempo.protocol.messages import Departed, Held, Refused, SendSeed
from polytempo.records.lines import RecordLine


@dataclass(frozen=True)
class ToShards:
    """The next entry of the log."""

    entry: LogEntry


@dataclass(frozen=True)
class ToWorker:
    """Tell a worker something."""

    worker: int
    message: Held | SendSeed | Refused | Departed


@dataclass(frozen=True)
class Write:
    """The next line of the record."""

    line: RecordLine


@dataclass(frozen=True)
class WakeAt:
    """Call `tick` at this moment."""

    at: float


@dataclass(frozen=True)
class Checkpoint:
    """All shards save here in the log; when they have, this manifest makes it a checkpoint."""

    name: str
    manifest: dict[str, Any]


Effect = ToShards | ToWorker | Write | WakeAt | Checkpoint

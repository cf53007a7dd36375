"""Effects: what a server's decisions ask for, as values. Decisions return them in order and do nothing themselves.

sequencer, checkpoints, hosts, messages' handlers  ->  `Coordinator` carries out those of the record, timers, checkpoints
                                                       and of what the user is told; it returns the rest
the rest, and those of a shard's inbox             ->  the I/O loop sends them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.log import LogEntry
from polytempo.protocol.messages import AnyMessage, NormTotal, Push
from polytempo.protocol.values import PushId
from polytempo.records.lines import RecordLine
from polytempo.transport.channel import Bytes

# What the I/O loop sends.


@dataclass(frozen=True)
class ToShards:
    """Append this entry to the log: every shard carries it out."""

    entry: LogEntry


@dataclass(frozen=True)
class ToWorker:
    """Send a message to a worker."""

    worker: int
    message: AnyMessage
    buffers: Sequence[Bytes] = ()


@dataclass(frozen=True)
class ToServers:
    """Send a message to all other servers."""

    message: AnyMessage


@dataclass(frozen=True)
class ToLauncher:
    """Send a message to the launcher, if it is connected."""

    message: AnyMessage


@dataclass(frozen=True)
class ToAgent:
    """Send a message to the agent of another host, by its number."""

    agent: int
    message: AnyMessage


@dataclass(frozen=True)
class ShareNorm:
    """Give all shards the squared norm of a whole update."""

    total: NormTotal


@dataclass(frozen=True)
class StopWorkers:
    """Tell all workers that the job has ended early."""

    cause: str


@dataclass(frozen=True)
class EndLoop:
    """Leave the I/O loop: the job is over."""


# What a shard's inbox has to say to the coordinator.


@dataclass(frozen=True)
class PushArrived:
    """This shard has received a push in full: tell the coordinator."""

    push: Push


@dataclass(frozen=True)
class ReportHold:
    """A worker asks about a push that this shard has received: if the policy holds it, tell the worker for which ranks."""

    id: PushId


# What the coordinator carries out.


@dataclass(frozen=True)
class Write:
    """Append this line to the record."""

    line: RecordLine


@dataclass(frozen=True)
class WakeAt:
    """Call `Sequencer.tick` at this moment."""

    at: float


@dataclass(frozen=True)
class Checkpoint:
    """All shards save at this position of the log; when they have, this manifest makes it a checkpoint."""

    name: str
    manifest: dict[str, Any]
    told: tuple[int, ...] = ()  #: workers that will hear of it, and give what their scripts have registered
    due: Mapping[int, int] = field(default_factory=dict)  #: of those that are past it when they hear: their last push in it


@dataclass(frozen=True)
class Unsaved:
    """A checkpoint could not be written: go on without it, or end the job, as was asked for."""

    name: str
    reason: str


@dataclass(frozen=True)
class Diverged:
    """The training has diverged: tell the user, or end the job, as was asked for."""

    trouble: str
    advice: str


@dataclass(frozen=True)
class Tell:
    """Tell the user, in one line; before the launcher is there, it is kept for it. `about`: what the line is of, as
    `protocol/messages.py:Notice` says it."""

    text: str
    about: str = ""


@dataclass(frozen=True)
class StopJob:
    """The job ends early, for this cause. `over=False`: the launcher, where there is one, will send Finish after the last
    checkpoint."""

    cause: str
    over: bool = True


Effect = (
    (ToShards | ToWorker | ToServers | ToLauncher | ToAgent | ShareNorm | StopWorkers | EndLoop)
    | (PushArrived | ReportHold)
    | (Write | WakeAt | Checkpoint | Unsaved | Diverged | Tell | StopJob)
)

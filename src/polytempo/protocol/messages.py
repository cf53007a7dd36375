"""The headers of all messages, as typed values, and their bytes (msgpack).

A message is one header and any number of raw buffers. Nothing that is received is evaluated: a header that is not exactly
one of these is refused. Buffers are checked against the layout where they are used.

    worker   -> coordinator    Hello, Register, ReadRequest, Repeat, Leave, LeaseSamples, MetricReport, StoreSet,
                               StoreGet, AskWhere, ScriptState (with buffers), RecallState
    worker   -> every server   Hello, PushStatus, Push, PartialPush, Pull, Keep and ShareDevice (with buffers)
    server   -> coordinator    Hello, Arrived, Norm, Saved, NotSaved, Failed
    coordinator -> servers     Entries (of the log), NormTotal, Stopped
    server   -> worker         Welcome, Answer, ReadAnswer and PulledRows (with buffers), Held, SendSeed, StatusReply,
                               Resend, Refused, Departed, StoreSet (the value of a StoreGet), Stopped,
                               DeviceShared, SamplesLeased, Whereabouts, StateRecalled (with buffers)
    launcher -> coordinator    Hello, Expecting, Gone, Stop, StatusRequest, Finish;   back: Status, Notice, Finished
    agent    -> coordinator    Hello, Gone, Heartbeat;                     back: Assigned, Heartbeat, Stopped

The coordinator is part of server 0.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from polytempo.errors import PeerError
from polytempo.protocol.log import Decided, LogEntry
from polytempo.protocol.push import Measures, PushBody, StepBody
from polytempo.protocol.values import (
    BufferRange,
    DeviceRange,
    Keys,
    OptimizerSpec,
    PushId,
    RowAnswer,
    SavedObject,
    Share,
    TrainingProgress,
    WireMessage,
)

#: A header longer than this is refused unread. A model of 100,000 tensors fits.
HEADER_LIMIT = 32 << 20
#: What a peer may send before its Hello was accepted.
STRANGER_LIMIT = 64 << 10


class AnyMessage(WireMessage):
    """The header of a message: a class that derives from this one can travel, and nothing else."""


# From workers.


class Hello(AnyMessage):
    """Who I am. The first message on every connection."""

    role: str
    rank: int = 0
    incarnation: int = 0
    pid: int = 0
    count: int = 0  #: of an agent: how many workers it will start
    token: str = ""  #: of a worker on another host: proves its rank (`transport/keys.py`)


class Register(AnyMessage):
    """This worker has made an optimizer."""

    optimizer_id: str
    optimizer_spec: OptimizerSpec


class Push(AnyMessage, omit_defaults=True):
    """An update, or values beside the updates; see `push.py` for what it is made of."""

    id: PushId
    body: PushBody
    attempt: int = 0  #: how often it was sent before; the content is the same
    version: int = 0  #: of the values it was computed on
    own: int = 0  #: pushes of this worker since `version`, which do not make this one stale
    sent: int = 0  #: bytes by this worker so far
    received: int = 0
    asked: bool = False  #: has this worker asked whether to stop?
    measures: Measures = msgspec.field(default_factory=Measures)

    @property
    def made(self) -> StepBody:
        """What a step has made, in pushes of steps."""
        assert isinstance(self.body, StepBody)
        return self.body


class ShareDevice(AnyMessage):
    """Pushes of this optimizer will lie in device memory of this worker, and answers shall go there. The buffer is the
    memory of the fences (`device/device.py`)."""

    optimizer_id: str
    identity: str  #: of the device
    gradients: tuple[DeviceRange, ...]  #: flat memory, one for each dtype, in the order of the layout's sizes
    values: tuple[DeviceRange, ...]  #: where answers go, likewise


class PartialPush(AnyMessage):
    """A bucket of a push to come; its pieces follow in the buffers."""

    id: PushId
    bucket: int
    serial: int
    pieces: tuple[BufferRange, ...]


class RequestName(WireMessage):
    """The name of a request: what it is ("push", "read" or "pull"), of which optimizer, and its number."""

    what: str
    optimizer_id: str
    number: int  #: of a push its step


class PushStatus(RequestName, AnyMessage):
    """Nothing has moved for a while: what of this? It went before this message, on the same connection, so that a server
    which does not know it has lost it."""


class Repeat(AnyMessage):
    """Every shard has said that it answered this push, and not every answer has come: answer it again, from a new place of
    the log. `place` is that of the answer that was lost."""

    id: PushId
    place: int


class ReadRequest(AnyMessage):
    """Send me the values ("params") or the optimizer's state ("state"), all shards at one place of the log.

    "filters": what a worker of my rank had left over in its filters when the checkpoint was made that the job goes on from.
    """

    optimizer_id: str
    worker: int
    request: int
    what: str


class Leave(AnyMessage):
    """I am done."""

    worker: int
    incarnation: int
    reason: str
    alone: int = 0  #: steps that it has trained without any exchange, in a job of several workers
    life: int = 0  #: jobs that this process had left before: it may join the next
    fault: str = ""  #: what the job's mode has done here that no mode may do: the job ends by it


class AskWhere(AnyMessage):
    """I wait for these ranks: where are they?"""

    life: int
    call: str | None = None  #: that I am in; empty: I wait no more; None: that is not said
    ranks: tuple[int, ...] = ()


class MetricReport(AnyMessage):
    """A figure for the record."""

    worker: int
    values: dict[str, float | int | str]
    progress: TrainingProgress | None = None  #: for the display: no push tells it how this worker gets on


class StoreSet(AnyMessage):
    """Where I can be reached, for other workers."""

    key: str
    value: str


class LeaseSamples(AnyMessage):
    """Give me places of an epoch's order, in modes in which workers take as many samples as they manage."""

    request: int  #: asked again with the same number, the answer is the same
    sampler: str
    epoch: int
    length: int  #: of the epoch's order
    turn: int = 0  #: how often this worker has come to the end of the epoch before; -1: only what has returned of any turn
    count: int = 0  #: places that are needed now; 0: none
    ahead: int = 0  #: more, while there is much left
    back: tuple[tuple[int, int], ...] = ()  #: places that this worker was given and will not use
    done: tuple[tuple[int, int], ...] = ()  #: places that it was given and has only looked at


class Keep(AnyMessage):
    """What this worker's filters hold back, for a checkpoint; `state` describes the buffers."""

    optimizer_id: str
    checkpoint: str
    state: bytes


class ScriptState(AnyMessage):
    """What the script has registered for checkpoints, as of this worker's last push: the objects whose state has changed.
    Their tensors follow in the buffers."""

    objects: tuple[SavedObject, ...]
    exchange: int  #: the last push
    same: tuple[str, ...] = ()  #: names of objects that have not changed
    checkpoint: str = ""  #: the checkpoint that an answer has named: all state that belongs to it is here now
    partial: bool = False  #: there are more, too large for every report
    given: bool = False  #: the script has loaded it: it is no report, but what workers start from


#: Of each object what a worker of my rank had, the newest that any worker had, the mean of all; or, of this job, what a
#: script has loaded before its first step.
RECALLED = OWN, NEWEST, MEAN, GIVEN = "own", "newest", "mean", "given"


class RecallState(AnyMessage):
    """What had the script registered in the checkpoint that the job goes on from, or what do workers start from?"""

    which: str  #: one of `RECALLED`


class StoreGet(AnyMessage):
    """What has been posted under this key, once it is there?"""

    key: str


class Pull(AnyMessage):
    """Send me rows, or say ("clock") which steps have reached a span. Buffer: ids, as for `Want`."""

    optimizer_id: str
    request: int
    table: int
    span: tuple[int, int] | None = None
    keys: Keys | None = None
    what: str = "rows"


# Between servers; more below.


class Entries(AnyMessage):
    """The next entries of the log."""

    entries: tuple[LogEntry, ...]


# To workers.


class Welcome(AnyMessage):
    """You belong to the job."""

    size: int
    shards: int
    thread: int = 0  #: of a server that has one worker only: which may be called over to the worker's core


class Answer(Decided, AnyMessage, kw_only=True):
    """The exchange is finished; you may start `step`. The values follow in the buffers."""

    shard: int
    skipped: bool = False
    absent: tuple[int, ...] = ()  #: tensors for which no push had a gradient, where gradients are averaged
    shares: tuple[Share, ...] = ()  #: with `members`, whose gradients are in the update; at first, whose values to take
    rows: tuple[RowAnswer, ...] = ()  #: of tables; their buffers come after the dense ones
    filtered: bool = False  #: the dense buffers are what the pull filter has left
    touched: str = ""  #: a parameter that a script has written to: are values that stay with the workers still alike?
    spread: float = 0.0  #: of the workers' latest gradients, relative to their mean
    fence: int = 0  #: not 0: no dense buffers follow; the values lie in the worker's device memory, once its fence is here


class DeviceShared(AnyMessage):
    """Whether a shard has mapped a worker's device memory; if not, why, and the worker's pushes must have buffers."""

    optimizer_id: str
    shard: int
    refusal: str = ""


class ReadAnswer(AnyMessage):
    """What was read; `state` describes the buffers where they are an optimizer's state."""

    optimizer_id: str
    shard: int
    request: int
    version: int
    state: bytes = b""
    exchange: int = -1  #: the reader's last push that is in it


class PulledRows(AnyMessage):
    """The answer to `Pull`; the rows follow in a buffer."""

    optimizer_id: str
    shard: int
    request: int
    version: int = 0
    clock: dict[int, int] = msgspec.field(
        default_factory=dict
    )  #: of a span: for each worker its latest step that has reached all of it


class Held(AnyMessage):
    """The policy holds this push, and for which ranks."""

    optimizer_id: str
    exchange: int
    waiting_for: tuple[int, ...]
    waiting_count: int
    reason: str


class SendSeed(AnyMessage):
    """The job starts from your values: push them."""

    optimizer_id: str


class StatusReply(RequestName, AnyMessage, kw_only=True):
    """What a shard knows of what it was asked about. It goes behind the answer, on the same connection: who hears "answered"
    and has no answer has lost it."""

    state: str  #: "unknown", "received" or "answered"
    place: int = -1  #: of the answer to a push


class Resend(RequestName, AnyMessage, kw_only=True):
    """Your push or pull is not here in full, and will not be: send this shard's part again, and lists of ids in full."""

    lost: bool  #: a part of it was lost on its way; else the shard has forgotten a list of ids that it names by its digest


class SamplesLeased(AnyMessage):
    """The answer to `LeaseSamples`: ranges of places, none where nothing is left for now."""

    request: int
    ranges: tuple[tuple[int, int], ...] = ()
    earlier: tuple[int, ...] = ()  #: epochs before that one of which places have returned


class StateRecalled(AnyMessage):
    """The answer to `RecallState`; the tensors of the objects follow in the buffers."""

    which: str
    objects: tuple[SavedObject, ...]
    step: int  #: of the checkpoint
    size: int  #: workers of the job that made the checkpoint
    due: int = -1  #: the last push in it of a worker of my rank, where that is known


class Refused(AnyMessage):
    """This cannot be; the worker must stop."""

    reason: str
    differs: bool = False  #: a push, by its hyper-parameters from those of its round


class Departed(AnyMessage):
    """Another worker is gone: its sockets may live on in a process that it has forked, or it may be alive where no host of
    the job hears it. To those that share an optimizer with it when it leaves the servers, and to all workers with `ended`
    when its process has ended, or it was given up.

    `group`: it is lost, and was in this group of ranks, whose optimizer does not go on without it.
    """

    worker: int
    group: tuple[int, ...] = ()
    optimizer_id: str = ""
    ended: bool = False


class Whereabouts(AnyMessage):
    """The answer to `AskWhere`: which of those ranks have ended, and how; what the others are in, where that is known."""

    ended: dict[int, str] = msgspec.field(default_factory=dict)
    calls: dict[int, str] = msgspec.field(default_factory=dict)


class Stopped(AnyMessage):
    """The job has ended early."""

    cause: str


# Launcher and agents.


class Gone(AnyMessage):
    """A process of a worker has ended: "finished", "failed" or "lost". `cause` says how, for people."""

    worker: int
    incarnation: int
    reason: str
    cause: str = ""
    asked: bool = False  #: by a signal that asks processes to end, such as SIGTERM


class Stop(AnyMessage):
    """End the job with this cause."""

    cause: str


class StatusRequest(AnyMessage):
    """Ask for the status of all workers."""


class WorkerStatus(msgspec.Struct, array_like=True):
    """A worker in the launcher's display."""

    worker: int
    step: int  #: that it makes, of its own; those of a block or of shares one by one
    samples: float
    state: str  #: "absent", "computing", "waiting", "finished", "failed" or "lost"
    waited_s: float
    held_s: float  #: of that, in the wait that goes on now
    present_s: float
    waiting_for: tuple[int, ...]
    accepted: bool = False  #: was any push of it counted?


class Status(AnyMessage):
    """The status of all workers."""

    seconds: float
    used: float  #: share of the budget, 0 without one
    workers: tuple[WorkerStatus, ...]
    checkpoint: str = ""
    progress: TrainingProgress | None = None  #: of what trains without pushes
    trains: bool = False  #: has any worker made an optimizer?
    holds: bool = False  #: do servers hold values of one?


class Notice(AnyMessage):
    """A line for the launcher's output."""

    text: str
    fatal: bool = False
    about: str = ""  #: "record": it is cut short


class Finish(AnyMessage):
    """All workers are gone: write what is left and end."""

    exit_status: int
    cause: str = ""
    save: bool = False  #: a checkpoint is wanted although the job has ended early


class Finished(AnyMessage):
    """The last word of the first server, with the job's summary."""

    summary: dict[str, Any]
    checkpoint: str = ""
    cause: str = ""  #: why the last checkpoint could not be written
    paces: tuple[tuple[float, ...], ...] = ()  #: what steps took (`records/step_figures.py`)


class Expecting(AnyMessage):
    """Workers will come from other hosts: what they are told, and their ranks."""

    job: dict[str, Any]
    ranks: tuple[int, ...]


class Heartbeat(AnyMessage):
    """An agent is alive; and back, so is the job."""


class Assigned(AnyMessage):
    """An agent's ranks and the job's facts: what a worker process is started with."""

    job: dict[str, Any]
    ranks: tuple[int, ...]
    tokens: tuple[str, ...] = ()  #: one for each rank


# What servers tell the first one, and it them.


class Arrived(AnyMessage):
    """A push is here in full, at this shard."""

    shard: int
    id: PushId


class Norm(AnyMessage):
    """The squared norm of this shard's part of an update."""

    shard: int
    optimizer_id: str
    version: int
    square: float


class NormTotal(AnyMessage):
    """The sum over all shards."""

    optimizer_id: str
    version: int
    square: float


class Saved(AnyMessage):
    """This shard's part of a checkpoint is on the disk."""

    shard: int
    name: str
    file: str
    digest: str
    tensors: dict[str, Any]


class NotSaved(AnyMessage):
    """This shard's part of a checkpoint could not be written; or, of a worker, what its filters hold back."""

    shard: int
    name: str
    reason: str
    worker: int = -1


class Failed(AnyMessage):
    """A server cannot go on."""

    cause: str


#: What a request is, of which optimizer, and its number.
RequestKey = tuple[str, str, int]


def request_of(message: AnyMessage) -> RequestKey:
    """The request that a message of a worker makes, or one of a server answers: one rule for both ends, by which each counts
    once. (The first answer to a worker that joins an optimizer names the push before its first, which it has not made.)"""
    match message:
        case Push():
            return "push", message.id.optimizer_id, message.id.step
        case Answer():
            return "push", message.optimizer_id, message.exchange
        case Register():
            return "join", message.optimizer_id, 0
        case ReadRequest() | ReadAnswer():
            return "read", message.optimizer_id, message.request
        case Pull() | PulledRows():
            return "pull", message.optimizer_id, message.request
        case PushStatus() | StatusReply() | Resend():
            return message.what, message.optimizer_id, message.number
        case LeaseSamples() | SamplesLeased():
            return "samples", "", message.request
        case StoreGet() | StoreSet():
            return "key", message.key, 0
        case RecallState() | StateRecalled():
            return "state", message.which, 0
        case ShareDevice() | DeviceShared():
            return "device", message.optimizer_id, 0
        case Hello() | Welcome():
            return "welcome", "", 0
        case _:
            raise TypeError(f"{type(message).__name__} belongs to no request")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(reduce(or_, AnyMessage.__subclasses__()))


def encode(message: AnyMessage) -> bytes:
    """The bytes of a header."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> AnyMessage:
    """The header in these bytes; `PeerError` when they are none."""
    if len(data) > HEADER_LIMIT:
        raise PeerError(f"a header of {len(data)} bytes was refused; at most {HEADER_LIMIT} are read")
    try:
        message: AnyMessage = _decoder.decode(data)
        return message
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise PeerError(f"a message was refused: {error}; are all hosts on the same version of polytempo?") from None

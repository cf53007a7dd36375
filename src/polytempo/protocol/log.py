"""The entries of the log: what every shard carries out, one after another, in the order the sequencer gave them."""

from __future__ import annotations

from polytempo.protocol.values import ClosedRound, OptimizerSpec, PushId, UpdatePart, WireMessage
from polytempo.sync.directives import Directive


class Setup(WireMessage):
    """Make the store of this optimizer."""

    optimizer_id: str
    optimizer_spec: OptimizerSpec
    resume: bool = False


class Seed(WireMessage):
    """Take the first values from this push."""

    id: PushId


class Update(WireMessage):
    """Make one update of these pushes at the learning rate times `rate`."""

    optimizer_id: str
    version: int
    parts: tuple[UpdatePart, ...]
    rate: float
    barrier: bool
    mean_staleness: float = 0.0  #: of all pushes so far, where the mode corrects momentum by it
    divisor: float = 0.0  #: of the weighted sum of the gradients, where it is not the sum of the weights


class Drop(WireMessage):
    """Forget this push: it is not applied."""

    id: PushId


class Decided(WireMessage):
    """What the log says of an answer to a push, and every shard's answer says likewise."""

    optimizer_id: str
    exchange: int  #: the push that is answered; -1: of a worker that joins
    place: int  #: in the log, of no other answer of this optimizer: answers of all shards from one are one state of the job
    step: int  #: that the worker may start
    version: int
    stop: bool
    waited: float = 0.0  #: seconds the mode held the worker
    staleness: int = 0  #: of the push that is answered
    members: tuple[int, ...] = ()  #: who takes part, where values stay with the workers
    checkpoint: str = ""  #: one is being made of this moment: what this worker's filters hold back, and its script, is in it
    directive: Directive | None = None  #: what else the policy tells the worker of the step, in modes that tell more
    certain: int = 0  #: the next answers to this worker, this many, will not say `stop`
    closed: ClosedRound | None = None  #: the round that has ended, in modes with deadlines


class Reply(Decided, kw_only=True):
    """Answer this push (or, with exchange -1, this joiner) with the values as they are here."""

    worker: int
    incarnation: int
    early: bool = False  #: the push that is answered is still to be applied, or dropped


class ReadHere(WireMessage):
    """Answer this read with what is here."""

    optimizer_id: str
    worker: int
    request: int
    what: str
    exchange: int = -1  #: the reader's last push before this place


class LoadState(WireMessage):
    """Take the optimizer's state, or values, from this push, and answer it; `again`: it was taken before, and only the
    answer was lost."""

    id: PushId
    place: int  #: as in `Reply`
    again: bool = False


class Save(WireMessage):
    """Write this shard's part of a checkpoint."""

    name: str


class ForgetWorker(WireMessage):
    """Drop what this incarnation has sent, but for what was counted and is still to be applied."""

    worker: int
    incarnation: int
    counted: tuple[PushId, ...] = ()


LogEntry = Setup | Seed | Update | Drop | Reply | ReadHere | LoadState | Save | ForgetWorker

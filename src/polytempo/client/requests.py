"""What a worker has asked servers for: each request is kept until it is answered.

    Question      small, of one server or of each: a welcome, places of samples, a key, what a script has registered
    Joining       an optimizer: the first answer has the values that it starts from
    Outstanding   a push, and the answers of all shards to it
    Reading       values or optimizer state of all shards, at one position of the log (`state_dict`, `consolidate`)
    RowPull       rows of a table, from the shards that have them, as they are when the request comes

**When it is asked again.** Once no byte has moved on any connection for `retry` seconds (`Client.remind`). What is small is
sent again then, and answered alike. Of the rest the shards are asked what they know. The question goes behind what it is
about, and the reply comes behind what the shard has sent: so a shard that does not know a request has lost it and gets it
again, and an answer that a shard has given and that is not here was lost on its way. Nothing is sent twice because it is
slow (`docs/design/0010`).

**What counts as answered.** Each answer names its request (`request_of`). It counts when all shards have given it from one
position of the log, and once: what comes later is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import msgspec
import torch

from polytempo.compression.key_cache import KeySender
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Pull,
    Push,
    PushStatus,
    ReadRequest,
    Register,
    Repeat,
    RequestKey,
    Resend,
    StatusReply,
    request_of,
)
from polytempo.protocol.push import Content
from polytempo.protocol.values import Keys
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.channel import Bytes

#: Takes a shard, a message and its buffers.
SendMessage = Callable[[int, AnyMessage, Sequence[Bytes]], None]
#: Of each shard: the message and its buffers.
Answers = dict[int, tuple[Any, list[Bytes]]]


@dataclass(eq=False)
class Request(ABC):
    """Something that servers were asked for."""

    receipt = True  # do shards keep a receipt of it, and so can say what became of it?

    places: dict[int, Answers] = field(default_factory=dict, init=False, repr=False)  #: answers, by position of the log
    answers: Answers | None = field(default=None, init=False, repr=False)  #: those that count, once all are there
    #: Gets those instead: the memory of an answer is to be free as soon as it is used up.
    then: Callable[[Any, Answers], None] | None = field(default=None, init=False, repr=False)

    @property
    @abstractmethod
    def key(self) -> RequestKey:
        """Its name."""

    @abstractmethod
    def send(self, shard: int, send: SendMessage) -> None:
        """Send what this shard is asked."""

    def asked(self, shards: int) -> Collection[int]:
        """To which of this many shards it is sent."""
        return range(shards)

    def awaited(self, shards: int) -> Collection[int]:
        """Which of them answer."""
        return range(shards)

    def in_order(self) -> list[tuple[Any, list[Bytes]]]:
        """The answers that count, by shard."""
        assert self.answers is not None
        return [self.answers[shard] for shard in sorted(self.answers)]

    def missing(self, shards: int) -> list[int]:
        return [shard for shard in self.awaited(shards) if not any(shard in answers for answers in self.places.values())]

    def ask_again(self, shards: int, send: SendMessage) -> None:
        """Nothing has moved for a while: ask what the shards know."""
        what, optimizer_id, number = self.key
        for shard in sorted({*self.asked(shards), *self.missing(shards)}):
            send(shard, PushStatus(what=what, optimizer_id=optimizer_id, number=number), ())

    def send_again(self, shard: int, send: SendMessage) -> None:
        """A shard has not got it, and will not."""
        self.send(shard, send)

    def answer_lost(self, shard: int, place: int, requests: Requests) -> None:
        """A shard has answered, from this position of the log, and the answer will not come."""
        self.send_again(shard, requests.send)


class Question(Request):
    """Something small.

    Args:
        message: What is asked.
        of: The shards that are asked, with the buffers for each; by default the coordinator.
        repeated: Is it asked again after a silence? It must be answered alike then.
    """

    receipt = False

    def __init__(self, message: AnyMessage, of: Sequence[Sequence[Bytes]] = ((),), repeated: bool = True) -> None:
        super().__init__()
        self._message, self._of, self._repeated = message, of, repeated

    @property
    def key(self) -> RequestKey:
        return request_of(self._message)

    @property
    def answer(self) -> tuple[Any, list[Bytes]]:
        """The coordinator's."""
        assert self.answers is not None
        return self.answers[0]

    def send(self, shard: int, send: SendMessage) -> None:
        send(shard, self._message, self._of[shard])

    def asked(self, shards: int) -> Collection[int]:
        return range(len(self._of))

    awaited = asked

    def ask_again(self, shards: int, send: SendMessage) -> None:
        for shard in self.missing(shards) if self._repeated else ():
            self.send(shard, send)


class Joining(Question):
    """A worker has made an optimizer. Not asked again: a description may be long, and others may come hours later."""

    def __init__(self, message: Register) -> None:
        super().__init__(message, repeated=False)

    def awaited(self, shards: int) -> Collection[int]:
        return range(shards)


@dataclass(eq=False)
class Outstanding(Request):
    """A push that was not answered yet: kept to be sent again."""

    push: Push
    parts: list[list[Bytes]]  # for each shard its dense buffers
    rows: list[list[Bytes]] = field(default_factory=list)  # and those of its tables
    plain: Callable[[], tuple[Content, list[list[Bytes]]]] | None = None  # the body and its rows without cached keys
    blocks: list[Bytes] = field(default_factory=list)  # of the client's arena, in which rows lie

    @property
    def key(self) -> RequestKey:
        return request_of(self.push)

    def buffers(self, shard: int) -> list[Bytes]:
        return [*self.parts[shard], *self.rows[shard]] if self.rows else self.parts[shard]

    def send(self, shard: int, send: SendMessage) -> None:
        send(shard, self.push, self.buffers(shard))

    def send_again(self, shard: int, send: SendMessage) -> None:
        if self.plain is not None:
            body, self.rows = self.plain()
            self.push, self.plain = msgspec.structs.replace(self.push, body=body), None
        self.push = msgspec.structs.replace(self.push, attempt=self.push.attempt + 1)
        self.send(shard, send)

    def answer_lost(self, shard: int, place: int, requests: Requests) -> None:
        """Every shard answers once more, from a new position of the log."""
        requests.send(0, Repeat(id=self.push.id, place=place), ())


class Reading(Request):
    """A read of values ("params"), state ("state") or what filters held back ("filters")."""

    def __init__(self, optimizer_id: str, what: str, worker: int) -> None:
        super().__init__()
        self._message = ReadRequest(optimizer_id=optimizer_id, worker=worker, request=0, what=what)

    @property
    def key(self) -> RequestKey:
        return request_of(self._message)

    def send(self, shard: int, send: SendMessage) -> None:
        send(shard, self._message, ())

    def asked(self, shards: int) -> Collection[int]:
        return (0,)

    def begin(self, request: int) -> None:
        """Under a new number; answers to the one before count no more."""
        self._message.request = request
        self.places.clear()

    def answer_lost(self, shard: int, place: int, requests: Requests) -> None:
        """Read once more: answers must be from one position of the log."""
        requests.forget(self)
        requests.start(self)


@dataclass(eq=False)
class RowPull(Request):
    """Rows of one table: given ids of some shards, or a span of all.

    A list of ids that a shard was sent before goes as its digest, if it is to be remembered (`cached`); a shard that has
    forgotten it says so and gets the list.
    """

    pull: Pull
    ids: dict[int, Bytes]  # of each shard that is asked
    caches: Sequence[KeySender]
    cached: bool = False

    @property
    def key(self) -> RequestKey:
        return request_of(self.pull)

    def begin(self, request: int) -> None:
        self.pull.request = request

    def asked(self, shards: int) -> Collection[int]:
        return self.ids

    awaited = asked

    def send(self, shard: int, send: SendMessage) -> None:
        self._send(shard, self._keys(shard), send)

    def send_again(self, shard: int, send: SendMessage) -> None:
        keys = self._keys(shard)
        self._send(shard, Keys(keys.digest, known=False) if keys else None, send)

    def _keys(self, shard: int) -> Keys | None:
        return keys_of(self.caches[shard], as_tensor(self.ids[shard], "int64")) if self.cached else None

    def _send(self, shard: int, keys: Keys | None, send: SendMessage) -> None:
        bare = self.pull.span is not None or (keys is not None and keys.known)
        send(shard, msgspec.structs.replace(self.pull, keys=keys), [] if bare else [self.ids[shard]])


def keys_of(cache: KeySender, ids: torch.Tensor) -> Keys:
    """A list of ids as it may go to a shard, which then remembers it."""
    digest, known = cache.offer(ids)
    return Keys(digest, known)


AnyRequest = TypeVar("AnyRequest", bound=Request)

#: Bytes of lists of ids that a shard is assumed to remember.
REMEMBERED = 32 << 20


class Requests:
    """The requests of one worker that are not answered yet.

    Args:
        send: SendMessages a message to a shard.
        shards: How many there are.
        note_loss: Called when a message was lost.
    """

    def __init__(self, send: SendMessage, shards: int, note_loss: Callable[[], None]) -> None:
        self.send, self._shards, self._note_loss = send, shards, note_loss
        self._open: dict[RequestKey, Request] = {}
        self._numbers = count(1)
        self.caches = [KeySender(REMEMBERED) for _ in range(shards)]  #: lists of ids that each shard knows

    # Asking.

    def start(self, request: AnyRequest) -> AnyRequest:
        """Send a request; its answers come when messages are taken in."""
        if isinstance(request, Reading | RowPull):
            request.begin(next(self._numbers))
        self.keep(request)
        for shard in request.asked(self._shards):
            request.send(shard, self.send)
        return request

    def keep(self, request: Request) -> None:
        """Wait for its answers; the caller sends it."""
        self._open[request.key] = request
        self._end_if_whole(request, {})

    def forget(self, request: Request) -> None:
        """It is not waited for any more."""
        if self._open.get(request.key) is request:
            del self._open[request.key]

    def ask_again(self) -> None:
        """Nothing has moved for a while."""
        for request in list(self._open.values()):
            request.ask_again(self._shards, self.send)

    def send_again(self, request: Request, shard: int) -> None:
        """It was lost on its way to a shard."""
        self._note_loss()
        request.send_again(shard, self.send)

    # What comes.

    def answered(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        request = self._open.get(request_of(message))
        if request is None and isinstance(message, Answer):  # it names a push that this worker has not made
            request = self._open.get(("join", message.optimizer_id, 0))
        if request is None:
            return  # it was answered before
        answers = request.places.setdefault(message.place if isinstance(message, Answer) else -1, {})
        answers[shard] = message, buffers
        self._end_if_whole(request, answers)

    def _end_if_whole(self, request: Request, answers: Answers) -> None:
        if len(answers) == len(request.awaited(self._shards)):
            del self._open[request.key]
            request.places = {}
            if request.then is None:
                request.answers = answers
            else:
                request.then(request, answers)

    def told(self, shard: int, told: StatusReply) -> None:
        """What a shard knows of a request: is it lost, or does it only take its time?"""
        request = self._open.get(request_of(told))
        if request is None or not request.receipt:
            return
        if told.state == "unknown" and shard in request.asked(self._shards) and shard in request.missing(self._shards):
            self.send_again(request, shard)
        elif told.state == "answered" and shard not in request.places.get(told.place, ()):
            self._note_loss()
            request.answer_lost(shard, told.place, self)

    def resend(self, shard: int, message: Resend) -> None:
        """A shard has dropped a request, because of what it lacks."""
        request = self._open.get(request_of(message))
        if request is not None:
            if message.lost:
                self._note_loss()
            request.send_again(shard, self.send)

"""What a worker reads outside of its pushes. The caller that waits for it does the receiving (`client.py`).

    Reads   values or optimizer state of all shards, at one position of the log (`state_dict`, `consolidate`)
    Pulls   rows of a table, from the shards that have them, as they are when the request comes

A list of row ids that a shard was sent before goes as its digest; if the shard has forgotten it, it says so, and gets the
list. A read or pull of which an answer was lost is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from polytempo.client.client_state import Reading
from polytempo.compression.key_cache import KeySender
from polytempo.protocol.messages import AnyMessage, PushStatus, ReadAnswer, ReadRequest, StatusReply
from polytempo.protocol.values import Keys, Pull, PulledRows
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.transport.channel import Bytes

#: Bytes of lists of ids that a shard is assumed to remember.
REMEMBERED = 32 << 20

SendFn = Callable[[int, AnyMessage, Sequence[Bytes]], None]


class Reads:
    """The reads of one worker."""

    def __init__(self, send: SendFn, rank: int, shards: int) -> None:
        self._send, self._rank, self._shards = send, rank, shards
        self._readings: dict[int, Reading] = {}  # by request
        self._requests = 0

    def start(self, reading: Reading) -> None:
        """Read, once more if an answer was lost: then only the new answers count, which are from one position of the log."""
        self._readings.pop(reading.request, None)
        self._requests += 1
        reading.request = self._requests
        reading.answers.clear()
        self._readings[reading.request] = reading
        self._request(reading)

    def _request(self, reading: Reading) -> None:
        request = ReadRequest(
            optimizer_id=reading.optimizer_id, worker=self._rank, request=reading.request, what=reading.what
        )
        self._send(0, request, ())

    def answered(self, answer: ReadAnswer, buffers: list[Bytes]) -> None:
        """One shard's answer."""
        if answer.request in self._readings:
            self._readings[answer.request].answers[answer.shard] = answer, buffers

    def is_done(self, reading: Reading) -> bool:
        """Have all shards answered?"""
        return len(reading.answers) == self._shards

    def take(self, reading: Reading) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """What was read, shard by shard."""
        del self._readings[reading.request]
        return [reading.answers[shard] for shard in range(self._shards)]

    def ask_status(self, reading: Reading) -> None:
        """Ask what became of a read."""
        for shard in range(self._shards):
            if shard == 0 or shard not in reading.answers:
                self._send(shard, PushStatus(what="read", optimizer_id=reading.optimizer_id, number=reading.request), ())

    def status(self, shard: int, told: StatusReply) -> bool:
        """What a shard knows of a read; True when its answer was lost."""
        reading = self._readings.get(told.number)
        if reading is None:
            return False
        if told.state == "answered" and shard not in reading.answers:
            self.start(reading)
            return True
        if told.state == "unknown" and shard == 0:
            self._request(reading)
        return False


@dataclass
class PendingPull:
    """A pull under way."""

    pull: Pull
    ids: dict[int, Bytes]  # for each shard that was asked
    cached: bool = False  # shards shall remember them
    answers: dict[int, tuple[PulledRows, list[Bytes]]] = field(default_factory=dict)


class Pulls:
    """The pulls of one worker."""

    def __init__(self, send: SendFn, shards: int) -> None:
        self._send_message = send
        self._shards = shards
        self._senders = [KeySender(REMEMBERED) for _ in range(shards)]
        self._waiting: dict[int, PendingPull] = {}
        self._requests = 0

    def ask(self, optimizer_id: str, table: int, ids: Sequence[torch.Tensor], cached: bool = False) -> int:
        """Ask for rows, given each shard's ids; the number under which they will come."""
        lists = {shard: as_bytes(own) for shard, own in enumerate(ids) if own.numel()}
        request = self._begin(Pull(optimizer_id=optimizer_id, request=0, table=table), lists, cached)
        for shard in lists:
            keys = self.keys(shard, ids[shard]) if cached else None
            self._send(request, shard, keys)
        return request

    def ask_span(self, optimizer_id: str, table: int, span: tuple[int, int], what: str = "rows") -> int:
        """Ask for all rows of a span, or for its clock."""
        nothing = {shard: as_bytes(torch.empty(0)) for shard in range(self._shards)}
        request = self._begin(Pull(optimizer_id=optimizer_id, request=0, table=table, span=span, what=what), nothing)
        for shard in range(self._shards):
            self._send(request, shard, None)
        return request

    def keys(self, shard: int, ids: torch.Tensor) -> Keys:
        """A list of ids as it may go to a shard, which then remembers it."""
        digest, known = self._senders[shard].offer(ids)
        return Keys(digest, known)

    def _begin(self, pull: Pull, lists: dict[int, Bytes], cached: bool = False) -> int:
        self._requests += 1
        pull.request = self._requests
        self._waiting[self._requests] = PendingPull(pull, lists, cached)
        return self._requests

    def _send(self, request: int, shard: int, keys: Keys | None) -> None:
        waiting = self._waiting[request]
        pull = Pull(
            optimizer_id=waiting.pull.optimizer_id,
            request=request,
            table=waiting.pull.table,
            span=waiting.pull.span,
            keys=keys,
            what=waiting.pull.what,
        )
        bare = waiting.pull.span is not None or (keys is not None and keys.known)
        self._send_message(shard, pull, [] if bare else [waiting.ids[shard]])

    def send_keys(self, request: int, shard: int) -> None:
        """A shard does not know a list: here it is, to be remembered from now on."""
        waiting = self._waiting.get(request)
        if waiting is not None:
            keys = self.keys(shard, as_tensor(waiting.ids[shard], "int64")) if waiting.cached else None
            self._send(request, shard, Keys(keys.digest, known=False) if keys else None)

    def ask_status(self, request: int) -> None:
        """Ask the shards that have not answered what became of a pull."""
        waiting = self._waiting[request]
        for shard in waiting.ids:
            if shard not in waiting.answers:
                self._send_message(
                    shard, PushStatus(what="pull", optimizer_id=waiting.pull.optimizer_id, number=request), ()
                )

    def status(self, shard: int, told: StatusReply) -> bool:
        """What a shard knows of a pull; True when the pull or its answer was lost: it is asked for again."""
        waiting = self._waiting.get(told.number)
        lost = waiting is not None and told.state != "received" and shard in waiting.ids and shard not in waiting.answers
        if lost:
            self.send_keys(told.number, shard)
        return lost

    def answered(self, rows: PulledRows, buffers: list[Bytes]) -> None:
        """Some rows have come."""
        waiting = self._waiting.get(rows.request)
        if waiting is not None:
            waiting.answers[rows.shard] = rows, buffers

    def is_done(self, request: int) -> bool:
        """Is everything there?"""
        waiting = self._waiting[request]
        return len(waiting.answers) == len(waiting.ids)

    def take(self, request: int) -> list[tuple[int, PulledRows, list[Bytes]]]:
        """What came, by shard."""
        answers = self._waiting.pop(request).answers
        return [(shard, *answers[shard]) for shard in sorted(answers)]

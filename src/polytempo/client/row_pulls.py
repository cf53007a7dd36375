"""Rows of tables that a worker has asked for. Whoever waits for them does the receiving (`client.py`).

Only shards that have some of the rows are asked. A list of ids that a shard was sent before goes as its digest; if the
shard has forgotten it, it says so, and gets the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from polytempo.compression.key_cache import KeySender
from polytempo.protocol.values import Keys, Pull, PulledRows
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.transport.channel import Bytes

#: Bytes of lists of ids that a shard is assumed to remember.
REMEMBERED = 32 << 20

Tell = Callable[[int, Pull, Sequence[Bytes]], None]


@dataclass
class Waiting:
    """A pull under way."""

    pull: Pull
    ids: dict[int, Bytes]  # for each shard that was asked
    cached: bool = False  # shards shall remember them
    answers: dict[int, tuple[PulledRows, list[Bytes]]] = field(default_factory=dict)


class Pulls:
    """The pulls of one worker."""

    def __init__(self, tell: Tell, shards: int) -> None:
        self._tell = tell
        self._shards = shards
        self._senders = [KeySender(REMEMBERED) for _ in range(shards)]
        self._waiting: dict[int, Waiting] = {}
        self._requests = 0

    def ask(self, track: str, table: int, ids: Sequence[torch.Tensor], cached: bool = False) -> int:
        """Ask for rows, given each shard's ids; the number under which they will come."""
        lists = {shard: as_bytes(own) for shard, own in enumerate(ids) if own.numel()}
        request = self._begin(Pull(track=track, request=0, table=table), lists, cached)
        for shard in lists:
            keys = self.keys(shard, ids[shard]) if cached else None
            self._send(request, shard, keys)
        return request

    def ask_span(self, track: str, table: int, span: tuple[int, int], what: str = "rows") -> int:
        """Ask for all rows of a span, or for its clock."""
        nothing = {shard: as_bytes(torch.empty(0)) for shard in range(self._shards)}
        request = self._begin(Pull(track=track, request=0, table=table, span=span, what=what), nothing)
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
        self._waiting[self._requests] = Waiting(pull, lists, cached)
        return self._requests

    def _send(self, request: int, shard: int, keys: Keys | None) -> None:
        waiting = self._waiting[request]
        pull = Pull(
            track=waiting.pull.track,
            request=request,
            table=waiting.pull.table,
            span=waiting.pull.span,
            keys=keys,
            what=waiting.pull.what,
        )
        bare = waiting.pull.span is not None or (keys is not None and keys.known)
        self._tell(shard, pull, [] if bare else [waiting.ids[shard]])

    def send_keys(self, request: int, shard: int) -> None:
        """A shard does not know a list: here it is, to be remembered from now on."""
        waiting = self._waiting.get(request)
        if waiting is not None:
            keys = self.keys(shard, as_tensor(waiting.ids[shard], "int64")) if waiting.cached else None
            self._send(request, shard, Keys(keys.digest, known=False) if keys else None)

    def missing(self, request: int) -> list[tuple[int, str]]:
        """The shards that have not answered, and the track they were asked about."""
        waiting = self._waiting[request]
        return [(shard, waiting.pull.track) for shard in waiting.ids if shard not in waiting.answers]

    def lacks(self, request: int, shard: int) -> bool:
        """Is this shard's answer still waited for?"""
        waiting = self._waiting.get(request)
        return waiting is not None and shard in waiting.ids and shard not in waiting.answers

    def heard(self, rows: PulledRows, buffers: list[Bytes]) -> None:
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

"""Answers that no worker waits for: they are looked for between two steps, and asked for when nothing was heard for a while,
as while a worker waits: a push or an answer may have been lost on its way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from polytempo.client.client import Client
from polytempo.protocol.messages import ReadAnswer
from polytempo.reducer.exchange import Exchange
from polytempo.reducer.servers import ServerExchange
from polytempo.transport.channel import Bytes


class Silence:
    """Since when no byte has come from the servers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._since, self._moved = time.monotonic(), client.connections.moved()

    def is_long(self) -> bool:
        """Is it time to ask? Once the caller was told so, silence begins anew: the answer takes its time, too."""
        now, before, self._moved = time.monotonic(), self._moved, self._client.connections.moved()
        over = self._moved == before and now - self._since > self._client.retry
        if over or self._moved != before:
            self._since = now
        return over


class AnswerWatch:
    """The answers to pushes of all fragments."""

    def __init__(self, reducers: Sequence[Exchange]) -> None:
        self.reducers = [reducer for reducer in reducers if isinstance(reducer, ServerExchange)]
        assert len(self.reducers) == len(reducers)  # the mode has no other way
        self._client, self._session = self.reducers[0].client, self.reducers[0].session
        self._silence = Silence(self._client)

    def poll(self) -> None:
        """Handle what has come, without waiting; after a silence, ask."""
        with self._session.lock:
            self._client.poll()
            if self._silence.is_long():
                for reducer in self.reducers:
                    self._client.exchanges.ask_status(reducer.client_state)

    def settle(self) -> None:
        """Wait until one more is there."""
        with self._session.lock:
            self._client.settle(*(reducer.name for reducer in self.reducers), enough=any)

    def forget(self) -> None:
        """No further answer is looked for."""
        for reducer in self.reducers:
            reducer.client_state.outstanding.clear()


class ValueFetch:
    """The servers' values, which were asked for."""

    def __init__(self, reducer: ServerExchange) -> None:
        self._client, self._lock = reducer.client, reducer.session.lock
        with self._lock:
            self.reading = self._client.start_read(reducer.name, "params")
        self._silence = Silence(self._client)
        self._came = False

    def comes(self) -> bool:
        """Has the last of them come since the call before? After a silence, ask. The caller has polled the client."""
        with self._lock:
            if self._came:
                return False
            self._came = self._client.reads.is_done(self.reading)
            if not self._came and self._silence.is_long():
                self._client.reads.ask_status(self.reading)
        return self._came

    def take(self) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """What each shard has answered."""
        with self._lock:
            return self._client.reads.take(self.reading)

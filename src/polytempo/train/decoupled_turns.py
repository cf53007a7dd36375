"""Turns of fragments in decoupled DiLoCo (`sync/decoupled_diloco.py`): a worker computes on, and waits for no merge.

    turn     after each k local steps of a fragment its change since the anchor is pushed; a turn is left out while the push
             before is not answered, and what it would have sent goes with the next one
    answer   looked for between two steps; when it is there, x = anchor' + (x - x at the sending), and anchor' is what the
             next push is a difference to
    end      a worker that leaves pushes what is unsent and waits for its merge. Meanwhile it has a push of every fragment
             pending, an empty one where it has no change: workers that leave at the same time wait for each other's pushes,
             and none is missing in a merge that another waits for

`consolidate` takes the servers' newest values without a merge and without other workers. What this worker has not pushed
yet is not in them; it stays with its fragment and goes with the next push.

A push or an answer that was lost on its way is found by asking: when no byte has moved for a while, the servers say what
they know, as they do while a worker waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from polytempo.client.client import Client
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.train.fragment import Fragment


class DecoupledTurns:
    """The turns of one optimizer's fragments.

    Args:
        fragments: All of them.
        send: Begins a round of a fragment.
        took: Called when the answer of a fragment was taken.
    """

    def __init__(
        self, fragments: Sequence[Fragment], send: Callable[[Fragment], None], took: Callable[[Fragment], None]
    ) -> None:
        self._fragments, self._send, self._took = list(fragments), send, took
        reducers = [fragment.reducer for fragment in fragments if isinstance(fragment.reducer, ServerReducer)]
        assert len(reducers) == len(self._fragments)  # the mode has no other way
        self._reducers = reducers
        self._client: Client = reducers[0].client
        self._session = reducers[0].session
        self.left_out = 0  #: turns of the first fragment at which nothing was sent
        self._quiet_since, self._moved = time.monotonic(), 0

    def after_step(self, steps: int) -> None:
        """A local step was made, the number `steps`: take what has come, and send what is due."""
        self._poll()
        for fragment in self._fragments:
            if fragment.due == steps:
                fragment.due += max(fragment.reducer.period, 1)
                if fragment.sent_at is None:
                    self._send(fragment)
                elif fragment is self._fragments[0]:
                    self.left_out += 1

    def _poll(self) -> None:
        """Take the answers that are there, without waiting."""
        if all(fragment.sent_at is None for fragment in self._fragments):
            return
        with self._session.lock:
            self._client.poll()
        self._take_answers()
        self._ask_after_silence()

    def _take_answers(self) -> None:
        for fragment in self._fragments:
            if fragment.is_answered():
                fragment.take()
                self._took(fragment)

    def _ask_after_silence(self) -> None:
        now, moved = time.monotonic(), self._client.connections.moved()
        if moved != self._moved:
            self._quiet_since, self._moved = now, moved
        elif now - self._quiet_since > self._client.retry:
            self._quiet_since = now
            with self._session.lock:
                for reducer in self._reducers:
                    self._client.exchanges.ask_status(reducer.client_state)

    def flush(self) -> None:
        """Push all that is unsent, and wait until all changes are merged."""
        names = [reducer.name for reducer in self._reducers]
        while any(fragment.made.count or fragment.sent_count for fragment in self._fragments):
            for fragment in self._fragments:
                if fragment.sent_at is None:
                    self._send(fragment)
            with self._session.lock:
                self._client.settle(*names, enough=any)
            self._take_answers()
        for reducer in self._reducers:
            reducer.client_state.outstanding.clear()  # of no change: this worker need not know of their merge

    def consolidate(self) -> None:
        """Take the servers' newest values; what is unsent stays for the next push."""
        for fragment, reducer in zip(self._fragments, self._reducers, strict=True):
            newest = reducer.newest()
            self._poll()  # an answer may have come meanwhile
            fragment.show(newest)

"""Ranks that do not come are waited for aloud, not for ever, and not at all once they are known to be gone."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from wires import Client
from worlds import PATIENCE, ROUTE, Shelf, outcomes, said, unused_name

from polytempo.client.client import Client as ServersClient
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.collectives import point_to_point
from polytempo.collectives.world import open_by_store
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.protocol.messages import AnyMessage, Hello, Push, PushStatus, StatusReply, Welcome, decode, encode
from polytempo.protocol.push import PushedGradient
from polytempo.protocol.values import PushId
from polytempo.session.session import seconds_of
from polytempo.transport import deadline
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel


def one_who_has_said(*words: str) -> Shelf:
    """The store of two ranks on one host, of whom the other has said so much, and says no more."""
    by_itself, store = Shelf(), Shelf()
    open_by_store(by_itself, 0, 1, ROUTE).close()
    known = {"host": said(by_itself, "host-0"), "token": unused_name()}
    for word in words:
        store.put(word, known[word.partition("-")[0]])
    return store


#: Who waits, and what the other has said.
PLACES = {
    "where it is": (0, ()),
    "the token": (1, ("host-0",)),  # of another version: ours says it before its host
    "that it connects": (0, ("host-1",)),
    "that it listens": (1, ("host-0", "token-0")),
}


@pytest.mark.parametrize("place", PLACES)
def test_one_who_is_gone_is_not_waited_for(place: str) -> None:
    (rank, words), looks = PLACES[place], count()

    class Watch(deadline.RankWatch):
        def look(self, call: str, ranks: Sequence[int]) -> None:
            assert (call, list(ranks)) in (("all_reduce #1", [1 - rank]), ("", []))
            self.ended = {1 - rank: "was killed"} if next(looks) else {}  # it dies while it is waited for

    store = one_who_has_said(*words)
    about: dict[str, Any] = {"join_timeout": 10 * PATIENCE, "watch": Watch(), "call": "all_reduce #1"}
    (world,) = outcomes(Client(lambda: open_by_store(store, rank, 2, ROUTE, **about)))
    if place == "the token":
        assert str(world) == "rank 0 was killed, and has left no token"
        return
    mine = torch.ones(1)
    calls = {
        "barrier": world.all_ranks.barrier,
        "all_reduce(sum, float32[1])": lambda: world.all_ranks.all_reduce([mine]),
        f"recv(float32[1], from {1 - rank}, tag 0)": lambda: point_to_point.receive(world.all_ranks, mine, 1 - rank),
    }
    for name, call in calls.items():
        (outcome,) = outcomes(Client(lambda call=call: call().wait()))
        assert isinstance(outcome, RankLost), outcome
        assert str(outcome).startswith(f"rank {1 - rank} was killed: rank {rank} needs it"), name
        assert outcome.ranks == (1 - rank,)
    assert world.reform().ranks == (rank,)
    world.close()


@pytest.mark.parametrize("place", PLACES)
def test_waiting_is_said_and_ends(place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(deadline, "FIRST_REPORT", 0.0)  # at the first look
    monkeypatch.setattr(deadline, "LOOK_EVERY", 0.01)
    rank, words = PLACES[place]
    store = one_who_has_said(*words)
    (outcome,) = outcomes(Client(lambda: open_by_store(store, rank, 2, ROUTE, join_timeout=0.1)))
    assert isinstance(outcome, PeerError), outcome
    says = f"for rank {1 - rank} to join: rank {1 - rank} has called no collective yet"
    ends = rf"rank {rank} has waited 0.1 s {says};( it cannot be reached .*;)? was it started\?"
    assert re.fullmatch(ends, str(outcome))
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(rf"polytempo: rank {rank} has waited \d+ s {says}", line) for line in lines)


def test_a_timeout_is_seconds_or_a_timedelta_or_none() -> None:
    assert (seconds_of(3), seconds_of(timedelta(minutes=2)), seconds_of(math.inf)) == (3.0, 120.0, None)
    for wrong in (0, -1.0, math.nan, timedelta(0)):
        with pytest.raises(UsageError, match="expected timeout= above 0 seconds, got"):
            seconds_of(wrong)


def test_it_is_said_again_after_twice_as_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting, said_at = deadline.Deadline(0, 100.0), []
    for second in range(1, 100):
        now[0] = 100.0 + second
        assert not waiting.over
        waiting.look([1, 2])
        if line := capsys.readouterr().err:
            assert line == f"polytempo: rank 0 has waited {second} s for ranks 1, 2 to join\n"
            said_at.append(second)
    assert said_at == [10, 20, 40, 80]
    now[0] = 200.0
    assert waiting.over
    waiting.restart()
    assert not waiting.over


class Answering(Channel):
    """A server that answers each type of message with one of its own, or with nothing."""

    def __init__(self, answers: dict[type, AnyMessage]) -> None:
        self._answers, self._waiting = answers, deque[bytes]()
        self._read, self._write = os.pipe()

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        if (answer := self._answers.get(type(decode(header)))) is not None:
            self._waiting.append(encode(answer))
            os.write(self._write, b"!")
        return len(header)

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        if not self._waiting:
            return None
        os.read(self._read, 1)
        return self._waiting.popleft(), []

    def pollable(self) -> Any:
        return self._read

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def test_a_server_that_answers_no_question_is_named_and_a_busy_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have the push, and neither has applied it: only one of them says so."""
    monkeypatch.setattr(deadline, "FIRST_REPORT", 0.0)
    known = StatusReply(what="push", optimizer_id="0", number=0, state="received", place=-1)
    answers: dict[type, AnyMessage] = {Hello: Welcome(size=1, shards=2), PushStatus: known}
    channels = [Answering(answers), Answering({Hello: answers[Hello]})]
    client, text = ServersClient(channels, 3, 0, Pool(), retry=0.02), []

    client.exchanges.states["0"] = ClientState("0", joined=True)
    client.push(Outstanding(Push(id=PushId("0", 3, 0, 0), body=PushedGradient()), [[], []]))

    def told() -> bool:
        text.append(capsys.readouterr().err)
        return "does not answer" in text[-1]

    client.wait(told, "an answer")
    client.close()
    assert re.fullmatch(
        r"polytempo: rank 3 has waited \d+ s for an answer; server 1 does not answer, is it stopped\?\n", text[-1]
    )
    assert not any("server 0" in part for part in text)


def test_where_a_rank_is_debugged_no_wait_for_others_times_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for waits whose end is no failure; and the wait is told once."""
    now = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(deadline, "_endless", False)
    deadline.wait_without_limit()
    endless, firm = deadline.Deadline(0, 5.0), deadline.Deadline(0, 5.0, firm=True)
    for now[0] in (10.0, 100.0, 1000.0):
        endless.look([1])
        assert (endless.over, endless.left, firm.over) == (False, None, True)
    assert capsys.readouterr().err == "polytempo: rank 0 has waited 10 s for rank 1 to join\n"
    assert deadline.limit_of(5.0) is None

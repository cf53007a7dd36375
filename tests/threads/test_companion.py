"""A worker that has its server to itself calls it over to its core while it waits; who computes keeps its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import copied, made_params, set_gradients, until

from polytempo.client.connections import ServerConnections
from polytempo.protocol.messages import Welcome
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport import cpu_affinity
from polytempo.transport.cpu_affinity import Companion, CoreSlot

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads to cores"),
]


@pytest.fixture(autouse=True)
def own_mask() -> Iterator[set[int]]:
    """This thread may use the same cores after a test as before."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.fixture(autouse=True)
def nothing_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise, exchanges count as far apart."""
    monkeypatch.setattr(cpu_affinity, "BRIEF", 0.0)


class Sleeper(threading.Thread):
    """A thread that waits to be ended; its number is known."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._known, self._end = threading.Event(), threading.Event()
        self.number = 0
        self.start()
        assert self._known.wait(10)

    def run(self) -> None:
        self.number = threading.get_native_id()
        self._known.set()
        self._end.wait(30)

    def end(self) -> None:
        self._end.set()
        until(lambda: not Path(f"/proc/self/task/{self.number}").exists(), "the thread ends")


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    thread = Sleeper()
    yield thread
    thread.end()


def test_inside_both_are_on_one_core_and_afterwards_this_thread_is_free(sleeper: Sleeper, own_mask: set[int]) -> None:
    companion = Companion(sleeper.number)
    for _ in range(3):
        with companion:
            mine = os.sched_getaffinity(0)
            assert len(mine) == 1
            assert mine <= own_mask
            assert os.sched_getaffinity(sleeper.number) == mine
        assert os.sched_getaffinity(0) == own_mask


def test_the_companion_follows_to_another_core(sleeper: Sleeper, own_mask: set[int]) -> None:
    if len(own_mask) < 2:
        pytest.skip("there is one core only")
    companion = Companion(sleeper.number)
    for core in (min(own_mask), max(own_mask), min(own_mask)):
        os.sched_setaffinity(0, {core})
        with companion:
            assert os.sched_getaffinity(sleeper.number) == {core}
        assert os.sched_getaffinity(0) == {core}


def test_an_exception_that_passes_leaves_this_thread_free(sleeper: Sleeper, own_mask: set[int]) -> None:
    companion = Companion(sleeper.number)
    with pytest.raises(KeyError, match="passes"), companion:
        raise KeyError("passes")
    assert os.sched_getaffinity(0) == own_mask
    with companion:  # and it works again
        assert len(os.sched_getaffinity(0)) == 1


def test_while_exchanges_follow_each_other_closely_nothing_is_asked_twice(
    sleeper: Sleeper, own_mask: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_affinity, "BRIEF", 1e9)
    asked: list[int] = []
    plain = os.sched_setaffinity
    monkeypatch.setattr(
        cpu_affinity.os, "sched_setaffinity", lambda thread, mask: asked.append(thread) or plain(thread, mask)
    )
    companion = Companion(sleeper.number)
    for _ in range(5):
        with companion:
            assert len(os.sched_getaffinity(0)) == 1
    assert asked == [sleeper.number, 0]
    companion.release()
    assert os.sched_getaffinity(0) == own_mask


def test_after_a_long_time_of_computing_this_thread_is_free_again(
    sleeper: Sleeper, own_mask: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    companion = Companion(sleeper.number)
    for brief, free in ((1e9, False), (1e9, False), (0.0, True)):
        monkeypatch.setattr(cpu_affinity, "BRIEF", brief)
        with companion:
            pass
        assert (os.sched_getaffinity(0) == own_mask) == (free or len(own_mask) == 1)


def test_a_companion_that_is_gone_is_done_without(own_mask: set[int]) -> None:
    thread = Sleeper()
    thread.end()
    companion = Companion(thread.number)
    for _ in range(2):
        with companion:
            assert os.sched_getaffinity(0) == own_mask
        assert os.sched_getaffinity(0) == own_mask


@pytest.mark.parametrize("error", [PermissionError("no"), ProcessLookupError("gone"), ValueError("no such core")])
def test_who_may_not_bind_threads_does_without_and_asks_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(thread: int, mask: set[int]) -> None:
        asked.append(thread)
        raise error

    monkeypatch.setattr(cpu_affinity.os, "sched_setaffinity", refuse)
    companion, entered = Companion(12345), 0
    for _ in range(3):
        with companion:
            entered += 1
    assert (entered, asked) == (3, [12345])
    monkeypatch.undo()


def test_without_a_way_to_know_the_core_nothing_is_bound(
    sleeper: Sleeper, own_mask: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_affinity.ctypes, "CDLL", lambda name: object())
    with Companion(sleeper.number):
        assert os.sched_getaffinity(0) == own_mask
    assert os.sched_getaffinity(sleeper.number) == own_mask


# In a job.


def welcomed(workers: int, servers: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that workers were told of, after some steps of everybody."""
    told: list[int] = []
    plain = ServerConnections._handle

    def hear(self: ServerConnections, shard: int, message: Any, buffers: Any) -> None:
        if isinstance(message, Welcome):
            told.append(message.thread)
        plain(self, shard, message, buffers)

    monkeypatch.setattr(ServerConnections, "_handle", hear)
    start = made_params([(4,)])

    def work(session: Session) -> None:
        before = os.sched_getaffinity(0)
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        for _ in range(3):
            set_gradients(params, [torch.ones(4)])
            optimizer.step()
            assert os.sched_getaffinity(0) == before
        client = session.client
        assert client is not None
        assert (client.companion is not None) == any(told)

    with ThreadJob(workers, servers) as job:
        job.run(work)
        threads = [thread.native_id for thread in job._threads]
    assert len(told) == workers * servers
    assert all(thread in threads for thread in told if thread)
    return told


@pytest.mark.parametrize("wire", ["memory", "ipc"], indirect=True)
def test_a_worker_with_a_server_of_its_own_is_told_its_thread(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (thread,) = welcomed(1, 1, monkeypatch)
    assert thread != 0


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (1, 2), (3, 2)])
def test_several_workers_or_servers_are_not_called_over(workers: int, servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert welcomed(workers, servers, monkeypatch) == [0] * (workers * servers)


def test_who_computes_with_several_threads_is_not_called_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are started inside would inherit the narrow mask. The fixture of this directory sets it back."""
    torch.set_num_threads(2)
    assert welcomed(1, 1, monkeypatch) == [0]


def test_a_worker_that_computes_with_several_threads_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Companion] = []
    plain = Companion.__enter__
    monkeypatch.setattr(Companion, "__enter__", lambda self: entered.append(self) or plain(self))
    start = made_params([(4,)])

    def work(session: Session) -> tuple[int, int]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, [torch.ones(4)])
        optimizer.step()
        with_one = len(entered)
        torch.set_num_threads(2)
        optimizer.step()
        torch.set_num_threads(1)
        return with_one, len(entered)

    with ThreadJob(1) as job:
        assert job.run(work) == [(1, 1)]


# Who computes wakes up where it fell asleep.


def test_who_waits_in_its_seat_keeps_its_core_until_it_is_awake(own_mask: set[int]) -> None:
    seat = CoreSlot(1)
    for _ in range(3):
        with seat:
            assert len(os.sched_getaffinity(0)) == 1
            assert os.sched_getaffinity(0) <= own_mask
        assert os.sched_getaffinity(0) == own_mask
    with pytest.raises(KeyError, match="passes"), seat:
        raise KeyError("passes")
    assert os.sched_getaffinity(0) == own_mask


def test_more_who_compute_than_cores_take_any_core(own_mask: set[int]) -> None:
    with CoreSlot(len(own_mask) + 1):
        assert os.sched_getaffinity(0) == own_mask


def test_where_cores_cannot_be_chosen_nothing_happens(own_mask: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: int, mask: set[int]) -> None:
        raise PermissionError(1, "not permitted")

    seat = CoreSlot(1)
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with seat, seat:
        assert os.sched_getaffinity(0) == own_mask
    monkeypatch.undo()
    with seat:
        assert os.sched_getaffinity(0) == own_mask, "it is not tried again"

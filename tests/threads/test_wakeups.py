"""Wake-ups are not lost: not to a descriptor that has a closed one's number, not to a failure that comes early."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.protocol.messages import Norm
from polytempo.server.shard_executor import ShardExecutor, ShardState
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Poller
from polytempo.transport.memory import MemoryChannel, MemoryEndpoint, MemoryLink, WakeUp
from polytempo.transport.peer_link import FAILED, LinkMessage


def rings(descriptor: int) -> bool:
    poller = Poller()
    poller.register(descriptor, 1)
    return descriptor in poller.poll(0)


def ends(call: Callable[[], object]) -> bool:
    """Does it return?"""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_closed_bell_takes_no_ring_from_the_one_that_has_its_number_now() -> None:
    first = WakeUp()
    first.close()
    second = WakeUp()
    assert second.fileno == first.fileno
    second.ring()
    first.silence()
    assert rings(second.fileno)
    second.close()


def test_a_link_that_was_closed_while_its_bell_rang_is_not_read() -> None:
    engine = ProgressEngine(0)
    link, other = MemoryLink.pair((0, engine.messages), (1, ProgressEngine(1).messages))
    link.attach(Poller())
    other._give(None)
    link.close()
    taken = WakeUp()
    assert taken.fileno == link._wake_up.fileno
    taken.ring()
    link.handle({taken.fileno: 1})
    assert rings(taken.fileno)
    taken.close()


def test_a_channel_is_woken_when_its_endpoint_closes() -> None:
    endpoint = MemoryEndpoint("server-0")
    waiting, left = MemoryChannel(endpoint), MemoryChannel(endpoint)
    left.close()
    assert not rings(waiting.pollable())
    endpoint.close()
    assert rings(waiting.pollable())
    with pytest.raises(PeerError, match="server-0 is gone"):
        waiting.receive()
    waiting.close()


def at_line(number: int, call: Callable[[], object], of: str, act: Callable[[], object]) -> bool:
    """Call, and act just before that line of a function, as another thread might; had it so many?"""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_name != of:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines >= number


def test_a_failure_in_a_group_that_is_just_being_made_is_not_forgotten() -> None:
    for line in range(1, 20):
        engine = ProgressEngine(0)
        link, _ = MemoryLink.pair((0, engine.messages), (1, ProgressEngine(1).messages))
        engine.attach([link])
        made: list[CallQueue] = []
        failed = LinkMessage(FAILED, 7, 0, b"rank 1 failed")
        lasts = at_line(
            line,
            lambda engine=engine, made=made: made.append(engine.queues.open(7, (0, 1))),
            "open",
            lambda engine=engine, failed=failed: engine.messages.arrived(1, failed, None),
        )
        if lasts:
            assert str(made[0].failed) == "rank 1 failed", f"it came before line {line} of open_lane"
            assert made[0].ranks == (0, 1)
        engine.close()
        if not lasts:
            assert line > 2
            return
    pytest.fail("open_lane has no end")


def test_a_server_that_ends_waits_for_the_norms_of_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers may each have an update that waits for the other shards' norms."""
    keeper = ShardExecutor(ShardState(0, 2, Pool()))
    entry: Any = Norm(shard=0, optimizer_id="0", version=1, square=1.0)
    monkeypatch.setattr(keeper.state, "carry_out", lambda entry, pushes, total_norm: [total_norm(entry)])
    keeper.put(entry, {})
    keeper.put(entry, {})
    assert ends(keeper.close)


def test_a_link_that_cannot_be_closed_keeps_no_task_and_no_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ProgressEngine(0)
    links = [MemoryLink.pair((0, engine.messages), (rank, ProgressEngine(rank).messages))[0] for rank in (1, 2)]
    engine.attach(links)

    def steps() -> Steps:
        yield Wait(lambda: False, lambda: [1])

    def broken() -> None:
        raise OSError("no such descriptor")

    task = engine.start(engine.queues.open(0, (0, 1, 2)), "waiting", steps(), False)
    monkeypatch.setattr(links[0], "close", broken)
    with pytest.raises(OSError, match="no such descriptor"):
        engine.close()
    assert task.done
    assert not links[1].open
    assert ends(engine.close)

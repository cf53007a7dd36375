"""Stages that share device memory, on the stand-in: the same numbers as by messages, to the bit; leases; lost senders."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import SGD, batches, everywhere, layered, mse

from polytempo.device.device import Fences
from polytempo.device.host_device import HostDevice, HostFences
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.pipeline import device_messages
from polytempo.pipeline.builder import StageHooks
from polytempo.pipeline.device_messages import BLOCKS, WORDS, WRITTEN, DeviceBlocks, exchange_devices
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.point_to_point import DEVICE, FORWARD, PointToPoint
from polytempo.pipeline.stage_message import MessageForm, StageMessage, copied_out, described
from polytempo.session.session import Session
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import make_segment

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "microbatches": 4},
    "gpipe without recomputation": {"schedule": "gpipe,recompute=0", "microbatches": 4},
    "1f1b": {"schedule": "1f1b", "microbatches": 4},
    "sequential": {"schedule": "sequential", "microbatches": 2},
    "pipedream": {"schedule": "pipedream"},
    "replicas": {"schedule": "1f1b", "replicas": [2, 1], "microbatches": 4},
    "clipped": {"schedule": "1f1b", "microbatches": 4, "clip_norm": 0.1},
}


def trained(ranks: int, on: dict[int, str], options: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any], set[str]]]:
    """Losses, state and evaluation of a small model; and how its messages went. `on`: ranks with a device, its identity."""
    models = [copy.deepcopy(layered(7)) for _ in range(ranks)]
    (x, y), data = batches(1, 6, seed=9)[0], batches(5, 8)

    def work(session: Session) -> tuple[list[Any], dict[str, Any], set[str]]:
        hooks = StageHooks(device=HostDevice(on[session.rank])) if session.rank in on else None
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=SGD, _hooks=hooks, **options)
        found: list[Any] = [pipe.step(*pair) for pair in data]
        found += [pipe.flush()] if not pipe.schedule.flushes else []
        found += [pipe.evaluate(x, y), pipe.predict(x)]
        return (
            found,
            pipe.state_dict(),
            {one.how for one in pipe._built.p2p._outgoing.values() if one.form and one.form.entries},
        )

    results = everywhere(ranks, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_by_device_memory_train_as_by_messages(name: str) -> None:
    options = SCHEDULES[name]
    ranks = sum(options.get("replicas", (1, 1, 1)))
    by_message = trained(ranks, {}, options)
    by_device = trained(ranks, dict.fromkeys(range(ranks), "gpu"), options)
    assert {how for _, _, hows in by_device for how in hows} == {DEVICE}
    assert not any(DEVICE in hows for _, _, hows in by_message)
    for (found, state, _), (wanted, other, _) in zip(by_device, by_message, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(state, other, rtol=0, atol=0)


def test_ranks_without_a_device_or_with_one_out_of_reach_are_sent_bytes() -> None:
    options = {"schedule": "1f1b", "microbatches": 4}
    wanted = trained(4, {}, options)
    mixed = trained(4, {0: "a", 1: "a", 2: "b"}, options)
    assert [DEVICE in hows for _, _, hows in mixed] == [True, True, False, False]
    for (found, state, _), (right, other, _) in zip(mixed, wanted, strict=True):
        torch.testing.assert_close((found, state), (right, other), rtol=0, atol=0)


# Leases.


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_block_is_never_written_while_it_may_be_read(data: st.DataObject) -> None:
    """A reader that is behind by any number of messages, and reads them in any order, finds each as it was sent."""
    sender = DeviceBlocks(HostDevice(), make_segment(WORDS))
    reader = HostDevice().fences(sender.words.view(0, WORDS))
    sizes = [10, 3000, 5000, 100_000]
    under_way: list[tuple[int, bytes, MessageForm]] = []
    most = 0
    for number in range(data.draw(st.integers(1, 40))):
        if not under_way or data.draw(st.booleans()):
            message = StageMessage([torch.full((data.draw(st.sampled_from(sizes)),), float(number))], number=number)
            form = MessageForm(described(message))
            under_way.append((number, sender.write(form, message), form))
            most = max(most, len(under_way))
        else:
            sent, header, form = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            block, count, *_ = device_messages.HEADER.unpack(header)
            assert reader.reached(WRITTEN, count)
            values = copied_out(form, sender.blocks[block].memory.tensor, torch.device("cpu"))
            assert torch.equal(values[0], torch.full_like(values[0], float(sent)))
            reader.signal(BLOCKS + block, count)
    assert len(sender.blocks) <= most * len(sizes), "blocks are used again"


def test_blocks_are_used_again_and_memory_stays_small() -> None:
    def work(session: Session) -> int:
        device = HostDevice("gpu")
        group = session.world().new_group(range(2))
        assert group is not None
        p2p = PointToPoint(group, torch.device("cpu"), (device, exchange_devices(group, device)))
        for number in range(30):
            if session.rank == 0:
                p2p.send(1, FORWARD, StageMessage([torch.full((300_000,), float(number))], number=number))
            else:
                held = p2p.take(0, FORWARD, number)
                assert torch.equal(held.values[0], torch.full((300_000,), float(number)))
                p2p.confirm()
            group.barrier().wait()
        p2p.settle()
        return device.allocated

    assert everywhere(2, work) == [1_310_720, 0]


def test_too_many_messages_under_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_messages, "MOST_BLOCKS", 2)
    blocks = DeviceBlocks(HostDevice(), make_segment(WORDS))
    blocks.take(10), blocks.take(10)
    with pytest.raises(UsageError, match="fewer microbatches"):
        blocks.take(10)


# Senders that are lost with a message that is not written.


class _Silent(HostFences):
    """Of a process that is killed before its GPU has written a message."""

    def signal(self, index: int, value: int) -> None:
        if index != WRITTEN or value < 3:
            super().signal(index, value)


class _SilentDevice(HostDevice):
    def fences(self, words: Bytes) -> Fences:
        return _Silent(words)


def test_a_sender_that_dies_before_its_gpu_has_written_reaches_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is blocked by its stream, is released, and raises before its update."""
    monkeypatch.setattr(device_messages, "SUSPICIOUS", 0.05)
    monkeypatch.setattr(device_messages, "LOOK", 0.01)
    states: list[dict[str, torch.Tensor]] = []
    blocked = threading.Event()
    models = [layered(5), layered(5)]
    wait = HostFences.wait

    def noted(self: HostFences, index: int, value: int) -> None:
        if index == WRITTEN and value == 3:
            blocked.set()
        wait(self, index, value)

    monkeypatch.setattr(HostFences, "wait", noted)

    def work(session: Session) -> None:
        device = _SilentDevice("gpu") if session.rank == 0 else HostDevice("gpu")
        pipe = Pipeline(
            models[session.rank],
            loss=mse,
            optimizer=SGD,
            microbatches=4,
            schedule="gpipe",
            _hooks=StageHooks(device=device),
        )
        states.append({name: value.clone() for name, value in pipe.stage.state().items()} if session.rank else {})
        if session.rank == 0:

            def dies(*arguments: Any) -> StageMessage:
                assert blocked.wait(20)
                session.abandon()
                raise KeyboardInterrupt

            pipe._built.p2p.take = dies  # type: ignore[method-assign]
        try:
            pipe.step(*batches(1, 8)[0])
        finally:
            if session.rank:
                before = next(state for state in states if state)
                torch.testing.assert_close(pipe.stage.state(), before, rtol=0, atol=0)

    first, second = everywhere(2, work)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RankLost)
    assert "stage 0 (rank 0)" in str(second)
    assert second.ranks == (0,)


def test_a_sender_that_never_writes_is_waited_for_no_longer_than_the_groups_time() -> None:
    def work(session: Session) -> None:
        device = _SilentDevice("gpu") if session.rank == 0 else HostDevice("gpu")
        group = session.world().new_group(range(2))
        assert group is not None
        p2p = PointToPoint(group, torch.device("cpu"), (device, exchange_devices(group, device)))
        if session.rank == 0:
            for number in range(3):
                p2p.send(1, FORWARD, StageMessage([torch.ones(5)], number=number))
            group.barrier().wait()
            return
        group.timeout = 1.5
        for number in range(3):
            p2p.take(0, FORWARD, number)
        begun = time.monotonic()
        try:
            p2p.confirm()
        finally:
            assert time.monotonic() - begun < 30
            group.timeout = None
            group.barrier().wait()

    first, second = everywhere(2, work)
    assert first is None
    assert isinstance(second, PeerError)
    assert "rank 0 has not written its message after 1.5 s" in str(second)

"""Memory that processes share: who holds it, when it is free again, and what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import numpy
import pytest
import torch
from sharing import SIZE, Pair, descriptors, mapped, nothing_is_left, pair, shared
from wires import filled, hear, same

from polytempo.server.optimizer_state import as_tensor
from polytempo.transport import shared_memory
from polytempo.transport.buffer_pool import KEEP_FROM, Pool
from polytempo.transport.channel import Bytes
from polytempo.transport.connect import LIMIT
from polytempo.transport.framing import SEGMENT_COUNT_LIMIT, FrameWriter
from polytempo.transport.shared_memory import (
    BLOCK_LEASE,
    SHARE_FROM,
    Borrowed,
    Lease,
    SharedMemoryRegistry,
    address_of,
    make_segment,
    read_block,
)
from polytempo.transport.stream import StreamChannel

__all__ = ["nothing_is_left", "pair"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


# A registry.


@pytest.mark.parametrize(("size", "is_shared"), [(0, False), (1, False), (SHARE_FROM - 1, False), (SHARE_FROM, True)])
def test_memory_is_zeroed_and_shared_if_it_is_large_enough(size: int, is_shared: bool) -> None:
    registry = SharedMemoryRegistry()
    memory = registry.allocate(size)
    assert (memory.nbytes, int(memory.sum()), memory.dtype) == (size, 0, numpy.uint8)
    assert (registry.find(memory) is not None) == is_shared


def test_a_buffer_is_found_where_it_lies() -> None:
    registry = SharedMemoryRegistry()
    memories = [registry.allocate(SIZE + 4096 * number) for number in range(4)]
    for memory in memories:
        found = registry.find(memory[100 : 100 + SHARE_FROM])
        assert found is not None
        segment, offset = found
        assert (segment.address + offset, offset) == (address_of(memory) + 100, 100)
        assert segment.size == memory.nbytes


def test_what_is_not_ours_or_too_small_is_not_found() -> None:
    registry, other = SharedMemoryRegistry(), SharedMemoryRegistry()
    memory = registry.allocate(SIZE)
    assert registry.find(numpy.zeros(SIZE, dtype=numpy.uint8)) is None
    assert registry.find(other.allocate(SIZE)) is None
    assert registry.find(memory[: SHARE_FROM - 1]) is None
    assert registry.find(memory.view(Borrowed)) is None, "what another process lent us is not ours to share"


def test_memory_ends_with_its_last_view_and_not_before() -> None:
    gc.collect()  # of other tests
    registry, before, open_before = SharedMemoryRegistry(), mapped(), descriptors()
    memory = registry.allocate(SIZE)
    tensor = as_tensor(memory, "uint8")[8:]
    assert mapped() == before + 1
    del memory
    tensor.fill_(3)
    assert mapped() == before + 1
    del tensor
    assert (mapped(), descriptors()) == (before, open_before)


def test_a_segment_cannot_be_shrunk_nor_inherited() -> None:
    segment = make_segment(SIZE)
    assert not os.get_inheritable(segment.descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)


# Leases.


def test_a_lease_is_returned_when_its_byte_is_cleared_and_the_registry_looks() -> None:
    registry, done = SharedMemoryRegistry(), list[str]()
    first, second = (registry.lease(lambda name=name: done.append(name)) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    registry.collect()
    assert done == []
    second.held_by(1)()
    assert done == []
    registry.collect()
    registry.collect()
    assert done == ["second"]
    registry.expire(first)
    registry.expire(first)
    assert done == ["second", "first"]


def test_the_byte_of_a_returned_lease_is_used_again_but_not_of_an_expired_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader of an expired lease may still live, and clear its byte later."""
    monkeypatch.setattr(shared_memory, "LEASES", 2)
    registry, done = SharedMemoryRegistry(), list[int]()
    one, two = registry.lease(lambda: done.append(1)), registry.lease(lambda: done.append(2))
    assert one is not None
    assert two is not None
    assert registry.lease(lambda: done.append(3)) is None, "there are two only"
    registry.expire(one)
    assert registry.lease(lambda: done.append(4)) is None
    two.held_by(1)()
    again = registry.lease(lambda: done.append(5))
    assert again is not None
    assert (again.word, done) == (two.word, [1, 2])


# Messages.


def test_what_is_lent_arrives_in_place_and_is_done_after_the_last_view(pair: Pair) -> None:
    channel, peer = pair.join()
    values = shared(pair.registry)
    back = pair.lent(peer, values)
    header, (view,) = hear(channel)
    assert header == b"values"
    assert isinstance(view, Borrowed)
    assert same([view], [values])
    values[7] ^= 255
    assert view[7] == values[7], "it is the same memory"
    pair.registry.collect()
    assert back == []
    del view
    assert back == [], "nobody has looked"
    pair.registry.collect()
    assert back == [1]


@pytest.mark.parametrize(
    "keep",
    [lambda view: view[8:16], lambda view: as_tensor(view, "float32"), lambda view: as_tensor(view, "uint8")[3:].view(-1)],
    ids=["a slice", "a tensor", "a part of a tensor"],
)
def test_whatever_is_made_of_a_view_keeps_the_loan(pair: Pair, keep: Callable[[Bytes], object]) -> None:
    channel, peer = pair.join()
    back = pair.lent(peer, shared(pair.registry))
    kept = keep(hear(channel)[1][0])
    gc.collect()
    pair.registry.collect()
    assert back == []
    del kept
    pair.registry.collect()
    assert back == [1]


def test_a_loan_of_several_buffers_is_back_with_the_last_of_them(pair: Pair) -> None:
    channel, peer = pair.join()
    sent = [shared(pair.registry, SIZE, 1), filled(100, 2), shared(pair.registry, SHARE_FROM, 3), filled(SIZE, 4), filled(0)]
    back = pair.lent(peer, *sent)
    views = hear(channel)[1]
    assert same(views, sent)
    assert [isinstance(view, Borrowed) for view in views] == [True, False, True, False, False]
    while len(views) > 1:
        del views[-1]
        pair.registry.collect()
        assert back == []
    del views[0]
    pair.registry.collect()
    assert back == [1]


def test_a_closed_connection_returns_its_loans_and_views_stay_readable(pair: Pair) -> None:
    channel, peer = pair.join()
    values = shared(pair.registry)
    back = pair.lent(peer, values)
    _, (view,) = hear(channel)
    pair.channels.remove(channel)
    channel.close()
    assert pair.serve(lambda: pair.closed)
    assert back == [1]
    assert same([view], [values])
    del view
    pair.registry.collect()
    assert back == [1]


def test_a_closed_connection_returns_no_loans_of_others(pair: Pair) -> None:
    """The word of a loan that came back may be another's by now."""
    early, first = pair.join()
    late, second = pair.join()
    values = shared(pair.registry)
    assert pair.lent(first, values) == []
    hear(early)  # and forget it
    pair.registry.collect()
    back = pair.lent(second, values)
    _, (view,) = hear(late)
    pair.channels.remove(early)
    early.close()
    assert pair.serve(lambda: pair.closed)
    assert back == [], "it was said to be free while somebody reads it"
    assert same([view], [values])
    del view
    pair.registry.collect()
    assert back == [1]


def test_a_push_is_read_where_its_sender_has_it(pair: Pair) -> None:
    channel, _ = pair.join()
    worker = SharedMemoryRegistry()
    sender = StreamChannel(pair.path, Pool(worker), LIMIT)
    pair.channels.append(sender)
    bucket = shared(worker, 4 * SIZE)
    for part in (bucket[:SIZE], bucket[SIZE : 3 * SIZE]):
        sender.send(b"push", [part])
    assert pair.serve(lambda: len(pair.received) == 2)
    got = [received.buffers[0] for received in pair.received]
    assert same(got, [bucket[:SIZE], bucket[SIZE : 3 * SIZE]])
    bucket[SIZE] ^= 255
    assert got[1][0] == bucket[SIZE]
    assert all(isinstance(buffer, Borrowed) for buffer in got)
    channel.send(b"plain", [filled(SIZE)])
    assert pair.serve(lambda: len(pair.received) == 3)
    assert not isinstance(pair.received[2].buffers[0], Borrowed)


@pytest.mark.parametrize(("size", "is_shared"), [(SHARE_FROM - 1, False), (SHARE_FROM, True)])
def test_small_parts_of_shared_memory_travel_as_bytes(pair: Pair, size: int, is_shared: bool) -> None:
    channel, peer = pair.join()
    values = shared(pair.registry)[8 : 8 + size]
    back = pair.lent(peer, values)
    _, (view,) = hear(channel)
    assert same([view], [values])
    assert isinstance(view, Borrowed) == is_shared
    assert back == ([] if is_shared else [1]), "what was sent as bytes is free once it is sent"


def test_what_was_borrowed_is_passed_on_as_bytes(pair: Pair) -> None:
    channel, peer = pair.join()
    back = pair.lent(peer, shared(pair.registry))
    channel.send(b"echo", hear(channel)[1])
    assert pair.serve(lambda: pair.received)
    assert same(pair.received[0].buffers, [filled(SIZE)])
    assert not isinstance(pair.received[0].buffers[0], Borrowed)
    pair.registry.collect()
    assert back == [1]


def test_a_segment_is_handed_over_once() -> None:
    registry = SharedMemoryRegistry()
    writer, values, other = FrameWriter(Pool(registry)), registry.allocate(SIZE), registry.allocate(SIZE)
    counts = [len(writer.write(b"", buffers, None)[0][0][1]) for buffers in ([values], [values], [other, values], [other])]
    assert counts == [1, 0, 1, 0]


def test_borrowed_buffers_are_not_kept_for_later() -> None:
    pool = Pool(SharedMemoryRegistry())
    memory = numpy.zeros(KEEP_FROM, dtype=numpy.uint8)
    pool.give(memory.view(Borrowed))
    assert address_of(pool.take(KEEP_FROM)) != address_of(memory)
    pool.give(memory)
    assert pool.take(KEEP_FROM) is memory


def test_a_tensor_of_borrowed_memory_is_not_a_copy(pair: Pair) -> None:
    channel, peer = pair.join()
    values = shared(pair.registry)
    pair.lent(peer, values)
    tensor = as_tensor(hear(channel)[1][0], "uint8")
    values.fill(9)
    assert torch.equal(tensor, torch.full((SIZE,), 9, dtype=torch.uint8))


# When there is no room.


def test_more_loans_than_there_are_words_for_carry_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LEASES", 2)
    with closing(Pair()) as pair:
        channel, peer = pair.join()
        values = shared(pair.registry)
        loans = [pair.lent(peer, values) for _ in range(3)]
        views = [hear(channel)[1][0] for _ in loans]
        assert [isinstance(view, Borrowed) for view in views] == [True, True, False]
        assert all(same([view], [values]) for view in views)
        assert loans == [[], [], [1]]
        del views[0]
        loans.append(pair.lent(peer, values))
        assert isinstance(hear(channel)[1][0], Borrowed), "a word is free again"


def test_without_memory_for_the_words_of_loans_bytes_are_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, peer = pair.join()
    values = shared(pair.registry)

    def no_room(size: int) -> shared_memory.Segment:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "make_segment", no_room)
    back = pair.lent(peer, values)
    assert same(hear(channel)[1], [values])
    assert back == [1]


def test_more_new_segments_than_fit_one_message_arrive_all_the_same(pair: Pair) -> None:
    channel, peer = pair.join()
    sent = [shared(pair.registry, SHARE_FROM, number) for number in range(SEGMENT_COUNT_LIMIT + 1)]
    pair.lent(peer, *sent)
    assert same(hear(channel)[1], sent)


POOR = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
import numpy
from polytempo.transport.shared_memory import SharedMemoryRegistry
registry = SharedMemoryRegistry()
for size in (1 << 20, 1 << 21, 1 << 15):
    memory = registry.allocate(size)
    assert memory.nbytes == size and not memory.any() and registry.find(memory) is None
    memory[-1] = 1
print("done")
"""


def test_too_little_memory_is_said_once_and_bytes_are_sent_instead() -> None:
    done = subprocess.run([sys.executable, "-c", POOR], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "cannot share 1048576 bytes of memory (File too large)" in line
    assert "sockets instead" in line


def test_a_forked_child_gives_back_nothing_that_its_parent_reads() -> None:
    """It inherits the views of a lease, and drops them: the owner of the memory must not take that for the reader's end."""
    segment = make_segment(4096)
    lease = Lease(segment, BLOCK_LEASE)
    lease.grant()
    borrowed = read_block(segment, 0, 1024)
    child = os.fork()
    if child == 0:
        del borrowed
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not lease.free
    del borrowed
    assert lease.free

"""Single messages between two ranks of a group: `send` and `recv`, with tags, from one rank or any, posted in any order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.executor import bytes_of, nbytes
from polytempo.collectives.flattening import flat, shape_of
from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.errors import PeerError, UsageError
from polytempo.profile_ranges import profiled
from polytempo.transport.peer_link import DATA, LinkMessage

#: Tags are whole numbers of 64 bits.
TAGS = 1 << 63


def send(group: RankGroup, tensor: torch.Tensor, to: int, tag: int = 0, background: bool = False) -> Task:
    """Send a tensor. Done when it may be changed again: the receiver need not be there yet."""
    _check_peer(group, to)
    _check_tag(tag)
    peer = group.ranks[to]

    def steps() -> Steps:
        copy, left = flat(tensor)[0], [1]
        group.engine.messages.send(peer, LinkMessage(DATA, group.context + 1, tag), bytes_of(copy), left.clear)
        if left:
            yield Wait(lambda: not left, lambda: [peer])

    return _start(group, "send", f"send({shape_of(tensor)}, to {to}, tag {tag})", tensor, steps, background)


def listen(group: RankGroup, tensor: torch.Tensor, tag: int) -> Task:
    """Receive from any member what may come at any time or never, in the background: for what answers requests."""
    task = receive(group, tensor, None, tag, background=True)
    task.idle = True
    return task


def receive(group: RankGroup, tensor: torch.Tensor, source: int | None, tag: int = 0, background: bool = False) -> Task:
    """Receive into a tensor, from one member of the group or from any; the result is the rank of the world that sent it."""
    _check_tag(tag)
    if source is not None:
        _check_peer(group, source)
    sender = None if source is None else group.ranks[source]
    others = [rank for rank in group.ranks if rank != group.engine.rank]

    def steps() -> Steps:
        target, back = flat(tensor, reads=False)
        receipt = group.engine.messages.expect(group.context + 1, tag, sender, nbytes(target), bytes_of(target))
        try:
            if not receipt.done:
                yield group.engine.messages.until(receipt, others)
        finally:
            group.engine.messages.mailbox.withdraw(receipt, group.context + 1, tag)
        if receipt.problem:
            raise PeerError(f"{receipt.problem}: {shape_of(tensor)} does not fit what was sent with tag {tag}")
        if back is not None:
            back()
            if tensor.is_cuda:  # the caller may use any stream
                torch.cuda.current_stream(tensor.device).synchronize()
        return receipt.source

    source_name = f"from {source}" if source is not None else "from any"
    return _start(group, "recv", f"recv({shape_of(tensor)}, {source_name}, tag {tag})", tensor, steps, background)


def _check_peer(group: RankGroup, rank: int) -> None:
    if not 0 <= rank < group.size:
        raise UsageError(f"expected a rank from 0 to {group.size - 1}, got {rank}")
    if rank == group.rank:
        raise UsageError(f"rank {rank} cannot send to itself; copy the tensor")


def _check_tag(tag: int) -> None:
    if not -TAGS <= tag < TAGS:
        raise UsageError(f"expected a tag from {-TAGS} to {TAGS - 1}, got {tag}")


def _start(
    group: RankGroup, kind: str, name: str, tensor: torch.Tensor, steps: Callable[[], Steps], background: bool
) -> Task:
    """A queue of its own: single messages do not wait for collectives. In order with the caller's stream of a GPU."""
    on = group.engine.streams.call([tensor]) if tensor.is_cuda else None
    run = steps() if on is None else on.run(None, steps)
    with profiled(kind):
        return group.engine.start(CallQueue(-1, group.ranks), name, run, background, group.timeout, 0, on, kind)

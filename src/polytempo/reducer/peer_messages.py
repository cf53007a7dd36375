"""Messages between the workers of an optimizer beside their collectives: tensors to one rank, and notes that only grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from polytempo.collectives import point_to_point
from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.collectives.world import World
from polytempo.errors import PeerError

#: The part of an optimizer's contexts that these messages have.
BESIDE = 1
#: Seconds after which a rank that leaves no longer waits until what it has sent is gone.
LAST_WAIT = 10.0


class PeerMessages:
    """The messages of one optimizer, on one rank.

    Args:
        world: All ranks of the job.
        members: Those of the optimizer.
        number: The number of the optimizer in the job.
    """

    def __init__(self, world: World, members: Sequence[int], number: int) -> None:
        self.world, self.rank, self.number = world, world.rank, number
        self.group = world.group_of_optimizer(members, number, BESIDE)
        self._tasks: list[Task] = []  # what is sent in the background

    def send(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Send tensors of the host to a rank, in the background; they stay as they are from now on."""
        to = self.group.ranks.index(rank)
        self._tasks = [task for task in self._tasks if not task.done]
        self._tasks += [point_to_point.send(self.group, tensor, to, tag, background=True) for tensor in tensors]

    def receive(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Fill tensors of the host with what a rank has sent.

        Raises:
            RankLost: The rank is lost.
        """
        source = self.group.ranks.index(rank)
        for tensor in tensors:
            point_to_point.receive(self.group, tensor, source, tag).wait()

    def settle(self) -> None:
        """Wait, for a while, until what was sent is gone: a rank that is stopped does not receive."""
        with suppress(PeerError):
            for task in self._tasks:
                task.wait(LAST_WAIT)

    # Notes: whole numbers that only grow.

    def note(self, ranks: Iterable[int], number: int) -> None:
        """Tell these ranks a number; those that are lost are left out."""
        messages, context = self.world.engine.messages, self._notes

        def steps() -> Steps:
            there = [rank for rank in ranks if rank != self.rank and rank not in messages.left]
            messages.notify(there, context, number)
            return
            yield

        self._run("telling how a round went", steps())

    def noted(self, rank: int) -> int:
        """The last number that a rank has told; -1 before the first."""
        return self.world.engine.messages.notified.get((rank, self._notes), -1)

    def wait_for(self, missing: Callable[[], list[int]], name: str) -> None:
        """Wait until no rank is missing, by what ranks have told, and which are lost."""

        def steps() -> Steps:
            yield Wait(lambda: not missing(), missing)

        self._run(name, steps())

    def is_lost(self, rank: int) -> bool:
        """Has a rank ended, as far as this one knows?"""
        return rank in self.world.engine.messages.left

    @property
    def _notes(self) -> int:
        return self.group.context + 1

    def _run(self, name: str, steps: Steps) -> Any:
        engine = self.world.engine
        return engine.start(CallQueue(-1, self.group.ranks), name, steps, False, self.group.timeout).wait()

    # Figures.

    def traffic(self) -> tuple[int, int]:
        """Bytes to and from other ranks of the job."""
        messages = self.world.engine.messages
        return sum(link.payload_sent for link in messages.links.values()), messages.payload_received

    def handed(self, context: int) -> int:
        """Bytes handed to other ranks in the group of a context."""
        handed = self.world.engine.messages.handed
        return handed[context] + handed[context + 1]

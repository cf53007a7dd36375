"""What takes the place of a sequencer where there is none: the ranks vote, and each runs the mode's rule on the ballots.

A ballot (`ballot.py`) ends a step. A rank that votes has all sums of its step, since collectives end in their order. So a
vote that one rank has seen to its end is the end of the step for all, even if a rank dies before the others have: they learn
the ballots from a rank that has them. If none has, the step is made again from the gradients, without the dead rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import torch

from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import RankLost, UsageError
from polytempo.reducer.ballot import Ballot
from polytempo.server.optimizer_state import as_bytes
from polytempo.sync.barrier import Barrier
from polytempo.sync.directives import Directive
from polytempo.sync.events import Measured, Pushed
from polytempo.sync.spec import Spec

#: Bytes of a text that are compared where ranks differ.
TEXT = 64 << 10


class VotingGroup:
    """The ranks that make rounds, and the last vote.

    Reducers whose rounds follow one another, in one order on all ranks, share one: where a rank has died, a rank that has
    gone on to the next reducer forms the group again together with ranks that have not.

    Args:
        world: All ranks of the job.
        number: The number of the first reducer's optimizer in the job, the same on all ranks.
        least: With fewer ranks left, the death of a rank is raised.
        members: The ranks that make rounds, where they are not all: then they go on together or not at all.
    """

    def __init__(self, world: World, number: int, least: int, members: Sequence[int] = ()) -> None:
        group = world.group_of_optimizer(members, number) if members else world.new_group(range(world.size))
        assert group is not None
        self.world, self.group, self._number, self._least = world, group, number + 1, least
        self._may_shrink = not members
        self._votes = 0
        self.ballots: list[bytes] = []  #: of the last vote
        self.voted: tuple[int, ...] = ()  #: whose they are: of more ranks than the group has, where one has died since

    def vote(self, ballot: bytes) -> None:
        """Give this rank's ballot, and get all."""
        self.ballots = gather_bytes(self.group, ballot, self.world.wait)
        self.voted = self.group.ranks
        self._votes += 1

    def form_again(self, error: RankLost) -> bool:
        """Form the group again without the dead ranks.

        Returns:
            Whether another rank has seen the vote to its end that this rank has not; its ballots are here then.
        """
        if not self._may_shrink or self.world.size - len({*self.world.engine.messages.left, *error.ranks}) < self._least:
            raise error
        before, earlier, members = self._votes, self.ballots, self.group.ranks
        self.group = self.world.reform(self._number)
        if self.group.size < self._least:
            raise error
        counts = [int.from_bytes(data, "little") for data in gather_bytes(self.group, before.to_bytes(8, "little"))]
        self._votes = max(counts)
        if min(counts) == max(counts):
            return False
        knows = counts.index(max(counts))
        sizes = torch.tensor([len(earlier), len(earlier[0]) if earlier else 0])
        self.group.broadcast([sizes], knows).wait()
        count, each = (int(size) for size in sizes)
        data = torch.zeros(count * each, dtype=torch.uint8)
        if before == max(counts):
            data.copy_(torch.frombuffer(bytearray(b"".join(earlier)), dtype=torch.uint8))
        self.group.broadcast([data], knows).wait()
        if before == max(counts):
            return False
        whole = data.numpy().tobytes()
        self.ballots = [whole[start : start + each] for start in range(0, len(whole), each)]
        self.voted = members
        return True


class RuleByBallot:
    """The rule of a mode's rounds, run by each rank on the ballots of all: the same numbers, so the same decisions."""

    def __init__(self, sync: Spec, members: Sequence[int]) -> None:
        policy = sync.policy(len(members))
        assert isinstance(policy, Barrier)
        self._rule, self._step = policy.rule, 0
        self.began = time.monotonic()  #: seconds since then, of the first rank that votes, are the rule's clock
        self._rule.start(0.0)
        if self._rule.weights:
            self._rule.weights = tuple((worker, 1.0) for worker in members)

    @property
    def directive(self) -> Directive | None:
        """What it says of the next round."""
        return self._rule.directive(starts=True)

    def close(self, ranks: Sequence[int], ballots: Sequence[Ballot]) -> None:
        """A round has ended with the ballots of these ranks."""
        active = [(rank, ballot) for rank, ballot in zip(ranks, ballots, strict=True) if not ballot.ran_out]
        if not active:  # those that went on last may have shared all of it: now all begin together again
            self._rule.gather(ranks)
            return
        pushes = tuple(
            Pushed(rank, self._step, one.weight, measured=Measured(one.loss, one.lr, one.work, one.computed, one.drawn))
            for rank, one in active
        )
        self._step += 1
        self._rule.close(pushes, [worker for worker, _ in active], active[0][1].seconds)


def gather_bytes(group: RankGroup, data: bytes, wait: Callable[[Task], object] = Task.wait) -> list[bytes]:
    """All ranks' bytes, which must have the same length on each."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    outputs = [torch.empty_like(mine) for _ in range(group.size)]
    wait(group.all_gather(outputs, mine))
    return [as_bytes(output).tobytes() for output in outputs]


def digest_of(text: str) -> int:
    """A 64-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def raise_difference(group: RankGroup, text: str) -> None:
    """Ranks have different texts: raise, on all of them, an error with the first line that differs."""
    padded = text.encode()[:TEXT].ljust(TEXT, b"\0")
    texts = [data.rstrip(b"\0").decode(errors="replace").splitlines() for data in gather_bytes(group, padded)]
    for rank, lines in enumerate(texts):
        for number in range(max(len(lines), len(texts[0]))):
            one, other = (part[number] if number < len(part) else "nothing" for part in (texts[0], lines))
            if one != other:
                ranks = group.ranks[0], group.ranks[rank]
                raise UsageError(f"rank {ranks[0]} has {one} where rank {ranks[1]} has {other}; all ranks must be alike")
    raise UsageError("ranks differ in what they optimize; all ranks must be alike")

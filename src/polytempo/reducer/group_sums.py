"""Sums of the workers of a round by all-reduce, in a group of exactly these ranks; between hosts.

There is a group for each set of ranks. The sequencer numbers the sets, so that their ranks need not agree on that. A rank
that is stopped is in no set, and delays no other; unless it is stopped after its report and before it has added its part.

A rank says of each round that it has the sum, or that it has not because another rank is lost. Where no rank has it, the
ranks that are left add up what they have. Where one rank has it and another has not, the other ends: the sum is made of what
the lost rank had.
"""

from __future__ import annotations

import torch

from polytempo.collectives.group import RankGroup
from polytempo.errors import RankLost
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.peer_messages import PeerMessages
from polytempo.reducer.round_sums import EndedRound, RoundSums

#: Tags from here downwards, one for each round, belong to sums that are made again without a lost rank.
AGAIN = -1


class RoundGroups:
    """The groups of the sets of ranks that have made rounds."""

    def __init__(self, messages: PeerMessages) -> None:
        self._messages = messages
        self.groups: dict[tuple[int, ...], RankGroup] = {}

    def of(self, closed: EndedRound) -> RankGroup:
        """The group of a round's ranks."""
        key, messages = tuple(closed.ranks), self._messages
        if key not in self.groups:
            self.groups[key] = messages.world.group_of_round(key, messages.number, closed.group)
        return self.groups[key]

    def gather(self, data: bytes, closed: EndedRound) -> dict[int, bytes]:
        """The bytes of each rank of a round, which have the same length on all."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in closed.ranks]
        self.of(closed).all_gather(rows, mine, self.algorithm(closed)).wait()
        return {rank: row.numpy().tobytes() for rank, row in zip(closed.ranks, rows, strict=True)}

    def algorithm(self, closed: EndedRound) -> str:
        """Sets of ranks that are not all may be many, and short-lived: on one host they get no memory of their own."""
        group = self.of(closed)
        return "auto" if group.size == self._messages.group.size or len(group.place.hosts) > 1 else "ring"


class GroupSums(RoundSums):
    """The sums of one optimizer, on one rank."""

    def __init__(self, messages: PeerMessages, groups: RoundGroups) -> None:
        self._messages, self._groups = messages, groups
        self._total: FlatBuffer | None = None

    def put(self, total: FlatBuffer | None, step: int) -> None:
        self._total = total

    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        flats = list(result.tensors.values())
        self._fill(result, closed.divisor)
        try:
            self._messages.world.wait(self._groups.of(closed).all_reduce(flats, "sum", self._groups.algorithm(closed)))
        except RankLost as error:
            lost = self._messages.world.confirm_loss(closed.ranks, error.ranks)
            self._fill(result, closed.divisor)
            self._make_again(flats, closed, RankLost(str(error), tuple(lost)))
            self.remade = True
        self._messages.note(closed.ranks, 2 * closed.step + 1)
        return True

    def _fill(self, result: FlatBuffer, divisor: float) -> None:
        """This rank's part of the sum."""
        for dtype, flat in result.tensors.items():
            if self._total is None:
                flat.zero_()
            else:
                torch.div(self._total.tensors[dtype], divisor, out=flat)

    def _make_again(self, flats: list[torch.Tensor], closed: EndedRound, error: RankLost) -> None:
        """A rank is lost: the lowest of the others adds up what they have. A note of twice a round's number says that a rank
        has not the sum, a higher one that it has."""
        messages, failed, tag = self._messages, 2 * closed.step, AGAIN - closed.step
        messages.note(closed.ranks, failed)

        peers = [rank for rank in closed.ranks if rank not in (messages.rank, *error.ranks)]

        def unheard() -> list[int]:
            return [rank for rank in peers if messages.noted(rank) < failed and not messages.is_lost(rank)]

        messages.wait_for(unheard, "hearing which ranks have a round's sum")
        if done := [rank for rank in peers if messages.noted(rank) > failed]:
            raise RankLost(f"{error}; rank {done[0]} has that round's sum, and rank {messages.rank} has not", error.ranks)
        rest = [rank for rank in peers if not messages.is_lost(rank)]
        if rest and rest[0] < messages.rank:
            messages.send(flats, rest[0], tag)
            messages.receive(flats, rest[0], tag)  # it sends once it has received
            return
        received = [torch.empty_like(flat) for flat in flats]
        for rank in rest:
            messages.receive(received, rank, tag)
            torch._foreach_add_(flats, received)
        for rank in rest:
            messages.send([flat.clone() for flat in flats], rank, tag)

    def handed(self) -> int:
        return sum(self._messages.handed(group.context) for group in self._groups.groups.values())

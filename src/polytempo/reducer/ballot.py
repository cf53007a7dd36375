"""The ballot that ends a step which no sequencer decides: what each rank reports, and what all of them then do.

A rank that has run out of data goes on with weight zero. A bucket whose gradients a rank has changed since it was launched
(clipping, another weight than expected) is reduced again by all ranks. If one rank skips the step, all skip it.

In modes with blocks of local steps a ballot ends a block. What the rule of the period needs is in it (the block's loss and
learning rate, and the seconds since the rank's start, of which those of the first rank count), so every rank runs the same
rule on the same numbers. Likewise with shares by speed: a ballot says, in the same places, what the rank's batch cost, the
seconds it took, and which batch the rank has drawn last.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polytempo.summation import in_order

HEAD = struct.Struct("<dBQQddd")
RAN_OUT, SKIPS, TOUCHED, MEASURED = 1, 2, 4, 8
#: A pass, and the number of a batch in it, are one whole number that a double holds exactly.
BATCHES = 1 << 32


@dataclass(frozen=True)
class Ballot:
    """What one rank reports."""

    weight: float
    ran_out: bool = False  #: it has no more data
    skips: bool = False
    digest: int = 0  #: of its hyper-parameters; 0 where they are not compared
    changed: frozenset[int] = frozenset()  #: buckets whose gradients have changed since they were launched
    absent: frozenset[int] = frozenset()  #: parameters without a gradient
    touched: bool = False  #: its script has written to parameters, so that replicas may differ
    gradient: int = 0  #: a digest of its gradient, in the first steps
    loss: float | None = None  #: of its block of local steps
    lr: float | None = None
    seconds: float = 0.0  #: since its start
    work: float | None = None  #: what its batch cost, where shares follow the ranks' speed
    computed: float | None = None  #: and the seconds it took
    drawn: tuple[int, int] | None = None  #: the last batch that its sampler has handed out

    def pack(self, buckets: int, params: int) -> bytes:
        """The ballot as bytes, of the same length on every rank."""
        measured = self.work is not None
        flags = RAN_OUT * self.ran_out | SKIPS * self.skips | TOUCHED * self.touched | MEASURED * measured
        figures = (self.work, self.computed) if measured else (self.loss, self.lr)
        first, second = (math.nan if value is None else value for value in figures)
        drawn = -1 if self.drawn is None else self.drawn[0] * BATCHES + self.drawn[1]
        third = float(drawn) if measured else self.seconds
        head = HEAD.pack(self.weight, flags, self.digest, self.gradient, first, second, third)
        return head + _bits(self.changed, buckets) + _bits(self.absent, params)


@dataclass(frozen=True)
class BallotOutcome:
    """What all ranks do now."""

    total: float  #: the weight of all gradients
    over: bool  #: all ranks have run out of data
    skipped: bool
    again: tuple[int, ...]  #: buckets to reduce again
    absent: tuple[int, ...]  #: parameters without a gradient on any rank
    unlike: tuple[int, int] | None  #: the first two ranks whose hyper-parameters differ
    touched: bool = False  #: a script has written to parameters: compare the replicas
    alike: tuple[int, int] | None = None  #: two ranks with the same gradient
    ended: tuple[int, ...] = ()  #: ranks that have run out of data, where others have not


def size_of(buckets: int, params: int) -> int:
    """Bytes of a ballot."""
    return HEAD.size + -(-buckets // 8) + -(-params // 8)


def unpack(data: bytes, buckets: int, params: int) -> Ballot:
    """The ballot that `pack` wrote."""
    weight, flags, digest, gradient, first, second, third = HEAD.unpack_from(data)
    middle = HEAD.size + -(-buckets // 8)
    changed, absent = _numbers(data[HEAD.size : middle]), _numbers(data[middle:])
    ran_out, skips, touched, measured = (bool(flags & flag) for flag in (RAN_OUT, SKIPS, TOUCHED, MEASURED))
    one, other = (None if math.isnan(value) else value for value in (first, second))
    ballot = Ballot(weight, ran_out, skips, digest, changed, absent, touched, gradient)
    if not measured:
        return replace(ballot, loss=one, lr=other, seconds=third)
    place = divmod(int(third), BATCHES) if third >= 0 else None
    return replace(ballot, work=one, computed=other, drawn=place)


def outcome(ballots: Sequence[Ballot]) -> BallotOutcome:
    """What all ranks conclude from all ballots."""
    active = [index for index, ballot in enumerate(ballots) if not ballot.ran_out]
    weighing = [index for index in active if ballots[index].weight > 0]
    given = [index for index in active if ballots[index].digest]
    unlike = next(((given[0], other) for other in given if ballots[other].digest != ballots[given[0]].digest), None)
    skipped = any(ballots[index].skips for index in active)
    again = frozenset[int]() if skipped else frozenset().union(*(ballots[index].changed for index in active))
    return BallotOutcome(
        total=in_order(ballots[index].weight for index in active),
        over=not active,
        skipped=skipped,
        again=tuple(sorted(again)),
        absent=tuple(sorted(frozenset.intersection(*(ballots[index].absent for index in weighing)))) if weighing else (),
        unlike=unlike,
        touched=any(ballot.touched for ballot in ballots),
        alike=_alike([(index, ballots[index].gradient) for index in active]),
        ended=tuple(index for index, ballot in enumerate(ballots) if ballot.ran_out) if active else (),
    )


def _alike(gradients: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    seen: dict[int, int] = {}
    for index, gradient in gradients:
        if gradient and seen.setdefault(gradient, index) != index:
            return seen[gradient], index
    return None


def _bits(numbers: frozenset[int], count: int) -> bytes:
    return sum(1 << number for number in numbers).to_bytes(-(-count // 8), "little")


def _numbers(data: bytes) -> frozenset[int]:
    bits = int.from_bytes(data, "little")
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)

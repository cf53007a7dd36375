"""Which calls of different ranks belong together: those of one name, in whatever order; without a name, in their order.

Ranks hear the same records in the same rounds (`negotiating.py`), so each keeps the same table, and all decide alike. A
round has one record of each rank: a call, or that it waits for one, or that it has joined. A call starts in the round in
which all ranks have made it or have joined. When all that have not joined wait, and nothing can start, all are told: they
would wait for ever. No tensors, no messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from polytempo.horovod.negotiation_records import GOES_ON, Call, CallKind

#: The digest of a name and 0, or 0 and how many calls without a name there were before.
CallKey = tuple[int, int]


@dataclass
class Match:
    """Calls that belong together, by rank. With `error` they do not fit, on all ranks."""

    key: CallKey
    calls: dict[int, Call]
    error: str = ""


@dataclass
class Heard:
    """What follows from a round."""

    keys: dict[int, CallKey]  #: of the calls in it, by rank
    matches: list[Match] = field(default_factory=list)
    last: int | None = None  #: all have joined: who came last


class Matching:
    """What was called and has not started."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._round = 0
        self._pending: dict[CallKey, dict[int, Call]] = {}
        self._unnamed: Counter[int] = Counter()
        self._joined: dict[int, int] = {}  # rank -> round

    def hear(self, calls: Sequence[Call]) -> Heard:
        """A round: one record of each rank, in their order."""
        self._round += 1
        heard = Heard({})
        for rank, call in zip(self._ranks, calls, strict=True):
            if call.kind == CallKind.JOIN:
                self._joined.setdefault(rank, self._round)
            elif call.kind != CallKind.WAIT:
                heard.keys[rank] = key = self._key(rank, call)
                self._pending.setdefault(key, {})[rank] = call
        ready = [key for key, made in self._pending.items() if made.keys() | self._joined.keys() >= set(self._ranks)]
        heard.matches = [Match(key, made := self._pending.pop(key), self._problem(made)) for key in ready]
        if not heard.matches and not heard.keys and any(call.kind == CallKind.WAIT for call in calls):
            heard.matches, self._pending = self._stuck(), {}
        if len(self._joined) == len(self._ranks):
            heard.last = max(self._joined, key=lambda rank: (self._joined[rank], rank))
            self._joined.clear()
            self._unnamed.clear()  # some have made fewer calls than others
        return heard

    def _key(self, rank: int, call: Call) -> CallKey:
        if call.key:
            return call.key, 0
        self._unnamed[rank] += 1
        return 0, self._unnamed[rank]

    def _problem(self, calls: dict[int, Call]) -> str:
        """Why calls do not fit together, or cannot go on without those that have joined."""
        (first, mine), *others = sorted(calls.items())
        for rank, call in others:
            if alike(mine) != alike(call):
                return (
                    f"rank {first} calls {mine} where rank {rank} calls {call}{_difference(mine, call)}; "
                    "all ranks must make the same calls"
                )
        if self._joined and mine.kind not in GOES_ON:
            return (
                f"rank {first} calls {mine}, but rank {min(self._joined)} has called join(): only allreduce, optimizer "
                "steps and barrier go on until all ranks have joined"
            )
        return ""

    def _stuck(self) -> list[Match]:
        """Everything, since nothing of it can start."""
        return [Match(key, made, self._missing(made)) for key, made in self._pending.items()]

    def _missing(self, calls: dict[int, Call]) -> str:
        first, mine = min(calls.items())
        absent = next(rank for rank in self._ranks if rank not in calls and rank not in self._joined)
        theirs = next((made[absent] for made in self._pending.values() if absent in made and first not in made), None)
        instead = f"rank {absent} calls {theirs}" if theirs is not None else f"rank {absent} calls nothing"
        return f"rank {first} calls {mine} where {instead}, and all ranks wait; all ranks must make the same calls, by name"


def alike(call: Call) -> Call:
    """What must be the same on all ranks."""
    return replace(call, own=0, name="")


def _difference(one: Call, other: Call) -> str:
    """Where two calls look alike in words."""
    if str(one) != str(other):
        return ""
    fields = ("count", "shape", "root", "scale")
    different = [field for field in fields if getattr(one, field) != getattr(other, field)]
    words = {"count": "size", "root": "optimizer" if one.kind == CallKind.STEP else "root rank", "scale": "factor"}
    return f" with another {words.get(different[0], different[0])}" if different else ""

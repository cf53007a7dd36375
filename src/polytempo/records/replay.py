"""Feeds the events of a record, with their moments, to a fresh policy, and compares its decisions with the record's.

Policies do not know staleness: a push that was dropped for it is an update to them. In the record a discard then stands
where the policy has the update; whether its reason is one of the spec's, the checker says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polytempo.errors import BrokenInvariant, PolytempoError
from polytempo.records.files import to_text
from polytempo.records.lines import RecordLine, action_line, event_of
from polytempo.sync import corrections
from polytempo.sync.actions import Apply
from polytempo.sync.events import Event, Pushed
from polytempo.sync.policy import Policy

#: Lines that a policy's actions leave.
DECIDED = ("join", "hold", "release", "discard", "refuse")


def replay(lines: Iterable[RecordLine], policy: Policy) -> int:
    """Check that `policy`, fresh, decides as the record says; the number of decisions compared.

    The first difference is raised as `BrokenInvariant` with its line. Of an `apply` its workers are compared.
    """
    expected: list[RecordLine] = []  # what the policy decided and the record has not shown yet
    updates: list[list[int]] = []
    applied: dict[int, int] = {}  # server: how many of the updates it has shown
    count = 0
    event: Event | None = None  # the latest
    for number, line in enumerate(lines, 1):
        happened = event_of(line)
        if happened is not None:
            event = happened
            if expected:
                raise BrokenInvariant(f"line {number}: replay expected {to_text(expected[0])}, got {to_text(line)}")
            now = line["t"]
            try:
                actions = policy.handle(event, now)
            except PolytempoError as error:
                raise BrokenInvariant(f"line {number}: {error}") from None
            updates += [[push.worker for push in a.pushes] for a in actions if isinstance(a, Apply)]
            expected = [decided for a in actions if (decided := action_line(a, now)) is not None]
        if line["kind"] == "discard" and expected[:1] != [line] and _was_stale(line, event, updates):
            updates.pop()
            count += 1
        elif line["kind"] in DECIDED:
            _compare(number, line, expected)
            count += 1
        elif line["kind"] == "apply":
            _compare_update(number, line, updates, applied)
            count += 1
    if expected:
        raise BrokenInvariant(f"the record ends; replay expected {to_text(expected[0])}")
    return count


def decisions(lines: Iterable[RecordLine], policy: Policy) -> Iterator[RecordLine]:
    """What `policy` decides on the events of a record, as lines: to see what another mode would have done."""
    for line in lines:
        event = event_of(line)
        if event is not None:
            for action in policy.handle(event, line["t"]):
                decided = action_line(action, line["t"])
                if decided is not None:
                    yield decided


def _was_stale(line: RecordLine, event: Event | None, updates: list[list[int]]) -> bool:
    """Is this the discard of a push, the latest event, that the policy makes an update of?"""
    worker, step = line["worker"], line["step"]
    latest = isinstance(event, Pushed) and (event.worker, event.step) == (worker, step) and updates[-1:] == [[worker]]
    return latest and line["reason"].startswith(corrections.STALE)


def _compare(number: int, line: RecordLine, expected: list[RecordLine]) -> None:
    if not expected:
        raise BrokenInvariant(f"line {number}: replay decides nothing here, the record has {to_text(line)}")
    wanted = expected.pop(0)
    if wanted != line:
        raise BrokenInvariant(f"line {number}: replay expected {to_text(wanted)}, got {to_text(line)}")


def _compare_update(number: int, line: RecordLine, updates: list[list[int]], applied: dict[int, int]) -> None:
    shown = applied.get(line["server"], 0)
    applied[line["server"]] = shown + 1
    if shown >= len(updates):
        raise BrokenInvariant(f"line {number}: replay makes {len(updates)} updates so far, the record shows one more")
    if updates[shown] != line["workers"]:
        raise BrokenInvariant(f"line {number}: replay updates from {updates[shown]}, the record from {line['workers']}")

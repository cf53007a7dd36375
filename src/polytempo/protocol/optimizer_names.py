"""Names of optimizers in a job: the same on all workers that take their steps together, and no two alike.

"0", "1"         the optimizers that all workers make, in the order in which they make them; "0" is the main one
"0@1"            of groups that are made side by side, the one whose lowest rank is 1; the main one is "0"
"0.2", "0.2@1"   part 2 of an optimizer in several parts, in a group
"0/mean"         averages of an optimizer beside its steps
"""

from __future__ import annotations

from collections.abc import Sequence


def name_in_group(number: str, members: Sequence[int], main: bool) -> str:
    """The name of an optimizer with this number whose steps are taken by these ranks alone."""
    return number if main else f"{number}@{min(members)}"


def part_of(name: str, part: int) -> str:
    """The name of a part of an optimizer in a group; the first part has the optimizer's own."""
    number, at, lowest = name.partition("@")
    return f"{number}.{part}{at}{lowest}"


def number_of(name: str) -> int:
    """The number of the optimizer that a name belongs to."""
    return int(beside(name).split("/")[0].split(".")[0])


def number_of_part(name: str) -> int:
    """The number of the part of its optimizer."""
    return int(beside(name).split("/")[0].partition(".")[2] or 0)


def beside(name: str) -> str:
    """What optimizers that are made side by side have in common: the name without the group."""
    start, _, rest = name.partition("@")
    _, slash, side = rest.partition("/")
    return f"{start}{slash}{side}"

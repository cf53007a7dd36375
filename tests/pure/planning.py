"""Plans of all ranks, for the tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plan_checker import PlanError, check

from polytempo.collectives.plans import plan_for
from polytempo.collectives.steps import FORMS, HostRanks, Place, Step
from polytempo.errors import UsageError, nearest

ROOTED = ("broadcast", "reduce", "gather", "scatter")

Plans = list[list[Step]]


def one_host(size: int) -> HostRanks:
    return (tuple(range(size)),)


def apart(size: int) -> HostRanks:
    return tuple((rank,) for rank in range(size))


def plans_of(collective: str, algorithm: str, hosts: HostRanks, pieces: int = 1, root: int = 0) -> tuple[int, Plans]:
    """The number of chunks, and the plan of each rank."""
    size = sum(map(len, hosts))
    made = [plan_for(collective, algorithm, Place(rank, hosts), pieces, root) for rank in range(size)]
    return made[0][0], [list(steps) for _, steps in made]


def checked(collective: str, algorithm: str, hosts: HostRanks, pieces: int = 1, root: int = 0) -> None:
    chunks, plans = plans_of(collective, algorithm, hosts, pieces, root)
    check(plans, collective, hosts, chunks, root)


def complaint(plans: Plans, collective: str, hosts: HostRanks, chunks: int, root: int = 0) -> str:
    with pytest.raises(PlanError) as caught:
        check(plans, collective, hosts, chunks, root)
    text = str(caught.value)
    assert "\n" not in text
    return text


def _pattern(form: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[0-9]+(?:,[0-9]+)*)", form))


_PATTERNS = {kind: _pattern(form) for kind, form in FORMS.items()}


def parse_steps(text: str) -> list[Step]:
    """What `text_of` wrote; empty lines are passed over."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [_parsed(number, line) for number, line in lines if line]


def _parsed(number: int, line: str) -> Step:
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(line)
        if match and all(name == "members" or "," not in value for name, value in match.groupdict().items()):
            return kind(**{name: _numbers(name, value) for name, value in match.groupdict().items()})
    words = [form.split()[0] for form in FORMS.values()]
    known = ", ".join(form.replace("{", "").replace("}", "") for form in FORMS.values())
    raise UsageError(f"line {number}: no step is written {line!r}; known: {known}{nearest(line.split()[0], words)}")


def _numbers(name: str, text: str) -> Any:
    return tuple(map(int, text.split(","))) if name == "members" else int(text)

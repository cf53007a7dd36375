"""Events and actions as the lines of events.jsonl, and back.

A line is a plain dict; keys stand in the order of the contract. `t` is the unrounded `now` that the policy was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from polytempo.errors import RecordError
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release
from polytempo.sync.directives import NextBlock, NextDeadline, NextMixing, NextShares
from polytempo.sync.events import Event, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.fields import Fields, fields

RecordLine = dict[str, Any]


MAIN = "0"  #: the first optimizer of a job, whose lines do not name it
MEAN = "/mean"  #: ends the name of a side clock, in which gradients are averaged


def of_optimizer(lines: Iterable[RecordLine], optimizer_id: str) -> Iterator[RecordLine]:
    """The lines that belong to one optimizer, without its name; what belongs to none goes with the first."""
    for line in lines:
        if line.get("optimizer", MAIN) == optimizer_id:
            yield {key: value for key, value in line.items() if key != "optimizer"}


def event_line(event: Event, now: float, figures: RecordLine | None = None) -> RecordLine | None:
    """The line of an event; None for `Joined`, whose line is that of the `Admit` it is answered with. `figures` are what a
    push says of its worker beside what the policy is given (`step_figures.py`)."""
    if isinstance(event, Pushed):
        line = {"t": now, "kind": "push", "worker": event.worker, "step": event.step, "samples": event.samples}
        measured = event.measured
        more: RecordLine = {"count": event.count if event.count != 1 else None, "loss": measured.loss, "lr": measured.lr}
        more |= {"work": measured.work, "computed": measured.computed, "drawn": measured.drawn and list(measured.drawn)}
        more["fields"] = None if measured.fields is None else dict(measured.fields.pairs)
        line |= {name: value for name, value in more.items() if value is not None}
        line |= {name: value for name, value in (figures or {}).items() if name not in line}
        return line if not event.hyper else {**line, "hyper": dict(event.hyper)}
    if isinstance(event, Left):
        return {"t": now, "kind": "leave", "worker": event.worker, "reason": event.reason}
    if isinstance(event, Ticked):
        return {"t": now, "kind": "tick"}
    return None


def action_line(action: Action, now: float) -> RecordLine | None:
    """The line of an action; None for those that leave none: `Wake`, and `Apply`, which servers write (`apply_line`)."""
    if isinstance(action, Release):
        line = {"t": now, "kind": "release", "worker": action.worker, "step": action.step, "slowest": action.slowest}
        return line | _release_details(action)
    if isinstance(action, Hold):
        line = {"t": now, "kind": "hold", "worker": action.worker, "step": action.step}
        waits = {"waiting_for": list(action.waiting_for), "waiting_count": action.waiting_count}
        return {**line, **waits, "reason": action.reason}
    if isinstance(action, Admit):
        return {"t": now, "kind": "join", "worker": action.worker, "step": action.step}
    if isinstance(action, Discard | Refuse):
        kind = "discard" if isinstance(action, Discard) else "refuse"
        return {"t": now, "kind": kind, "worker": action.worker, "step": action.step, "reason": action.reason}
    return None


def _release_details(release: Release) -> RecordLine:
    """What a release says in modes with blocks, neighbours, shares or deadlines."""
    details: RecordLine = {}
    match release.directive:
        case NextBlock(period):
            details["period"] = period
        case Fields(pairs=told_of_it):
            details["told"] = dict(told_of_it)
        case NextShares(weights, since) if weights and not release.repeats:
            details["weights"] = [list(pair) for pair in weights]
            if since is not None:
                details["since"] = list(since)
        case NextDeadline(seconds, behind, catching_up):
            told = {"deadline": seconds, "behind": behind, "catching_up": list(catching_up)}
            details |= {name: value for name, value in told.items() if value}
        case NextMixing(mixing, lost, enters):
            if mixing is not None:
                pairs = {"send": [list(pair) for pair in mixing.send], "receive": [list(pair) for pair in mixing.receive]}
                details["mixing"] = {"keep": mixing.keep, **pairs}
            if lost:
                details["lost"] = list(lost)
            if enters:
                details["enters"] = True
    return details


def apply_line(action: Apply, now: float, server: int, version: int, staleness: list[int]) -> RecordLine:
    """The line of an update on one server: the version it made, and how stale each part of it was."""
    workers = [push.worker for push in action.pushes]
    line: RecordLine = {"t": now, "kind": "apply", "server": server, "version": version}
    line |= {"workers": workers, "staleness": staleness}
    return line | {"divisor": action.divisor} if action.divisor else line


def event_of(line: RecordLine) -> Event | None:
    """The event a line stands for, or None when it stands for something else."""
    try:
        kind = line["kind"]
        if kind == "push":
            hyper = tuple(line.get("hyper", {}).items())
            drawn = tuple(line["drawn"]) if "drawn" in line else None
            told = {name: line[name] for name in ("loss", "lr", "work", "computed") if name in line}
            own = fields(**line["fields"]) if "fields" in line else None
            measured = Measured(**told, drawn=drawn, fields=own)
            return Pushed(line["worker"], line["step"], line.get("samples", 1), hyper, line.get("count", 1), measured)
        if kind == "join":
            return Joined(line["worker"])
        if kind == "leave":
            return Left(line["worker"], line["reason"])
        return Ticked() if kind == "tick" else None
    except KeyError as error:
        raise RecordError(f"a line lacks {error}: {line}") from None

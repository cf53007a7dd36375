"""What has happened in a job, in words: an event and what was answered are a line.

1. worker 0 joins -> admitted at step 0; held for step 0: 1 of 2 workers have not joined yet
2. worker 1 joins -> admitted at step 0; worker 0 released for step 0; worker 1 released for step 0
3. worker 0 pushes step 0 (1 sample) -> update of 0:0 at rate 0.5; worker 0 held for step 1: 1 ahead of worker 1, bound 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass

from polytempo.errors import counted
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked
from polytempo.sync.machine import WorkerEvent, WorkerOrder

#: Of an order or a directive, characters at most.
LONGEST = 120


def happened(event: Event, now: float) -> str:
    """An event of a policy."""
    match event:
        case Joined(worker):
            return f"worker {worker} joins"
        case Left(worker, reason):
            return f"worker {worker} leaves ({reason})"
        case Pushed(worker, step, samples):
            return f"worker {worker} pushes step {step} ({samples:g} sample{'s' * (samples != 1)})"
        case Ticked():
            return f"it is {now:g} s"
    return repr(event)


def answered(event: Event, actions: Iterable[Action]) -> str:
    """What a policy answers to an event."""
    own = getattr(event, "worker", None)
    return "; ".join(_action(action, own) for action in actions) or "nothing"


def _action(action: Action, own: int | None) -> str:
    match action:
        case Admit(worker, step):
            return f"{_who(worker, own)}admitted at step {step}"
        case Hold(worker, step, _, _, reason):
            return f"{_who(worker, own)}held for step {step}" + (f": {reason}" if reason else "")
        case Release(worker, step, _, directive):
            return f"{_who(worker, own)}released for step {step}" + (f" with {_short(directive)}" if directive else "")
        case Apply(pushes, rate, weights, divisor):
            of = " ".join(f"{push.worker}:{push.step}" for push in pushes) or "no pushes"
            weighed = f" with weights {', '.join(f'{weight:g}' for weight in weights)}" if weights else ""
            return f"update of {of} at rate {rate:g}{weighed}" + (f" divided by {divisor:g}" if divisor else "")
        case Discard(worker, step, reason):
            return f"step {step} of worker {worker} discarded: {reason}"
        case Refuse(worker, step, reason):
            return f"step {step} of worker {worker} refused: {reason}"
        case Wake(at):
            return f"to be woken at {at:g} s"
    return _short(action)


def _who(worker: int, own: int | None) -> str:
    return "" if worker == own else f"worker {worker} "


def told(rank: int, event: WorkerEvent, orders: Sequence[WorkerOrder]) -> str:
    """What a worker's machine hears, and orders."""
    return f"worker {rank} hears {_plain(event)} -> {', '.join(map(_plain, orders)) or 'nothing'}"


def _plain(thing: object) -> str:
    """The name of an event or order, and those of its values that say something."""
    name = type(thing).__name__
    if not is_dataclass(thing):
        return _short(thing)
    values = [(field, getattr(thing, field.name)) for field in fields(thing)]
    said = [f"{field.name}={value!r}" for field, value in values if value != field.default]
    return _short(f"{name}({', '.join(said)})" if said else name)


def _short(thing: object) -> str:
    text = thing if isinstance(thing, str) else repr(thing)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def numbered(lines: Iterable[str]) -> tuple[str, ...]:
    """These lines with their numbers."""
    return tuple(f"{number}. {line}" for number, line in enumerate(lines, 1))


def counted_things(number: int, thing: str) -> str:
    """A number with its thousands, and what it counts."""
    return counted(number, thing) if number < 10_000 else f"{number:,} {thing}s"

"""Pushes for tests: fields by their names alone, wherever they are in the message."""

from __future__ import annotations

from typing import Any

from polytempo.protocol.messages import Push
from polytempo.protocol.push import Measures, PushBody, PushedGradient
from polytempo.protocol.values import PushId


def push_of(identity: PushId, body: PushBody | None = None, **fields: Any) -> Push:
    """A push with these fields of its head, of its measures and, unless it has another body, of a gradient."""

    def named(kind: type[Push | Measures | PushedGradient]) -> dict[str, Any]:
        return {name: fields[name] for name in kind.__struct_fields__ if name in fields}

    known = {*named(Push), *named(Measures), *named(PushedGradient)}
    assert known == set(fields), f"no push has {set(fields) - known}"
    body = PushedGradient(**named(PushedGradient)) if body is None else body
    return Push(id=identity, body=body, measures=Measures(**named(Measures)), **named(Push))

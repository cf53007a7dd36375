"""Headers on the wire: what goes in comes out, and whatever else comes in is refused, unread and unevaluated."""

from __future__ import annotations

import pickle
import types
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polytempo.errors import PeerError
from polytempo.protocol import log, messages
from polytempo.protocol.log import LogEntry
from polytempo.protocol.messages import HEADER_LIMIT, AnyMessage, Heartbeat, Push, Repeat, Stop, decode, encode
from polytempo.protocol.push import Measures, NewState, PushedGradient, StepReport
from polytempo.protocol.values import PushId, WireMessage

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in AnyMessage.__subclasses__()}
ENTRIES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(LogEntry)}
ID = PushId("0", 3, 1, 17)

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def moderately(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# Any message of any kind, made from the types of its fields.

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=6),
    bool: st.booleans(),
    bytes: st.binary(max_size=6),
    type(None): st.none(),
}
SIMPLE[Any] = st.recursive(
    st.one_of(*SIMPLE.values()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SIMPLE[str], inner, max_size=2),
    max_leaves=4,
)


def some(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as the headers use types."""
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(some, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(some, arguments))
    if origin is tuple:
        return st.lists(some(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(some(arguments[0]), some(arguments[1]), max_size=2)
    return st.builds(annotation, **{field.name: some(field.type) for field in msgspec.structs.fields(annotation)})


STRATEGIES = {name: some(kind) for name, kind in KINDS.items()}


@every_kind
@given(data=st.data())
@moderately(12)
def test_every_kind_comes_out_as_it_went_in(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(STRATEGIES[kind.__name__])
    again = decode(encode(message))
    assert type(again) is kind
    assert again == message
    assert decode(memoryview(bytearray(encode(message)))) == message


def test_every_header_that_is_defined_can_travel_or_stand_in_the_log() -> None:
    both = {**vars(messages), **vars(log)}
    defined = {name for name, value in both.items() if isinstance(value, type) and issubclass(value, WireMessage)}
    assert defined - {"WireMessage", "AnyMessage", "Decided", "RequestName"} == set(KINDS) | set(ENTRIES)


@pytest.mark.parametrize("kind", ENTRIES.values(), ids=ENTRIES)
@given(data=st.data())
@moderately(5)
def test_an_entry_of_the_log_does_not_travel_on_its_own(kind: type[Any], data: st.DataObject) -> None:
    with pytest.raises(PeerError, match="a message was refused"):
        decode(encode(data.draw(some(kind))))


# What is refused.


def header(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@given(noise=st.binary(max_size=60))
@example(noise=b"")
@example(noise=b"\x80")
@example(noise=b"\xc1")
@example(noise=b"\x91" * 50_000)
@example(noise=b"\xdf\xff\xff\xff\xff")
@example(noise=b"\xc6\xff\xff\xff\xff")
@moderately(300)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(PeerError):
        decode(noise)


@every_kind
@given(data=st.data())
@moderately(5)
def test_a_message_that_was_cut_off_is_refused(kind: type[Any], data: st.DataObject) -> None:
    whole = encode(data.draw(STRATEGIES[kind.__name__]))
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PeerError):
        decode(whole[:length])


@given(
    message=st.one_of(*STRATEGIES.values()),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1),
)
@moderately(150)
def test_a_damaged_message_is_a_message_or_is_refused(message: AnyMessage, changes: list[tuple[int, int]]) -> None:
    """Whatever bytes are changed: no other error comes out, and no other type of value."""
    damaged = bytearray(encode(message))
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        found = decode(damaged)
    except PeerError:
        return
    assert type(found) in KINDS.values()


@pytest.mark.parametrize(
    "raw",
    [
        header(type="Stop", cause="x").replace(b"x", b"\xff"),
        header(type="Beat").replace(b"Beat", b"\xff\xfe\xfd\xfc"),
        header(type="Metric", worker=0, values={"loss": 1.0}).replace(b"loss", b"los\xff"),
    ],
    ids=["a value", "the kind", "a key"],
)
def test_text_that_is_not_utf8_is_refused(raw: bytes) -> None:
    with pytest.raises(PeerError):
        decode(raw)


@every_kind
@given(data=st.data())
@moderately(3)
def test_a_field_that_the_kind_does_not_have_is_refused(kind: type[Any], data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(encode(data.draw(STRATEGIES[kind.__name__])))
    with pytest.raises(PeerError, match="unknown field `evil`"):
        decode(header(**fields, evil=1))


@every_kind
@given(data=st.data())
@moderately(3)
def test_a_field_that_is_missing_is_refused(kind: type[Any], data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(encode(data.draw(STRATEGIES[kind.__name__])))
    for required in ["type", *(field.name for field in msgspec.structs.fields(kind) if field.required)]:
        with pytest.raises(PeerError, match=f"missing required field `{required}`"):
            decode(header(**{name: value for name, value in fields.items() if name != required}))


@pytest.mark.parametrize(
    "raw",
    [
        header(type="Nonsense"),
        header(type="Message"),
        header(type="PushId", optimizer_id="0", worker=0, incarnation=0, step=0),
        header(type=0),
        header(type="Stop", cause=7),
        header(type="Stop", cause=None),
        header(type="Repeat", place=1, id=["0", 0, 0]),
        header(type="Repeat", place=1, id=["0", 0, 0, "1"]),
        header(type="Repeat", place=1, id=["0", 0, 0, 1.5]),
        header(type="Push", id=["0", 0, 0, 1], skip=True),
        header(type="Push", id=["0", 0, 0, 1], body=["report", "", [], [], 1]),
        header(type="Push", id=["0", 0, 0, 1], body=["report", "", [], [], True, "evil"]),
        header(type="Push", id=["0", 0, 0, 1], body=["idea", "", [], [], True]),
        header(type="Push", id=["0", 0, 0, 1], body=["report"], measures=["many"]),
        header(type="Metric", worker=0, values={"loss": [1]}),
        header(type="Metric", worker=0, values={1: 1}),
        header(type="Entries", entries=[{"type": "Stop", "cause": ""}]),
        msgspec.msgpack.encode(["Stop", "x"]),
        encode(Heartbeat()) + b"\x00",
        msgspec.json.encode(Stop(cause="x")),
    ],
)
def test_what_is_not_exactly_a_header_is_refused(raw: bytes) -> None:
    with pytest.raises(PeerError, match="a message was refused"):
        decode(raw)


def test_a_push_says_only_what_there_is_to_say() -> None:
    report = decode(header(type="Push", id=["0", 3, 1, 17], body=["report", "", [], [], True]))
    assert report == Push(id=ID, body=StepReport(skip=True))
    measures = Measures(samples=32.0, computed=0.25, exchanged=0.5, input=0.125, work=32.0)
    usual = Push(
        id=ID, version=17, sent=1 << 30, received=1 << 30, measures=measures, body=PushedGradient(hyper=({"lr": 0.1},))
    )
    assert len(encode(usual)) < 165


fired: list[str] = []


def set_off(name: str) -> str:
    fired.append(name)
    return name


class Bomb:
    """Whoever unpickles it sets it off."""

    def __reduce__(self) -> tuple[Any, ...]:
        return set_off, ("bomb",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_loaded(protocol: int) -> None:
    fired.clear()
    raw = pickle.dumps(Bomb(), protocol)
    with pytest.raises(PeerError, match="a message was refused"):
        decode(raw)
    given = Push(id=ID, body=NewState(state=raw))
    assert decode(encode(given)) == given
    assert fired == []
    pickle.loads(raw)
    assert fired == ["bomb"], "this test could not have failed"


def test_what_looks_like_code_stays_text() -> None:
    fired.clear()
    code = f"__import__({__name__!r}).set_off('code')"
    hostile = Push(id=PushId(code, 0, 0, 0), body=StepReport(touched=code, hyper=({code: code},)))
    assert decode(encode(hostile)) == hostile
    assert fired == []


def test_a_header_that_is_too_long_is_refused_unread() -> None:
    longest = encode(Stop(cause=""))[:-1]
    room = HEADER_LIMIT - len(longest) - 5
    fits = longest + b"\xdb" + room.to_bytes(4, "big") + b"x" * room
    assert len(fits) == HEADER_LIMIT
    assert decode(fits) == Stop(cause="x" * room)
    with pytest.raises(PeerError, match=f"a header of {HEADER_LIMIT + 1} bytes was refused; at most {HEADER_LIMIT}"):
        decode(bytes(HEADER_LIMIT + 1))


def test_a_refusal_says_what_may_be_wrong() -> None:
    with pytest.raises(PeerError, match="are all hosts on the same version of polytempo"):
        decode(header(type="Repeat", id=ID, place=1, later=1))
    assert decode(header(type="Repeat", id=ID, place=1)) == Repeat(id=ID, place=1)

"""Clusters and experiments from a description.

It is plain data (a YAML or JSON file, already loaded), checked key by key: a mistake is one line that says where it is, what
was expected and what was given; a misspelt key names the nearest one. (Checked by hand, because the simulator imports no
third-party package.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import ClusterError, nearest
from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Hiccup, Hosts, Link, Servers, Stall
from polytempo.simulate.durations import Constant, Duration, Exponential, Lognormal, Trace, Uniform
from polytempo.units import parse_rate, parse_seconds, parse_size

FieldReader = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Experiment:
    """What a file may describe: a cluster, the modes to compare on it, and when a run ends."""

    cluster: Cluster = field(default_factory=Cluster)
    sync: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    budget: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


def experiment_from(data: Any) -> Experiment:
    """The experiment that this data describes."""
    return Experiment(**_keys(data, "the file", _EXPERIMENT))


def cluster_from(data: Any, where: str = "cluster") -> Cluster:
    """Read a cluster from plain data, as in a YAML file: numbers, or texts with units ("1Gb/s", "200ms", "50MB").

    Args:
        data: A mapping with the keys of `cluster:` in the file (docs/simulate.md).
        where: How errors name the place.

    Returns:
        The cluster.

    Raises:
        ClusterError: A key is unknown or a value cannot be read.
    """
    values = _keys(data, where, _CLUSTER)
    if "model" in values:
        values["model_bytes"] = values.pop("model")
    try:
        return Cluster(**values)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def duration_from(data: Any, where: str) -> Duration:
    """A step time: seconds, a list of them (a trace), or a mapping with a `kind`."""
    if isinstance(data, list):
        return Trace(tuple(_seconds(value, where) for value in data))
    if not isinstance(data, Mapping):
        return Constant(_seconds(data, where))
    kind = data.get("kind")
    if kind not in _DURATIONS:
        raise ClusterError(f"{where}: unknown kind {kind!r}; known: {', '.join(_DURATIONS)}{nearest(str(kind), _DURATIONS)}")
    make, readers = _DURATIONS[kind]
    values = _keys({key: value for key, value in data.items() if key != "kind"}, where, readers)
    try:
        return make(**values)
    except TypeError:
        raise ClusterError(f"{where}: {kind} needs {', '.join(readers)}; got {', '.join(values) or 'nothing'}") from None


# Readers: each takes a value and its place in the description.


def _plain(words: str, kind: type, *also: type) -> FieldReader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, (kind, *also)) or (isinstance(value, bool) and kind is not bool):
            raise ClusterError(f"{where}: expected {words}, got {value!r}")
        return kind(value)

    return read


_number, _whole = _plain("a number", float, int), _plain("a whole number", int)
_flag, _text = _plain("true or false", bool), _plain("a word", str)


def _with_unit(parse: Callable[[Any, str], float], what: str) -> FieldReader:
    return lambda value, where: parse(value, f"{where} as a {what}")


_seconds, _size, _rate = _with_unit(parse_seconds, "time"), _with_unit(parse_size, "size"), _with_unit(parse_rate, "rate")


def _optional(read: FieldReader) -> FieldReader:
    return lambda value, where: None if value is None else read(value, where)


def _words(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_text(one, where) for one in values)


def _record(make: Callable[..., Any], readers: Mapping[str, FieldReader]) -> FieldReader:
    def read(value: Any, where: str) -> Any:
        values = _keys(value, where, readers)
        try:
            return make(**values)
        except TypeError:
            needed = ", ".join(readers)
            raise ClusterError(f"{where}: expected {needed}; got {', '.join(values) or 'nothing'}") from None

    return read


def _list(read: FieldReader) -> FieldReader:
    def read_all(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise ClusterError(f"{where}: expected a list, got {value!r}")
        return tuple(read(one, f"{where}[{index}]") for index, one in enumerate(value))

    return read_all


def _by_rank(read: FieldReader) -> FieldReader:
    def read_all(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping) or not all(type(rank) is int for rank in value):
            raise ClusterError(f"{where}: expected ranks with their values, such as {{3: 2}}, got {value!r}")
        return {rank: read(one, f"{where}[{rank}]") for rank, one in value.items()}

    return read_all


def _mapping(readers: Mapping[str, FieldReader]) -> FieldReader:
    return lambda value, where: _keys(value, where, readers)


def _keys(data: Any, where: str, readers: Mapping[str, FieldReader]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in readers:
            raise ClusterError(f"{where}: unknown key {key!r}; known: {', '.join(readers)}{nearest(str(key), readers)}")
    return {key: readers[key](value, f"{where}.{key}") for key, value in data.items()}


_DURATIONS: dict[str, tuple[Callable[..., Duration], Mapping[str, FieldReader]]] = {
    "constant": (Constant, {"seconds": _seconds}),
    "lognormal": (Lognormal, {"mean": _seconds, "spread": _number}),
    "uniform": (Uniform, {"low": _seconds, "high": _seconds}),
    "exponential": (Exponential, {"mean": _seconds, "base": _seconds}),
    "trace": (Trace, {"seconds": _list(_seconds)}),
}

_LINK = _record(Link, {"latency": _seconds, "bandwidth": _optional(_rate), "shared": _flag})
_EVENT: dict[str, FieldReader] = {"worker": _whole, "at": _seconds}

_CLUSTER: dict[str, FieldReader] = {
    "workers": _whole,
    "step_time": duration_from,
    "slow": _by_rank(_number),
    "step_times": _by_rank(duration_from),
    "batch": _whole,
    "batches": _by_rank(_whole),
    "fixed_time": _seconds,
    "fixed_times": _by_rank(_seconds),
    "hiccup": _record(Hiccup, {"probability": _number, "seconds": _seconds}),
    "stalls": _list(_record(Stall, {**_EVENT, "seconds": _seconds})),
    "joins": _list(_record(Arrival, _EVENT)),
    "leaves": _list(_record(Departure, _EVENT)),
    "crashes": _list(_record(Crash, {**_EVENT, "noticed_after": _optional(_seconds)})),
    "link": _LINK,
    "links": _by_rank(_LINK),
    "servers": _record(Servers, {"shards": _whole, "bandwidth": _optional(_rate), "update_rate": _optional(_rate)}),
    "hosts": _record(Hosts, {"size": _whole, "latency": _seconds, "bandwidth": _optional(_rate)}),
    "reduce_rate": _optional(_rate),
    "model": _size,
}

_EXPERIMENT: dict[str, FieldReader] = {
    "cluster": cluster_from,
    "sync": _words,
    "via": _words,
    "budget": _mapping({"seconds": _seconds, "steps": _whole, "samples": _whole, "steps_each": _whole}),
    "train": _mapping({"task": _text, "lr": _number, "target": _number, "evaluate_every": _seconds}),
    "seed": _whole,
}

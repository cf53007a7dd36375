"""Clusters and experiments from a description.

It is plain data (a YAML or JSON file, already loaded), checked key by key: a mistake is one line that says where it is, what
was expected and what was given; a misspelt key names the nearest one. (Checked by hand, because the simulator imports no
third-party package.) Keys and their types are the fields of the classes in `cluster.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from polytempo.errors import ClusterError, nearest
from polytempo.simulate.cluster import Cluster, Constant, Duration, Exponential, Lognormal, TimeQuantity, Trace, Uniform
from polytempo.units import parse_rate, parse_seconds, parse_size

_DURATIONS = {"constant": Constant, "lognormal": Lognormal, "uniform": Uniform, "exponential": Exponential, "trace": Trace}
_UNITS = {"time": parse_seconds, "size": parse_size, "rate": parse_rate}
#: What is expected of a value without a unit, and the types that it may have.
_PLAIN = {
    float: ("a number", (float, int)),
    int: ("a whole number", (int,)),
    bool: ("true or false", (bool,)),
    str: ("a word", (str,)),
}


@dataclass(frozen=True)
class Experiment:
    """What a file may describe: a cluster, the modes to compare on it, and when a run ends."""

    cluster: Cluster = field(default_factory=Cluster)
    sync: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    budget: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


#: A word, or several.
_Words = Annotated[tuple[str, ...], "words"]
_EXPERIMENT = {
    "cluster": Cluster,
    "sync": _Words,
    "via": _Words,
    "budget": {"seconds": TimeQuantity, "steps": int, "samples": int, "steps_each": int},
    "train": {"task": str, "lr": float, "target": float, "evaluate_every": TimeQuantity},
    "seed": int,
}


def experiment_from(data: Any) -> Experiment:
    """The experiment that this data describes."""
    return Experiment(**_read_keys(_EXPERIMENT, data, "the file"))


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
    kinds = {"model" if name == "model_bytes" else name: kind for name, kind in _fields_of(Cluster).items()}
    values = _read_keys(kinds, data, where)
    if "model" in values:
        values["model_bytes"] = values.pop("model")
    try:
        return Cluster(**values)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


@cache
def _fields_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read_keys(kinds: Mapping[str, Any], data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in kinds:
            raise ClusterError(f"{where}: unknown key {key!r}; known: {', '.join(kinds)}{nearest(str(key), kinds)}")
    return {key: _read(kinds[key], value, f"{where}.{key}") for key, value in data.items()}


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of this type; `where` is its place in the description."""
    outer, inner = get_origin(kind), get_args(kind)
    if Duration in inner:
        return _read_duration(value, where)
    if type(None) in inner:
        return None if value is None and not is_dataclass(inner[0]) else _read(inner[0], value, where)
    if kind == _Words:
        return tuple(_read(str, one, where) for one in (value if isinstance(value, list) else [value]))
    if outer is Annotated:
        return _UNITS[inner[1]](value, f"{where} as a {inner[1]}")
    if outer is tuple:
        if not isinstance(value, list):
            raise ClusterError(f"{where}: expected a list, got {value!r}")
        return tuple(_read(inner[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if outer is Mapping:
        if not isinstance(value, Mapping) or not all(type(rank) is int for rank in value):
            raise ClusterError(f"{where}: expected ranks with their values, such as {{3: 2}}, got {value!r}")
        return {rank: _read(inner[1], one, f"{where}[{rank}]") for rank, one in value.items()}
    if isinstance(kind, Mapping):
        return _read_keys(kind, value, where)
    if kind is Cluster:
        return cluster_from(value, where)
    if is_dataclass(kind):
        return _read_record(kind, value, where, "expected")
    words, types = _PLAIN[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise ClusterError(f"{where}: expected {words}, got {value!r}")
    return kind(value)


def _read_duration(data: Any, where: str) -> Duration:
    """A step time: seconds, a list of them (a trace), or a mapping with a `kind`."""
    if isinstance(data, list):
        return Trace(tuple(_read(TimeQuantity, value, where) for value in data))
    if not isinstance(data, Mapping):
        return Constant(_read(TimeQuantity, data, where))
    kind = data.get("kind")
    if kind not in _DURATIONS:
        raise ClusterError(f"{where}: unknown kind {kind!r}; known: {', '.join(_DURATIONS)}{nearest(str(kind), _DURATIONS)}")
    values = {key: value for key, value in data.items() if key != "kind"}
    made: Duration = _read_record(_DURATIONS[kind], values, where, f"{kind} needs")
    return made


def _read_record(kind: Any, data: Any, where: str, needs: str) -> Any:
    kinds = _fields_of(kind)
    values = _read_keys(kinds, data, where)
    try:
        return kind(**values)
    except TypeError:
        raise ClusterError(f"{where}: {needs} {', '.join(kinds)}; got {', '.join(values) or 'nothing'}") from None

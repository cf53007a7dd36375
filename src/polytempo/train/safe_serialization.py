"""Safe serialization of plain data: never pickles, since reading a pickle runs code of its writer's choice.

Plain: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, set, numpy arrays and scalars, tensors.
Containers and arrays are encoded as a letter and their contents, in msgpack.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from polytempo.errors import PeerError, UsageError, WrongType

TensorList = list[torch.Tensor]

_UNCHANGED = (type(None), bool, float, str, bytes)
_INT64_LIMIT = 1 << 63
_SENT, _REFUSED = b"\0", b"\1"


def encode(thing: object, aside: TensorList | None = None) -> bytes:
    """Plain data as bytes. With `aside`, tensors are appended to it, and only described in the bytes."""
    try:
        return msgspec.msgpack.encode(_down(thing, aside))
    except RecursionError:
        raise UsageError("expected plain data, got something that contains itself, or is nested too deeply") from None


def decode(data: bytes, aside: TensorList | None = None) -> Any:
    """The data again. Tensors that were put aside are allocated, to be filled, and appended to `aside`."""
    try:
        return _up(msgspec.msgpack.decode(data), aside)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PeerError(f"expected plain data from another rank, got {len(data)} bytes that are none: {error}") from None


def encode_for_all(thing: object, aside: TensorList | None = None) -> tuple[bytes, UsageError | None]:
    """Plain data as bytes or, where it is refused, the refusal as bytes: the ranks that wait for it must raise it too."""
    try:
        return _SENT + encode(thing, aside), None
    except UsageError as error:
        if aside is not None:
            aside.clear()
        return _REFUSED + str(error).encode(), error


def is_refusal(data: bytes) -> bool:
    """Did `encode_for_all` refuse the data?"""
    return data[:1] == _REFUSED


def decode_from(rank: int, data: bytes, aside: TensorList | None = None) -> Any:
    """The data that `encode_for_all` of this rank encoded; a refusal is raised here as well."""
    if is_refusal(data):
        raise WrongType(f"rank {rank} has nothing to send: {data[1:].decode(errors='replace')}")
    return decode(data[1:], aside)


def _down(thing: Any, aside: TensorList | None) -> Any:
    kind = type(thing)
    if kind in _UNCHANGED:
        return thing
    if kind is int:
        return thing if -_INT64_LIMIT <= thing < _INT64_LIMIT else ["i", str(thing)]
    if kind in (list, tuple, set, torch.Size):
        letter = "l" if kind is list else "s" if kind is set else "t"
        return [letter, [_down(part, aside) for part in thing]]
    if kind in (dict, OrderedDict, Counter):
        pairs = [[_down(key, aside), _down(value, aside)] for key, value in thing.items()]
        return ["d" if kind is dict else "o" if kind is OrderedDict else "c", pairs]
    if isinstance(thing, np.ndarray | np.generic) and thing.dtype.kind in "biufcSU":
        return ["n" if isinstance(thing, np.ndarray) else "g", thing.dtype.str, list(thing.shape), thing.tobytes()]
    if isinstance(thing, torch.Tensor) and thing.layout == torch.strided and not thing.is_quantized:
        tensor = thing.detach()
        about = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if aside is not None:
            aside.append(tensor)
            return ["a", *about]
        flat = tensor.cpu().contiguous().resolve_conj().reshape(-1)
        return ["T", *about, flat.view(torch.uint8).numpy().tobytes()]
    raise WrongType(
        f"expected plain data (None, numbers, str, bytes, list, tuple, dict, arrays, tensors), got {kind.__name__}; "
        "other objects would need pickles, which are not used: send what it is made of"
    )


def _up(data: Any, aside: TensorList | None) -> Any:
    if not isinstance(data, list):
        return data
    letter, *rest = data
    return _READERS[letter](aside, *rest)


def _many(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda aside, parts: kind(_up(part, aside) for part in parts)


def _pairs(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda aside, pairs: kind((_up(key, aside), _up(value, aside)) for key, value in pairs)


def _array(aside: TensorList | None, dtype: str, shape: list[int], data: bytes) -> Any:
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


def _tensor(aside: TensorList | None, dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    empty = torch.empty(shape, dtype=_dtype(dtype))
    if empty.numel():
        empty.copy_(torch.frombuffer(bytearray(data), dtype=empty.dtype).view(shape))
    return empty


def _tensor_aside(aside: TensorList | None, dtype: str, shape: list[int]) -> torch.Tensor:
    if aside is None:
        raise ValueError("a tensor that was put aside")
    aside.append(torch.empty(shape, dtype=_dtype(dtype)))
    return aside[-1]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


_READERS: dict[str, Callable[..., Any]] = {
    "i": lambda aside, text: int(text),
    "l": _many(list),
    "t": _many(tuple),
    "s": _many(set),
    "d": _pairs(dict),
    "o": _pairs(OrderedDict),
    "c": _pairs(lambda pairs: Counter(dict(pairs))),  # such as the milestones of a schedule
    "n": _array,
    "g": lambda aside, *about: _array(aside, *about)[()],
    "T": _tensor,
    "a": _tensor_aside,
}

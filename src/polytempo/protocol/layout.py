"""How the tensors of a model become flat buffers, and how those are cut into shards.

All tensors of one dtype and one parameter group stand one after another; the groups of a dtype make its flat buffer; the
buffers of all dtypes, laid end to end, are cut into S stretches of equal bytes. A cut may fall inside a tensor, so shards
differ by less than two elements a dtype however large one tensor is.

    flat float32   [ w0 | w1 | b0 || w2 ... ]      flat bfloat16  [ e0 | e1 ]
    shard                  0 ^        1                 ^  2

Optimizers that must see whole tensors (Adafactor, Muon) get a layout with `whole=True`: tensors go to the emptiest shard,
largest first, and shards are as equal as that allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from polytempo.errors import UsageError
from polytempo.protocol.values import TableInfo, TensorInfo

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of the flat buffer of a dtype."""

    dtype: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """In elements."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """In bytes."""
        return self.size * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor stands in the flat buffer of its dtype."""

    index: int  #: of the tensor, as the worker named it
    info: TensorInfo
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The places of all tensors, in flat order, and the stretches of each shard."""

    places: tuple[TensorPlace, ...]
    shards: tuple[tuple[Stretch, ...], ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each dtype's flat buffer."""
        sizes: dict[str, int] = {}
        for place in self.places:
            sizes[place.info.dtype] = max(sizes.get(place.info.dtype, 0), place.stop)
        return sizes


def lay_out(tensors: Sequence[TensorInfo], shards: int, whole: bool = False) -> Layout:
    """Cut these tensors into `shards` shards."""
    if shards < 1:
        raise UsageError(f"expected at least 1 server, got {shards}")
    for info in tensors:
        if info.dtype not in ITEM_SIZES:
            raise UsageError(f"{info.name} is {info.dtype}; a parameter server holds {', '.join(ITEM_SIZES)}")
    if whole:
        return _whole(tensors, shards)
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].dtype, tensors[i].group, i))
    places = _places(tensors, order)
    return Layout(places, _cut(places, shards))


def _places(tensors: Sequence[TensorInfo], order: Sequence[int]) -> tuple[TensorPlace, ...]:
    ends: dict[str, int] = {}
    places = []
    for index in order:
        info = tensors[index]
        start = ends.get(info.dtype, 0)
        ends[info.dtype] = start + prod(info.shape)
        places.append(TensorPlace(index, info, start, ends[info.dtype]))
    return tuple(places)


def _cut(places: Sequence[TensorPlace], shards: int) -> tuple[tuple[Stretch, ...], ...]:
    """Cut the line of all bytes at equal distances; a cut moves to the next whole element."""
    lengths: dict[str, int] = {}
    for place in places:
        lengths[place.info.dtype] = place.stop
    total = sum(length * ITEM_SIZES[dtype] for dtype, length in lengths.items())
    cuts = [total * shard // shards for shard in range(shards + 1)]
    result: list[list[Stretch]] = [[] for _ in range(shards)]
    offset = 0
    for dtype, length in lengths.items():
        item = ITEM_SIZES[dtype]
        edges = [min(max(-(-(cut - offset) // item), 0), length) for cut in cuts]
        for shard in range(shards):
            result[shard].append(Stretch(dtype, edges[shard], edges[shard + 1]))
        offset += length * item
    return tuple(tuple(stretches) for stretches in result)


def _whole(tensors: Sequence[TensorInfo], shards: int) -> Layout:
    """Whole tensors, largest first, each to the shard with the fewest bytes."""
    loads = [0] * shards
    owner: dict[int, int] = {}
    size = [prod(info.shape) * ITEM_SIZES[info.dtype] for info in tensors]
    for index in sorted(range(len(tensors)), key=lambda i: (-size[i], i)):
        owner[index] = min(range(shards), key=lambda shard: (loads[shard], shard))
        loads[owner[index]] += size[index]
    order = sorted(owner, key=lambda i: (tensors[i].dtype, owner[i], tensors[i].group, i))
    places = _places(tensors, order)
    result: list[tuple[Stretch, ...]] = []
    for shard in range(shards):
        mine = [place for place in places if owner[place.index] == shard]
        dtypes = sorted({place.info.dtype for place in places})
        stretches = []
        for dtype in dtypes:
            own = [place for place in mine if place.info.dtype == dtype]
            stretches.append(Stretch(dtype, own[0].start, own[-1].stop) if own else Stretch(dtype, 0, 0))
        result.append(tuple(stretches))
    return Layout(places, tuple(result))


def first_difference(ours: Sequence[TensorInfo], theirs: Sequence[TensorInfo]) -> str:
    """In a few words, where two models differ first; empty when they do not."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"parameter {index} is {_described(one)} here and {_described(other)} there"
    if len(ours) != len(theirs):
        return f"{len(ours)} parameters here and {len(theirs)} there"
    return ""


def _described(info: TensorInfo) -> str:
    return f"{info.name} {list(info.shape)} {info.dtype} in group {info.group}"


def table_difference(ours: Sequence[TableInfo], theirs: Sequence[TableInfo]) -> str:
    """In a few words, where the tables of two models differ first; empty when they do not."""
    for one, other in zip(ours, theirs, strict=False):
        for name in TableInfo.__struct_fields__:
            here, there = getattr(one, name), getattr(other, name)
            if here != there:
                return f"table {one.name!r} has {name} {here!r} here and {there!r} there"
    return f"{len(ours)} tables here and {len(theirs)} there" if len(ours) != len(theirs) else ""

"""Sparsification: codes that send some of the values with their indices: the largest, or those above a threshold.

    topk:density      the k = ceil(density * n) largest |p|, at least one; among equals the first
    significant:t     every |p| above t

A message has the indices as int32, strictly increasing, and the values in the same order.

Finding the k-th largest of a million is most of the work, so a sample gives a bound that slightly more than k values exceed,
and the k-th is searched among those. The bound decides how long it takes, never what is found. On a GPU `torch.topk` finds
the k-th; which values are sent is decided by it as on the CPU, also among equals.

`kkt_keep` is the KKT filter of Li et al. (OSDI 2014) for L1 problems: with a penalty of lambda * |w|, a weight that is zero
stays zero as long as |gradient| <= lambda. A worker knows its own gradient only, so `delta` is below lambda: how far is the
caller's choice, and skipped entries are never sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

import numpy
import torch

from polytempo.compression.encoding import (
    ByteArray,
    Code,
    NumberFormat,
    Whole,
    as_values,
    clear,
    magnitudes,
    narrow,
    round_down,
)
from polytempo.errors import PeerError, UsageError

#: Values looked at to guess a bound; fewer than four times as many are not worth a guess.
SAMPLE = 1 << 14
#: More cannot be counted in int32.
SIZE_LIMIT = 1 << 31


class _Selection(Code):
    buffers = 2

    def check(self, form: NumberFormat) -> None:
        if form.size > SIZE_LIMIT:
            raise UsageError(
                f"expected at most {SIZE_LIMIT} values in one tensor, got {form.size}; use a cast or more servers"
            )


@dataclass(frozen=True)
class TopK(_Selection):
    """The largest values."""

    density: float

    @property
    def text(self) -> str:
        return f"topk:{_number(self.density)}"

    @cached_property
    def share(self) -> Fraction:
        """The decimal number that was written, not its nearest float: 0.07 of 100 are 7, not 8."""
        return Fraction(repr(self.density))

    def count(self, size: int) -> int:
        """How many of `size` values are sent: at least one, if there is any."""
        return ceil(self.share * size)

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        sizes, count = magnitudes(held), self.count(form.size)
        places = torch.from_numpy(largest(sizes.numpy(), count)) if form.on_host else _largest_on_device(sizes, count)
        return _pack(held, places, form)

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        return _unpack(buffers, self.count(form.size), form, device)


@dataclass(frozen=True)
class Significant(_Selection):
    """The values beyond a threshold."""

    threshold: float

    @property
    def text(self) -> str:
        return f"significant:{_number(self.threshold)}"

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        bound = int(magnitudes(torch.tensor([round_down(self.threshold, form.wide)], dtype=form.wide)))
        above = magnitudes(held) > bound
        return _pack(held, torch.from_numpy(numpy.flatnonzero(above.numpy())) if form.on_host else _places_of(above), form)

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        return _unpack(buffers, buffers[0].nbytes // 4, form, device)


def largest(values: Whole, count: int) -> Whole:
    """Places of the `count` largest, in order; among equals those that stand first."""
    if count >= values.size:
        return numpy.arange(values.size)
    places = _candidates(values, count)
    chosen = values if places is None else values[places]
    smallest = numpy.partition(chosen, chosen.size - count)[chosen.size - count]
    keep = chosen > smallest
    equal = numpy.flatnonzero(chosen == smallest)
    keep[equal[: count - int(numpy.count_nonzero(keep))]] = True
    kept = numpy.flatnonzero(keep)
    return kept if places is None else places[kept]


def _largest_on_device(values: torch.Tensor, count: int) -> torch.Tensor:
    """The same places. The host waits for the stream once: `nonzero` must know how many there are."""
    if count >= values.numel():
        return torch.arange(values.numel(), device=values.device)
    smallest = torch.topk(values, count, sorted=False).values.amin()
    above, equal = values > smallest, values == smallest
    room = count - above.sum()
    return _places_of(above | (equal & (equal.cumsum(0, dtype=torch.int32) <= room)))


def _places_of(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().view(-1)


def _candidates(values: Whole, count: int) -> Whole | None:
    """Places of some more than `count` values, the largest among them; None for all."""
    if values.size < 4 * SAMPLE:
        return None
    sample = values[:: values.size // SAMPLE]
    share = count / values.size
    rank = ceil(sample.size * share + 4 * (sample.size * share) ** 0.5) + 1
    if rank >= sample.size // 2:
        return None
    bound = numpy.partition(sample, sample.size - rank)[sample.size - rank]
    places = numpy.flatnonzero(values >= bound)
    return places if places.size >= count else None


def _number(value: float) -> str:
    return repr(value).removesuffix(".0").replace("e+", "e")


def _pack(held: torch.Tensor, where: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
    chosen = held[where]
    sent = narrow(chosen, form)
    held[where] = chosen - sent.to(form.dtype)
    clear(held, form.on_host)
    return [where.int(), sent]


def _unpack(buffers: Sequence[ByteArray], count: int, form: NumberFormat, device: torch.device) -> torch.Tensor:
    places = as_values(buffers[0], count, torch.int32, "places")
    values = as_values(buffers[1], count, form.wire, "values")
    _check_places(places.numpy(), form.size)
    result = torch.zeros(form.size, dtype=form.dtype, device=device)
    result[places.to(device).long()] = values.to(device).to(form.dtype)
    return result


def _check_places(places: Whole, size: int) -> None:
    if places.size and not (places[0] >= 0 and places[-1] < size and bool((places[1:] > places[:-1]).all())):
        lowest, highest = int(places.min()), int(places.max())
        expected = f"expected strictly increasing places from 0 to {size - 1}"
        raise PeerError(f"{expected}, got {places.size} from {lowest} to {highest} that are not")


def kkt_keep(weights: torch.Tensor, gradient: torch.Tensor, delta: float) -> torch.Tensor:
    """A mask of the entries to send: all but those with a weight of zero and a gradient of at most `delta`."""
    if weights.shape != gradient.shape:
        shapes = f"{list(weights.shape)} and {list(gradient.shape)}"
        raise UsageError(f"expected weights and gradient of the same shape, got {shapes}; pull the weights of the same keys")
    if not 0 <= delta < math.inf:
        raise UsageError(f"expected a delta of at least 0, got {delta}; it is a bound of the gradient, below the penalty")
    small = gradient.abs() <= round_down(float(delta), gradient.dtype)  # NaN is not small
    return ~((weights == 0) & small)

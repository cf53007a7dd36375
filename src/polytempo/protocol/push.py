"""What a push is made of, beside its head (`messages.py`): what it says of its worker's steps, and what it brings.

    Measures        weight, seconds, losses, places in the data: read by the sequencer and its guards, by no shard

    PushedGradient  of a step: servers make an update of it
    PushedChange    of a step: servers add it to the values
    PushedValues    of a step: servers take their mean
    StepReport      of a step, which stays with the workers: nothing follows
    FirstValues     what the job starts from
    NewValues       what a script has written takes the place of the values
    NewState        what a script has loaded takes the place of the optimizer's state

The first four have the numbers of steps, from 0 on; the first values have -1, and what is new the numbers below. Each shard
has its part in the buffers, one for each dtype that it holds, then those of tables.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polytempo.protocol.values import BufferRange, Position, RowPart, SentBucket, VitalSigns, Want
from polytempo.sync.fields import Fields

#: Vital signs of steps in a push; of more steps every second, or fewer of the earlier ones.
MOST_SIGNS = 16


class Measures(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a push says of its worker's steps. It is filled on the way from `step()` to the wire, and by then left alone."""

    samples: float = 1.0  #: its weight
    size: float | None = None  #: samples that it was made of, where the script or its sampler has said so
    count: int = 1  #: local steps whose gradients are in it
    computed: float = 0.0  #: seconds since the last answer
    exchanged: float | None = None  #: seconds of exchanges since the last push, where that is not the reducer's last one
    input: float = 0.0  #: of `computed`, the seconds before the first forward pass: waiting for data
    work: float | None = None  #: what its micro-batches cost: their samples, or in the units of the sampler's `cost`
    drawn: tuple[int, int] | None = None  #: the last batch that the worker's sampler has handed out: pass, number
    loss: float | None = None  #: the mean loss of the local steps in it, where the mode asks for it
    lr: float | None = None  #: the learning rate of the last of them
    positions: tuple[Position, ...] = ()  #: of every sampler that trains
    vital_signs: tuple[VitalSigns, ...] = ()  #: of its steps, or of some of them
    gradient_digest: int = 0  #: a digest of the gradient, in the first few pushes
    nonfinite: bool = False
    busy: bool = False  #: sent by the communication thread at a deadline, while the worker computes
    fields: Fields | None = None  #: what the worker's machine has measured, in modes that declare it

    @property
    def taken(self) -> float:
        """The samples that it counts for in budgets and figures."""
        return self.samples if self.size is None else self.size

    def exchanging(self, waited: float) -> float:
        """Of the seconds of its exchanges, those beside the ones for which the mode made it wait: the network's and the
        servers'."""
        return max((self.exchanged or 0.0) - waited, 0.0)

    def add(self, steps: Measures) -> None:
        """Count more steps of the worker: the next, or several. Places that are dealt out come one after another; of other
        samplers it is known how far they are."""
        self.samples, self.count = self.samples + steps.samples, self.count + steps.count
        self.computed, self.input = self.computed + steps.computed, self.input + steps.input
        self.work, self.size = _sum(self.work, steps.work), _sum(self.size, steps.size)
        dealt = any(one.length for one in steps.positions)
        self.positions = (*self.positions, *steps.positions) if dealt else steps.positions
        signs = (*self.vital_signs, *steps.vital_signs)
        self.vital_signs = signs[::-2][::-1] if len(signs) > MOST_SIGNS else signs  # with the last
        self.gradient_digest = self.gradient_digest or steps.gradient_digest
        self.nonfinite = self.nonfinite or steps.nonfinite


def no_steps() -> Measures:
    """Of no step yet: `add` counts them."""
    return Measures(samples=0.0, count=0)


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


class StepBody(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """What a step has made."""

    hyper: tuple[dict[str, Any], ...] = ()
    absent: tuple[int, ...] = ()  #: tensors without a gradient
    skip: bool = False  #: counts as a step, changes nothing


class StepReport(StepBody, tag="report"):
    """It stays with the workers."""

    touched: str = ""  #: a parameter that the script has written to since the last step


class Content(StepBody):
    """Its part for this shard follows in the buffers."""

    values: bool = True  #: shall the answer bring the dense values?
    fence: int = 0  #: not 0: no dense buffers follow; they lie in shared device memory, once its fence is here
    sent_buckets: tuple[SentBucket, ...] = ()  #: what was sent ahead and counts
    patches: tuple[BufferRange, ...] = ()  #: if that is so: what the buffers are
    rows: tuple[RowPart, ...] = ()  #: of tables; their buffers come after the dense ones
    wants: tuple[Want, ...] = ()  #: rows that the answer shall bring; the buffers of their ids come last
    rules: tuple[dict[str, Any], ...] = ()  #: hyper-parameters of each table's rule


class PushedGradient(Content, tag="gradient"):
    """Of which servers make an update, their optimizer's or that of the mode."""


class PushedChange(Content, tag="change"):
    """Of the values, by the worker's optimizer."""


class PushedValues(Content, tag="values"):
    """The values themselves, as the worker's optimizer has made them."""


class FirstValues(msgspec.Struct, tag="first values", array_like=True, forbid_unknown_fields=True, kw_only=True):
    """What the job starts from: the values, then the optimizer's state if it has some, then rows of tables."""

    state: bytes = b""  #: description of the optimizer's state in the buffers
    rows: tuple[RowPart, ...] = ()


class NewValues(msgspec.Struct, tag="new values", array_like=True, forbid_unknown_fields=True, kw_only=True):
    """What a script has made of the values."""

    touched: str = ""  #: a parameter that it has written to
    digest: bytes = b""  #: of all that is given


class NewState(msgspec.Struct, tag="new state", array_like=True, forbid_unknown_fields=True, kw_only=True):
    """An optimizer's state that a script has loaded."""

    state: bytes  #: description of what is in the buffers
    digest: bytes = b""  #: of all that is given


PushBody = PushedGradient | PushedChange | PushedValues | StepReport | FirstValues | NewValues | NewState


def row_buffers(body: Content | FirstValues) -> int:
    """How many of a push's buffers are of tables, once all lists of ids are there."""
    wants = body.wants if isinstance(body, Content) else ()
    return sum(1 if part.span else 2 for part in body.rows) + len(wants)

"""The events of a job that a policy handles.

Events are plain values and are never changed. (They are not frozen dataclasses because those take six times as long to
make, and a simulation makes tens of millions.) The time at which the policy handles one is not part of it: `now`
is an argument of `Policy.handle`, read from one clock, live or virtual.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polytempo.sync.fields import Fields

HyperItems = tuple[tuple[str, object], ...]


@dataclass(slots=True)
class Joined:
    """A worker is ready to take part; the policy decides at which step it starts."""

    worker: int


@dataclass(slots=True, unsafe_hash=True)  # a default of a field must have a hash
class Measured:
    """What a push says of its steps, as far as the mode asks for it.

    Of a block of local steps `loss` is their mean loss and `lr` the learning rate of the last. Where shares or deadlines
    follow the workers' speed, `work` is what the micro-batches cost (in samples, or in the units of the sampler's `cost`),
    `computed` the worker's own seconds for them, and `drawn` the last batch (pass, number in the pass) that the worker's
    sampler has handed out, its loader's prefetching included. In a push of no samples, `work` and `computed` are those of a
    micro-batch that was abandoned and has ended, if any. `fields` is what the worker's machine has measured, in modes that
    declare it.
    """

    loss: float | None = None
    lr: float | None = None
    work: float | None = None
    computed: float | None = None
    drawn: tuple[int, int] | None = None
    fields: Fields | None = None


NOT_MEASURED = Measured()


@dataclass(slots=True)
class Pushed:
    """The update of a worker's step has reached the job.

    `samples` weighs it; `hyper` are the hyper-parameters it was made with, as (name, value) pairs; `count` is the number of
    its local steps, or of its micro-batches where shares or deadlines follow the workers' speed. `number` is the caller's:
    policies neither read nor compare it. It finds the push again when the policy gives the event back in an `Apply`; worker
    and step would not do, as a worker that was lost may come back and push a step again while its first push of it waits.
    """

    worker: int
    step: int
    samples: float = 1
    hyper: HyperItems = ()
    count: int = 1
    measured: Measured = NOT_MEASURED
    number: int = field(default=0, compare=False, repr=False)


@dataclass(slots=True)
class Left:
    """A worker is gone: "finished", "failed" or "lost". What it had pushed before still counts."""

    worker: int
    reason: str = "finished"


@dataclass(slots=True)
class Ticked:
    """Time has passed: the answer to a `Wake` action."""


Event = Joined | Pushed | Left | Ticked

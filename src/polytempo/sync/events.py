"""What can happen to a job, as the deciding policy sees it.

Events are plain values; nobody changes one. (They are not frozen dataclasses because those take six times as long to
make, and a simulation makes tens of millions.) The moment at which one is handed to the policy is not part of it: `now`
is an argument of `Policy.handle`, read from one clock, live or virtual.
"""

from __future__ import annotations

from dataclasses import dataclass

HyperItems = tuple[tuple[str, object], ...]


@dataclass(slots=True)
class Joined:
    """A worker is ready to take part; the policy decides at which step it starts."""

    worker: int


@dataclass(slots=True)
class Pushed:
    """The update of a worker's step has reached the job.

    `samples` weighs it; `hyper` are the hyper-parameters it was made with, as (name, value) pairs.
    """

    worker: int
    step: int
    samples: float = 1
    hyper: HyperItems = ()


@dataclass(slots=True)
class Left:
    """A worker is gone: "finished", "failed" or "lost". What it had pushed before still counts."""

    worker: int
    reason: str = "finished"


@dataclass(slots=True)
class Ticked:
    """Time has passed: the answer to a `Wake` action."""


Event = Joined | Pushed | Left | Ticked

"""One entry of the table of modes: its name, its argument and options, and how its policy is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import SpecError
from polytempo.options import ArgumentReader, positive_number, whole_number
from polytempo.sync.capabilities import SINGLE_PUSHES, UNPROVED, USUAL, Capabilities, Promises, Unsound
from polytempo.sync.machine import WorkerMachine, a_push_each_step
from polytempo.sync.policy import Policy


@dataclass(frozen=True)
class Origin:
    """Where a mode comes from that was brought to this process."""

    name: str  #: what texts call it: "own_mode.py:K_BATCH", or the name of an entry point
    file: str  #: as messages name it: "own_mode.py"
    code: str  #: as Python names it: the `co_filename` of its functions
    digest: str  #: of the file, the same on all hosts of a job
    line: int = 0  #: at which the mode is declared; 0: not known

    @property
    def of_file(self) -> bool:
        """Is it named by a file and a name in it, and not by an entry point?"""
        return self.name.startswith(f"{self.file}:")

    @property
    def source(self) -> str:
        """What all processes of a job must have alike: the file, or the entry point."""
        return self.file if self.of_file else self.name

    @property
    def digests(self) -> dict[str, str]:
        """What a record says of it."""
        return {self.source: self.digest} if self.digest else {}


@dataclass(frozen=True)
class Mode:
    """One line of the table of modes. `build(workers, *argument, **options)` makes its policy.

    What is in `rule_options` is for the update rule on the servers; the policy does not see it.
    """

    name: str
    example: str
    meaning: str
    build: Callable[..., Policy]
    argument: ArgumentReader | None = None
    options: Mapping[str, ArgumentReader] = field(default_factory=dict)
    #: What it can do and needs, as a value or, where that depends on them, made of its argument and options.
    capabilities: Capabilities | Callable[..., Capabilities] = SINGLE_PUSHES
    split: Unsound | None = UNPROVED  #: why it does not go with a model that is split; None: it does
    price: str = ""  #: what it may cost beside time, in words; empty: what all modes of its caution may
    rule: str = ""  #: the update rule that servers use instead of the given optimizer's
    rule_options: Mapping[str, ArgumentReader] = field(default_factory=dict)
    averaging: Callable[..., Any] | None = None  #: makes the `Averaging` of a mode whose workers average their models
    variants: Mapping[str, Mode] = field(default_factory=dict)  #: what the mode is when one of these options is given
    keeps_momentum: bool = False  #: does a worker keep momentum of its own, unless told otherwise (`momentum.py`)?
    machine: Callable[..., WorkerMachine] = a_push_each_step  #: `(worker, last step, *argument, **options)`: a worker's half
    gossip: Callable[..., Any] | None = None  #: makes the `GossipSpec` of a mode whose workers mix with neighbours
    promises: Promises = USUAL  #: beyond what every mode promises
    tells: Mapping[str, type] = field(default_factory=dict)  #: fields of its releases, with their types (`fields.py`)
    measures: Mapping[str, type] = field(default_factory=dict)  #: fields of its pushes
    origin: Origin | None = field(default=None, compare=False)  #: None: it is one of ours, or was not brought yet

    def __call__(self, *argument: Any, **options: Any) -> Any:
        """The spec of this mode with an argument and options: what `sync=` takes where servers share this process.

        Example:
            ```python
            simulate_job(Cluster(workers=8), K_BATCH(2), steps=1000)
            ```
        """
        from polytempo.sync.spec import spec_of_object

        return spec_of_object(self, argument, options)


def _read_span(text: str) -> tuple[int, int]:
    lower, dots, upper = text.partition("..")
    bound = whole_number("", at_least=0)
    if not dots:
        raise ValueError(text)
    low, high = bound.read(lower), bound.read(upper)
    if low > high:
        raise SpecError(f"the lower bound {low} is above the upper bound {high}; write {high}..{low}")
    return low, high


#: Two whole numbers L..U with L <= U.
SPAN = ArgumentReader("two whole numbers L..U", _read_span)

#: How the push of one worker is scaled: by 1/n (None), by a power of n ("n^-0.75", "sqrt" for n^-0.5), or by a number.
Scale = float | str | None

_NUMBER = positive_number("scale")


def _read_scale(text: str) -> float | str:
    if text == "sqrt":
        return text
    if text.startswith("n^-"):
        exponent = float(text.removeprefix("n^-"))
        if not 0 < exponent <= 1:
            raise ValueError(text)
        return text
    return float(_NUMBER.read(text))


#: The option of every mode that applies single pushes.
SCALE: Mapping[str, ArgumentReader] = {
    "scale": ArgumentReader(f"{_NUMBER.expected}, sqrt, or a power of n such as n^-0.75", _read_scale)
}


def rate_of(scale: Scale, active: float) -> float:
    """The factor on the rate of one push, with this number of active workers."""
    if scale == "sqrt":
        return 1 / math.sqrt(active)
    if isinstance(scale, str):
        return float(active ** -float(scale.removeprefix("n^-")))
    return scale or 1 / active

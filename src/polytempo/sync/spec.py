"""Synchronisation specs: from a text such as `every:8,wait=2` to a mode, its policy and its corrections.

The syntax is that of `polytempo/options.py`. Adding a mode means one new file and one line in `MODES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from polytempo.errors import SpecError, UsageError
from polytempo.options import ArgumentReader, Syntax, parse
from polytempo.sync.adacomm import ADACOMM
from polytempo.sync.adpsgd import ADPSGD
from polytempo.sync.anytime import ANYTIME
from polytempo.sync.asup import ASUP, DEFAULTS, Momentum
from polytempo.sync.asynchronous import ASP
from polytempo.sync.balance import BALANCE
from polytempo.sync.barrier import BACKUP, BSP
from polytempo.sync.blocks import Averaging
from polytempo.sync.capabilities import Capabilities, Caution
from polytempo.sync.corrections import NOTHING, OPTIONS, Corrections, corrections_from
from polytempo.sync.delay import DELAY
from polytempo.sync.diloco import DILOCO
from polytempo.sync.downpour import DOWNPOUR
from polytempo.sync.dssp import DSSP
from polytempo.sync.dssp_paper import DSSP_PAPER
from polytempo.sync.every import EVERY
from polytempo.sync.gossip import GOSSIP, GossipSpec
from polytempo.sync.local_sgd import LOCAL
from polytempo.sync.machine import WorkerMachine
from polytempo.sync.mode import Mode, rate_of
from polytempo.sync.momentum import ASYNC, LOOKAHEAD, MOMENTUM, SERVER, WORKER, GroupSettings, check_spike, chosen_options
from polytempo.sync.policy import Policy
from polytempo.sync.ssp import SSP

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        BSP,
        BACKUP,
        BALANCE,
        ANYTIME,
        SSP,
        DSSP,
        DSSP_PAPER,
        ASP,
        EVERY,
        DELAY,
        DOWNPOUR,
        ASUP,
        LOCAL,
        ADACOMM,
        DILOCO,
        GOSSIP,
        ADPSGD,
    )
}

#: The modes that advice compares, those first that change least about how a model learns (`report/advice.py`).
_COMPARED = (
    "bsp",
    "bsp+balance",
    "anytime:auto",
    "bsp+backup:1",
    "local:8",
    "diloco:100",
    "ssp:3",
    "dssp:3..15",
    "asp",
)


def _corrections_of(mode: Mode) -> Mapping[str, ArgumentReader]:
    if "scale" not in mode.options:  # no single pushes, which can be stale
        return {}
    return {**OPTIONS, **MOMENTUM} if mode.keeps_momentum else OPTIONS


#: What modes may cost beside time; a mode can have words of its own.
_PRICES = {
    Caution.EXACT: "exact: the update of bsp",
    Caution.FRESH: "no stale gradient",
    Caution.LOCAL: "local steps may cost accuracy",
    Caution.STALE: "stale by {:.1f}: may cost accuracy",
}


_SYNTAX = {
    name: Syntax(
        mode.example,
        mode.argument,
        options={**mode.options, **_corrections_of(mode), **mode.rule_options},
    )
    for name, mode in MODES.items()
}


@dataclass(frozen=True)
class Spec:
    """A parsed spec; `text` is as the user wrote it."""

    text: str
    mode: Mode
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def policy(self, workers: int, members: Sequence[int] = ()) -> Policy:
        """A fresh policy for a job that starts with this number of workers.

        Args:
            workers: They are 0 to n - 1, unless `members` says which.
            members: The workers that take part; empty: all.
        """
        own = {name: value for name, value in self.options.items() if name in self.mode.options}
        if not members:
            return self.mode.build(workers, *self.arguments, **own)
        if self.mode.gossip is not None:
            raise SpecError(
                f"{self.text} mixes models between neighbours among all {workers} workers, and a group has "
                f"{len(members)}; leave group= out, or use sync='local:8'"
            )
        policy = self.mode.build(len(members), *self.arguments, **own)
        policy.expect(members)
        return policy

    def machine(self, worker: int, last: float = math.inf) -> WorkerMachine:
        """A fresh machine for a life of this worker.

        Args:
            worker: Its rank.
            last: How many (local) steps it makes at most.
        """
        return self.mode.machine(worker, last, *self.arguments, **self.options)

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the mode can do and needs, with these options."""
        declared = self.mode.capabilities
        return declared if isinstance(declared, Capabilities) else declared(*self.arguments, **self.options)

    def price(self, staleness: float = 0.0) -> str:
        """What the mode may cost beside time, in a few words; `staleness`: the mean of its pushes."""
        return self.mode.price or _PRICES[self.capabilities.caution].format(staleness)

    @property
    def corrections(self) -> Corrections:
        """The corrections of stale gradients. Modes that average models have none: their policy drops what is too old."""
        if self.mode.averaging is not None:
            return NOTHING
        momentum = self.options.get("momentum")
        adapts = momentum.adapts if isinstance(momentum, Momentum) else momentum == ASYNC
        return corrections_from(self.options, adapts)

    @property
    def worker_momentum(self) -> str:
        """How each worker keeps momentum of its own: "lookahead", "worker", or "" where it does not."""
        momentum = self.options.get("momentum") if self.mode.keeps_momentum else None
        return str(momentum) if momentum in (LOOKAHEAD, WORKER) else ""

    @property
    def looks_ahead(self) -> bool:
        """Is what a worker's own momentum pushes extrapolated?"""
        return self.worker_momentum == LOOKAHEAD

    def own_push_rate(self, workers: int) -> float:
        """How far an unanswered push of a worker's own moves the values that it computes on, in parts of its rate.

        It stands for those of the other workers, too, which have as many under way. 0: the worker computes on the values
        as it has read them.
        """
        return (
            workers * rate_of(self.options.get("scale"), workers)
            if self.capabilities.ahead and self.worker_momentum
            else 0.0
        )

    @property
    def spike(self) -> float:
        """From how many times the usual length on a worker shortens a gradient; 0: none."""
        return float(self.options.get("spike", 0.0))

    @property
    def at_workers(self) -> bool:
        """Does each worker keep the state of an optimizer of its own?"""
        return self.averaging is not None or bool(self.worker_momentum)

    @property
    def needs_server(self) -> str:
        """Why momentum must stay on the servers in this mode; empty where it need not."""
        return "dc and dca correct gradients there" if self.corrections.compensation else ""

    def settled(self, optimizer: str, groups: Sequence[GroupSettings], *, workers: int, needs_server: str = "") -> Spec:
        """With the options written out that it leaves to the optimizer; they are part of its text, and are recorded.

        Args:
            optimizer: The name of its class.
            groups: Its parameter groups.
            workers: Of the job.
            needs_server: A reason for which momentum must stay on the servers, if there is one.

        Raises:
            UsageError: the spec shortens gradients (`spike`) where that could have no effect.
        """
        if self.mode.rule or "scale" not in self.mode.options:
            return self
        why_not = needs_server or self.needs_server
        chosen = chosen_options(optimizer, groups, self.options, workers=workers, why_not=why_not)
        if not self.mode.keeps_momentum:
            chosen = {name: value for name, value in chosen.items() if name not in MOMENTUM}
        spec = parse_spec(",".join([self.text, *(f"{name}={value}" for name, value in chosen.items())])) if chosen else self
        if spec.spike and workers > 1:
            given = self.options.get("momentum")
            where = f"momentum={given} keeps it on the servers" if given in (SERVER, ASYNC) else why_not
            check_spike(self.text, optimizer, groups, bool(spec.worker_momentum), where)
        return spec

    def told(self, optimizer: str, fallback: str) -> str:
        """What a user is to know of options that were written out for an optimizer, in a line; empty where it is nothing.

        Args:
            optimizer: The name of its class.
            fallback: Why servers keep the momentum, where the mode would have each worker keep its own.
        """
        if self.worker_momentum:
            pushed = "its look-ahead" if self.looks_ahead else "what it steps along"
            times = f"{self.spike:g}"
            calmed = (
                f"gradients above {times} times their usual length are shortened (spike={times}); " if self.spike else ""
            )
            return (
                f"{self.text}: each worker keeps the momentum of its own {optimizer} and pushes {pushed}; {calmed}"
                "momentum=server keeps one for all on the servers"
            )
        if fallback:
            return (
                f"{self.text}: momentum stays on the servers: {fallback}; a rate that is right for bsp may be too high there"
            )
        if isinstance(scale := self.options.get("scale"), str):
            counts = "1/sqrt(n)" if scale == "sqrt" else scale
            return f"{self.text}: {optimizer} divides by the size of gradients; a push of one of n workers counts {counts}"
        return ""

    @property
    def rule_options(self) -> dict[str, Any]:
        """The settings of the mode's own update rule, beside the learning rate."""
        given = {name: value for name, value in self.options.items() if name in self.mode.rule_options}
        if isinstance(momentum := given.get("momentum"), Momentum):
            given["momentum"] = momentum.value
        return {**DEFAULTS, **given} if self.mode.rule else {}

    @property
    def period(self) -> int:
        """Steps between two pushes, at first: the local steps of a block; else 1."""
        averaging = self.averaging
        return averaging.period if averaging is not None else int(self.options.get("push", 1))

    @property
    def outer_momentum(self) -> str:
        """The kind of momentum with which an average of models is followed; empty without one."""
        averaging = self.averaging
        if averaging is None or not averaging.outer_momentum:
            return ""
        return "block momentum" if averaging.in_lr else "outer momentum"

    @property
    def fragments(self) -> int:
        """The parts in which a model is averaged, one after another; else 1."""
        return self.averaging.fragments if self.averaging is not None else 1

    @property
    def averaging(self) -> Averaging | None:
        """What workers do with their models at the end of a block of local steps, in modes that have them."""
        return None if self.mode.averaging is None else self.mode.averaging(*self.arguments, **self.options)

    @property
    def gossip(self) -> GossipSpec | None:
        """How workers mix their models with those of their neighbours, in modes that have them."""
        return None if self.mode.gossip is None else self.mode.gossip(*self.arguments, **self.options)


def compared() -> tuple[str, ...]:
    """The modes that advice compares, those first that change least about how a model learns."""
    return _COMPARED


def compared_specs() -> dict[str, Spec]:
    """The same, parsed."""
    return {mode: parse_spec(mode) for mode in _COMPARED}


def refused_of(check: Callable[[Spec], object], known: Collection[str] = ()) -> tuple[str, ...]:
    """Of the modes that advice compares those that a job cannot use: those that are `known` to be refused, and those for
    which its own `check` raises `UsageError`, as it does when the job is started in such a mode."""

    def is_refused(mode: str) -> bool:
        try:
            check(parse_spec(mode))
        except UsageError:
            return True
        return False

    return tuple(mode for mode in _COMPARED if mode in known or is_refused(mode))


def every_mode() -> Iterator[Mode]:
    """Each mode, and each of its variants."""
    for mode in MODES.values():
        yield mode
        yield from mode.variants.values()


def mode_examples() -> dict[str, str]:
    """What `--sync` may be: an example of each mode, and its meaning."""
    return {mode.example: mode.meaning for mode in MODES.values()}


@lru_cache(maxsize=256)
def parse_spec(text: str) -> Spec:
    """Read a synchronisation spec.

    Args:
        text: such as `ssp:3` or `every:8,wait=2`; the syntax is that of `polytempo/options.py`.

    Returns:
        The spec; `spec.policy(workers)` makes its policy.

    Raises:
        SpecError: the spec is unknown or malformed, or its options exclude each other; one line says what to write.
    """
    choice = parse(text, "synchronisation mode", _SYNTAX, error=SpecError)
    mode = MODES[choice.name]
    arguments = () if choice.argument is None or mode.argument is None else (choice.argument,)
    mode = next((variant for option, variant in mode.variants.items() if option in choice.options), mode)
    spec = Spec(text.strip(), mode, arguments, choice.options)
    _ = spec.averaging, spec.gossip  # these refuse options that exclude each other
    if spec.corrections.compensation and spec.worker_momentum:
        raise SpecError(
            f"dc and dca correct gradients on the servers, and momentum={spec.worker_momentum} pushes what each worker has "
            f"made of its own; write momentum={SERVER}"
        )
    return spec

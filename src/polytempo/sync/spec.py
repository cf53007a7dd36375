"""Synchronisation specs: from a text such as `every:8,wait=2` to a mode, its policy and its corrections.

The syntax is that of `polytempo/options.py`. Adding a mode means one new file and one line in `MODES`.

Modes that users bring stand beside them, once `polytempo/door.py` has loaded them: by the name of an entry point, or by
those of a file and of the mode in it, `own_mode.py:K_BATCH`. A text that names a mode which was not brought to this process
is refused: reading a text loads nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

from polytempo.errors import SpecError, UsageError
from polytempo.options import ArgumentReader, Syntax, parse, read_after
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
from polytempo.sync.easgd import EASGD
from polytempo.sync.every import EVERY
from polytempo.sync.gossip import GOSSIP, GossipSpec
from polytempo.sync.local_sgd import LOCAL
from polytempo.sync.machine import WorkerMachine
from polytempo.sync.mode import Mode, Origin, rate_of
from polytempo.sync.momentum import ASYNC, LOOKAHEAD, MOMENTUM, SERVER, WORKER, GroupSettings, check_spike, chosen_options
from polytempo.sync.policy import Policy
from polytempo.sync.ssp import SSP
from polytempo.sync.watch import WatchedMachine, WatchedPolicy, called, check_declaration

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
        EASGD,
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


#: What modes may cost beside time; a mode can have words of its own.
_PRICES = {
    Caution.EXACT: "exact: the update of bsp",
    Caution.FRESH: "no stale gradient",
    Caution.LOCAL: "local steps may cost accuracy",
    Caution.STALE: "stale by {:.1f}: may cost accuracy",
}


def _syntax_of(mode: Mode) -> Syntax:
    corrections: Mapping[str, ArgumentReader] = {}
    if "scale" in mode.options:  # single pushes, which can be stale
        corrections = {**OPTIONS, **MOMENTUM} if mode.keeps_momentum else OPTIONS
    return Syntax(mode.example, mode.argument, options={**mode.options, **corrections, **mode.rule_options})


_SYNTAX = {name: _syntax_of(mode) for name, mode in MODES.items()}

#: Modes that were brought to this process, by the names that texts have for them. Code that is loaded belongs to a process.
_BROUGHT: dict[str, Mode] = {}

#: A mode of a file: the file, with or without its folder, and the mode's name in it.
OF_FILE = re.compile(r"(?P<file>[^:,]*\.py):(?P<name>[^:,]*)")


@dataclass(frozen=True, repr=False)
class Spec:
    """A parsed spec; `text` is as the user wrote it."""

    text: str
    mode: Mode
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"Spec({self.text!r})"

    def policy(self, workers: int, members: Sequence[int] = ()) -> Policy:
        """A fresh policy for a job that starts with this number of workers: 0 to n - 1, or those that `members` names."""
        own = {name: value for name, value in self.options.items() if name in self.mode.options}
        if self.mode.origin is not None:
            return WatchedPolicy(self.mode, self.capabilities, members or range(workers), self.arguments, own)
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

    @property
    def digest(self) -> str:
        """The digest of the file that the mode was brought from; empty of one of ours."""
        return "" if self.mode.origin is None else self.mode.origin.digest

    def machine(self, worker: int, last: float = math.inf) -> WorkerMachine:
        """A fresh machine for a life of this worker, of at most `last` (local) steps."""
        if self.mode.origin is not None:
            made = WatchedMachine(self.mode, self.capabilities, worker, last, self.arguments, self.options)
            return cast(WorkerMachine, made)
        return self.mode.machine(worker, last, *self.arguments, **self.options)

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the mode can do and needs, with these options."""
        declared = self.mode.capabilities
        made: Capabilities = self.declared(declared)
        # All-reduce takes the plain mean, and without a sequencer ranks run the rule of a round: ours are made for that.
        return made if self.mode.origin is None else replace(made, on_servers=True)

    def declared(self, fact: Any, *first: Any) -> Any:
        """What the mode declares: the fact itself, or where it is a function, what that makes of the argument and options.

        Args:
            fact: Such as `mode.promises.lead`.
            *first: What the function takes before these.
        """
        if not callable(fact):
            return fact
        if self.mode.origin is None:
            return fact(*first, *self.arguments, **self.options)
        return called(self.mode.origin, lambda: fact(*first, *self.arguments, **self.options))

    def price(self, staleness: float = 0.0) -> str:
        """What the mode may cost beside time, in a few words; `staleness`: the mean of its pushes."""
        return self.mode.price or _PRICES[self.capabilities.caution].format(staleness)

    @property
    def corrections(self) -> Corrections:
        """The corrections of stale gradients. Modes that average models have none: their policy drops what is too old."""
        if self.mode.averaging is not None or "scale" not in self.mode.options:
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
        return cast(Averaging | None, self.declared(self.mode.averaging))

    @property
    def gossip(self) -> GossipSpec | None:
        """How workers mix their models with those of their neighbours, in modes that have them."""
        return cast(GossipSpec | None, self.declared(self.mode.gossip))


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


def bring(mode: Mode) -> None:
    """From now on texts may name this mode, by the name of its origin.

    Raises:
        SpecError: Another mode has this name.
        ModeError: Its declaration cannot be used.
    """
    origin = mode.origin
    assert origin is not None
    here = [known.origin for known in _BROUGHT.values() if known.origin is not None]
    others = [known for known in here if known.code != origin.code and known.digest != origin.digest]
    if origin.name in MODES or any(known.source == origin.source for known in others):
        there = "is one of Polytempo's own modes" if origin.name in MODES else "was brought from another file"
        what = origin.name if origin.name in MODES else origin.source
        raise SpecError(f"{what} {there}; give yours another name")
    check_declaration(mode)
    _BROUGHT[origin.name] = mode
    parse_spec.cache_clear()


def brought() -> Mapping[str, Mode]:
    """The modes that were brought to this process, by their names."""
    return dict(_BROUGHT)


def origin_named(text: str) -> Origin | None:
    """The origin of the mode that a text names; None of one of ours, or where it was not brought to this process."""
    mode = _BROUGHT.get(name_in(text))
    return None if mode is None else mode.origin


def name_in(text: str) -> str:
    """The name of the mode in a text: for one of a file, that of the file without its folder, and its own."""
    found = OF_FILE.match(text.strip())
    return re.split(r"[:,]", text.strip(), maxsplit=1)[0] if found is None else f"{_base(found['file'])}:{found['name']}"


def source_in(text: str) -> str:
    """The file that a text names, without its folder, or else the name of the mode."""
    found = OF_FILE.match(text.strip())
    return name_in(text) if found is None else _base(found["file"])


def spec_of(sync: str | Mode | Spec) -> Spec:
    """The spec that a `sync=` stands for: a text, a mode, or a mode with an argument and options."""
    if isinstance(sync, Spec):
        return sync
    return parse_spec(sync) if isinstance(sync, str) else spec_of_object(sync)


def spec_of_object(mode: Mode, argument: Sequence[Any] = (), options: Mapping[str, Any] | None = None) -> Spec:
    """The spec of a mode that is given as an object; texts in this process may name it from here on."""
    if mode.origin is None and not any(mode is own for own in MODES.values()):
        file = _file_of(mode.build)
        brought_so = [known for known in _BROUGHT.values() if known.origin and known.origin.of_file]
        same = [known for known in brought_so if known.origin and known.origin.code == file and known.name == mode.name]
        if len(same) == 1:  # the script imports it from the very file that the command line has named
            mode = same[0]
        else:
            mode = replace(mode, origin=Origin(mode.name, _base(file) or mode.name, file, ""))
            if _BROUGHT.get(mode.name) != mode:  # a cell of a notebook may have declared it anew
                bring(mode)
    name = mode.name if mode.origin is None else mode.origin.name
    given = "".join(f":{_written(value)}" for value in argument)
    return parse_spec(name + given + "".join(f",{option}={_written(value)}" for option, value in (options or {}).items()))


def _file_of(build: Callable[..., Any]) -> str:
    """The file of the code that makes a policy: of a function, or of the first method of a class."""
    made_by = [build, *vars(build).values()] if isinstance(build, type) else [build]
    codes = (getattr(one, "__code__", None) for one in made_by)
    return next((str(code.co_filename) for code in codes if code is not None), "")


def _written(value: Any) -> str:
    """An argument or option as a text has it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _base(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def _of_brought(text: str) -> tuple[str, str] | None:
    """Where a text names a mode of a file, or one that was brought: its name, and what follows it."""
    found, name = OF_FILE.match(text), name_in(text)
    if found is None:
        return (name, text[len(name) :]) if name in _BROUGHT else None
    if name not in _BROUGHT:
        others = [known for known in _BROUGHT if known.startswith(f"{_base(found['file'])}:")]
        if others:
            raise SpecError(f"{_base(found['file'])} has no mode {found['name']!r}; it has {', '.join(others)}")
        raise SpecError(
            f"{text!r} names a mode of a file, and such a file is loaded only where this machine's command line names it; "
            f"add --mode {found['file']}"
        )
    return name, text[found.end() :]


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
    of_brought = _of_brought(text.strip())
    if of_brought is None:
        choice = parse(text, "synchronisation mode", _SYNTAX, error=SpecError)
        mode = MODES[choice.name]
    else:
        name, rest = of_brought
        mode, text = _BROUGHT[name], name + rest
        syntax = replace(_syntax_of(mode), example=name + mode.example.removeprefix(mode.name))
        choice = read_after(name, rest, syntax, SpecError)
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

"""Random training scripts: a seed becomes a setting, a model and a list of operations. Pure: nothing here runs anything.

A script is lines of text. `fuzz_plain.py` runs them with plain PyTorch, `fuzz_job.py` as a worker of a job; both must end
with the same weights, or the job must refuse in one line, for a reason that is among the script's own lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

#: Modes in which one worker trains as plain PyTorch does. `delay:2` is not: gradients of its own are stale by design.
ALONE = (
    "bsp",
    "asp",
    "ssp:2",
    "dssp:1..4",
    "every:3",
    "every:2,wait=1",
    "delay:0",
    "asp,scale=1",
    "asp,lr=staleness,drop=3",
    "ssp:0,dc=0.04",
    "downpour:push=1,fetch=1",
    "downpour:push=3,fetch=2",
    "asup",
)
SHAPES = ("", "3", "0", "0,3", "2,3,4", "4,1", "1")


@dataclass(frozen=True)
class Line:
    """A word, and what is said with it."""

    word: str
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.word, *(f"{name}={_text(value)}" for name, value in self.facts.items())])

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)


def _text(value: Any) -> str:
    return "/".join(map(_text, value)) if isinstance(value, tuple) else str(value)


def line(word: str, **facts: Any) -> Line:
    return Line(word, facts)


@dataclass(frozen=True)
class Setting:
    """Where a script runs."""

    way: str = "ps"  #: "alone": no launcher; "ps"; "allreduce": beside servers; "group": as torchrun starts it
    workers: int = 1
    servers: int = 1
    sync: str = "bsp"
    apply: str = "server"
    wire: str = "memory"
    small: bool = False  #: buckets and shared memory from the first byte on

    def __str__(self) -> str:
        small = ", small buckets" if self.small else ""
        return f"{self.way}, {self.workers}w{self.servers}s, {self.sync}, apply={self.apply}, {self.wire}{small}"

    @property
    def barrier(self) -> bool:
        return self.sync == "bsp"

    @property
    def on_servers(self) -> bool:
        """Is the update made there?"""
        return self.way == "ps" and self.apply == "server"


@dataclass(frozen=True)
class Script:
    """One script. `without` are numbers of lines that were dropped, to find out which are needed for it to fail."""

    seed: int
    setting: Setting
    optimizer: Line
    pieces: tuple[Line, ...]
    operations: tuple[Line, ...]
    without: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.setting}", f"   {self.optimizer}"]
        return "\n".join(lines + [f"{number:2} {text}" for number, text in self.numbered()])

    def numbered(self) -> list[tuple[int, Line]]:
        """The lines that are left: first the model's pieces, then operations."""
        lines = enumerate((*self.pieces, *self.operations))
        return [(number, text) for number, text in lines if number not in self.without]

    @property
    def model(self) -> list[Line]:
        return [text for number, text in self.numbered() if number < len(self.pieces)]

    @property
    def steps(self) -> list[Line]:
        """The operations."""
        return [text for number, text in self.numbered() if number >= len(self.pieces)]

    def dropping(self, numbers: Sequence[int]) -> Script:
        return replace(self, without=tuple(sorted({*self.without, *numbers})))

    def has(self, word: str, **facts: Any) -> bool:
        """Is there such a line?"""
        lines = [self.optimizer, *(text for _, text in self.numbered())]
        return any(x.word == word and all(x.get(name) == value for name, value in facts.items()) for x in lines)

    @property
    def single(self) -> bool:
        """Is anything computed in single precision?"""
        return (
            self.has("single") or self.has("cast", to="float") or (self.has("begin") and not self.has("cast", to="double"))
        )

    @property
    def is_joint(self) -> bool:
        """Could all workers' batches be one, as far as the script can tell?"""
        own = ("clip", "meddle", "idle", "scaler")  # these look at one worker's gradient
        steps = [line for line in self.steps if line.word == "step"]
        plain = all(
            line["samples"] == "len" or (len(set(line["sizes"])) == 1 and line["samples"] == "none") for line in steps
        )
        plain = plain and all(line["zero"] != "skip" and not any(word in line.facts for word in own) for line in steps)
        whole = not any(self.has(word) for word in ("norm", "sometimes", "counted", "hook")) and not self.sparse
        return self.setting.workers > 1 and plain and whole

    @property
    def sparse(self) -> bool:
        return self.has("embedding", sparse=True)


def script_of(seed: int, setting: Setting | None = None) -> Script:
    """The script of a seed; with a setting, one that fits there."""
    dice = Random(f"polytempo {seed}")
    setting = setting or _setting(dice)
    own = ALONE if setting.workers == 1 and setting.way in ("ps", "alone") else ("bsp",)
    sync = dice.choice(own) if dice.random() < 0.7 else own[0]
    if setting.way == "alone" and (sync.startswith("downpour") or "," in sync):
        sync = "bsp"
    apply = (
        "delta" if setting.way == "ps" and dice.random() < 0.2 and sync in ("bsp", "asp", "ssp:2", "every:3") else "server"
    )
    setting = replace(setting, sync=sync, apply=apply)
    pieces = _pieces(dice)
    optimizer = _optimizer(dice, setting, pieces)
    operations = _operations(dice, setting, pieces, optimizer)
    return Script(seed, setting, optimizer, tuple(pieces), tuple(operations))


def _setting(dice: Random) -> Setting:
    way = dice.choice(("ps", "ps", "ps", "allreduce", "group", "alone"))
    workers = {
        "alone": 1,
        "ps": dice.choice((1, 1, 2, 3)),
        "allreduce": dice.choice((1, 2, 3)),
        "group": dice.choice((2, 3)),
    }[way]
    servers = dice.choice((1, 1, 2, 3)) if way == "ps" else 1
    return Setting(way, workers, servers, wire=dice.choice(("memory", "ipc")), small=dice.random() < 0.5)


# The model.


def _pieces(dice: Random) -> list[Line]:
    makers: list[tuple[int, Callable[[], Line]]] = [
        (4, lambda: line("linear", bias=dice.random() < 0.7, twice=dice.random() < 0.2)),
        (2, lambda: line("tied", to=dice.randrange(3))),
        (1, lambda: line("frozen")),
        (2, lambda: line("unused", shape=dice.choice(SHAPES))),
        (2, lambda: line("scale")),
        (1, lambda: line("empty", shape=dice.choice(("0", "0,3", "2,0")))),
        (2, lambda: line("transposed")),
        (1, lambda: line("strided")),
        (2, lambda: line("conv")),
        (2, lambda: line("norm")),
        (1, lambda: line("embedding", sparse=dice.random() < 0.5)),
        (2, lambda: line("sometimes")),
        (1, lambda: line("single")),
        (1, lambda: line("counted")),
        (1, lambda: line("normed")),
    ]
    chosen = dice.choices([make for _, make in makers], [weight for weight, _ in makers], k=dice.randint(1, 6))
    return [line("linear", bias=True, twice=False), *(make() for make in chosen)]


# The optimizer.

_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {"lr": 0.1},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.1},
        {"lr": 0.1, "weight_decay": 0.01},
        {"lr": 0.1, "maximize": True},
    ),
    "Adam": (
        {"lr": 0.01, "eps": 1e-5},
        {"lr": 0.01, "eps": 1e-5, "amsgrad": True},
        {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1},
    ),
    "AdamW": ({"lr": 0.01, "eps": 1e-5},),
    "NAdam": ({"lr": 0.01, "eps": 1e-5},),
    "RAdam": ({"lr": 0.01, "eps": 1e-5},),
    "Adamax": ({"lr": 0.01, "eps": 1e-5},),
    "Adadelta": ({"lr": 0.5, "eps": 1e-5},),
    "Adagrad": ({"lr": 0.05, "eps": 1e-5}, {"lr": 0.05, "eps": 1e-5, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "RMSprop": ({"lr": 0.005, "eps": 1e-5, "momentum": 0.8, "centered": True}, {"lr": 0.005, "eps": 1e-5}),
    "Rprop": ({"lr": 0.01},),
    "ASGD": ({"lr": 0.05, "t0": 3},),
    "Adafactor": ({"lr": 0.01},),
    "Own": ({"lr": 0.05},),  # a class that a script brings itself
}


def _optimizer(dice: Random, setting: Setting, pieces: Sequence[Line]) -> Line:
    sparse = any(piece.get("sparse") for piece in pieces)
    empty = any("0" in piece.get("shape", "") for piece in pieces)
    name = dice.choice(tuple(_OPTIONS)) if dice.random() < 0.7 else "SGD"
    options = dice.choice(_OPTIONS[name])
    if sparse and dice.random() < 0.9:
        name = dice.choice(("SGD", "Adagrad"))
        options = {"lr": 0.1} if name == "SGD" else {"lr": 0.05, "eps": 1e-5}
    if setting.sync.startswith("downpour"):
        name, options = "SGD", {"lr": 0.1}  # local steps know no more
    if setting.sync == "asup" and dice.random() < 0.95:
        name, options = "SGD", {"lr": 0.01, "weight_decay": 0.01}
    if name == "Own" and setting.on_servers and dice.random() < 0.7:
        name, options = "SGD", {"lr": 0.1}  # refused, which need not be seen often
    if name == "Adafactor" and empty:
        name, options = "AdamW", {"lr": 0.01, "eps": 1e-5}  # torch divides by the number of elements
    if name == "Rprop" and not setting.barrier and dice.random() < 0.7:
        name, options = "RAdam", {"lr": 0.01, "eps": 1e-5}
    form = {} if name == "Own" or sparse else dice.choice(({}, {}, {"foreach": True}, {"foreach": False}))
    clip = dice.choice((0.1, 1.0)) if dice.random() < (0.05 if sparse else 0.2) else None
    if name not in ("Own", "Adafactor") and form != {"foreach": True} and not sparse and dice.random() < 0.15:
        form = {**form, "tensor_lr": True}
    return line(
        "optimizer",
        name=name,
        **options,
        **form,
        groups=dice.choice((1, 1, 2)),
        trainable=dice.random() < 0.3,  # only what is not frozen
        clip_norm=clip,
        model=sparse or dice.random() < 0.7,  # is the model given to the wrapper?
    )


# Operations.


class _Body:
    """The operations of one script, made one after another."""

    def __init__(self, dice: Random, setting: Setting, pieces: Sequence[Line], optimizer: Line) -> None:
        self.dice, self.setting, self.optimizer = dice, setting, optimizer
        words = {piece.word for piece in pieces}
        self.whole = "frozen" not in words or not optimizer["trainable"]  # does the optimizer have all parameters?
        self.least = 2 if "norm" in words else 1  # samples of a batch that BatchNorm needs
        self.dense = not any(piece.get("sparse") for piece in pieces)
        self.batches = self.since_zero = 0
        self.saved = self.stepped = False
        steady = setting.sync.startswith("downpour:push=3")  # pushes of several steps have one rate
        self.may_change_rate = not steady
        self.before: tuple[Any, ...] = ()

    def step(self) -> Line:
        dice, setting = self.dice, self.setting
        self.batches += 1
        size = dice.randint(self.least, 5)
        equal = dice.random() < 0.5
        sizes = tuple(size if equal else dice.randint(self.least, 5) for _ in range(setting.workers))
        samples = dice.choice(("none", "len", "len", "odd"))
        if setting.workers > 1 and dice.random() < 0.1:
            samples = "zero"
        facts: dict[str, Any] = {"batch": self.batches, "sizes": sizes, "samples": samples}
        parts = dice.choice((1, 1, 1, 2, 3))
        if parts > 1:
            facts |= {"parts": parts, "no_sync": dice.random() < 0.7}
        if parts > 1 and facts["no_sync"] and dice.random() < 0.2:
            facts["no_sync"] = "all"  # the last one, too
        facts["zero"] = dice.choice(("none", "none", "keep", "model", "skip" if self._may_skip_zero(samples) else "none"))
        clip = dice.choice(("", "", "", "", "mean", "value", "own", "mean value"))
        if clip.startswith("mean") and not setting.barrier and dice.random() < 0.9:
            clip = "own"
        if clip and self.dense:
            facts["clip"] = clip
        if "clip" not in facts and parts == 1 and dice.random() < 0.15:
            facts["closure"] = True
        elif dice.random() < 0.1 and "clip" not in facts and facts["zero"] != "skip" and self.dense:
            facts["scaler"] = True
        if dice.random() < 0.1 and self.dense:
            facts["backward"] = dice.choice(("graph", "twice"))
        if samples == "len" and dice.random() < 0.2:
            facts["given"] = dice.choice(("int", "numpy", "tensor"))
        if "closure" not in facts and "scaler" not in facts and "clip" not in facts and dice.random() < 0.08:
            facts["idle"] = dice.randrange(-1, setting.workers)  # who has no gradient at all; -1: all
        if not facts.get("closure") and dice.random() < 0.25:
            own = () if "scaler" in facts else ("assign",)  # which a scaler would take for a scaled one
            facts["meddle"] = dice.choice(("none", "double", "transposed", "data", "hold", *own))
            facts["param"], facts["rank"] = dice.randrange(20), dice.randrange(-1, setting.workers)
        self.before = samples, facts.get("clip")
        return Line("step", facts)

    def _may_skip_zero(self, samples: str) -> bool:
        """Gradients that stay are each worker's own, or the mean: the same only with equal weights. Some of torch's foreach
        forms leave something else in them."""
        if self.optimizer.get("foreach"):
            return False
        if self.setting.workers == 1:
            return self.optimizer["clip_norm"] is None
        if self.setting.apply == "delta":
            return False  # the mean
        return samples == "none" and self.before == ("none", None) and self.optimizer["clip_norm"] is None

    def other(self) -> Line | None:
        """Something that is not a step."""
        dice = self.dice
        word = dice.choices(
            [
                "evaluate",
                "rate",
                "freeze",
                "thaw",
                "save",
                "reload",
                "resume",
                "state",
                "cast",
                "change",
                "group",
                "deepcopy",
            ],
            [5, 2, 2, 2, 4, 3, 3, 3, 2, 3, 0.3, 1],
        )[0]
        if word == "rate":
            return line("rate", times=dice.choice((0.5, 1.5))) if self.may_change_rate else None
        if word == "evaluate":
            return line("evaluate", how=dice.choice(("no_grad", "inference")))
        if word == "hook":
            return line("hook", on=dice.choice(("gradient", "step")), param=dice.randrange(20))
        if word in ("freeze", "thaw"):
            return line(word, param=dice.randrange(20))
        if word in ("reload", "resume"):
            if not self.saved:
                self.saved = True
                return line("save")
            if word == "reload":
                return line(
                    "reload", what=dice.choice(("optimizer", "optimizer", "model", "both")), push=dice.random() < 0.85
                )
            return line(
                "resume", load=dice.choice(("before", "after", "after")), model=dice.choice(("new", "new", "new", "same"))
            )
        if word == "save":
            self.saved = True
        if word == "cast":
            return line("cast", to=dice.choices(("double", "channels_last", "float"), (3, 3, 0.3))[0])
        if word == "change":
            return line("change", how=dice.choice(("clamp", "vector", "data", "copy")), push=dice.random() < 0.85)
        return line(word)

    def prelude(self) -> list[Line]:
        """What happens before the optimizer is wrapped."""
        dice, lines = self.dice, []
        if dice.random() < 0.15:
            lines += [line("begin"), line("cast", to="double")]  # built in single precision
        for _ in range(dice.randrange(3)):
            word = dice.choice(("load", "cast", "freeze", "schedule", "warm"))
            if word == "load":
                lines.append(line("load", of=dice.choice(("all", "each")) if self.whole else "all"))
            elif word == "cast":
                lines.append(line("cast", to="channels_last"))
            elif word == "freeze":
                lines.append(line("freeze", param=dice.randrange(20)))
            elif word == "schedule" and self.may_change_rate:
                lines.append(line("schedule", kind=dice.choice(("steps", "cosine", "cycle"))))
            elif word == "warm" and self.setting.sync != "asup":
                lines.append(line("warm", batch=100 + len(lines), sizes=(3,)))
        return lines


def _operations(dice: Random, setting: Setting, pieces: Sequence[Line], optimizer: Line) -> list[Line]:
    body = _Body(dice, setting, pieces, optimizer)
    lines = [*body.prelude(), line("wrap")]
    if body.may_change_rate and dice.random() < 0.25:
        lines.append(line("schedule", kind=dice.choice(("steps", "cosine", "cycle"))))
    for _ in range(dice.randint(5, 14)):
        made = body.step() if dice.random() < 0.65 else body.other()
        if made is not None:
            lines.append(made)
            if made.get("push") is False and not setting.barrier:
                lines.append(body.step())  # where it is refused; consolidate() would take the job's values
    return [*lines, body.step(), line("state")]

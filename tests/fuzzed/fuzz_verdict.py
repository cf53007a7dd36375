"""Judges a random script: did it end as plain PyTorch does, was it refused for a reason of its own, or has it failed?"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_job import run_in_threads
from fuzz_plain import Outcome, PlainRun
from fuzz_program import Script

from polytempo.errors import PolytempoError


def _changes_values(script: Script, pushed: bool | None = None) -> bool:
    """Does the script change weights by hand, or load them; if asked, only where it says so, or does not?"""
    lines = [
        line for line in script.steps if line.word == "change" or (line.word == "reload" and line["what"] != "optimizer")
    ]
    return any(pushed is None or line["push"] == pushed for line in lines)


#: What may be refused, how that is said, and which scripts give the reason for it.
REFUSALS: dict[str, tuple[str, Callable[[Script], bool]]] = {
    "class of the script's own": (
        r"a server cannot run Own",
        lambda s: s.has("optimizer", name="Own") and s.setting.on_servers,
    ),
    "Rprop without rounds": (
        r"Rprop ignores the learning rate",
        lambda s: s.has("optimizer", name="Rprop") and not s.setting.barrier,
    ),
    "group added": (r"add parameter groups before wrapping", lambda s: s.has("group")),
    "synchronize without rounds": (
        r"synchronize\(\) needs a barrier mode",
        lambda s: not s.setting.barrier and (s.has("step", clip="mean") or s.has("step", clip="mean value")),
    ),
    "clip_norm with tables": (
        r"clip_norm sees dense gradients only",
        lambda s: s.sparse and s.optimizer["clip_norm"] is not None,
    ),
    "sparse with such an option": (r"cannot take the sparse gradients of an embedding", lambda s: s.sparse),
    "sparse with such a class": (r"has sparse gradients, which \w+ does not take", lambda s: s.sparse),
    "another dtype": (
        r"when the optimizer was wrapped and is .* now; cast",
        lambda s: (
            s.has("cast", to="float") or (s.has("single") and (s.has("cast", to="double") or s.has("change", how="vector")))
        ),
    ),
    "sparse weights changed": (
        r"was changed in place, and of a sparse embedding only rows",
        lambda s: s.sparse and _changes_values(s),
    ),
    "weights changed, and not sent": (
        r"was changed in place since the last step\(\), and in",
        lambda s: not s.setting.barrier and _changes_values(s, pushed=False),
    ),
    "written through .data": (r"was written to through \.data or NumPy", lambda s: _changes_values(s, pushed=False)),
    "push_parameters() with local steps": (
        r"push_parameters\(\) is not possible in this job",
        lambda s: s.setting.sync.startswith("downpour") and _changes_values(s),
    ),
    "states of the optimizer differ": (
        r"with state \w+ (at worker|where rank)",
        lambda s: s.has("load", of="each") and s.has("warm"),
    ),
    "rule of the mode with sparse gradients": (
        r"AsuP works on dense gradients, and got a sparse one",
        lambda s: s.sparse and s.setting.sync == "asup",
    ),
    "rule of the mode": (r"brings its own rule; wrap SGD", lambda s: s.setting.sync == "asup"),
}


@dataclass(frozen=True)
class Verdict:
    """`kind`: "same", "refused" or "failed"."""

    kind: str
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.kind == "failed"

    @property
    def like(self) -> str:
        """What failures of one kind have in common: the beginning of what is said last, without numbers and names."""
        last = (self.why.strip().splitlines() or [""])[-1]
        return self.kind + re.sub(r"pieces\.\S+|[\d.]+", "", last)[:40]


def judge(script: Script, run: Callable[[Script], list[Outcome]] = run_in_threads) -> Verdict:
    """Run it both ways, and compare."""
    try:
        with one_thread():
            got = run(script)
    except PolytempoError as error:
        return judge_refusal(script, error)
    except Exception as error:  # noqa: BLE001  whatever it is, it belongs into the report
        same = str(error) == str(_plain_error(script))
        return Verdict("refused", "by torch itself") if same else Verdict("failed", traceback.format_exc())
    plain = PlainRun(script)
    error = _plain_error(script, plain)
    if error is not None and script.sparse and "sparse gradients" in str(error):
        return Verdict("refused", "by torch itself")  # means are dense: a job may well run it
    if error is not None:
        return Verdict("failed", "plain PyTorch does not run it: " + "".join(traceback.format_exception(error)))
    return judge_outcomes(script, got, plain.outcomes)


def _plain_error(script: Script, plain: PlainRun | None = None) -> Exception | None:
    """What plain PyTorch has against the script."""
    try:
        with one_thread():
            (plain or PlainRun(script)).run()
    except Exception as error:  # noqa: BLE001  as above
        return error
    return None


def judge_refusal(script: Script, error: BaseException) -> Verdict:
    text = str(error)
    for name, (pattern, applies) in REFUSALS.items():
        if re.search(pattern, text):
            if "\n" in text:
                return Verdict("failed", f"refused in several lines: {text}")
            if applies(script):
                return Verdict("refused", name)
    return Verdict("failed", "refused without a reason in the script: " + "".join(traceback.format_exception(error)))


def judge_outcomes(script: Script, got: Sequence[Outcome], wanted: Sequence[Outcome]) -> Verdict:
    for rank, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        try:
            _compare(script, ours, theirs)
        except AssertionError as error:
            return Verdict("failed", f"worker {rank}: {error}")
    return Verdict("same")


def is_exact(script: Script) -> bool:
    """Are bits promised: one worker, whose gradient goes as it is into the same class?"""
    setting, optimizer = script.setting, script.optimizer
    usual = optimizer["clip_norm"] is None and setting.apply == "server" and not script.sparse
    usual = usual and optimizer["name"] != "Adafactor"  # its sums go through memory in another order
    return setting.workers == 1 and usual and setting.way in ("alone", "ps") and not setting.sync.startswith("downpour")


def _compare(script: Script, ours: Outcome, theirs: Outcome) -> None:
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if script.single else {"rtol": 1e-9, "atol": 1e-11}
    if is_exact(script):
        close = {"rtol": 0, "atol": 0}
    assert ours.weights.keys() == theirs.weights.keys()
    for name, wanted in theirs.weights.items():
        _same(f"{name} at the end", ours.weights[name], wanted, close)
    for number, (one, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        _same(f"the loss of step {number}", torch.tensor(one), torch.tensor(other), close)
    for number, (seen, wanted) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
        _same(f"what evaluation {number} saw", seen, wanted, close)
    for number, (state, right) in enumerate(zip(ours.states, theirs.states, strict=True)):
        _same_state(f"state {number} of the optimizer", state, right, close)


def _same(what: str, got: torch.Tensor, wanted: torch.Tensor, close: dict[str, Any]) -> None:
    try:
        torch.testing.assert_close(got, wanted, equal_nan=True, **close)
    except AssertionError as error:
        raise AssertionError(f"{what}: {' '.join(str(error).split())}") from None


def _same_state(what: str, got: dict[str, Any], wanted: dict[str, Any], close: dict[str, Any]) -> None:
    groups = [[(float(group["lr"]), group["params"]) for group in d["param_groups"]] for d in (got, wanted)]
    assert groups[0] == groups[1], f"{what}: groups {groups[0]} and {groups[1]}"
    looked = {param for d in (got, wanted) for param in d["state"] if _elements(got, param) and _elements(wanted, param)}
    keys = [{k: sorted(v) for k, v in d["state"].items() if v and k in looked} for d in (got, wanted)]
    assert keys[0] == keys[1], f"{what}: has {keys[0]}, expected {keys[1]}"
    for param in keys[1]:
        for name, value in wanted["state"][param].items():
            if isinstance(value, torch.Tensor):
                _same(f"{what}: {name} of parameter {param}", torch.as_tensor(got["state"][param][name]), value, close)


def _elements(state: dict[str, Any], param: int) -> bool:
    """Has this parameter any? Of one that has none it does not matter what is kept."""
    kept = [value for value in state["state"].get(param, {}).values() if isinstance(value, torch.Tensor)]
    return not kept or all(value.numel() for value in kept)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shrunk(script: Script, fails: Callable[[Script], bool]) -> Script:
    """The same failure with fewer lines: half of them, a quarter, ... one, as long as it still fails."""
    size = len(script.numbered()) // 2
    while size:
        numbers = [number for number, line in script.numbered() if number and line.word != "wrap"]
        for start in range(0, len(numbers), size):
            fewer = script.dropping(numbers[start : start + size])
            if fewer.model and fewer.steps and fails(fewer):
                script = fewer
        size //= 2
    return script


def report(script: Script, why: str) -> str:
    """Everything that is needed to look at it again."""
    without = f" --without {','.join(map(str, script.without))}" if script.without else ""
    return f"{script}\n{why}\nagain: python benchmarks/scripts_proof.py --seed {script.seed}{without}"

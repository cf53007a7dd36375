"""Random training scripts in threads end as plain PyTorch does, or are refused in one line for a reason of their own.

`make proof ARGS="--only scripts"` runs many more, and some with processes. A seed that fails is looked at alone with
`python benchmarks/scripts_proof.py --seed N --shrink`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzzed"))

from fuzz_job import run_in_threads
from fuzz_plain import Outcome, PlainRun
from fuzz_program import Script, script_of
from fuzz_verdict import REFUSALS, Verdict, judge, report, shrunk

pytestmark = pytest.mark.timeout(120)

#: Each a few lines of hundreds; together they have every way, most modes and most operations.
SEEDS = range(48)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 6))
def test_they_end_as_plain_pytorch_does_or_are_refused_for_a_reason(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of what they do, alone as well
        for seed in SEEDS[first : first + 6]:
            script = script_of(seed)
            verdict = judge(script)
            assert not verdict.failed, report(script, verdict.why)


def test_most_scripts_are_such_as_run_to_their_end() -> None:
    """Judged by their lines alone: of many seeds few have anything that may be refused."""
    scripts = [script_of(seed) for seed in range(200)]
    free = [script for script in scripts if not any(applies(script) for _, applies in REFUSALS.values())]
    assert len(free) > 0.6 * len(scripts)
    assert {script.setting.way for script in free} == {"alone", "ps", "allreduce", "group"}
    words = {line.word for script in free for line in script.steps}
    assert words >= {"wrap", "step", "save", "resume", "reload", "evaluate", "cast", "change", "freeze", "schedule"}


def test_a_seed_is_one_script_and_its_text_says_all_of_it() -> None:
    assert str(script_of(7)) == str(script_of(7))
    assert len({str(script_of(seed)) for seed in range(100)}) == 100


def wrong(script: Script) -> list[Outcome]:
    """A job that loses a part of every update that follows a save."""
    outcomes = run_in_threads(script)
    if script.has("save"):
        for outcome in outcomes:
            outcome.weights = {name: value + torch.ones_like(value) for name, value in outcome.weights.items()}
    return outcomes


def test_a_failure_is_seen_and_shrinks_to_the_lines_that_cause_it() -> None:
    seed = next(seed for seed in range(100) if script_of(seed).has("save") and script_of(seed).setting.way == "alone")
    verdict = judge(script_of(seed), wrong)
    assert verdict.failed
    small = shrunk(script_of(seed), lambda script: judge(script, wrong).like == verdict.like)
    assert [line.word for line in small.steps if line.word not in ("wrap", "begin", "cast")] == ["save"]
    assert f"--seed {seed} --without" in report(small, verdict.why)


def test_a_refusal_needs_a_reason_in_the_script() -> None:
    def refuse(script: Script) -> list[Outcome]:
        raise pytest.importorskip("polytempo").UsageError("add parameter groups before wrapping the optimizer")

    with_group = next(script for script in map(script_of, range(300)) if script.has("group"))
    without = next(script for script in map(script_of, range(300)) if not script.has("group"))
    assert judge(with_group, refuse) == Verdict("refused", "group added")
    assert judge(without, refuse).failed


@pytest.mark.filterwarnings("ignore:.*create_graph=True")  # once in a process: in the first test that does so
def test_the_reference_is_training_on_the_joint_batch() -> None:
    """With equal weights for all samples the mean over workers is that of one batch of all of them."""
    found = [script for script in map(script_of, range(4000)) if script.is_joint and not script.single][:2]
    assert len(found) == 2
    for script in found:
        parts, joint = PlainRun(script), PlainRun(script, joint=True)
        for run in (parts, joint):
            run.run()
        for one, other in zip(parts.outcomes[0].weights.values(), joint.outcomes[0].weights.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)

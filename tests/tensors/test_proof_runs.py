"""The runs of the proof of asynchronous modes: what is trained, where, and how it is settled."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import asynchronous
import asynchronous_runs
from asynchronous_verdicts import BEFORE

GPT = asynchronous.run_of("gpt", 4, "even", "asp", 2e-3, 0.9, 0)


def test_runs_are_kept_under_the_mode_as_it_is_settled() -> None:
    """So lines of the old way are not taken for those of the new."""
    modes = (*asynchronous.MODES, "bsp")
    sync = {mode: asynchronous.run_of("digits", 8, "even", mode, 0.1, 0.9, 0).sync for mode in modes}
    assert sync == {**{mode: f"{mode},momentum=lookahead,spike=1.5" for mode in asynchronous.MODES}, "bsp": "bsp"}
    assert asynchronous.run_of("cnn", 4, "even", f"delay:4{BEFORE}", 0.1, 0.9, 0).sync == "delay:4,momentum=server"
    assert GPT.sync.startswith("asp,momentum=lookahead")
    assert asynchronous.run_of("gpt", 4, "even", f"asp{BEFORE}", 2e-3, 0.9, 0).sync == "asp,momentum=server,scale=0.25"


def test_the_rate_is_that_of_the_measured_momentum() -> None:
    means = {(0.8, 0.8): 99.0, (0.9, 0.1): 97.0, (0.9, 0.2): 97.2, (0.9, 0.4): 60.0}
    assert asynchronous.best_rate(means, least=False) == 0.2
    assert asynchronous.best_rate({(0.9, 0.1): 2.0, (0.9, 0.2): 1.9}, least=True) == 0.2


def test_a_difference_is_taken_from_bsp_of_the_same_seed() -> None:
    cell = next(cell for cell in asynchronous.cells_of("twice") if (cell.mode, cell.cluster) == ("asp", "slow"))
    rates = {"digits": 0.2}
    ours, base = ({seed: of.run(seed, rates) for seed in range(3)} for of in (cell, cell.base))
    assert {run.rate for run in (*ours.values(), *base.values())} == {0.4}
    assert {(run.sync, run.cluster) for run in base.values()} == {("bsp", "even")}
    ended = {run: {"accuracy": 0.9 + 0.01 * seed, "loss": 0.0} for seed, run in base.items()}
    ended |= {run: {"accuracy": 0.9, "loss": 0.0} for run in ours.values()}
    del ended[ours[1]]
    found = asynchronous.judged_of(cell, ended, rates)
    assert found is not None
    assert found.seeds == (0, 2)
    assert found.differences == pytest.approx([0.0, -2.0])
    assert asynchronous.judged_of(cell, {}, rates) is None


def test_of_the_gpt_runs_of_one_text_are_compared() -> None:
    """Runs of another machine, whose library differs, count where they are more."""
    digits = asynchronous.run_of("digits", 4, "even", "asp", 0.2, 0.9, 0)
    other = [replace(GPT, data="another", seed=seed) for seed in range(2)]
    found = asynchronous.of_one_text({GPT: {"loss": 1.0}, **{run: {"loss": 2.0} for run in other}, digits: {"loss": 3.0}})
    assert found == {GPT: {"loss": 2.0}, replace(GPT, seed=1): {"loss": 2.0}, digits: {"loss": 3.0}}
    assert asynchronous.of_one_text({digits: {"loss": 3.0}}) == {digits: {"loss": 3.0}}


def test_a_delayed_worker_has_four_exchanges_under_way() -> None:
    run = asynchronous.run_of("digits", 8, "slow", "delay:4", 0.1, 0.9, 0)
    cluster = asynchronous_runs.cluster_of(run)
    assert (cluster.workers, cluster.slow, 2 * cluster.link.latency) == (8, {7: 3.0}, 4.0)
    assert asynchronous_runs.cluster_of(replace(run, sync="asp", cluster="even")).link.latency == 0.0


def test_a_run_ends_with_what_the_whole_test_set_says(tmp_path: Path) -> None:
    """It is looked at in parts."""
    run = replace(asynchronous.run_of("digits", 4, "slow", "asp", 0.2, 0.9, 3), samples=1024)
    ended = asynchronous_runs.train(run, tmp_path)
    assert 0.3 < ended["accuracy"] <= 1.0
    task = asynchronous_runs.task_of("digits", 3, tmp_path)
    with torch.no_grad():
        whole = float(task.loss(task.model(task.data[1][0]), task.data[1][1]))
    assert asynchronous_runs.ended_with(task.model, task)["loss"] == pytest.approx(whole, rel=1e-6)


def test_adam_is_scheduled_and_clipped_as_in_the_example() -> None:
    """Beside torch's own loop; the rate that a step had is what can be read after it."""

    def parameter() -> nn.Parameter:
        return nn.Parameter(torch.linspace(-1.0, 1.0, 5, dtype=torch.float64))

    ours, theirs, steps = parameter(), parameter(), 6
    optimizer = asynchronous_runs.scheduled_adam([ours], 0.1, steps)
    plain = torch.optim.AdamW([theirs], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=steps + 1)
    for step in range(steps):
        for param in (ours, theirs):
            param.grad = (step + 1.0) * param.detach().sin()
        optimizer.step()
        nn.utils.clip_grad_norm_([theirs], 1.0)
        plain.step()
        assert torch.equal(ours, theirs)
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        schedule.step()


def test_momentum_on_the_servers_has_one_schedule_over_all_updates() -> None:
    """Its rate has the share of one push in it, since the schedule says what it is."""
    before = asynchronous.run_of("gpt", 4, "even", f"asp{BEFORE}", 2e-3, 0.9, 0)
    rates = {}
    for name, run in (("before", before), ("now", GPT)):
        parameter = nn.Parameter(torch.ones(1))
        optimizer = asynchronous_runs.optimizer_of(run)([parameter])
        for _ in range(91):
            parameter.grad = torch.ones(1)
            optimizer.step()
        rates[name] = optimizer.param_groups[0]["lr"]
    assert rates["now"] == pytest.approx(2e-3, rel=1e-3)  # at its height, after three tenths of 300 steps
    assert rates["before"] < 0.25 * 0.3 * 2e-3


def test_the_gpt_is_that_of_the_example_from_a_seed_of_its_own() -> None:
    first, again, other = (asynchronous_runs.example(seed) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in names["model"].parameters()]) for names in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert (first["options"].steps, first["options"].batch) == (asynchronous_runs.GPT_STEPS, asynchronous_runs.WINDOWS)
    assert first["options"].lr == asynchronous.EXAMPLE_RATE
    assert GPT.data == asynchronous_runs.text_digest() != ""

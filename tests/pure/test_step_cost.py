"""The fixed time of a step: fitted to records, and what the simulator makes of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from polytempo.errors import ClusterError
from polytempo.records.lines import RecordLine
from polytempo.records.step_figures import StepFigures, figures_of, step_costs
from polytempo.report.recorded_cluster import cluster_from_record
from polytempo.report.straggler_report import best_mode, straggler_report
from polytempo.simulate.cluster import Cluster, Lognormal
from polytempo.simulate.description import cluster_from
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

FIXED, PER_SAMPLE, BATCH = 0.077, 0.0038, 32
#: Small batches on a CPU, as they were measured: 6.2 ms a sample in batches of 32, 23 ms in micro-batches of 4.
SMALL = Cluster(
    workers=4,
    batch=BATCH,
    step_time=Lognormal(FIXED + BATCH * PER_SAMPLE, 0.03),
    fixed_time=FIXED,
    slow={3: 2.0},
)


def bsp_record(sizes: list[int], seed: int = 0, noise: float = 0.03, stalls: float = 0.05) -> list[RecordLine]:
    """300 rounds of `bsp` on `SMALL`, of these batch sizes in turn; slow first steps, and stalls of a second."""
    dice, now = Random(f"record {seed}"), 0.0
    lines: list[RecordLine] = []
    for step in range(300):
        samples, ends = sizes[step % len(sizes)], []
        for worker in range(4):
            lines.append({"t": now, "kind": "release", "worker": worker, "step": step, "slowest": step})
            own = SMALL.slow.get(worker, 1.0) * (FIXED + samples * PER_SAMPLE) * dice.gauss(1, noise)
            own += 3.0 if step < 2 else 1.0 if dice.random() < stalls else 0.0
            ends.append((now + own, worker, own))
        for t, worker, own in sorted(ends):
            lines.append({"t": t, "kind": "push", "worker": worker, "step": step, "samples": samples, "computed": own})
        now = max(ends)[0]
    return lines


@pytest.mark.parametrize("sizes", [[32, 8], [32, 32, 32, 32, 32, 32, 32, 20], [*range(4, 33)]], ids=["two", "last", "many"])
def test_a_record_with_several_batch_sizes_tells_the_fixed_time_of_each_worker(sizes: list[int]) -> None:
    costs = step_costs(figures_of(bsp_record(sizes)))
    for worker in range(4):
        factor = SMALL.slow.get(worker, 1.0)
        step = factor * (FIXED + BATCH * PER_SAMPLE)
        assert costs[worker].fixed == pytest.approx(factor * FIXED, abs=0.05 * step)
        assert costs[worker].seconds(BATCH) == pytest.approx(step, rel=0.03)


def test_steps_of_one_size_or_of_too_much_noise_cannot_tell_it() -> None:
    assert step_costs(figures_of(bsp_record([32]))) == {}
    assert cluster_from_record(bsp_record([32]), 4).fixed_times == {}
    assert step_costs(figures_of(bsp_record([32, 31]))) == {}  # too far from nothing
    assert step_costs(figures_of(bsp_record([32, 24], noise=0.8)[:120])) == {}


def test_a_worker_that_cannot_tell_splits_its_time_as_the_others_do() -> None:
    figures = [one for one in figures_of(bsp_record([32, 8], stalls=0.0)) if one.worker != 3 or one.samples == 32]
    assert step_costs(figures)[3].fixed == pytest.approx(2 * FIXED, rel=0.05)


def test_micro_batches_share_the_samples_of_a_push_and_each_has_the_fixed_time() -> None:
    """Pushes of `anytime` say how many micro-batches they are made of; the last one of an epoch is short."""
    dice = Random(1)
    figures = []
    for step in range(100):
        number, short = dice.randint(2, 9), step % 10 == 9
        size = 2.0 if short else 4.0
        seconds = number * (FIXED + size * PER_SAMPLE)
        figures.append(StepFigures(0, step, float(step), number * size, number, computed=seconds))
    assert step_costs(figures)[0] == pytest.approx((FIXED, PER_SAMPLE))


@pytest.mark.parametrize("sync", ["bsp", "bsp+backup:1", "bsp+balance", "bsp+balance,micro=8", "anytime:auto", "local:8"])
def test_modes_are_predicted_from_a_record_of_bsp_with_two_batch_sizes(sync: str) -> None:
    """Without the fixed time what is made of micro-batches would be predicted at a third of its time, as it was live."""
    told = replace(cluster_from_record(bsp_record([48, 16], stalls=0.0), 4), batches={}, batch=BATCH)
    truth, predicted, blind = (
        simulate_job(cluster, sync, steps=800).seconds for cluster in (SMALL, told, replace(told, fixed_times={}))
    )
    assert predicted == pytest.approx(truth, rel=0.05)
    if sync in ("anytime:auto", "bsp+balance,micro=8"):
        assert blind < 0.5 * truth


def test_the_fixed_time_of_shares_and_micro_batches_by_hand() -> None:
    """Two workers of 8 samples, 1 s a step, of which 0.6 s are fixed."""
    cluster = Cluster(workers=2, batch=8, fixed_time=0.6)
    assert simulate_job(cluster, "bsp", steps=20).seconds == pytest.approx(10.0)  # a whole step is as ever
    assert simulate_job(cluster, "bsp+balance", steps=20).seconds == pytest.approx(10.0)
    assert simulate_job(cluster, "bsp+balance,micro=4", steps=20).seconds == pytest.approx(10 * (4 * 0.6 + 0.4))
    first = [simulate_job(cluster, "anytime:auto,micro=4", seconds=seconds).updates for seconds in (2.79, 2.81)]
    assert first == [0, 1]  # the first round has no deadline: 4 x 0.6 s + 0.4 s


def test_advice_on_a_job_of_small_batches_knows_their_fixed_time() -> None:
    """Most of a step is fixed: shares by speed gain little, deadlines with eight micro-batches lose."""
    report = straggler_report(figures_of(bsp_record([32, 8], stalls=0.0)), parse_spec("bsp"))
    cost = next(cost for cost in report.costs if cost.straggler.cause == "computing")
    gains = {mode.spec.text: mode.gain for mode in cost.modes}
    assert gains["anytime:auto"] < 0
    best = best_mode(cost, parse_spec("bsp"))
    assert best is not None
    truth = [simulate_job(replace(SMALL, batch=20), mode, steps=800).seconds for mode in ("bsp", best.spec.text)]
    assert best.spec.text == "bsp+balance"
    assert truth[0] / truth[1] > 1.05


def test_a_fixed_time_is_described_and_checked() -> None:
    described = cluster_from({"workers": 2, "step_time": "100ms", "fixed_time": "20ms", "fixed_times": {1: 0.03}})
    assert (described.fixed_time, described.fixed_times) == (0.02, {1: 0.03})
    with pytest.raises(ClusterError, match=r"at most 0.1 s, got 0.2 s"):
        cluster_from({"step_time": "100ms", "fixed_time": 0.2})
    with pytest.raises(ClusterError, match="at least 0"):
        Cluster(fixed_time=-1.0)


def test_small_shares_do_not_make_a_worker_look_slower_than_it_is() -> None:
    """Half of a step is fixed: a worker of half the speed has a share of a few samples, and takes its time for them."""
    lines: list[RecordLine] = []
    cluster = Cluster(workers=4, slow={1: 2.0}, batch=64, fixed_time=0.5)
    simulate_job(cluster, "bsp+balance", record=lines.append, figures=True, steps=400)
    (cost,) = straggler_report(figures_of(lines), parse_spec("bsp+balance")).costs
    assert (cost.straggler.cause, cost.straggler.worker) == ("computing", 1)
    assert cost.straggler.factor == pytest.approx(2.0, rel=0.1)

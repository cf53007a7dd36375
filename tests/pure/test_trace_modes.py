"""Modes on recorded jobs, the cause of their stragglers, and the command that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from random import Random
from statistics import median, median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import Seconds, even, job, noisy, write_operations

from polytempo.cli.main import run
from polytempo.errors import UsageError
from polytempo.simulate import Cluster, simulate_job
from polytempo.traces.analysis import TraceAnalysis, analyse, verdict
from polytempo.traces.causes import factors_of
from polytempo.traces.job import JobTrace, job_seconds
from polytempo.traces.modes import by_cost, by_speed, in_order, predict
from polytempo.traces.step_times import PARTS, step_times_from


def seconds_of(found: TraceAnalysis) -> dict[str, float]:
    return {mode.mode: mode.step_seconds for mode in found.modes}


def slow_worker(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
    return even(step, replica, batch, stage, backward) * (2.5 if (replica, stage) == (1, 2) else 1.0)


def uneven_work(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
    return even(step, replica, batch, stage, backward) * Random(f"{step} {replica} {batch}").choice((0.5, 0.5, 1.0, 2.5))


def heavy_stage(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
    return even(step, replica, batch, stage, backward) * (1.8 if stage == 3 else 1.0)


def stalls(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
    stalled = Random(f"{step} {replica} {batch} {stage} {backward}").random() < 0.01
    return even(step, replica, batch, stage, backward) + 2.0 * stalled


@pytest.mark.parametrize(
    ("seconds", "cause", "said"),
    [
        (
            slow_worker,
            "worker",
            r"slow against the other replicas at the same work: stage 2 of replica 1 \(2\.\d\dx\); costs",
        ),
        (uneven_work, "cost", r"uneven work: 1 micro-batch in 20 costs [23]\.\dx the mean or more"),
        (
            heavy_stage,
            "stage",
            r"an uneven partition: stage 3 takes 1\.\d\dx the mean of the other stages, in every replica",
        ),
        (stalls, "stalls", r"passing stalls, now of one worker, now of another"),
    ],
)
def test_the_cause_is_named(seconds: Seconds, cause: str, said: str) -> None:
    found = analyse(job(noisy(seconds)), ["bsp+balance"])
    assert found.causes[:1] == (cause,), found.without
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(verdict(found)[0])


def test_nothing_is_wrong() -> None:
    found = analyse(job(noisy(even)))
    assert (found.causes, found.slow) == ((), ())
    assert found.slowdown == pytest.approx(1.0, abs=0.03)
    assert verdict(found)[0] == "cause: none is worth 5 % of a step"
    assert verdict(found)[-1].startswith("advice: no mode of the data axis helps")


def test_a_slow_replica_gets_fewer_micro_batches() -> None:
    found = analyse(job(noisy(slow_worker), batches=32))
    modes = seconds_of(found)
    assert modes["bsp"] == pytest.approx(found.actual)
    assert found.actual > 1.5 * modes["bsp+balance"]
    assert found.actual > 1.5 * modes["anytime:auto,micro=32"]
    balance = next(mode for mode in found.modes if mode.mode == "bsp+balance")
    assert sum(balance.shares) == 4 * 32
    assert balance.shares[1] < 20 < 34 < min(balance.shares[0], *balance.shares[2:])
    assert balance.waiting < 0.15 < 0.3 < next(iter(found.modes)).waiting
    assert found.best().mode.startswith("bsp+balance")
    assert next(mode for mode in found.modes if mode.mode == "asp").staleness_max > 0


def test_uneven_work_is_dealt_by_cost() -> None:
    found = analyse(job(noisy(uneven_work), replicas=8, stages=2))
    modes = seconds_of(found)
    assert found.actual < 1.05 * modes["bsp+balance"], "speeds are even"
    assert found.actual > 1.1 * modes["bsp+balance by cost"]
    assert modes["bsp+balance by cost, in order"] < modes["bsp+balance by cost"]
    assert "give the sampler its cost=" in verdict(found)[-1]


def test_no_mode_of_the_data_axis_helps_against_a_heavy_stage() -> None:
    found = analyse(job(noisy(heavy_stage)))
    assert found.heaviest_stage == 3
    assert found.heaviest_factor == pytest.approx(1.8, rel=0.02)
    assert all(found.actual < 1.05 * seconds for seconds in seconds_of(found).values())
    assert verdict(found)[-1].startswith("advice: no mode of the data axis helps: the fastest, ")
    assert verdict(found)[-1].endswith("cut the model into more even stages (polytempo plan SCRIPT)")


def test_a_slow_worker_of_two_is_the_slow_one() -> None:
    found = analyse(job(noisy(slow_worker), replicas=2), ["bsp"])
    assert [(one.replica, one.stage) for one in found.slow] == [(1, 2)]


def test_a_replica_that_happened_to_be_dealt_more_work_is_not_slow() -> None:
    def dealt(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
        work = Random(f"{step} {replica} {batch}").lognormvariate(0.0, 0.6)
        return even(step, replica, batch, stage, backward) * work

    trace = job(dealt, replicas=8, stages=2, steps=4)
    medians = [
        median(batch[0][0] for step in trace.steps for batch in step.replicas[replica]) for replica in range(trace.replicas)
    ]
    assert max(medians) > 1.15 * median_low(medians), "by its seconds alone one would be"
    assert set(chain(*chain(*factors_of(trace).slowness))) == {1.0}


def test_a_micro_batch_costs_what_its_replica_is() -> None:
    trace = job(slow_worker)
    factors = factors_of(trace)
    here, there = trace.steps[0].replicas[0][0], trace.steps[0].replicas[1][0]
    for moved, wanted in ((factors.moved(here, 0, 1), there), (factors.moved(there, 1, 3), here)):
        assert list(chain(*moved)) == pytest.approx(list(chain(*wanted)))
    assert factors.moved(here, 2, 2) is here


@pytest.mark.parametrize("slow", [1.16, 1.4, 2.03, 3.0])
def test_step_times_and_virtual_time_agree(slow: float) -> None:
    """The rounds here and those of the simulator are two ways to one number."""
    lines = [f"{worker},{step},{slow if worker == 3 else 1.0}" for step in range(40) for worker in range(4)]
    trace = step_times_from("\n".join(["worker,step,seconds", *lines]), "a.csv")
    modes = seconds_of(analyse(trace, ["bsp+balance", "anytime:auto,micro=32", "asp"]))
    cluster = Cluster(4, slow={3: slow}, batch=PARTS)
    for mode, within in (("bsp", 1e-9), ("bsp+balance", 1e-9), ("asp", 0.02)):
        outcome = simulate_job(cluster, mode, samples=40 * 4 * PARTS)
        assert modes[mode] == pytest.approx(outcome.seconds * 4 * PARTS / outcome.samples, rel=within), mode
    rate = 3 + 1 / slow  # of all workers together
    assert modes["anytime:auto,micro=32"] == pytest.approx(4 / rate, rel=0.05)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(400, 700))])
def test_causes_of_drawn_jobs(seed: int) -> None:
    """One thing is wrong with a job, or nothing: it is named, and no worker is called slow where none is."""
    random = Random(f"drawn {seed}")
    cause = ("worker", "cost", "stage", "stalls", "")[seed % 5]
    replicas, stages, batches = random.choice((2, 4, 8)), random.choice((2, 4)), random.choice((8, 16))
    slow, heavy, spread = random.uniform(1.25, 3.0), random.uniform(1.5, 2.5), random.uniform(0.3, 0.7)
    worker, stalled, noise = (random.randrange(replicas), random.randrange(stages)), random.uniform(0.01, 0.03), 0.05

    def seconds(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
        one = Random(f"{seed} {step} {replica} {batch} {stage} {backward}")
        took = even(step, replica, batch, stage, backward) * max(0.5, one.gauss(1.0, noise))
        took *= slow if cause == "worker" and (replica, stage) == worker else 1.0
        took *= heavy if cause == "stage" and stage == worker[1] else 1.0
        took *= Random(f"{seed} {step} {replica} {batch}").lognormvariate(0.0, spread) if cause == "cost" else 1.0
        return took + 2.0 * (cause == "stalls" and one.random() < stalled)

    found = analyse(job(seconds, replicas, stages, batches, steps=10), ["bsp"])
    assert found.causes[:1] == ((cause,) if cause else ()), found.without
    assert [(one.replica, one.stage) for one in found.slow] == ([worker] if cause == "worker" else [])


@given(st.data())
def test_every_micro_batch_is_dealt_once(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 5))
    trace = job(uneven_work, replicas=replicas, stages=1, batches=data.draw(st.integers(1, 6)), steps=1)
    step, costs = trace.steps[0], factors_of(trace).costs[0]
    weights = tuple((worker, data.draw(st.floats(0.1, 2.0))) for worker in range(replicas))
    every = sorted((replica, number) for replica, row in enumerate(step.replicas) for number in range(len(row)))
    for dealt in (by_speed(step, weights), by_cost(step, costs, weights)):
        assert sorted(place for mine in dealt for place in mine) == every
        assert len(dealt) == replicas
        assert all(sorted(in_order(mine, costs)) == sorted(mine) for mine in dealt)


def test_a_replica_begins_with_its_cheapest_and_goes_on_from_the_most_expensive() -> None:
    costs = ((3.0, 1.0, 2.0, 5.0),)
    assert in_order([(0, 0), (0, 1), (0, 2), (0, 3)], costs) == [(0, 1), (0, 3), (0, 0), (0, 2)]
    assert in_order([], costs) == []


def test_a_micro_batch_that_is_late_is_abandoned_or_kept() -> None:
    trace = job(stalls, stages=1, batches=16, steps=24)
    factors = factors_of(trace)
    ((dropped,), (kept,)) = (predict(trace, factors, f"anytime:4{late}") for late in ("", ",late=keep"))
    assert kept.step_seconds < 0.99 * dropped.step_seconds
    assert job_seconds(trace) > dropped.step_seconds, "nobody waits for a stall"
    (short,) = predict(trace, factors, "anytime:0.01")
    assert short.step_seconds == inf, "no micro-batch ends by then"


def test_shares_follow_a_replica_that_becomes_slow() -> None:
    def later(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
        return even(step, replica, batch, stage, backward) * (3.0 if replica == 0 and step >= 10 else 1.0)

    trace = job(later, stages=1, batches=16, steps=24)
    (mode, *_) = predict(trace, factors_of(trace), "bsp+balance")
    even_step, slow_step = 16 * 0.3, 16 * 0.3 * 3
    assert mode.shares[0] < 8
    assert mode.step_seconds < (14 * even_step * 1.3 + 10 * slow_step) / 24 < job_seconds(trace) * 1.0


# Step times of workers.


def table(steps: int = 12, work: bool = True) -> str:
    """Worker 1 has thrice the work of the others, worker 2 is 1.6x slower."""
    lines = ["worker,step,seconds" + ",work" * work]
    for step in range(steps):
        for worker in range(4):
            has = 300 if worker == 1 else 100
            seconds = 0.01 * has * (1.6 if worker == 2 else 1.0) * Random(f"{worker} {step}").uniform(0.98, 1.02)
            lines.append(f"{worker},{step},{seconds:.5f}" + f",{has}" * work)
    return "\n".join(lines) + "\n"


def test_slowness_is_judged_against_work() -> None:
    with_work, without = (analyse(step_times_from(table(work=work), "a.csv"), ["bsp+balance"]) for work in (True, False))
    assert [one.replica for one in with_work.slow] == [2]
    assert with_work.causes[0] == "cost"
    assert verdict(with_work)[0].startswith("cause: uneven work: 1 step in 20 costs 2.0x the mean or more")
    assert [one.replica for one in without.slow] == [1, 2], "all that is known is that it takes longer"
    assert "worker 1 (3." in verdict(without)[0]
    assert set(seconds_of(with_work)) - set(seconds_of(without)) == {"bsp+balance by cost"}
    speed = 3 + 1 / 1.6  # of all workers together
    assert seconds_of(with_work)["bsp+balance by cost"] == pytest.approx(6 / speed, rel=0.15)


def test_csv_and_jsonl_are_one_table() -> None:
    rows = [line.split(",") for line in table(2).splitlines()]
    objects = [json.dumps(dict(zip(rows[0], map(float, row), strict=True))) for row in rows[1:]]
    found = step_times_from("\n".join([*objects, ""]), "a.jsonl")
    assert found == step_times_from(table(2), "a.csv")
    assert (found.replicas, found.stages, len(found.steps), found.divided) == (4, 1, 2, True)
    assert job_seconds(found) == pytest.approx(sum(max(float(row[2]) for row in rows[n : n + 4]) for n in (1, 5)) / 2)
    assert all(len(batches) == PARTS for step in found.steps for batches in step.replicas)


def test_steps_that_one_worker_lacks_are_left_out() -> None:
    found = step_times_from("worker, step, seconds\n0,5,1\n1,5,2\n0,6,1\n", "a.csv")
    assert [step.number for step in found.steps] == [5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.csv: expected a first line 'worker,step,seconds' .*: no worker"),
        ("worker,step,second\n", "unknown column 'second'; known: worker, step, seconds, work; nearest: seconds"),
        ("worker,step,seconds\n", "a.csv: expected lines with worker, step and seconds, got none"),
        ("worker,step,seconds\n0,0,fast\n", "a.csv, line 2: seconds must be a number, not 'fast'"),
        ("worker,step,seconds\n0,0,0\n", "a.csv, line 2: seconds must be above 0, not 0"),
        ("worker,step,seconds\n0,0,nan\n", "a.csv, line 2: seconds must be a number, not 'nan'"),
        ("worker,step,seconds\n0.5,0,1\n", "line 2: worker must be a whole number from 0 on, not 0.5"),
        ("worker,step,seconds\n0,0,1\n0,0,2\n", "line 3: step 0 of worker 0 is there twice; leave one of them out"),
        ("worker,step,seconds\n0,0,1\n2,0,2\n", "there is worker 2, and none is 1"),
        ("worker,step,seconds\n0,0,1\n1,1,2\n", "expected a step that each of the 2 workers has, got none"),
        ("worker,step,seconds,work\n0,0,1,5\n1,0,2,\n", "some lines have work and some have none"),
        ('{"worker": 0}\n', """a.csv, line 1: expected {"worker": 0, "step": 0, "seconds": 0.5}, got '{"worker": 0}'"""),
    ],
)
def test_tables_that_are_wrong(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        step_times_from(text, "a.csv")


# The command.


def test_the_command_prints_a_table_and_a_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_operations(tmp_path / "job.npz", noisy(slow_worker), replicas=3, batches=12, steps=4)
    assert run(["simulate", "--trace", str(path), "-q", "--json", str(tmp_path / "out.json")]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("job.npz: 3 replicas of 3 stages, 1f1b, 4 steps\na step takes ")
    for mode in ("bsp", "bsp+balance", "bsp+balance by cost", "anytime:auto,micro=12", "ssp:3", "dssp:3..15", "asp"):
        assert f"\n{mode} " in shown
    assert "\ncause: slow against the other replicas at the same work: stage 2 of replica 1 (2." in shown
    assert "\nadvice: " in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert {"actual", "ideal", "slowdown", "without", "causes", "slow", "modes", "verdict"} <= written.keys()
    *lines, note = shown.rstrip().splitlines()
    assert written["verdict"] == lines[-len(written["verdict"]) :]
    assert note.startswith(
        "note: polytempo run refuses bsp+balance with pipe=3: each stage would measure a speed of its own"
    )


def test_the_command_refuses_what_a_trace_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.csv"
    path.write_text(table(2))
    assert run(["simulate", "--trace", str(path), "-n", "8"]) != 0
    assert "--trace takes --sync, --seed, --json and --quiet only, got workers" in capfd.readouterr().err
    assert run(["simulate", "--trace", str(path), "-q", "--sync", "local:4", "--sync", "bsp+backup:1"]) == 0
    shown = capfd.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[6:9]] == ["bsp", "local:4", "bsp+backup:1"]


def test_work_of_other_units_changes_nothing() -> None:
    trace = step_times_from(table(4), "a.csv")
    scaled = replace(
        trace, steps=tuple(replace(s, costs=tuple(tuple(1e3 * c for c in r) for r in s.costs)) for s in trace.steps)
    )
    assert isinstance(trace, JobTrace)
    first, second = (seconds_of(analyse(one, ["bsp+balance"])) for one in (trace, scaled))
    assert first == pytest.approx(second)

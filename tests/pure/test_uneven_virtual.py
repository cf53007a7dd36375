"""`bsp+balance` and `anytime` in virtual time: who computes how much when, on clusters with slow and stalled workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from clusters import EVENTFUL, INSTANT, STRAGGLER, random_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.report.recorded_cluster import cluster_from_record
from polytempo.simulate.cluster import Cluster, Constant, Crash, Hiccup, Hosts, Link, Lognormal, Stall, Trace
from polytempo.simulate.run import simulate_job
from polytempo.simulate.worker import DealtSamples, MicroBatch, Worker
from polytempo.sync.spec import parse_spec

BOTH = ("bsp+balance", "anytime:auto")
UNEVEN = (*BOTH, "bsp+balance,micro=4", "anytime:auto,late=keep,micro=3", "anytime:0.7,divide=actual")


@pytest.mark.parametrize("cluster", [EVENTFUL, INSTANT], ids=["network", "instant"])
@pytest.mark.parametrize("sync", UNEVEN)
def test_seconds_of_uneven_workers_are_accounted_for(cluster: Cluster, sync: str) -> None:
    outcome = simulate_job(cluster, sync, steps_each=20)
    for worker in outcome.workers:
        parts = worker.computing_s + worker.waiting_s + worker.communicating_s
        assert parts == pytest.approx(worker.present_s)
        assert min(worker.computing_s, worker.waiting_s, worker.communicating_s) >= -1e-9
    assert 0 < outcome.efficiency <= 1 + 1e-12


@pytest.mark.parametrize("sync", UNEVEN[:-1])
@pytest.mark.parametrize("via", ["ps", "ring", "hierarchical"])
def test_with_equal_speeds_it_is_bsp(sync: str, via: str) -> None:
    """The same rounds at the same moments, over servers and over all-reduce, whatever messages take."""
    cluster = Cluster(workers=4, batch=24, link=Link(0.01, 1e6), hosts=Hosts(2, 0.0, 1e7), model_bytes=1e5)
    plain, ours = (simulate_job(cluster, mode, via=via, steps_each=20) for mode in ("bsp", sync))
    assert ours.seconds == pytest.approx(plain.seconds)
    assert (ours.samples, ours.updates, ours.staleness_max) == (plain.samples, plain.updates, 0)
    assert ours.efficiency == pytest.approx(plain.efficiency)


@pytest.mark.parametrize("factor", [1.16, 1.4, 2.03, 3.0])
@pytest.mark.parametrize("sync", BOTH)
def test_a_worker_that_is_always_slow_costs_what_it_lacks_and_no_more(sync: str, factor: float) -> None:
    cluster = Cluster(workers=4, batch=64, slow={3: factor})
    outcome = simulate_job(cluster, sync, seconds=300)
    own_rates = 64 * (3 + 1 / factor)
    assert outcome.samples_per_second > 0.95 * own_rates
    assert outcome.waiting < 0.05
    assert simulate_job(cluster, "bsp", seconds=300).samples_per_second < 1.001 * 256 / factor


def test_a_stuck_worker_delays_none_and_its_work_is_dropped_or_kept() -> None:
    stuck = Cluster(workers=4, batch=64, stalls=(Stall(0, 10.3, 40.0),))
    drop, keep = (simulate_job(stuck, f"anytime:auto,late={late}", seconds=100) for late in ("drop", "keep"))
    assert drop.updates == keep.updates == 89  # after five rounds without it the others take its part, in longer rounds
    assert [worker.samples for worker in drop.workers[1:]] == pytest.approx([98.5 * 64] * 3, abs=16)
    assert drop.workers[0].samples == pytest.approx((99 - 40) * 64, abs=64)
    assert keep.workers[0].samples == drop.workers[0].samples + 8  # the micro-batch it was stuck in counts, rounds late
    assert (drop.staleness_max, keep.staleness_max) == (0, 30)
    assert simulate_job(stuck, "bsp", seconds=100).updates == 60


def test_a_worker_that_vanishes_unnoticed_is_not_waited_for() -> None:
    lost = Cluster(workers=4, batch=64, crashes=(Crash(2, 10.0, noticed_after=None),))
    outcome = simulate_job(lost, "anytime:auto", seconds=100)
    assert [worker.samples for worker in outcome.workers][2] < 64 * 11
    assert min(outcome.workers[rank].samples for rank in (0, 1, 3)) > 64 * 95


@pytest.mark.parametrize(("slow", "fast"), [(3.0, 1.0), (1.0, 3.0)])
def test_shares_and_deadline_follow_a_change_of_speed_within_ten_rounds(slow: float, fast: float) -> None:
    """Worker 0 changes from one pace to the other in the middle of the run, for good."""
    change = 40
    paces = Trace((slow,) * change + (fast,) * 10_000)
    cluster = Cluster(workers=4, batch=64, step_times={0: paces, 1: 1.0, 2: 1.0, 3: 1.0})

    lines: list[RecordLine] = []
    simulate_job(cluster, "bsp+balance", steps_each=change + 30, record=lines.append)
    shares = {line["step"]: dict(line["weights"])[0] for line in lines if line["kind"] == "release" and "weights" in line}
    right = 4 * (1 / fast) / (3 + 1 / fast)
    follows = min(step for step, share in shares.items() if step > change and abs(share / right - 1) < 0.06)
    assert follows <= change + 10
    assert all(abs(share / right - 1) < 0.06 for step, share in shares.items() if step >= follows)

    lines.clear()
    simulate_job(cluster, "anytime:auto", steps_each=200, record=lines.append)
    # its own micro-batches say when it has changed: steps of its trace are pairs of eight of them
    rounds = [line for line in lines if line["kind"] == "push" and line["worker"] == 0 and line["count"]]
    first = next(line["step"] for line in rounds if abs(line["computed"] / line["count"] / (fast / 8) - 1) < 0.05)
    deadlines = {line["step"]: line["deadline"] for line in lines if line["kind"] == "release" and "deadline" in line}
    wanted = 4 / (3 + 1 / fast)  # in which all workers together do 32 micro-batches
    assert abs(deadlines[first] / wanted - 1) > 0.11
    assert all(abs(at / wanted - 1) < 0.11 for step, at in deadlines.items() if step >= first + 10)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), sync=st.sampled_from(UNEVEN), rounds=st.integers(1, 30))
def test_records_of_uneven_clusters_are_sound_and_replay(seed: int, sync: str, rounds: int) -> None:
    cluster, spec = random_cluster(seed), parse_spec(sync)
    lines: list[RecordLine] = []
    outcome = simulate_job(cluster, sync, seed=seed, steps_each=rounds, record=lines.append)
    check_lines(lines, spec, cluster.workers)
    replay(lines, spec.policy(cluster.workers))
    pushed = sum(line["samples"] for line in lines if line["kind"] == "push")
    assert outcome.samples <= pushed


def test_micro_batches_take_the_time_of_steps_and_have_their_stalls() -> None:
    """A thousand steps of one rank: as whole steps, and cut into eight."""
    cluster = Cluster(workers=1, batch=64, step_time=Lognormal(1.0, 0.3), hiccup=Hiccup(0.1, 10.0))
    whole, cut = Worker(cluster, 0, seed=5), Worker(cluster, 0, seed=5)
    cut.load(1, deals=True, micro=8)
    stalled = Counter[int]()
    for _ in range(1000):
        if not whole.step_times:
            whole.draw()
        step = whole.step_times.pop()
        parts = [cut.micro_batch_seconds(cut.unit) for _ in range(8)]
        assert sum(parts) == pytest.approx(step)
        stalled.update(place for place, part in enumerate(parts) if part > 10)
    assert sum(stalled.values()) == pytest.approx(100, abs=40)
    assert len(stalled) == 8  # in any of them


def test_a_budget_in_steps_has_the_samples_of_other_modes() -> None:
    for sync in BOTH:
        assert simulate_job(Cluster(batch=64), sync, steps=400).samples == 400 * 64
    assert simulate_job(Cluster(batch=64), "anytime:auto", steps=400).steps == 400 * 8


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 40), moves=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=60)
)
def test_each_place_is_used_once_an_epoch(length: int, moves: list[tuple[int, int, bool]]) -> None:
    """Workers take, and then use what they took or give it back."""
    dropped: list[int] = []
    dealer, used = DealtSamples(length, dropped.append), Counter[tuple[int, int]]()
    held: dict[int, MicroBatch] = {}
    for worker, count, uses in moves:
        if worker not in held:
            held[worker] = dealer.take(worker, count)
            assert held[worker].samples > 0
            continue
        batch = held.pop(worker)
        if uses:
            dealer.finish(worker, [batch])
            used.update((epoch, place) for epoch, start, stop in batch.places for place in range(start, stop))
        else:
            dealer.give_back(worker, [batch])
    assert max(used.values(), default=1) == 1
    for worker, batch in held.items():
        dealer.give_back(worker, [batch])
    for _ in range(length + 1):  # what is left of the epochs that have begun comes first
        batch = dealer.take(9, 1)
        dealer.finish(9, [batch])
        used.update((epoch, place) for epoch, start, stop in batch.places for place in range(start, stop))
    assert set(used.values()) == {1}
    assert {(0, place) for place in range(length)} <= set(used)
    assert not dropped
    for end in (dealer.finish, dealer.give_back):
        end(9, [dealer.take(9, 1, version=7)._replace(late=True)])
    assert dropped == [7, 7]  # what a late one has read is not needed any more


def test_constant_step_times_of_a_straggler_are_as_ever() -> None:
    """What the balanced engine changes of a worker's step times is its own step's only."""
    once = simulate_job(replace(STRAGGLER, batch=64), "bsp+balance", steps_each=100)
    assert once == simulate_job(replace(STRAGGLER, batch=64, step_time=Constant(1.0)), "bsp+balance", steps_each=100)
    assert once.seconds < 125


@pytest.mark.parametrize("sync", ["bsp+balance", "anytime:auto", "anytime:auto,late=keep"])
def test_a_record_of_uneven_shares_tells_what_other_modes_would_do(sync: str) -> None:
    """Shares and counts differ from worker to worker: it is the pace that is read from the record, and stalls with it."""
    real = Cluster(workers=4, batch=64, slow={3: 3.0}, hiccup=Hiccup(0.05, 10.0))
    lines: list[RecordLine] = []
    simulate_job(real, sync, steps_each=200, record=lines.append)
    seen = cluster_from_record(lines, 4)
    assert [seen.batches[rank] for rank in range(4)] == pytest.approx([64] * 4, abs=8)
    for mode in ("bsp", "asp", "anytime:auto"):
        truth, told = (simulate_job(cluster, mode, seconds=600).samples_per_second for cluster in (real, seen))
        assert told == pytest.approx(truth, rel=0.25), mode

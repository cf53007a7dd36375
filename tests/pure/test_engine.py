"""The engine: time, work, networks, membership, and what it says when nothing can happen any more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from clusters import EVENTFUL, INSTANT, MODES, STRAGGLER, speeds
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import StuckError, UsageError
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import (
    Arrival,
    Cluster,
    Constant,
    Crash,
    Departure,
    Exponential,
    Hiccup,
    Hosts,
    Link,
    Lognormal,
    Servers,
    Stall,
    Trace,
    Uniform,
    stretched,
)
from polytempo.simulate.links import Costs, all_reduce_seconds, halving_doubling, hierarchical, ring, tree
from polytempo.simulate.run import simulate_job
from polytempo.simulate.worker import Worker


@pytest.mark.parametrize("cluster", [EVENTFUL, INSTANT], ids=["network", "instant"])
@pytest.mark.parametrize("sync", MODES)
def test_every_second_of_every_worker_is_accounted_for(cluster: Cluster, sync: str) -> None:
    outcome = simulate_job(cluster, sync, steps_each=20)
    for worker in outcome.workers:
        parts = worker.computing_s + worker.waiting_s + worker.communicating_s
        assert parts == pytest.approx(worker.present_s)
        assert min(worker.computing_s, worker.waiting_s, worker.communicating_s) >= -1e-9
    assert 0 < outcome.efficiency <= 1 + 1e-12
    if cluster is INSTANT:
        assert outcome.communicating == pytest.approx(0, abs=1e-12)


def test_bsp_goes_at_the_pace_of_the_slowest() -> None:
    outcome = simulate_job(STRAGGLER, "bsp", steps_each=10)
    assert outcome.seconds == 30.0
    assert outcome.efficiency == pytest.approx((10 + 10 + 10 + 30) / (4 * 30))
    assert [worker.waiting_s for worker in outcome.workers] == [20.0, 20.0, 20.0, 0.0]


def test_asp_never_waits() -> None:
    outcome = simulate_job(STRAGGLER, "asp", seconds=30)
    assert [worker.steps for worker in outcome.workers] == [30, 30, 30, 10]
    assert outcome.waiting == 0


def test_a_finite_bound_settles_at_the_pace_of_the_slowest_and_absorbs_a_stall() -> None:
    """`algorithms.md` 1b, I4: 2 workers at 1.0 and 2.3 s for 2000 s."""
    assert [w.steps for w in simulate_job(speeds(1.0, 2.3), "ssp:3", seconds=2000).workers] == [873, 869]
    assert [w.steps for w in simulate_job(speeds(1.0, 2.3), "ssp:15", seconds=2000).workers] == [885, 869]
    assert [w.steps for w in simulate_job(speeds(1.0, 2.3), "asp", seconds=2000).workers] == [2000, 869]
    stalled = Cluster(workers=2, stalls=(Stall(0, 10.0, 4.0), Stall(1, 30.0, 4.0)))
    assert simulate_job(stalled, "bsp", steps_each=50).seconds == 58.0  # both stalls, one after the other
    assert simulate_job(stalled, "ssp:4", steps_each=50).seconds == 54.0  # each worker's own stall only


def test_budgets() -> None:
    cluster = Cluster(workers=3, batch=10)
    assert simulate_job(cluster, "asp", steps=7).steps == 7
    assert simulate_job(cluster, "asp", samples=65).samples == 70
    assert simulate_job(cluster, "asp", seconds=2.5).steps == 6
    assert simulate_job(cluster, "bsp", steps_each=4).updates == 4
    with pytest.raises(UsageError, match="needs an end"):
        simulate_job(cluster, "asp")
    with pytest.raises(UsageError, match="above 0"):
        simulate_job(cluster, "asp", steps=0)


def test_staleness_is_the_updates_between_read_and_apply() -> None:
    lines: list[RecordLine] = []
    simulate_job(EVENTFUL, "asp", steps_each=30, record=lines.append)
    read: dict[int, int] = {}
    version = 0
    for line in lines:
        if line["kind"] == "apply" and line["server"] == 0:
            (worker,) = line["workers"]
            assert line["staleness"] == [version - read[worker]]
            version += 1
        elif line["kind"] == "release":
            read[line["worker"]] = version


def test_a_crash_frees_the_others_when_it_is_noticed() -> None:
    crash = replace(STRAGGLER, crashes=(Crash(3, at=10.0, noticed_after=5.0),))
    lines: list[RecordLine] = []
    simulate_job(crash, "ssp:1", steps_each=40, record=lines.append)
    notice = next(index for index, line in enumerate(lines) if line["kind"] == "leave")
    assert (lines[notice]["t"], lines[notice]["worker"], lines[notice]["reason"]) == (15.0, 3, "lost")
    freed = [line["worker"] for line in lines[notice + 1 :] if line["t"] == 15.0 and line["kind"] == "release"]
    assert sorted(freed) == [0, 1, 2]


def test_a_run_that_cannot_go_on_says_who_waits_for_whom() -> None:
    with pytest.raises(StuckError) as stuck:
        simulate_job(replace(STRAGGLER, crashes=(Crash(3, 10.0, noticed_after=None),)), "ssp:1", steps_each=40)
    text = str(stuck.value)
    assert "worker 0 waits for 3 (2 ahead of worker 3, bound 1)" in text
    assert "crashed and not noticed: 3" in text
    assert "\n" not in text


def test_a_worker_that_comes_back_before_its_crash_was_noticed() -> None:
    back = replace(STRAGGLER, crashes=(Crash(3, 10.0, noticed_after=50.0),), joins=(Arrival(3, 12.0),))
    outcome = simulate_job(back, "bsp", steps_each=10)
    assert [worker.steps for worker in outcome.workers[:3]] == [10, 10, 10]


def test_leavers_finish_their_step() -> None:
    outcome = simulate_job(replace(STRAGGLER, leaves=(Departure(0, 4.5),)), "asp", seconds=20)
    assert outcome.workers[0].steps == 5
    assert outcome.workers[0].present_s == 5.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9)), max_size=5), st.floats(0, 60), st.floats(0.1, 20))
def test_stalls_add_what_they_overlap(stalls: list[tuple[float, float]], start: float, work: float) -> None:
    intervals = sorted((at, at + length) for at, length in stalls)
    end = stretched(start, work, intervals)
    moments = sorted({start, end, *(m for pair in intervals for m in pair if start < m < end)})
    done = sum(b - a for a, b in pairwise(moments) if not any(low <= (a + b) / 2 < high for low, high in intervals))
    assert done == pytest.approx(work)


@pytest.mark.parametrize(
    ("duration", "mean"),
    [
        (Constant(2.0), 2.0),
        (Lognormal(2.0, 0.5), 2.0),
        (Uniform(1.0, 3.0), 2.0),
        (Exponential(2.0, base=1.0), 2.0),
        (Trace((1.0, 3.0)), 2.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_step_times_have_their_mean_and_do_not_depend_on_the_mode(duration: Constant, mean: float) -> None:
    worker = Worker(Cluster(workers=1, step_time=duration), 0, seed=3)
    times = []
    for _ in range(100):
        worker.draw()
        times += [worker.step_times.pop() for _ in range(len(worker.step_times))]
    assert sum(times) / len(times) == pytest.approx(mean, rel=0.05)
    assert min(times) > 0
    outcome = [simulate_job(Cluster(workers=2, step_time=duration), s, steps_each=70) for s in ("asp", "ssp:0")]
    for a, b in zip(outcome[0].workers, outcome[1].workers, strict=True):
        assert a.computing_s == pytest.approx(b.computing_s)


def test_hiccups_come_as_often_as_said() -> None:
    outcome = simulate_job(Cluster(workers=4, hiccup=Hiccup(0.25, 8.0)), "asp", steps_each=2000)
    assert sum(w.computing_s for w in outcome.workers) / 8000 == pytest.approx(1 + 0.25 * 8, rel=0.05)


# Networks.


def test_a_server_round_takes_what_the_formula_says() -> None:
    """2 alpha + 2 n beta at a worker, 2 P n / k beta at the server: whichever is more."""
    for workers, shards in ((1, 1), (4, 1), (4, 2), (4, 8)):
        cluster = Cluster(workers=workers, link=Link(0.05, 100.0), servers=Servers(shards), model_bytes=10.0)
        rounds = [simulate_job(cluster, "bsp", steps_each=n).seconds for n in (5, 6)]
        expected = 1.0 + 2 * 0.05 + 2 * max(0.1, workers * 0.1 / shards)
        assert rounds[1] - rounds[0] == pytest.approx(expected)


def test_a_shared_medium_carries_one_message_at_a_time() -> None:
    own = Cluster(workers=4, link=Link(0.0, 100.0), servers=Servers(8), model_bytes=10.0)
    shared = replace(own, link=Link(0.0, 100.0, shared=True))
    assert simulate_job(own, "bsp", steps_each=11).seconds < simulate_job(shared, "bsp", steps_each=11).seconds
    rounds = [simulate_job(shared, "bsp", steps_each=n).seconds for n in (5, 6)]
    assert rounds[1] - rounds[0] == pytest.approx(1.0 + 2 * 4 * 0.1)


def test_delay_hides_the_exchange() -> None:
    cluster = Cluster(workers=1, link=Link(latency=1.0), model_bytes=1.0)
    busy = {t: simulate_job(cluster, f"delay:{t}", steps_each=200).efficiency for t in (0, 1, 2, 3)}
    assert busy[0] == pytest.approx(1 / 3, abs=0.01)
    assert busy[1] == pytest.approx(2 / 3, abs=0.01)
    assert busy[2] == pytest.approx(1.0, abs=0.02)


def test_first_releases_of_delay_travel_together() -> None:
    cluster = Cluster(workers=1, link=Link(0.0, 10.0), model_bytes=10.0)
    assert simulate_job(cluster, "delay:50", steps_each=1).seconds == pytest.approx(4.0)  # pull, compute, push, answer


COSTS = Costs(alpha=2.0, beta=3.0, gamma=5.0)


def test_all_reduce_formulas_by_hand() -> None:
    assert ring(4, 8.0, COSTS) == 2 * 3 * 2 + 2 * 6 * 3 + 6 * 5
    assert halving_doubling(4, 8.0, COSTS) == 2 * 2 * 2 + 2 * 6 * 3 + 6 * 5
    assert halving_doubling(5, 8.0, COSTS) == halving_doubling(4, 8.0, COSTS) + 2 * 2 + 2 * 8 * 3 + 8 * 5
    assert tree(4, 8.0, COSTS) == 2 * 2 * (2 + 8 * 3) + 2 * 8 * 5
    inside = Costs(1.0, 1.0, 0.0)
    between = Costs(2.0, 3.0, 0.0)
    assert hierarchical(8, 8.0, inside, between, size=4) == 2 * 3 * 1 + 2 * 6 * 1 + ring(2, 8.0, between)


@given(st.integers(2, 64), st.floats(1, 1e9))
@settings(max_examples=50)
def test_a_ring_takes_almost_the_same_for_any_size(workers: int, bytes_: float) -> None:
    cost = ring(workers, bytes_, Costs(0.0, 1e-9))
    assert bytes_ * 1e-9 * (1 - 1e-9) <= cost < 2 * bytes_ * 1e-9


def test_all_reduce_adds_its_cost_to_a_round() -> None:
    cluster = Cluster(workers=4, link=Link(0.01, 100.0), model_bytes=10.0, hosts=Hosts(2, 0.001, 1000.0))
    for via in ("ring", "halving-doubling", "tree", "hierarchical"):
        rounds = [simulate_job(cluster, "bsp", via=via, steps_each=n).seconds for n in (5, 6)]
        assert rounds[1] - rounds[0] == pytest.approx(1.0 + all_reduce_seconds(via, cluster, 4))
    best = simulate_job(cluster, "bsp", via="allreduce", steps_each=5)
    assert best.via == min(
        ("ring", "halving-doubling", "tree", "hierarchical"), key=lambda v: all_reduce_seconds(v, cluster, 4)
    )


def test_ways_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="needs a parameter server"):
        simulate_job(STRAGGLER, "ssp:3", via="ring", steps=10)
    with pytest.raises(UsageError, match="nearest: ring"):
        simulate_job(STRAGGLER, "bsp", via="rign", steps=10)
    with pytest.raises(UsageError, match="workers a host"):
        simulate_job(replace(STRAGGLER, model_bytes=1.0), "bsp", via="hierarchical", steps=10)

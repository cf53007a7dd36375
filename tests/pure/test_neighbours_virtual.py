"""Gossip and AD-PSGD in virtual time: what an exchange costs, who waits for whom, and members that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import STRAGGLER, random_cluster

from polytempo.errors import UsageError
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.simulate.cluster import Arrival, Cluster, Crash, Hiccup, Link, Lognormal
from polytempo.simulate.links import PeerRoute
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

SLOW_LINK = Cluster(workers=8, step_time=0.05, link=Link(bandwidth=12.5e6), model_bytes=10e6)
EACH = 0.8  # seconds a model takes on that link


@pytest.mark.parametrize(
    ("sync", "degree"), [("gossip:ring", 2), ("gossip:exp", 1), ("gossip:torus", 3), ("gossip:full", 7)]
)
def test_a_step_costs_its_computing_and_the_bytes_of_its_neighbours(sync: str, degree: int) -> None:
    outcome = simulate_job(SLOW_LINK, sync, steps_each=10)
    assert outcome.via == "peers"
    assert outcome.seconds == pytest.approx(10 * (0.05 + degree * EACH))
    assert {worker.bytes_sent for worker in outcome.workers} == {10 * degree * 10e6}


def test_overlap_hides_computing_behind_the_exchange() -> None:
    plain, hidden = (simulate_job(SLOW_LINK, sync, steps_each=10) for sync in ("gossip:ring", "gossip:ring,overlap=1"))
    assert hidden.seconds == pytest.approx(plain.seconds - 10 * 0.05)
    assert hidden.workers[0].bytes_sent == plain.workers[0].bytes_sent


def test_one_medium_carries_the_bytes_of_all() -> None:
    shared = replace(SLOW_LINK, link=replace(SLOW_LINK.link, shared=True))
    assert simulate_job(shared, "gossip:ring", steps_each=3).seconds > 3 * 8 * 2 * EACH


def test_both_ends_of_an_exchange_count() -> None:
    route = PeerRoute(Cluster(workers=3, link=Link(1.0, 10.0), links={2: Link(2.0, 5.0)}, model_bytes=20.0))
    left, arrivals = route.send(0, [1, 2], 0.0)
    assert left == 4.0
    assert arrivals == [5.0, 6.0]  # both have left after 4; the second has the larger latency
    assert route.send(1, [2], 0.0)[1] == [10.0]  # its link is busy until 4


def test_a_worker_mixes_when_the_values_have_come() -> None:
    """The slow worker's values leave its own link after 6 s, but the other's link takes 8 s for them."""
    cluster = Cluster(
        workers=2, step_times={0: 5.0, 1: 0.1}, link=Link(0.0, 8.0), links={1: Link(0.0, 1.0)}, model_bytes=8.0
    )
    outcome = simulate_job(cluster, "gossip:exp", steps_each=1)
    assert outcome.workers[0].present_s == pytest.approx(8.1)  # what worker 1 sent took that long
    assert outcome.workers[1].present_s == pytest.approx(13.0)


def test_a_stall_spreads_by_one_neighbour_a_step() -> None:
    """Workers far from a slow one go on: the local barrier is not a barrier."""
    stalled = Cluster(workers=16, hiccup=Hiccup(0.02, 10.0))
    assert (
        simulate_job(stalled, "gossip:ring", steps_each=60).efficiency
        > simulate_job(stalled, "bsp", steps_each=60).efficiency
    )


def test_adpsgd_waits_for_no_slow_worker() -> None:
    outcome = simulate_job(STRAGGLER, "adpsgd:ring", seconds=90)
    assert [worker.steps for worker in outcome.workers] == [90, 90, 90, 30]
    assert outcome.efficiency == pytest.approx(1.0)


def test_adpsgd_hides_the_average_behind_computing() -> None:
    """Two models over the link in each step of an active worker; passive ones only answer."""
    quick = replace(SLOW_LINK, workers=4, step_time=2.0)
    outcome = simulate_job(quick, "adpsgd:ring", steps_each=10)
    assert outcome.seconds == pytest.approx(20.0, rel=0.1)
    pair = simulate_job(replace(quick, workers=2, step_time=0.5), "adpsgd:ring", seconds=10 * 2 * EACH + 0.01)
    assert [worker.steps for worker in pair.workers] == [10, 32]
    sent = sum(worker.bytes_sent for worker in outcome.workers)
    assert sent == 2 * 10 * 2 * 10e6  # two active workers, ten steps, there and back


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "adpsgd:ring"])
def test_a_joiner_computes_once_it_has_a_model(sync: str) -> None:
    lines: list[RecordLine] = []
    cluster = Cluster(workers=3, step_time=Lognormal(1.0, 0.2), joins=(Arrival(3, 10.5),), link=Link(0.01))
    outcome = simulate_job(cluster, sync, steps_each=30, record=lines.append)
    pushes = [line for line in lines if line["kind"] == "push" and line["worker"] == 3]
    assert (pushes[0]["samples"] == 0) == sync.startswith("gossip")  # in adpsgd it asks first
    assert pushes[-1]["samples"] == 32
    assert outcome.workers[3].steps == sum(line["samples"] > 0 for line in pushes) > 10


def test_a_partner_that_crashed_is_waited_for_until_that_is_noticed() -> None:
    cluster = Cluster(workers=2, crashes=(Crash(1, 5.5, noticed_after=4.0),))
    outcome = simulate_job(cluster, "adpsgd:ring", steps_each=20)
    assert outcome.workers[0].steps == 20
    assert outcome.seconds == pytest.approx(9.5 + 13)  # it began to wait in its seventh step
    assert outcome.workers[0].communicating_s == pytest.approx(2.5)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp,static=1", "gossip:full,overlap=1", "adpsgd:exp"])
def test_records_of_random_clusters_check_and_replay(sync: str) -> None:
    spec = parse_spec(sync)
    for seed in range(20, 32):
        cluster = random_cluster(seed)
        lines: list[RecordLine] = []
        simulate_job(cluster, sync, seed=seed, steps_each=25, record=lines.append)
        check_lines(lines, spec, cluster.workers)
        replay(lines, spec.policy(cluster.workers))


def test_values_of_neighbours_have_one_way() -> None:
    with pytest.raises(UsageError, match="cannot go by 'ps'; use peers"):
        simulate_job(SLOW_LINK, "gossip:ring", via="ps", steps_each=1)
    with pytest.raises(UsageError, match="bsp cannot go by 'peers'; use ps"):
        simulate_job(SLOW_LINK, "bsp", via="peers", steps_each=1)

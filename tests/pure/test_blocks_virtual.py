"""Blocks of local steps in virtual time: how long they take, what counts as useful, deaths and joins, fragments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from clusters import EVENTFUL, INSTANT, STRAGGLER, random_cluster, speeds

from polytempo.cli.main import run
from polytempo.records.check import check_lines
from polytempo.records.files import RecordWriter
from polytempo.records.lines import RecordLine, of_optimizer
from polytempo.records.replay import replay
from polytempo.report.recorded_cluster import cluster_from_record
from polytempo.simulate.cluster import Arrival, Cluster, Crash, Link
from polytempo.simulate.links import all_reduce_seconds
from polytempo.simulate.outcome import meta_of
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

SLOW_LINK = Cluster(workers=4, step_time=0.05, link=Link(bandwidth=12.5e6), model_bytes=10e6)
STREAMING = ("diloco:4,fragments=2", "diloco:6,fragments=3,overlap=1", "diloco:6,overlap=2")


@pytest.mark.parametrize("period", [1, 4, 8, 40, 64])
def test_a_block_takes_its_steps_and_one_all_reduce(period: int) -> None:
    outcome = simulate_job(SLOW_LINK, f"local:{period}", steps_each=40)
    blocks = -(-40 // period)
    each = all_reduce_seconds("ring", SLOW_LINK, 4)
    assert outcome.via == "ring"
    assert outcome.seconds == pytest.approx(40 * 0.05 + blocks * each)
    assert outcome.steps == 160  # a shorter last block is averaged, too
    assert outcome.updates == blocks
    assert {worker.bytes_sent for worker in outcome.workers} == {10e6 * blocks}
    assert outcome.efficiency == pytest.approx(2.0 / outcome.seconds)


def test_over_servers() -> None:
    outcome = simulate_job(SLOW_LINK, "local:8", via="ps", steps_each=40)
    assert outcome.seconds == pytest.approx(40 * 0.05 + 5 * (4 + 4) * 0.8 + 4 * 0.8)  # and the first values


def test_a_block_of_one_is_a_round() -> None:
    rounds, blocks = (simulate_job(EVENTFUL, sync, via="ring", steps_each=20, seed=3) for sync in ("bsp", "local:1"))
    assert blocks.seconds == rounds.seconds
    assert [w.steps for w in blocks.workers] == [w.steps for w in rounds.workers]


def test_a_block_waits_for_the_slowest_once() -> None:
    uneven = speeds(1.0, 2.0)
    lines: list[RecordLine] = []
    outcome = simulate_job(uneven, "local:5", steps_each=20, record=lines.append)
    assert outcome.seconds == 40.0
    assert [worker.waiting_s for worker in outcome.workers] == [20.0, 0.0]
    pushes = [line for line in lines if line["kind"] == "push"]
    assert {line["count"] for line in pushes} == {5}
    assert {line["samples"] for line in pushes} == {160}


def test_what_is_never_merged_is_not_useful() -> None:
    """Worker 1 dies after 7 steps of a block of 10: they are lost, and the others average without it."""
    cluster = Cluster(workers=2, crashes=(Crash(1, 17.5, noticed_after=1.0),))
    outcome = simulate_job(cluster, "local:10", steps_each=20)
    assert [worker.steps for worker in outcome.workers] == [20, 10]
    assert outcome.efficiency == pytest.approx((20 + 10) / (20 + 17.5))


def test_the_end_of_the_budget_wastes_an_open_block() -> None:
    outcome = simulate_job(Cluster(workers=2), "local:10", seconds=25)
    assert outcome.steps == 40
    assert outcome.efficiency == pytest.approx(40 / 50)


def test_a_push_that_is_not_merged_before_the_end_is_wasted() -> None:
    outcome = simulate_job(speeds(1.0, 2.0), "local:10", seconds=15)
    assert (outcome.steps, outcome.efficiency) == (0, 0.0)


def test_a_joiner_starts_at_the_open_block() -> None:
    lines: list[RecordLine] = []
    cluster = Cluster(workers=2, joins=(Arrival(2, 12.0),))
    outcome = simulate_job(cluster, "local:10", steps_each=40, record=lines.append)
    joined = next(line for line in lines if line["kind"] == "join" and line["worker"] == 2)
    assert joined["step"] == 1
    assert [worker.steps for worker in outcome.workers] == [40, 40, 30]
    assert outcome.seconds == 42.0  # its block began two seconds later


def test_streaming_hides_the_exchange_behind_local_steps() -> None:
    whole = simulate_job(SLOW_LINK, "diloco:40", steps_each=400)
    parts = simulate_job(SLOW_LINK, "diloco:40,fragments=4", steps_each=400)
    hidden = simulate_job(SLOW_LINK, "diloco:40,fragments=4,overlap=8", steps_each=400)
    assert parts.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert hidden.seconds == pytest.approx(400 * 0.05, rel=0.03)
    assert hidden.efficiency > 0.97
    for outcome in (parts, hidden):
        sent = outcome.workers[0].bytes_sent
        assert sent == pytest.approx(whole.workers[0].bytes_sent, rel=0.1)


@pytest.mark.parametrize("sync", STREAMING)
def test_every_fragment_keeps_its_promises_and_replays(sync: str, tmp_path: Path) -> None:
    spec = parse_spec(sync)
    for number, cluster in enumerate((EVENTFUL, INSTANT, STRAGGLER, *map(random_cluster, range(6)))):
        lines: list[RecordLine] = []
        outcome = simulate_job(cluster, sync, steps_each=30, record=lines.append)
        for fragment in range(spec.averaging.fragments):
            own = list(of_optimizer(lines, str(fragment)))
            check_lines(own, spec, cluster.workers)
            replay(own, spec.policy(cluster.workers))
        with RecordWriter(tmp_path / str(number)) as writer:
            for line in lines:
                writer.write(line)
            writer.close(meta_of(outcome, cluster, 0))
    assert run(["check", str(tmp_path / "0")]) == 0


@pytest.mark.parametrize("sync", STREAMING)
@pytest.mark.parametrize("cluster", [EVENTFUL, INSTANT], ids=["network", "instant"])
def test_every_second_is_accounted_for(cluster: Cluster, sync: str) -> None:
    outcome = simulate_job(cluster, sync, steps_each=20)
    for worker in outcome.workers:
        parts = worker.computing_s + worker.waiting_s + worker.communicating_s
        assert parts == pytest.approx(worker.present_s)
        assert min(worker.computing_s, worker.waiting_s, worker.communicating_s) >= -1e-9
    assert 0 < outcome.efficiency <= 1 + 1e-12


def test_workers_with_smaller_batches_weigh_less() -> None:
    lines: list[RecordLine] = []
    simulate_job(replace(STRAGGLER, batches={1: 8}), "local:3", steps_each=6, record=lines.append)
    assert {line["worker"]: line["samples"] for line in lines if line["kind"] == "push"} == {0: 96, 1: 24, 2: 96, 3: 96}


DECOUPLED = (
    "diloco:4,quorum=2",
    "diloco:4,quorum=2,grace=0",
    "diloco:4,quorum=2,fragments=2,grace=1",
    "diloco:6,quorum=2,fragments=3,grace=1",  # two workers once waited for each other at the end, in two fragments
    "diloco:4,quorum=1,drop=1",
)


def test_a_decoupled_worker_waits_for_no_other() -> None:
    cluster = Cluster(workers=4, slow={3: 7.0}, crashes=(Crash(1, 33.5, noticed_after=20.0),))
    outcome = simulate_job(cluster, "diloco:10,quorum=2,grace=0", seconds=100)
    assert outcome.waiting == 0
    assert [worker.steps for worker in outcome.workers] == [100, 30, 100, 10]
    assert outcome.efficiency == pytest.approx((100 + 30 + 100 + 70) / (100 + 33.5 + 100 + 100))  # 3.5 and 30 never merged


def test_a_turn_is_left_out_while_the_push_before_is_not_answered() -> None:
    """An answer takes 2.5 of the 1 second that a block has: a push holds three blocks."""
    lines: list[RecordLine] = []
    cluster = Cluster(workers=2, step_time=0.5, link=Link(latency=1.25))
    simulate_job(cluster, "diloco:2,quorum=2", seconds=31, record=lines.append)
    pushes = [line for line in lines if line["kind"] == "push" and line["worker"] == 0]
    assert [line["count"] for line in pushes] == [2, *[6] * (len(pushes) - 1)]
    assert len(pushes) == 10


@pytest.mark.parametrize("sync", DECOUPLED)
def test_decoupled_records_check_and_replay(sync: str) -> None:
    spec = parse_spec(sync)
    for seed in range(8):
        cluster = random_cluster(seed)
        if cluster.workers == 1:
            continue
        lines: list[RecordLine] = []
        simulate_job(cluster, sync, seed=seed, steps_each=30, record=lines.append)
        for fragment in range(spec.averaging.fragments):
            own = list(of_optimizer(lines, str(fragment)))
            check_lines(own, spec, cluster.workers)
            replay(own, spec.policy(cluster.workers))


def test_with_a_quorum_of_all_and_unbounded_grace_it_takes_the_time_of_diloco() -> None:
    bound = simulate_job(EVENTFUL, "diloco:5", via="ps", steps_each=30)
    loose = simulate_job(EVENTFUL, "diloco:5,quorum=4,grace=inf", steps_each=30)
    assert loose.seconds == bound.seconds
    assert loose.updates == bound.updates


def test_the_command_simulates_records_and_checks_all_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    modes = ("local:8", "adacomm:4", "diloco:8,fragments=2,overlap=2", "diloco:8,quorum=2", "gossip:torus", "adpsgd:exp")
    options = [part for sync in modes for part in ("--sync", sync)]
    machines = ["--bandwidth", "100Mb/s", "--model", "10MB", "--step-time", "50ms", "--slow", "3:2"]
    assert run(["simulate", *options, *machines, "--steps-each", "24", "-q", "--record", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    for sync in modes:
        assert sync in shown
    records = sorted(path for path in tmp_path.iterdir())
    assert len(records) == len(modes)
    for record in records:
        assert run(["check", str(record)]) == 0


def test_a_recorded_run_with_blocks_gives_its_machines_back() -> None:
    """A block's seconds are those of its steps."""
    lines: list[RecordLine] = []
    simulate_job(speeds(1.0, 2.0), "local:5", steps_each=20, record=lines.append)
    cluster = cluster_from_record(lines, 2)
    assert cluster.batches == {0: 32, 1: 32}
    assert simulate_job(cluster, "bsp", steps_each=20).seconds == pytest.approx(40.0)


@pytest.mark.parametrize("sync", ["local:3", "local:4,after=3", "diloco:4,overlap=2", "diloco:3,quorum=2,drop=1"])
@pytest.mark.parametrize("via", ["auto", "ps"])
def test_every_local_step_is_merged_once_or_lost(sync: str, via: str) -> None:
    """What the figures say is what the record shows, on clusters on which everything happens."""
    for seed in range(40, 52):
        cluster = random_cluster(seed)
        if cluster.workers == 1:
            continue
        lines: list[RecordLine] = []
        outcome = simulate_job(cluster, sync, seed=seed, via=via, steps_each=25, record=lines.append)
        pending: dict[int, list[int]] = {}
        merged = 0
        for line in lines:
            if line["kind"] == "push":
                pending.setdefault(line["worker"], []).append(line.get("count", 1))
            elif line["kind"] == "discard":
                pending[line["worker"]].pop()
            elif line["kind"] == "apply" and line["server"] == 0:
                merged += sum(pending[worker].pop(0) for worker in line["workers"])
        assert outcome.steps == merged
        assert outcome.discarded == sum(line["kind"] == "discard" for line in lines)
        seconds = sum(worker.computing_s for worker in outcome.workers)
        assert outcome.efficiency * sum(worker.present_s for worker in outcome.workers) <= seconds + 1e-9


@pytest.mark.parametrize("sync", ["diloco:4,quorum=2", "diloco:4,quorum=3,grace=0", "diloco:6,fragments=2,overlap=2"])
@pytest.mark.parametrize("link", [Link(), Link(latency=1.7)])
def test_nothing_is_left_unmerged_when_workers_finish(sync: str, link: Link) -> None:
    cluster = Cluster(workers=4, slow={2: 1.3}, link=link)
    outcome = simulate_job(cluster, sync, steps_each=31)
    assert outcome.steps == 4 * 31
    assert outcome.efficiency * sum(worker.present_s for worker in outcome.workers) == pytest.approx(31 * 4.3)

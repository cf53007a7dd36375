"""Arrays under every mode: clocks of ranges, rounds, bounds, pushes under way, losses."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import check_record, until
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy import Fate, LossyJob, disturb
from sessions import within

from polytempo.launcher.job_facts import JobFacts
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.kv import KV, Array

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

ROWS = 11


def sometimes(copies: int, seed: int) -> Fate:
    """About each fourth message arrives this number of times; unlike each k-th, never in step with the repeats."""
    fates = {True: random.Random(seed), False: random.Random(seed + 100)}
    return lambda message, outward: copies if fates[outward].random() < 0.25 else 1


# Clocks.

Ranges = list[tuple[int, int, int]]  # worker, start, stop


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    pushes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, ROWS), st.integers(0, ROWS)), min_size=1, max_size=8),
    servers=st.integers(0, 3),
)
def clocks_are_those_of_single_keys(pushes: Ranges, servers: int) -> None:
    pushes = [(worker if servers else 0, min(a, b), max(a, b)) for worker, a, b in pushes]
    keys: list[dict[int, int]] = [{} for _ in range(ROWS)]
    newest, steps = [-1] * ROWS, [0, 0]
    for version, (worker, start, stop) in enumerate(pushes, start=1):
        for key in range(start, stop):
            keys[key][worker], newest[key] = steps[worker], version
        steps[worker] += 1
    spans = [(a, b) for a in range(ROWS) for b in (a + 1, (a + ROWS + 1) // 2, ROWS) if b > a]
    seen = played(pushes, servers, spans)
    for a, b in spans:
        lowest = {worker: min(own.get(worker, -1) for own in keys[a:b]) for worker in (0, 1)}
        assert {worker: seen[a, b][0].get(worker, -1) for worker in (0, 1)} == lowest, (a, b)
        assert seen[a, b][1] == max(newest[a:b]), (a, b)


def played(pushes: Ranges, servers: int, spans: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[Any, int]]:
    """The clocks and versions of spans after pushes in this order."""
    turns = [threading.Event() for _ in range(len(pushes) + 1)]
    turns[0].set()

    def work(session: Session) -> Any:
        kv = KV({"w": Array(ROWS)})
        for number, (worker, start, stop) in enumerate(pushes):
            if worker == session.rank:
                assert turns[number].wait(20)
                kv["w"].push(torch.ones(stop - start), start=start).result()
                turns[number + 1].set()
        assert turns[-1].wait(20)
        return {(a, b): (kv["w"].clock(a, b), kv["w"].version(a, b)) for a, b in spans}

    if not servers:
        return within(Session(None, JobFacts(1, (), "asp"), 0), work)
    with ThreadJob(2, servers, "asp") as job:
        first, second = job.run(work)
    assert first == second
    return first


def test_clocks_of_ranges_are_those_of_single_keys() -> None:
    clocks_are_those_of_single_keys()


# Modes.


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("add", [1 + 10 + 100, 10 + 100, 1]),
        ("sgd", [-(1 + 10 + 100) / 3, -(10 + 100) / 3, -1 / 3]),
        ("min", [-100, -100, -1]),
        ("max", [100, 100, 1]),
        ("assign", [100, 100, 1]),
    ],
)
def test_the_pushes_of_a_round_are_combined_as_the_rule_says(rule: str, wanted: list[float], servers: int) -> None:
    """Row 0 by all workers, row 1 by workers 1 and 2, row 2 by worker 0; the last is the one of the highest rank."""
    turns = [threading.Event() for _ in range(4)]
    turns[2].set()

    def work(session: Session) -> list[float]:
        options = {"lr": 1.0} if rule == "sgd" else {}
        kv = KV({"w": Array(4, rule=rule, dtype=torch.float64, **options)})
        rows = [0, 2] if session.rank == 0 else [0, 1]
        assert turns[session.rank].wait(20)  # worker 2 first, worker 0 last
        sign = -1 if rule == "min" else 1
        future = kv["w"].push([sign * 10.0**session.rank] * 2, rows=rows)
        until(lambda: job.sequencer.statistics[session.rank].steps == 1, "the push is there")
        turns[session.rank - 1].set()
        future.result()
        return kv["w"].pull(stop=3).result().tolist()

    with ThreadJob(3, servers, "bsp") as job:
        for got in job.run(work):
            assert got == pytest.approx(wanted, rel=1e-15)
        assert job.sequencer.clocks["0"].version == 1


def test_a_mean_is_weighted_by_samples_and_a_push_without_parts_counts_in_it() -> None:
    def work(session: Session) -> list[float]:
        kv = KV({"w": Array(2, rule="sgd", lr=1.0, dtype=torch.float64)})
        if session.rank == 2:
            kv.push(samples=4.0)
        else:
            kv["w"].push([8.0, float(session.rank)], samples=1.0 + 2 * session.rank)
        kv.finish()
        return kv["w"].pull().result().tolist()

    with ThreadJob(3, 2, "bsp") as job:
        for got in job.run(work):
            assert got == pytest.approx([-(1 * 8 + 3 * 8) / 8, -3 * 1 / 8], rel=1e-15)


@pytest.mark.parametrize(("sync", "lead"), [("bsp", 1), ("ssp:3", 4), ("ssp:0", 1)])
def test_a_fast_worker_is_held_where_the_mode_says(sync: str, lead: int, tmp_path: Path) -> None:
    def work(session: Session) -> float:
        kv = KV({"w": Array(4)})
        account = job.sequencer.statistics[0]
        if session.rank == 1:
            until(lambda: account.steps == lead and account.state == "waiting", "worker 0 is held")
        for _ in range(8):
            kv["w"].push(torch.ones(4))
        kv.finish()
        return float(kv.stats["waited_s"])

    with ThreadJob(2, 2, sync, record=tmp_path) as job:
        waited = job.run(work)
    lines = check_record(tmp_path)
    assert {"worker": 0, "step": lead} in [{k: h[k] for k in ("worker", "step")} for h in lines if h["kind"] == "hold"]
    assert waited[0] > 0


@pytest.mark.parametrize("delay", [1, 3])
def test_under_delay_at_most_so_many_pushes_and_one_are_under_way(delay: int) -> None:
    gate, under_way = threading.Event(), []

    def work(session: Session) -> torch.Tensor:
        kv = KV({"w": Array(4, dtype=torch.float64)})
        keeper = job.servers[0].executor.state
        carry_out = keeper.carry_out

        def held_up(*given: Any) -> Any:
            assert gate.wait(20)
            return carry_out(*given)

        keeper.carry_out = held_up  # type: ignore[method-assign]
        opener.start()
        for _ in range(12):
            kv["w"].push(torch.ones(4))
            under_way.append(len(kv._state.outstanding))
        kv.finish()
        return kv["w"].pull().result()

    def open_gate() -> None:
        until(lambda: len(under_way) == delay + 1, "the whole lead is taken")
        gate.set()

    opener = threading.Thread(target=open_gate)
    with ThreadJob(1, 1, f"delay:{delay}") as job:
        assert job.run(work)[0].tolist() == [12.0] * 4
    opener.join(20)
    assert under_way[: delay + 1] == list(range(1, delay + 2))
    assert max(under_way) == delay + 1


@pytest.mark.parametrize("sync", ["bsp", "ssp:2", "asp", "every:3", "dssp:1..3"])
def test_a_pull_after_a_push_of_the_same_worker_sees_it(sync: str) -> None:
    def work(session: Session) -> list[bool]:
        kv = KV({"w": Array(6, rule="max", dtype=torch.float64)})
        seen = []
        for step in range(6):
            kv["w"].push([float(step * 2 + session.rank + 1)], start=session.rank * 3)
            seen.append(kv["w"].pull(rows=[session.rank * 3]).result().item() == step * 2 + session.rank + 1)
        return seen

    with ThreadJob(2, 2, sync) as job:
        assert all(all(seen) for seen in job.run(work))


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:1", "delay:2"])
def test_what_is_lost_or_doubled_on_the_way_is_added_once(sync: str, copies: int) -> None:
    def work(session: Session) -> list[float]:
        kv = KV({"w": Array(7, dtype=torch.float64, cache_keys=True)})
        disturb(session, lambda shard: sometimes(copies, 2 * shard + session.rank))
        for step in range(8):
            kv["w"].push([1.0, 10.0, 100.0], rows=[0, 3, 5] if step % 2 else [1, 2, 6])
            assert len(kv._state.outstanding) <= (3 if sync == "delay:2" else 1)
        kv.finish()
        done.wait(20)
        return kv["w"].pull().result().tolist()

    done = threading.Barrier(2)
    with LossyJob(2, 2, sync, retry=0.02) as job:
        for got in job.run(work):
            assert got == [8, 8, 80, 80, 0, 800, 800]

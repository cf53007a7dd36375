"""Each mode live: records keep the mode's promises, leads are really taken, and a worker that is gone holds no other up."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_close, check_record, copied, made_gradients, made_params, set_gradients, until

from polytempo.records.files import read_meta
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(15), pytest.mark.both_wires]

MODES = [
    "bsp",
    "bsp+backup:1",
    "ssp:2",
    "dssp:1..4",
    "dssp-paper:1..4",
    "asp",
    "every:3",
    "every:3,wait=2",
    "delay:2",
]
WORKERS, STEPS, LR = 3, 10, 0.1
SHAPES = [(3, 2), (5,)]
START = made_params(SHAPES)
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=30 + worker) for worker in range(WORKERS)]


def made(session: Session, **options: str) -> tuple[list[torch.nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    return params, DistributedOptimizer(torch.optim.SGD(params, lr=LR), **options)  # type: ignore[arg-type]


def step_of(optimizer: DistributedOptimizer) -> int:
    return int(optimizer.stats["step"])


def pushed_in(lines: list[dict], worker: int) -> list[int]:
    return [line["step"] for line in lines if line["kind"] == "push" and line["worker"] == worker]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sync", MODES)
def test_the_record_of_unequal_workers_keeps_every_promise(sync: str, servers: int, tmp_path: Path) -> None:
    def work(session: Session) -> list[int]:
        params, optimizer = made(session)
        own = []
        for gradients in GRADIENTS[session.rank]:
            own.append(step_of(optimizer))
            set_gradients(params, gradients)
            optimizer.step()
        return own

    with ThreadJob(WORKERS, servers, sync, slow={2: 4.0}, hiccup=(0.2, 0.004), record=tmp_path) as job:
        taken = job.run(work)
    lines = check_record(tmp_path)
    assert [pushed_in(lines, worker) for worker in range(WORKERS)] == taken
    assert all(len(own) == STEPS for own in taken)
    if sync != "bsp+backup:1":
        assert taken == [list(range(STEPS))] * WORKERS
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["join"] == kinds["leave"] == WORKERS
    applied = STEPS * WORKERS - kinds["discard"]
    assert (
        sum(len(line["workers"]) for line in lines if line["kind"] == "apply" and line["server"] == servers - 1) == applied
    )
    meta = read_meta(tmp_path)
    assert meta["job"]["updates"] == kinds["apply"] / servers
    assert meta["exit_status"] == 0


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_side_clocks_and_second_optimizers_keep_their_promises_too(sync: str, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params, optimizer = made(session, apply="delta")
        others, second = made(session, sync="every:2")
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            set_gradients(others, gradients)
            optimizer.step()
            second.step()

    with ThreadJob(2, 2, sync, record=tmp_path, hiccup=(0.2, 0.004)) as job:
        job.run(work)
    check_record(tmp_path)
    expected = {"0": sync, "1": "every:2"} | ({"0/mean": sync} if sync == "bsp" else {})
    assert read_meta(tmp_path)["job"]["optimizers"] == expected


def test_a_slow_worker_sleeps_in_proportion_to_its_computing_however_many_optimizers_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock of the test's own: one second of computing before each pair of steps, at a third of the speed."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept.append(seconds)

    monkeypatch.setattr("polytempo.launcher.job_facts.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("polytempo.train.optimizer.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(session: Session) -> None:
        (params, first), (others, second) = made(session), made(session)
        for gradients in GRADIENTS[0][:5]:
            now[0] += 1.0
            set_gradients(params, gradients)
            set_gradients(others, gradients)
            first.step()
            second.step()

    with ThreadJob(1, 1, slow={0: 3.0}) as job:
        job.run(work)
    assert sum(slept) == pytest.approx(5 * 2.0)


# Worker 2 does not push before something has happened to worker 0.


@pytest.mark.parametrize(
    ("sync", "least", "most"),
    [("bsp", 1, 1), ("ssp:2", 3, 3), ("ssp:0", 1, 1), ("every:3", 3, 3), ("dssp:1..4", 2, 5)],
)
def test_a_fast_worker_takes_its_whole_lead_and_is_held_there(sync: str, least: int, most: int) -> None:
    held_after: list[int] = []

    def work(session: Session) -> float:
        params, optimizer = made(session)
        account = job.sequencer.statistics[0]
        if session.rank == 2:
            until(lambda: account.steps >= least and account.state == "waiting", "worker 0 is held")
            held_after.append(account.steps)
            assert 2 in account.waiting_for
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        return float(optimizer.stats["waited_s"])

    with ThreadJob(WORKERS, 2, sync) as job:
        waited = job.run(work)
    assert least <= held_after[0] <= most
    assert waited[0] > 0
    assert job.summary["steps"] == STEPS * WORKERS


@pytest.mark.parametrize("sync", ["asp", "delay:2", "bsp+backup:1", "every:3,wait=2"])
def test_modes_without_a_bound_let_a_worker_finish_before_another_has_begun(sync: str) -> None:
    def work(session: Session) -> int:
        params, optimizer = made(session)
        if session.rank == 2:
            until(lambda: job.sequencer.statistics[0].steps == STEPS, "worker 0 has made all its steps")
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        return int(job.sequencer.statistics[2].staleness_max)

    with ThreadJob(WORKERS, 2, sync) as job:
        stale = job.run(work)
    if sync == "bsp+backup:1":
        assert job.sequencer.statistics[2].discarded >= 1
        assert job.summary["staleness_max"] == 0
    else:
        assert stale[2] >= STEPS


def test_delay_lets_a_worker_run_ahead_of_its_own_answers_by_so_many_and_no_more() -> None:
    """The store's thread is kept busy, so that no answer comes: step() returns twice, and not a third time."""
    gate, steps = threading.Event(), []

    def work(session: Session) -> None:
        params, optimizer = made(session)
        keeper = job.servers[0].executor.state
        carry_out = keeper.carry_out

        def held_up(*given: Any) -> Any:
            assert gate.wait(20)
            return carry_out(*given)

        keeper.carry_out = held_up  # type: ignore[method-assign]
        for gradients in GRADIENTS[0][:4]:
            set_gradients(params, gradients)
            optimizer.step()
            steps.append(gate.is_set())
        optimizer.consolidate()

    with ThreadJob(1, 1, "delay:2") as job:
        worker = threading.Thread(target=lambda: job.run(work))
        worker.start()
        until(lambda: job.sequencer.statistics[0].steps == 3, "three pushes are made")
        gate.set()
        worker.join(20)
    assert steps == [False, False, True, True]


# Somebody is gone.


@pytest.mark.parametrize("sync", MODES)
def test_when_a_worker_fails_the_others_go_on(sync: str, tmp_path: Path) -> None:
    finished: dict[int, int] = {}

    def work(session: Session) -> None:
        params, optimizer = made(session)
        for number, gradients in enumerate(GRADIENTS[session.rank]):
            if session.rank == 1 and number == 3:
                raise ArithmeticError("worker 1 has had enough")
            set_gradients(params, gradients)
            optimizer.step()
        finished[session.rank] = step_of(optimizer)

    with ThreadJob(WORKERS, 2, sync, record=tmp_path) as job, pytest.raises(ArithmeticError):
        job.run(work)
    assert set(finished) == {0, 2}
    lines = check_record(tmp_path)
    reasons = {line["worker"]: line["reason"] for line in lines if line["kind"] == "leave"}
    assert reasons == {0: "finished", 1: "failed", 2: "finished"}
    assert [account.state for account in job.sequencer.statistics] == ["finished", "failed", "finished"]


def test_after_a_worker_is_gone_the_mean_is_over_the_rest() -> None:
    results: dict[int, list[torch.Tensor]] = {}

    def work(session: Session) -> None:
        params, optimizer = made(session)
        for number, gradients in enumerate(GRADIENTS[session.rank]):
            if session.rank == 1 and number == 3:
                return
            set_gradients(params, gradients)
            optimizer.step()
        results[session.rank] = [param.detach().clone() for param in params]

    with ThreadJob(WORKERS, 2) as job:
        job.run(work)
    wanted = []
    for index, start in enumerate(START):
        all_three = sum(GRADIENTS[worker][step][index] for worker in range(3) for step in range(3)) / 3
        two = sum(GRADIENTS[worker][step][index] for worker in (0, 2) for step in range(3, STEPS)) / 2
        wanted.append(start.detach() - LR * (all_three + two))
    for rank in (0, 2):
        assert_close(results[rank], wanted, rtol=1e-9)

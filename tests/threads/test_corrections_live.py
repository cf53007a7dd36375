"""Corrections for stale gradients in live jobs: plain loops in the order of the record, nothing for one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    copied,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained,
    until,
)
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

SHAPES = [(3, 2), (5,)]
START = made_params(SHAPES)
STEPS, LR = 6, 0.05
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=70 + worker) for worker in range(3)]
#: Who pushes when: worker 2 is late, and then comes often.
ORDER = [0, 1, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 0, 1, 1, 2, 2, 2]

Flat = list[torch.Tensor]
#: Changes weights by one gradient: (weights, gradient, those it was taken on, staleness, rate).
Reference = Callable[[Flat, Flat, Flat, int, float], Flat]


def made(session: Session, lr: float = 1.0, **options: Any) -> tuple[list[nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    return params, DistributedOptimizer(torch.optim.SGD(params, lr=lr), **options)


def values(params: list[nn.Parameter]) -> Flat:
    return [param.detach().clone() for param in params]


def played(
    sync: str, servers: int, directory: Path, momentum: float = 0.0
) -> tuple[Flat, list[dict[str, Any]], dict[str, Any]]:
    """Three workers push their gradients in the order `ORDER`: the end, the record, and the summary."""
    turns = [threading.Event() for _ in range(len(ORDER) + 1)]
    turns[0].set()
    ends: list[Flat] = []

    def work(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=LR, momentum=momentum))
        own = iter(GRADIENTS[session.rank])
        for number, worker in enumerate(ORDER):
            if worker == session.rank:
                assert turns[number].wait(20)
                set_gradients(params, next(own))
                optimizer.step()
                turns[number + 1].set()
        assert turns[-1].wait(20)
        optimizer.consolidate()
        ends.append(values(params))
        done.wait(20)  # who leaves changes the others' rate

    done = threading.Barrier(3)
    with ThreadJob(3, servers, sync, record=directory) as job:
        job.run(work)
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(end, ends[0], strict=True))
    return ends[0], check_record(directory), job.summary


def replayed(lines: list[dict[str, Any]], step: Reference, rate: Callable[[int], float] = lambda stale: 1 / 3) -> Flat:
    """A plain loop over the updates of a record. A worker holds what there was after its push before."""
    now = [start.detach().clone() for start in START]
    read = [now, now, now]
    counts = [0, 0, 0]
    for line in [one for one in lines if one["kind"] == "discard" or (one["kind"] == "apply" and one["server"] == 0)]:
        worker = line["worker"] if line["kind"] == "discard" else line["workers"][0]
        gradient, counts[worker] = GRADIENTS[worker][counts[worker]], counts[worker] + 1
        if line["kind"] == "apply":
            stale = line["staleness"][0]
            now = step(now, gradient, read[worker], stale, LR * rate(stale))
        read[worker] = now
    return now


def plain(now: Flat, gradient: Flat, read: Flat, stale: int, rate: float) -> Flat:
    return [one - rate * g for one, g in zip(now, gradient, strict=True)]


def staleness(lines: list[dict[str, Any]]) -> list[int]:
    return [line["staleness"][0] for line in lines if line["kind"] == "apply" and line["server"] == 0]


def stale_by_hand() -> list[int]:
    last, result = [0, 0, 0], []
    for version, worker in enumerate(ORDER):
        result.append(version - last[worker])
        last[worker] = version + 1
    return result


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("sync", "rate"),
    [
        ("asp", lambda stale: 1 / 3),
        ("asp,lr=staleness", lambda stale: 1 / 3 / max(1, stale)),
        ("asp,decay=0.7", lambda stale: 0.7**stale / 3),
        ("ssp:9,decay=0.7,lr=staleness,scale=1", lambda stale: 0.7**stale / max(1, stale)),
    ],
)
def test_a_rate_falls_with_staleness(sync: str, rate: Callable[[int], float], servers: int, tmp_path: Path) -> None:
    end, lines, _ = played(sync, servers, tmp_path)
    assert staleness(lines) == stale_by_hand()
    assert max(staleness(lines)) > 3
    assert_close(end, replayed(lines, plain, rate), rtol=1e-12)


@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_too_stale_is_dropped_and_counted(servers: int, tmp_path: Path) -> None:
    end, lines, summary = played("asp,drop=2", servers, tmp_path)
    dropped = [(line["worker"], line["step"], line["reason"]) for line in lines if line["kind"] == "discard"]
    assert dropped
    assert all(reason.startswith("staleness ") and reason.endswith(" is above 2") for _, _, reason in dropped)
    assert max(staleness(lines)) <= 2
    assert summary["discarded"] == len(dropped)
    assert summary["steps"] == summary["updates"] == len(ORDER) - len(dropped)
    assert_close(end, replayed(lines, plain), rtol=1e-12)


@pytest.mark.parametrize("servers", [1, 2])
def test_momentum_leaves_out_what_staleness_brings(servers: int, tmp_path: Path) -> None:
    end, lines, _ = played("asp,momentum=async", servers, tmp_path, momentum=0.9)
    velocity: list[torch.Tensor | None] = [None] * len(SHAPES)
    seen: list[int] = []
    used = []

    def step(now: Flat, gradient: Flat, read: Flat, stale: int, rate: float) -> Flat:
        seen.append(stale)
        mean = sum(seen) / len(seen)
        momentum = min(max(1 - (1 + mean) * (1 - 0.9), 0.0), 0.9)
        used.append(momentum)
        for i, g in enumerate(gradient):
            velocity[i] = g if velocity[i] is None else momentum * velocity[i] + g
        return [one - rate * v for one, v in zip(now, velocity, strict=True)]  # type: ignore[operator]

    assert_close(end, replayed(lines, step), rtol=1e-11)
    assert used[0] == 0.9
    assert min(used) < 0.8


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("sync", "adaptive"), [("asp,dc=0.4", False), ("asp,dca=2,dcm=0.8", True), ("ssp:9,dc=0.4", False)])
def test_a_gradient_is_bent_towards_the_weights_it_is_applied_to(
    sync: str, adaptive: bool, servers: int, tmp_path: Path
) -> None:
    end, lines, _ = played(sync, servers, tmp_path)
    squares = [torch.zeros_like(start) for start in START]

    def step(now: Flat, gradient: Flat, read: Flat, stale: int, rate: float) -> Flat:
        result = []
        for i, g in enumerate(gradient):
            squares[i] = 0.8 * squares[i] + 0.2 * g * g
            strength = 2 / (squares[i] + 1e-7).sqrt() if adaptive else 0.4
            result.append(now[i] - rate * (g + strength * g * g * (now[i] - read[i])))
        return result

    assert_close(end, replayed(lines, step), rtol=1e-11)
    assert not torch.allclose(end[0], replayed(lines, plain)[0], rtol=1e-4)


CORRECTIONS = ["lr=staleness", "decay=0.5", "drop=0", "momentum=async", "dc=0.4", "dca=2", "lr=staleness,decay=0.9,dc=1"]


@pytest.mark.parametrize("options", CORRECTIONS)
def test_for_one_worker_a_correction_is_nothing_to_the_bit(options: str) -> None:
    model, batches = small_model(), small_batches(8, [4])

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    ends = []
    for sync in ("asp", f"asp,{options}"):
        with ThreadJob(1, 2, sync) as job:
            ends.append(job.run(lambda session: trained(session, model, make, batches)[0])[0])
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("servers", [1, 2])
def test_under_delay_each_push_is_compensated_for_the_weights_it_was_made_on(servers: int) -> None:
    """One worker, two pushes under way: each gradient was taken on weights that lack the two before it."""
    read_at: list[int] = []

    def work(session: Session) -> Flat:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=LR))
        for gradients in GRADIENTS[0]:
            read_at.append(optimizer._reducer.client_state.version)  # type: ignore[union-attr]
            set_gradients(params, gradients)
            optimizer.step()
        optimizer.consolidate()
        return values(params)

    with ThreadJob(1, servers, "delay:2,dc=0.4") as job:
        end = job.run(work)[0]
    path = [[start.detach() for start in START]]
    for version, gradients in zip(read_at, GRADIENTS[0], strict=True):
        pairs = zip(path[-1], gradients, path[version], strict=True)
        path.append([now - LR * (g + 0.4 * g * g * (now - read)) for now, g, read in pairs])
    assert_close(end, path[-1], rtol=1e-11)


def test_a_worker_that_leaves_is_forgotten() -> None:
    def work(session: Session) -> None:
        params, optimizer = made(session, lr=LR)
        set_gradients(params, GRADIENTS[session.rank][0])
        optimizer.step()

    with ThreadJob(2, 2, "asp,dc=0.4") as job:
        job.run(work)
        until(
            lambda: all(not s.executor.state.optimizer_shards["0"].staleness_correction._given for s in job.servers),
            "nothing is kept",
        )


def test_filtered_answers_are_compensated_for_what_the_worker_was_told() -> None:
    """Worker 0 pushes between the answer to worker 1 and its next push."""
    turn, back = threading.Event(), threading.Event()

    def held() -> torch.Tensor:
        return job.servers[0].executor.state.optimizer_shards["0"].values["float64"].clone()

    def flat(tensors: Flat) -> torch.Tensor:
        return torch.cat([one.reshape(-1) for one in tensors])

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor] | None:
        params, optimizer = made(session, lr=LR, compression={"pull": "bf16"})
        if session.rank == 0:
            assert turn.wait(20)
            set_gradients(params, GRADIENTS[0][0])
            optimizer.step()
            back.set()
            return None
        set_gradients(params, GRADIENTS[1][0])
        optimizer.step()
        told = flat(values(params))
        turn.set()
        assert back.wait(20)
        before, g = held(), flat(GRADIENTS[1][1])
        set_gradients(params, GRADIENTS[1][1])
        optimizer.step()
        return held(), before - LR * (g + 0.4 * g * g * (before - told))

    with ThreadJob(2, 1, "asp,scale=1,dc=0.4") as job:
        got, wanted = job.run(work)[1]  # type: ignore[misc]
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("sync", "optimizer", "options", "reason"),
    [
        ("asp,dc=0.4", torch.optim.SGD, {"apply": "delta"}, "leave apply='delta' out"),
        ("asp,momentum=async", torch.optim.Adam, {}, "needs an optimizer with a momentum"),
    ],
)
def test_what_cannot_be_corrected_is_refused(sync: str, optimizer: Any, options: dict[str, str], reason: str) -> None:
    with ThreadJob(1, 1, sync) as job, pytest.raises(UsageError, match=reason):
        job.run(lambda session: DistributedOptimizer(optimizer(copied(START), lr=0.1), **options))


# With local steps.


def test_staleness_counts_the_updates_of_others_since_the_fetch(tmp_path: Path) -> None:
    """Worker 0 pushes alone at first, without fetching; then worker 1 pushes thrice; then worker 0 once more."""
    turns = [threading.Event() for _ in range(3)]

    def work(session: Session) -> None:
        params, optimizer = made(session)
        if session.rank == 0:
            for step in range(4):
                if step == 3:
                    assert turns[1].wait(20)
                set_gradients(params, GRADIENTS[0][step])
                optimizer.step()
            turns[0].set()
            return
        until(lambda: job.sequencer.statistics[0].steps == 3, "three pushes")
        for step in range(3):
            set_gradients(params, GRADIENTS[1][step])
            optimizer.step()
        optimizer.consolidate()
        turns[1].set()
        assert turns[0].wait(20)

    with ThreadJob(2, 1, "downpour:push=1,fetch=100", record=tmp_path) as job:
        job.run(work)
    stale = [(line["workers"][0], line["staleness"][0]) for line in check_record(tmp_path) if line["kind"] == "apply"]
    assert stale == [(0, 0)] * 3 + [(1, 3)] * 3 + [(0, 3)]


def test_a_dropped_push_does_not_overwrite_local_progress() -> None:
    def work(session: Session) -> list[list[torch.Tensor]]:
        params, optimizer = made(session)
        if session.rank == 1:
            for gradients in GRADIENTS[1][:3]:
                set_gradients(params, gradients)
                optimizer.step()
            optimizer.consolidate()
            pushed.set()
            done.wait(20)
            return []
        assert pushed.wait(20)
        path = [values(params)]
        for gradients in GRADIENTS[0][:6]:
            set_gradients(params, gradients)
            optimizer.step()
            path.append(values(params))
        done.set()
        return path

    pushed, done = threading.Event(), threading.Event()
    with ThreadJob(2, 2, "downpour:push=1,fetch=100,drop=0,scale=1") as job:
        path = job.run(work)[0]
    for step in range(6):
        wanted = [one - gradient for one, gradient in zip(path[step], GRADIENTS[0][step], strict=True)]
        assert_close(path[step + 1], wanted, rtol=1e-12)

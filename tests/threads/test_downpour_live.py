"""Downpour in live jobs: plain SGD where it should be, every gradient pushed once, fetches between steps, warm starts."""

from __future__ import annotations

import random
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, check_record, copied, made_gradients, made_params, set_gradients, small_model, until
from lossy import LossyJob, disturb
from torch import nn

from polytempo.errors import UsageError
from polytempo.records.files import read_meta
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.downpour import DownpourUpdate
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

SHAPES = [(3, 2), (5,)]
START = made_params(SHAPES)
STEPS = 14
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=70 + worker) for worker in range(3)]


def made(session: Session, lr: float = 1.0, **options: Any) -> tuple[list[nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    return params, DistributedOptimizer(torch.optim.SGD(params, lr=lr), **options)


def values(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def end_of(job: ThreadJob) -> list[torch.Tensor]:
    """What the servers hold when the job has ended: an update that no worker waits for may be made last."""
    flat = torch.cat([server.executor.state.optimizer_shards["0"].values["float64"].clone() for server in job.servers])
    parts = flat.split([param.numel() for param in START])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def total(workers: int, steps: int = STEPS) -> list[torch.Tensor]:
    return [sum(own[step][i] for own in GRADIENTS[:workers] for step in range(steps)) for i in range(len(SHAPES))]


# One worker: plain SGD.


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "sync", ["downpour:push=1,fetch=1", "downpour:push=3,fetch=1", "downpour:push=2,fetch=5", "downpour:fetch=3"]
)
def test_one_worker_is_plain_sgd_whatever_is_pushed_and_fetched_when(sync: str, servers: int) -> None:
    generator = torch.Generator().manual_seed(4)
    batches = [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(200)]

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        path = []
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            path.append([param.detach().clone() for param in model.parameters()])
        return path

    def work(session: Session) -> list[list[torch.Tensor]]:
        model = small_model()
        return trained(model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))

    with ThreadJob(1, servers, sync) as job:
        got = job.run(work)[0]
    model = small_model()
    wanted = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, rtol=1e-12)


@pytest.mark.parametrize("late", [1, 4])
def test_one_worker_is_plain_sgd_when_everything_arrives_late(late: int) -> None:
    """Fetched values lack pushes that are under way, and pushes that were made since: they are added again, each at the
    rate it was made with."""
    rates = [0.1 / (1 + step % 7) for step in range(5 * STEPS)]

    def work(session: Session) -> list[list[torch.Tensor]]:
        params, optimizer = made(session, lr=0.1)
        client = session.client
        assert client is not None
        hear, kept = client.connections._handle, deque[Any]()

        def hear_late(shard: int, message: Any, buffers: Any) -> None:
            kept.append((shard, message, [buffer.copy() for buffer in buffers]))
            while len(kept) > (late if not waits[0] else 0):
                hear(*kept.popleft())

        waits = [False]
        wait = client.wait

        def wait_for_all(*args: Any) -> None:
            waits[0] = True
            while kept:
                hear(*kept.popleft())
            wait(*args)
            waits[0] = False

        client.connections._handle, client.wait = hear_late, wait_for_all  # type: ignore[method-assign]
        path = []
        for rate, gradients in zip(rates, GRADIENTS[0] * 5, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            set_gradients(params, gradients)
            optimizer.step()
            path.append(values(params))
        installed.append(optimizer._reducer.client_state.version)  # type: ignore[union-attr]
        return path

    installed: list[int] = []
    with ThreadJob(1, 2, "downpour:push=1,fetch=1") as job:
        path = job.run(work)[0]
    plain = [start.detach().clone() for start in START]
    for step, gradients in enumerate(GRADIENTS[0] * 5):
        plain = [one - rates[step] * gradient for one, gradient in zip(plain, gradients, strict=True)]
        assert_close(path[step], plain, rtol=1e-12)
    assert installed[0] > 1


# Every gradient is pushed once.


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "sync", ["downpour:push=1,fetch=2", "downpour:push=5,fetch=3", "downpour:push=4,fetch=100", "downpour:push=100"]
)
def test_the_sum_of_all_pushes_is_the_sum_of_all_gradients_the_last_few_too(sync: str, servers: int, tmp_path: Path) -> None:
    def work(session: Session) -> int:
        params, optimizer = made(session)
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        return int(optimizer.stats["step"])

    with ThreadJob(3, servers, f"{sync},scale=1", record=tmp_path) as job:
        assert job.run(work) == [STEPS] * 3
    end = end_of(job)
    wanted = [start.detach() - sums for start, sums in zip(START, total(3), strict=True)]
    assert_close(end, wanted, rtol=1e-10)
    check_record(tmp_path)
    assert job.summary["steps"] == 3 * STEPS


def test_a_skipped_step_is_not_pushed_and_still_counts() -> None:
    skipped = {0, 1, 2, 6, 7, 11, 13}

    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session)
        for step, gradients in enumerate(GRADIENTS[0]):
            set_gradients(params, gradients)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(step in skipped))
            optimizer.step()
        return values(params)

    with ThreadJob(1, 2, "downpour:push=3,fetch=2") as job:
        here = job.run(work)[0]
    end = end_of(job)
    made_of = [sum(g[i] for step, g in enumerate(GRADIENTS[0]) if step not in skipped) for i in range(len(SHAPES))]
    wanted = [start.detach() - sums for start, sums in zip(START, made_of, strict=True)]
    assert_close(end, wanted, rtol=1e-10)
    assert_close(here, wanted, rtol=1e-10)
    assert job.summary["steps"] == STEPS


def test_a_parameter_without_a_gradient_in_some_steps_has_the_sum_of_the_others() -> None:
    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session)
        for step, (first, second) in enumerate(GRADIENTS[0]):
            set_gradients(params, [first if step % 3 else None, second if step % 4 > 1 else None])
            optimizer.step()
        return values(params)

    with ThreadJob(1, 2, "downpour:push=3,fetch=1") as job:
        here = job.run(work)[0]
    end = end_of(job)
    first = sum(g[0] for step, g in enumerate(GRADIENTS[0]) if step % 3)
    second = sum(g[1] for step, g in enumerate(GRADIENTS[0]) if step % 4 > 1)
    wanted = [start.detach() - sums for start, sums in zip(START, (first, second), strict=True)]
    assert_close(end, wanted, rtol=1e-10)
    assert_close(here, wanted, rtol=1e-10)


@pytest.mark.parametrize("copies", [0, 2])
def test_what_is_lost_or_doubled_on_the_way_is_applied_once(copies: int) -> None:
    def work(session: Session) -> None:
        params, optimizer = made(session)
        fates = [random.Random(session.rank + 10 * direction) for direction in (0, 1)]
        disturb(session, lambda shard: lambda message, outward: copies if fates[outward].random() < 0.2 else 1)
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()

    with LossyJob(2, 2, "downpour:push=2,fetch=3,scale=1", retry=0.05) as job:
        job.run(work)
    end = end_of(job)
    assert_close(end, [start.detach() - sums for start, sums in zip(START, total(2), strict=True)], rtol=1e-10)


def test_adagrad_on_the_servers_is_that_of_a_plain_loop_over_sums() -> None:
    push, lr, eps = 3, 0.3, 1e-10

    def work(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.Adagrad(params, lr=lr, eps=eps))
        for gradients in GRADIENTS[0]:
            set_gradients(params, gradients)
            optimizer.step()

    with ThreadJob(1, 2, f"downpour:push={push},fetch=2") as job:
        job.run(work)
    end = end_of(job)
    for index, start in enumerate(START):
        flat, squares = start.detach().clone(), torch.zeros_like(start)
        for begin in range(0, STEPS, push):
            gradient = sum(g[index] for g in GRADIENTS[0][begin : begin + push])
            squares = squares + gradient**2
            flat = flat - lr * gradient / (squares.sqrt() + eps)
        torch.testing.assert_close(end[index], flat, rtol=1e-12, atol=1e-12)


# What a worker sees, and when.


def test_values_are_installed_at_step_boundaries_and_local_progress_goes_on_between() -> None:
    other_done = threading.Event()

    def work(session: Session) -> list[list[torch.Tensor]]:
        params, optimizer = made(session)
        if session.rank == 1:
            until(lambda: job.sequencer.statistics[0].steps >= 4, "worker 0 has made four steps")
            for gradients in GRADIENTS[1][:4]:
                set_gradients(params, gradients)
                optimizer.step()
            optimizer.consolidate()
            other_done.set()
            return []
        path = [values(params)]
        for step, gradients in enumerate(GRADIENTS[0][:10]):
            set_gradients(params, gradients)
            if step == 5:
                assert other_done.wait(20)
            before = values(params)
            optimizer._reducer.client.poll()  # type: ignore[union-attr]  # whatever has come
            assert all(torch.equal(one, other) for one, other in zip(before, values(params), strict=True))
            optimizer.step()
            path.append(values(params))
        fetch = optimizer._update._fetch  # type: ignore[attr-defined]  # None: it came at once
        until(lambda: session.client.poll() or fetch is None or fetch.answers is not None, "it is there")  # type: ignore
        set_gradients(params, GRADIENTS[0][10])
        optimizer.step()
        return [*path, values(params)]

    with ThreadJob(2, 2, "downpour:push=1,fetch=10,scale=1") as job:
        path = job.run(work)[0]
    for step in range(9):
        wanted = [one - gradient for one, gradient in zip(path[step], GRADIENTS[0][step], strict=True)]
        assert_close(path[step + 1], wanted, rtol=1e-12)
    sums = [own + sum(g[i] for g in GRADIENTS[1][:4]) for i, own in enumerate(total(1, 11))]
    assert_close(path[11], [start.detach() - one for start, one in zip(START, sums, strict=True)], rtol=1e-10)


def test_what_is_kept_of_pushes_does_not_grow_between_fetches() -> None:
    def work(session: Session) -> int:
        params, optimizer = made(session)
        kept = 0
        for gradients in GRADIENTS[0] * 4:
            set_gradients(params, gradients)
            optimizer.step()
            assert isinstance(optimizer._update, DownpourUpdate)
            kept = max(kept, len(optimizer._update._sent))
        return kept

    with ThreadJob(1, 1, "downpour:push=1,fetch=1000") as job:
        assert job.run(work)[0] <= 3


def test_a_warm_start_is_one_worker_alone_and_the_others_begin_with_its_values(tmp_path: Path) -> None:
    warm = 6

    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session)
        first = values(params)
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        return first

    with ThreadJob(3, 2, f"downpour:push=2,fetch=2,warm={warm},scale=1", record=tmp_path) as job:
        firsts = job.run(work)
    lines = check_record(tmp_path)
    pushes = [line["worker"] for line in lines if line["kind"] == "push"]
    assert pushes[: warm // 2] == [0] * (warm // 2)
    held = {line["worker"]: line["reason"] for line in lines if line["kind"] == "hold" and "warm start" in line["reason"]}
    assert set(held) == {1, 2}
    warmed = [start.detach() - sums for start, sums in zip(START, total(1, warm), strict=True)]
    at = {line["worker"]: i for i, line in enumerate(lines) if line["kind"] == "release" and line["step"] == 0}
    for rank in (1, 2):
        before = [line for line in lines[: at[rank]] if line["kind"] == "apply" and line["server"] == 0]
        assert len(before) >= warm // 2
        if len(before) == warm // 2:
            assert_close(firsts[rank], warmed, rtol=1e-10)


def test_a_budget_counts_local_steps() -> None:
    def work(session: Session) -> int:
        params, optimizer = made(session)
        while not session.client.stop:  # type: ignore[union-attr]
            set_gradients(params, GRADIENTS[session.rank][0])
            optimizer.step()
            assert optimizer.stats["step"] < 1000
        return int(optimizer.stats["step"])

    with ThreadJob(2, 1, "downpour:push=5,fetch=1", limits=Limits(steps=40)) as job:
        steps = job.run(work)
    assert 40 <= sum(steps) < 40 + 4 * 10
    assert job.summary["steps"] == sum(steps)


def test_a_worker_that_dies_takes_only_its_unsent_sum_with_it(tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params, optimizer = made(session)
        for step, gradients in enumerate(GRADIENTS[session.rank]):
            if session.rank == 1 and step == 8:
                until(lambda: job.sequencer.statistics[1].steps == 6, "its two pushes are at every server")
                raise ArithmeticError("enough")
            set_gradients(params, gradients)
            optimizer.step()

    with ThreadJob(2, 2, "downpour:push=3,fetch=2,scale=1", record=tmp_path) as job, pytest.raises(ArithmeticError):
        job.run(work)
    end = end_of(job)
    sums = [a + sum(g[i] for g in GRADIENTS[1][:6]) for i, a in enumerate(total(1))]
    assert_close(end, [start.detach() - one for start, one in zip(START, sums, strict=True)], rtol=1e-10)
    check_record(tmp_path)
    assert read_meta(tmp_path)["job"]["steps"] == STEPS + 6


@pytest.mark.parametrize(
    ("sync", "options"), [("downpour", {"apply": "delta"}), ("downpour,dc=0.04", {}), ("downpour,dca=2", {})]
)
def test_what_does_not_go_together_is_refused(sync: str, options: dict[str, str]) -> None:
    with ThreadJob(1, 1, sync) as job, pytest.raises(UsageError, match="downpour"):
        job.run(lambda session: made(session, **options))

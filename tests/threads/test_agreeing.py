"""What workers agree on before or instead of a step: clipping, skipped steps, numbers that are none, buffers."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from helpers import (
    assert_close,
    assert_equal,
    copied,
    joined,
    loss_of,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained_alone,
    until,
    weights,
)
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]


@pytest.mark.long
@pytest.mark.parametrize("apply", ["server", "delta"])
@pytest.mark.parametrize("servers", [1, 2])
def test_synchronize_clip_step_is_one_process_that_clips(servers: int, apply: str) -> None:
    model, data = small_model(), small_batches(20, (2, 5, 3))

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.Adam(mine.parameters(), lr=0.01), apply=apply)
        for step in data:
            optimizer.zero_grad()
            batch = step[session.rank]
            loss_of(mine, batch).backward()
            optimizer.synchronize(samples=len(batch[0]))
            norm = torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.2)
            assert norm > 0.2
            optimizer.step()
        return weights(mine)

    alone = copy.deepcopy(model)
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in data:
        optimizer.zero_grad()
        loss_of(alone, joined(step)).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.2)
        optimizer.step()
    with ThreadJob(3, servers) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, weights(alone))


def test_synchronize_makes_grad_the_mean_of_all() -> None:
    start, gradients = made_params([(3, 2)]), [made_gradients([(3, 2)], 1, seed)[0] for seed in (5, 6)]

    def work(session: Session) -> torch.Tensor:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, gradients[session.rank])
        optimizer.synchronize()
        assert_equal([params[0].detach()], [start[0].detach()])
        grad = params[0].grad
        assert grad is not None
        return grad.clone()

    with ThreadJob(2, 2) as job:
        results = job.run(work)
    assert_close(results, [(gradients[0][0] + gradients[1][0]) / 2] * 2)


@pytest.mark.parametrize("apply", ["server", "delta"])
def test_a_step_that_one_workers_scaler_skips_is_skipped_by_the_whole_round(apply: str) -> None:
    """Worker 1's gradient overflows in step 2: no worker's weights move then, and every worker's clock does."""
    model, data = small_model(dtype=torch.float64), small_batches(5, (4, 4))

    def work(session: Session) -> tuple[list[list[torch.Tensor]], list[int], float]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9), apply=apply)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        history, clock = [], []
        for number, step in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(mine, step[session.rank])).backward()
            if (number, session.rank) == (2, 1):
                mine[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            history.append(weights(mine))
            clock.append(optimizer.stats["step"])
        return history, clock, scaler.get_scale()

    with ThreadJob(2, 2) as job:
        results = job.run(work)
    wanted = trained_alone(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), data[:2] + data[3:])
    for history, clock, _ in results:
        assert clock == [1, 2, 3, 4, 5]
        assert_equal(history[2], history[1])
        assert_close(history[4], wanted)
    assert [scale for _, _, scale in results] == [1024.0, 512.0]


def test_under_asp_a_skipped_step_counts_for_the_clock_and_changes_nothing() -> None:
    start, gradients = made_params([(3,)]), made_gradients([(3,)], 3)

    def work(session: Session) -> tuple[torch.Tensor, int]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, step in enumerate(gradients):
            loss = scaler.scale((params[0] * step[0]).sum() * (float("inf") if number == 1 else 1.0))
            optimizer.zero_grad()
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        return params[0].detach(), optimizer.stats["step"]

    with ThreadJob(1, 1, "asp") as job:
        ((got, step),) = job.run(work)
    assert step == 3
    assert_close([got], [start[0].detach() - 0.1 * (gradients[0][0] + gradients[2][0])], rtol=1e-9)


def test_gradients_that_are_not_finite_are_counted() -> None:
    start, gradients = made_params([(3,), (2,)]), made_gradients([(3,), (2,)], 4)

    def work(session: Session) -> int:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        for number, step in enumerate(gradients):
            set_gradients(params, step)
            if session.rank == 1 and number in (1, 3):
                params[1].grad[0] = (float("nan"), float("inf"))[number // 2]
            optimizer.step()
        return int(optimizer.stats["nonfinite"])

    with ThreadJob(2, 2) as job:
        assert job.run(work) == [0, 2]
    assert [account.nonfinite for account in job.sequencer.statistics] == [0, 2]
    assert job.summary["nonfinite"] == 2


def test_gradients_that_are_not_finite_can_be_refused_by_name() -> None:
    start = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]

    def work(session: Session) -> None:
        params = copied(start)
        named = [("first", params[0]), ("second", params[1])]
        inner = torch.optim.SGD(params, lr=0.1)
        optimizer = DistributedOptimizer(inner, named_parameters=named, nonfinite="refuse")
        set_gradients(params, [torch.ones(3), torch.ones(2)])
        optimizer.step()
        params[1].grad[1] = float("nan")
        optimizer.step()

    with ThreadJob(1) as job, pytest.raises(UsageError, match="worker 0, step 1: second has a gradient that is not finite"):
        job.run(work)


# Buffers.


def normed_model() -> nn.Module:
    return made_from_seed(5, lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))).double()


@pytest.mark.parametrize("buffers", ["local", "mean"])
def test_buffers_stay_local_and_are_merged_at_consolidate_when_asked(buffers: str) -> None:
    model, data = normed_model(), small_batches(4, (6, 6))
    both = threading.Barrier(2)

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor, int]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine, buffers=buffers)
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        before = mine[1].running_mean.clone()
        both.wait(20)
        optimizer.consolidate()
        both.wait(20)
        return before, mine[1].running_mean.clone(), int(mine[1].num_batches_tracked)

    with ThreadJob(2, 2) as job:
        (one, one_after, count), (other, other_after, _) = job.run(work)
    assert not torch.allclose(one, other)
    assert count == 4
    if buffers == "local":
        assert_equal([one_after, other_after], [one, other])
    else:
        assert_close([one_after, other_after], [(one + other) / 2] * 2)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("way", ["server", "delta", "synchronize"])
def test_what_a_late_worker_brings_to_backed_up_rounds_changes_nothing(way: str) -> None:
    """In round 0 all bring the same; rounds 1 to 3 are of workers 0 and 1; then worker 2 comes with its step 1."""
    start = made_params([(3, 2)])
    gradients = [made_gradients([(3, 2)], 4, seed) for seed in (5, 6, 7)]
    for own in gradients:
        own[0] = gradients[0][0]
    late, begun = threading.Event(), threading.Barrier(3)

    def work(session: Session) -> tuple[list[torch.Tensor], int]:
        params = copied(start)
        apply = "delta" if way == "delta" else "server"
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), apply=apply)
        for number, step in enumerate(gradients[session.rank][: 2 if session.rank == 2 else 4]):
            if number == 1:
                begun.wait(10)
            if (session.rank, number) == (2, 1):
                until(lambda: job.sequencer.clocks["0"].version == 4, "the others have made four rounds")
            set_gradients(params, step)
            if way == "synchronize":
                optimizer.synchronize()
            optimizer.step()
        if session.rank == 2:
            late.set()
        assert late.wait(10)
        return [param.detach().clone() for param in params], optimizer.stats["step"]

    with ThreadJob(3, 2, "bsp+backup:1") as job:
        results = job.run(work)
    wanted = start[0].detach() - 0.1 * sum((one[0] + other[0]) / 2 for one, other in zip(*gradients[:2], strict=True))
    for values, step in results:
        assert_close(values, [wanted], rtol=1e-9)
        assert step == 4
    discarded = [account.discarded for account in job.sequencer.statistics]
    assert sum(discarded) == 2  # one worker in round 0, and worker 2 in round 1
    assert discarded[2] >= 1


def test_without_rounds_clipping_is_of_each_workers_own_gradient() -> None:
    start = made_params([(3,)])

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0), clip_norm=2.0)
        set_gradients(params, [torch.tensor([0.0, 30.0, 40.0])])
        optimizer.step()
        return [params[0].detach().clone()]

    with ThreadJob(1, 2, "asp") as job:
        (got,) = job.run(work)
    assert_close(got, [start[0].detach() - torch.tensor([0.0, 1.2, 1.6], dtype=torch.float64)], rtol=1e-5)


def test_samples_of_zero_leave_a_workers_gradient_out() -> None:
    start, gradients = made_params([(3,)]), [made_gradients([(3,)], 2, seed) for seed in (5, 6)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        for samples, step in zip(((4, 0), (0, 0))[session.rank], gradients[session.rank], strict=True):
            set_gradients(params, step)
            optimizer.step(samples=samples)
        assert optimizer.stats["step"] == 2
        return [params[0].detach().clone()]

    with ThreadJob(2, 2) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, [start[0].detach() - gradients[0][0][0]], rtol=1e-12)

"""Where bytes must travel, buckets go while backward runs; `step()` commits them, and what changed since goes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_equal, loss_of, small_batches, small_model, trained_alone, weights
from lossy import LossyJob, disturb
from torch import nn

from polytempo.client.connections import ServerConnections
from polytempo.protocol.messages import AnyMessage, PartialPush, Push
from polytempo.protocol.push import PushedGradient
from polytempo.reducer import pushes
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(30)

STEPS = 6
Change = Callable[[list[nn.Parameter]], Any]


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "LIMIT", 100)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[AnyMessage]:
    """What clients send of gradients, in order."""
    found: list[AnyMessage] = []
    send = ServerConnections.send

    def spy(self: ServerConnections, shard: int, message: AnyMessage, buffers: Any = ()) -> None:
        if isinstance(message, PartialPush) or (isinstance(message, Push) and isinstance(message.body, PushedGradient)):
            found.append(message)
        send(self, shard, message, buffers)

    monkeypatch.setattr(ServerConnections, "send", spy)
    return found


def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(job: ThreadJob, change: Change = lambda params: None) -> list[list[torch.Tensor]]:
    batches = small_batches(STEPS, [4] * job.plan.size)

    def work(session: Session) -> list[torch.Tensor]:
        model = small_model()
        optimizer = DistributedOptimizer(make(list(model.parameters())))
        for step in batches:
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            change(list(model.parameters()))
            optimizer.step()
        return weights(model)

    return job.run(work)


def by_itself(workers: int) -> list[torch.Tensor]:
    return trained_alone(small_model(), make, small_batches(STEPS, [4] * workers))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_all_buckets_go_ahead_of_the_push_which_then_carries_nothing(servers: int, sent: list[AnyMessage]) -> None:
    with ThreadJob(1, servers) as job:
        assert_equal(train(job)[0], by_itself(1))
    pushes = [message for message in sent if isinstance(message, Push)]
    assert len(pushes) == STEPS * servers
    assert not any(push.body.patches for push in pushes)
    assert sum(len(push.body.sent_buckets) for push in pushes) == len(sent) - len(pushes) > STEPS * servers


def test_the_first_buckets_are_those_of_the_last_layers_as_the_first_backward_showed(sent: list[AnyMessage]) -> None:
    def work(session: Session) -> None:
        first, last = nn.Linear(5, 30, dtype=torch.float64), nn.Linear(30, 3, dtype=torch.float64)
        params = [*last.parameters(), *first.parameters()]  # not in the order of use
        optimizer = DistributedOptimizer(make(params))
        for _ in range(2):
            optimizer.zero_grad()
            last(first(torch.ones(1, 5, dtype=torch.float64))).sum().backward()
            optimizer.step()

    with ThreadJob(1) as job:
        job.run(work)
    second = [message for message in sent if isinstance(message, PartialPush) and message.id.step == 1]
    assert [message.bucket for message in second] == sorted(message.bucket for message in second)  # as they become ready
    assert second[0].pieces[0].start == 0  # the last layer, which stands first in the bucket


def test_what_is_changed_between_backward_and_step_goes_again(sent: list[AnyMessage]) -> None:
    scale = lambda params: params[0].grad.data.mul_(0.5)  # noqa: E731  in a way that torch does not count

    model, batches = small_model(), small_batches(STEPS, [4])
    optimizer = make(list(model.parameters()))
    for (batch,) in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        scale(list(model.parameters()))
        optimizer.step()
    with ThreadJob(1) as job:
        assert_equal(train(job, scale)[0], weights(model))
    assert all(push.body.patches and push.body.sent_buckets for push in sent if isinstance(push, Push))


def test_accumulation_sends_only_the_last_backward(sent: list[AnyMessage]) -> None:
    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(make(list(model.parameters())))
        ((x, y),) = small_batches(1, [4])[0]
        with optimizer.no_sync():
            loss_of(model, (x, y)).backward()
        assert sent == []
        loss_of(model, (x, y)).backward()
        optimizer.step()

    with ThreadJob(1) as job:
        job.run(work)
    assert [type(message) for message in sent].count(Push) == 1
    assert not [push for push in sent if isinstance(push, Push) and push.body.patches]


def test_zero_grad_without_step_drops_what_was_sent(sent: list[AnyMessage]) -> None:
    def forget(params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = None

    with ThreadJob(1) as job:
        start = weights(small_model())
        assert_equal(train(job, forget)[0], start)
    pushes = [message for message in sent if isinstance(message, Push)]
    assert len(sent) > len(pushes) == STEPS, "buckets went during backward"
    assert all(push.body.absent == (0, 1, 2, 3) and push.body.sent_buckets == () for push in pushes)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_bucket_that_is_lost_on_the_way_is_a_push_that_is_sent_again(sync: str, servers: int) -> None:
    lost = []

    def fate(message: AnyMessage, outward: bool) -> int:
        if isinstance(message, PartialPush) and message.id.step in (1, 4) and message.bucket == 0 and message.id not in lost:
            lost.append(message.id)
            return 0
        return 1

    with LossyJob(1, servers, sync, retry=0.05) as job:
        session_of = job.session

        def session(rank: int) -> Session:
            made = session_of(rank)
            disturb(made, lambda shard: fate)
            return made

        job.session = session  # type: ignore[method-assign]
        assert_close(train(job)[0], by_itself(1), rtol=1e-12)
    assert len(lost) == 2

"""Every push is applied exactly once on every shard, whatever is sent twice, lost or cut off on the way.

The gradients do not depend on the weights and the optimizer is plain SGD, so the end does not depend on the order of pushes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, copied, made_gradients, made_params, set_gradients
from lossy import LossyJob, UnreliableChannel, channels_of, disturb, every, repeat
from sessions import within
from torch import nn

from polytempo.client.client import Client
from polytempo.client.requests import Outstanding
from polytempo.protocol.messages import Answer, AnyMessage, Push, decode
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Channel

pytestmark = [pytest.mark.timeout(15), pytest.mark.both_wires]

WORKERS, STEPS, LR = 3, 10, 0.1
SHAPES = [(5, 3), (7,), (2, 2, 2)]
START = made_params(SHAPES)
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=10 + worker) for worker in range(WORKERS)]

Prepare = Callable[[Session], None]


def expected(scale: float) -> list[torch.Tensor]:
    sums = [sum(step[i] for own in GRADIENTS for step in own) for i in range(len(SHAPES))]
    return [start.detach() - LR * scale * total for start, total in zip(START, sums, strict=True)]


def push_all(job: ThreadJob, prepare: Prepare, make: Callable[[list[nn.Parameter]], Any] | None = None) -> list[Any]:
    """Every worker pushes its gradients, all wait until all are done, and each reads what the job holds."""
    done = threading.Barrier(WORKERS)

    def work(session: Session) -> tuple[list[torch.Tensor], dict[str, Any]]:
        params = copied(START)
        optimizer = DistributedOptimizer(make(params) if make else torch.optim.SGD(params, lr=LR))
        prepare(session)
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        optimizer.consolidate()  # under delay a worker's last pushes are still under way: now they have arrived
        done.wait(30)  # a worker that leaves changes the others' share of the rate
        optimizer.consolidate()
        state = optimizer.state_dict()
        done.wait(30)
        return [param.detach().clone() for param in params], state

    return job.run(work)


def assert_once(job: ThreadJob, results: list[Any], scale: float) -> None:
    for values, _ in results:
        assert_close(values, expected(scale), rtol=1e-9)
    updates = STEPS if job.plan.sync == "bsp" else STEPS * WORKERS
    assert job.sequencer.clocks["0"].version == updates
    assert [server.executor.state.optimizer_shards["0"].version for server in job.servers] == [updates] * job.plan.shards
    assert [account.steps for account in job.sequencer.statistics] == [STEPS] * WORKERS


def as_it_is(session: Session) -> None:
    pass


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    ("sync", "scale"),
    [
        ("bsp", 1 / WORKERS),
        ("asp", 1 / WORKERS),
        ("asp,scale=1", 1.0),
        ("ssp:1", 1 / WORKERS),
        ("every:3", 1 / WORKERS),
        ("delay:2", 1 / WORKERS),
        ("dssp:1..3", 1 / WORKERS),
    ],
)
def test_the_end_is_the_start_minus_the_scaled_sum_of_all_gradients(sync: str, scale: float, servers: int) -> None:
    with ThreadJob(WORKERS, servers, sync) as job:
        results = push_all(job, as_it_is)
    assert_once(job, results, scale)


def twice(session: Session) -> None:
    """Every push is sent again before anybody waits for its answer."""
    client = session.client
    assert client is not None
    push = client.push

    def push_twice(waiting: Outstanding, *ahead: Any) -> None:
        push(waiting, *ahead)
        repeat(client, waiting.push.id.optimizer_id)

    client.push = push_twice  # type: ignore[method-assign]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:1"])
def test_a_push_sent_twice_counts_once(sync: str, servers: int) -> None:
    with ThreadJob(WORKERS, servers, sync, retry=0.05) as job:
        results = push_all(job, twice)
        assert_once(job, results, 1 / WORKERS)
    assert [server.facts()["arrived"] for server in job.servers] == [0] * servers  # repeats are not kept


@pytest.mark.parametrize("servers", [1, 3])
def test_adam_counts_its_steps_once_though_pushes_are_sent_twice(servers: int) -> None:
    with ThreadJob(WORKERS, servers, "asp,momentum=server", retry=0.05) as job:
        results = push_all(job, twice, lambda params: torch.optim.Adam(params, lr=0.01))
    for _, state in results:
        assert [float(state["state"][i]["step"]) for i in range(len(SHAPES))] == [STEPS * WORKERS] * len(SHAPES)


@pytest.mark.parametrize("how", ["twice", "lost"])
@pytest.mark.parametrize("sync", ["asp,momentum=lookahead", "delay:2,momentum=lookahead"])
def test_what_each_worker_has_pushed_with_momentum_of_its_own_counts_once(sync: str, how: str) -> None:
    """The sum of g + m v of all workers, in whatever order; an optimizer that runs here has made its own steps, once."""
    for make in (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)):
        prepare = twice if how == "twice" else lambda session: disturb(session, lambda shard: every(5 + shard, 0))
        with LossyJob(WORKERS, 2, sync, retry=0.05) as job:
            results = push_all(job, prepare, make)  # type: ignore[arg-type]
        assert job.sequencer.clocks["0"].version == STEPS * WORKERS
        states = [state["state"] for _, state in results]
        if "step" in states[0][0]:
            assert {float(own["step"]) for state in states for own in state.values()} == {STEPS}
            continue
        pushed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for own in GRADIENTS:
            velocities = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
            for step in own:
                velocities = [0.9 * velocity + grad for velocity, grad in zip(velocities, step, strict=True)]
                pushed = [p + g + 0.9 * v for p, g, v in zip(pushed, step, velocities, strict=True)]
        wanted = [start.detach() - LR / WORKERS * total for start, total in zip(START, pushed, strict=True)]
        for values, _ in results:
            assert_close(values, wanted, rtol=1e-9)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:1"])
def test_a_connection_replaced_in_the_middle_of_an_exchange_loses_and_doubles_nothing(sync: str, servers: int) -> None:
    replace_connections(sync, servers)


@pytest.mark.timeout(10)
def test_under_delay_a_replaced_connection_loses_and_doubles_nothing() -> None:
    replace_connections("delay:2", 2)


def replace_connections(sync: str, servers: int) -> None:
    job = ThreadJob(WORKERS, servers, sync, retry=0.05)

    def cut(session: Session) -> None:
        client = session.client
        assert client is not None
        push = client.push

        def push_and_cut(waiting: Outstanding, *ahead: Any) -> None:
            push(waiting, *ahead)
            if waiting.push.id.step % 2 == 0:
                shard = (waiting.push.id.step // 2 + session.rank) % servers
                client.connections.reconnect(shard, job.connect(shard, client.pool), client.hello)

        client.push = push_and_cut  # type: ignore[method-assign]

    with job:
        results = push_all(job, cut)
    assert_once(job, results, 1 / WORKERS)


@pytest.mark.parametrize("copies", [pytest.param(0, id="lost", marks=pytest.mark.long), pytest.param(2, id="doubled")])
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.proof), 3])
@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_messages_lost_or_doubled_in_either_direction_change_nothing(sync: str, servers: int, copies: int) -> None:
    channels: list[UnreliableChannel] = []

    def prepare(session: Session) -> None:
        disturb(session, lambda shard: every(4 + (shard + session.rank) % 3, copies))
        channels.extend(channels_of(session))

    with LossyJob(WORKERS, servers, sync, retry=0.05) as job:
        results = push_all(job, prepare)
    assert_once(job, results, 1 / WORKERS)
    assert all(channel.disturbed > 1 for channel in channels)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("servers", [2])
def test_under_delay_an_answer_lost_in_the_middle_is_not_waited_for_for_ever(servers: int) -> None:
    """The answers to later pushes have come; that to an earlier one must come again when the worker settles."""

    def prepare(session: Session) -> None:
        lose = {2}

        def fate(message: AnyMessage, outward: bool) -> int:
            if isinstance(message, Answer) and message.exchange in lose:
                lose.clear()
                return 0
            return 1

        disturb(session, lambda shard: fate if shard == 0 else None)

    with LossyJob(WORKERS, servers, "delay:2", retry=0.05) as job:
        results = push_all(job, prepare)
    assert_once(job, results, 1 / WORKERS)


@pytest.mark.parametrize("servers", [1, 2])
def test_under_delay_a_push_lost_before_others_arrive_is_sent_again(servers: int) -> None:
    def prepare(session: Session) -> None:
        lose = {9}

        def fate(message: AnyMessage, outward: bool) -> int:
            if isinstance(message, Push) and message.id.step in lose:
                lose.remove(message.id.step)
                return 0
            return 1

        disturb(session, lambda shard: fate if shard == 0 else None)

    with LossyJob(WORKERS, servers, "delay:2", retry=0.05) as job:
        results = push_all(job, prepare)
    assert_once(job, results, 1 / WORKERS)


class LateAnswer(UnreliableChannel):
    """Keeps the answer to push 5 back until push 7 was sent, and loses that."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.fate = self._fate
        self.lost = False
        self.kept: list[Any] = []

    def _fate(self, message: AnyMessage, outward: bool) -> int:
        if isinstance(message, Push) and message.id.step == 7 and not self.lost:
            self.lost = True
            return 0
        return 1

    def receive(self) -> Any:
        if self.lost and self.kept:
            return self.kept.pop()
        received = super().receive()
        if received is not None and not self.lost:
            message = decode(received[0])
            if isinstance(message, Answer) and message.exchange == 5:
                self.kept.append(received)
                return super().receive()
        return received


def test_a_lost_push_is_sent_again_as_it_was_though_an_answer_came_in_between() -> None:
    """Under delay several pushes are under way; what is kept for a repeat must not be written over by an answer."""
    start = made_params([(2, 3, 2, 2)])[0].detach().to(memory_format=torch.channels_last)
    gradients = [gradient for (gradient,) in made_gradients([(2, 3, 2, 2)], 8)]

    def work(session: Session) -> torch.Tensor:
        param = nn.Parameter(start.clone(memory_format=torch.preserve_format))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=LR))
        for gradient in gradients:
            set_gradients([param], [gradient])
            optimizer.step()
        optimizer.consolidate()
        return param.detach().clone()

    with ThreadJob(1, 1, "delay:2", retry=0.05) as job:
        pool = Pool()
        channel = LateAnswer(job.connect(0, pool))
        session = Session(Client([channel], 0, 0, pool, job.retry), job.job, 0)
        got = within(session, work)
        session.close()
    assert channel.lost
    assert_close([got], [start - LR * sum(gradients)], rtol=1e-9)

"""Who may write when: what was lent does not change, and is used again once it is back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from by_hand import mean_of
from helpers import MakeOptimizer, assert_close, assert_equal, copied, made_gradients, made_params, set_gradients, until
from torch import nn

from polytempo.client.client import Client
from polytempo.client.requests import Outstanding, SendMessage
from polytempo.protocol.messages import STRANGER_LIMIT
from polytempo.server.shard import HostValues, Shard
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Endpoint
from polytempo.transport.connect import connect
from polytempo.transport.shared_memory import Borrowed
from polytempo.transport.zeromq import ZmqEndpoint

pytestmark = pytest.mark.timeout(30)

on_ipc = pytest.mark.parametrize("wire", ["ipc"], indirect=True)
on_both = pytest.mark.parametrize("wire", ["memory", "ipc"], indirect=True)

SHAPES = [(3, 5), (4,)]
SGD: MakeOptimizer = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731


class Taker:
    """A worker that keeps the values it receives, as one does that has not come to copying them yet."""

    def __init__(self, session: Session) -> None:
        self.params = copied(made_params(SHAPES))
        self.optimizer = DistributedOptimizer(SGD(self.params))
        self.held: list[tuple[list[Bytes], list[bytes]]] = []  # what was received, and what was in it
        self.keeping = 0
        line = self.optimizer._reducer.client_state
        self._take, line.take = line.take, self.take

    def take(self, parts: dict[int, list[Bytes]], absent: tuple[int, ...]) -> None:
        self._take(parts, absent)
        buffers = [buffer for part in parts.values() for buffer in part]
        assert all(isinstance(buffer, Borrowed) for buffer in buffers)
        self.held.append((buffers, [bytes(buffer) for buffer in buffers]))
        del self.held[: max(0, len(self.held) - self.keeping)]

    def step(self) -> None:
        set_gradients(self.params, [torch.ones(shape) for shape in SHAPES])
        self.optimizer.step()

    def assert_unchanged(self) -> None:
        assert all([bytes(buffer) for buffer in buffers] == before for buffers, before in self.held)

    def let_go(self) -> None:
        self.keeping = 0
        self.held.clear()
        gc.collect()


@pytest.fixture
def flats(monkeypatch: pytest.MonkeyPatch) -> list[HostValues]:
    """The stores that have made flat tensors, once for each time they did."""
    made: list[HostValues] = []
    plain = HostValues._lendable

    def counted(self: HostValues) -> Any:
        made.append(self)
        return plain(self)

    monkeypatch.setattr(HostValues, "_lendable", counted)
    return made


def store_of(job: ThreadJob, server: int = 0) -> Shard:
    return job.servers[server].executor.state.optimizer_shards["0"]


@on_ipc
def test_a_worker_alone_never_makes_the_server_copy(wire: str, flats: list[HostValues]) -> None:
    def work(session: Session) -> None:
        taker = Taker(session)
        for _ in range(20):
            taker.step()
            for server in range(2):
                store = store_of(job, server)
                store._pool.registry.collect()
                assert (store._memory._lent[2].count, store._pool.registry._granted, store._memory._earlier) == (0, {}, [])

    with ThreadJob(1, 2, "asp") as job:
        job.run(work)
    assert len(flats) == 2  # one for each server, at the start


@on_ipc
@pytest.mark.parametrize("keeping", [1, 3])
def test_values_that_slow_workers_still_read_do_not_change(wire: str, flats: list[HostValues], keeping: int) -> None:
    workers, begun = 3, threading.Barrier(3)
    takers: dict[int, Taker] = {}

    def work(session: Session) -> None:
        taker = takers[session.rank] = Taker(session)
        begun.wait(10)
        taker.keeping = keeping
        for _ in range(12):
            taker.step()
            taker.assert_unchanged()
        begun.wait(10)
        assert len(taker.held) == keeping
        for other in takers.values():
            other.assert_unchanged()
        begun.wait(10)
        taker.let_go()

    with ThreadJob(workers, 1, "asp") as job:
        job.run(work)
        store = store_of(job)
    assert store.version == 36
    held_at_once = workers * (keeping + 1)  # each has the last ones, and the next are on their way
    assert workers * keeping // 2 < len(flats) <= held_at_once + 1
    assert len(store._memory._earlier) == len(flats) - 1


@on_ipc
def test_memory_of_earlier_values_is_used_again(wire: str, flats: list[HostValues]) -> None:
    """Worker 0 holds an answer while worker 1 goes on; however often that happens, two flats are enough."""
    turn, other = threading.Barrier(2), threading.Barrier(2)

    def work(session: Session) -> int:
        taker = Taker(session)
        most = 0
        for _ in range(5):
            if session.rank == 0:
                taker.keeping = 1
                taker.step()
            turn.wait(10)
            if session.rank == 1:
                for _ in range(4):
                    taker.step()
            other.wait(10)
            taker.assert_unchanged()
            most = max(most, len(flats))
            taker.let_go()
            turn.wait(10)
        return most

    with ThreadJob(2, 1, "asp") as job:
        most = job.run(work)
        addresses = {flat[0]["float64"].data_ptr() for flat in store_of(job)._memory._earlier}
    assert max(most) in (2, 3)  # at the start both may read the first values
    assert len(addresses) == len(flats) - 1


@on_ipc
def test_a_closed_connection_returns_its_loans(wire: str, flats: list[HostValues]) -> None:
    gone, begun = threading.Event(), threading.Barrier(2)

    def work(session: Session) -> None:
        taker = Taker(session)
        begun.wait(10)
        taker.keeping = 1
        taker.step()
        begun.wait(10)
        if session.rank == 1:
            session.close("failed")
            gone.set()
            return
        taker.let_go()
        assert gone.wait(10)
        store, registry = store_of(job), store_of(job)._pool.registry
        until(lambda: not job.servers[0].facts()["workers"][1:], "the server hears that worker 1 is gone")
        until(lambda: not registry.collect() and not registry._granted, "all loans are back")
        assert store._memory._lent[2].count == 0
        assert all(loan.count == 0 for _, _, loan in store._memory._earlier)
        before = len(flats)
        for _ in range(5):
            taker.step()
        assert len(flats) == before

    with ThreadJob(2, 1, "asp") as job:
        job.run(work)


# Pushes and buckets.


class TcpJob(ThreadJob):
    """A job whose workers come over TCP, where answers are received into memory that is used again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._doors: list[Endpoint] = []
        super().__init__(*arguments, **options)

    def _more_endpoints(self, index: int, pool: Pool) -> list[Endpoint]:
        self._doors.append(ZmqEndpoint("tcp://127.0.0.1:*", None, pool, STRANGER_LIMIT))
        return self._doors[-1:]

    def session(self, rank: int) -> Session:
        pool = Pool()
        channels = [connect(door.address, f"{id(pool)}", None, pool) for door in self._doors]
        return Session(Client(channels, rank, self.job.incarnation, pool, self.retry), self.job, rank)


KINDS = {"memory": (ThreadJob, "memory"), "ipc": (ThreadJob, "ipc"), "tcp": (TcpJob, "tcp")}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[ThreadJob]:
    """A job over each way to travel."""
    job, wire = KINDS[request.param]
    monkeypatch.setattr(job, "wire", wire)
    return job


LARGE = (100, 100)  # 80 KB: buffers as large as this are used again


@pytest.mark.parametrize(("workers", "servers", "clip"), [(1, 1, None), (1, 1, 0.1), (3, 1, None), (3, 2, 0.1)])
def test_after_a_step_grad_is_the_workers_own(kind: type[ThreadJob], workers: int, servers: int, clip: float | None) -> None:
    start = made_params([LARGE, (3,)])
    gradients = [made_gradients([LARGE, (3,)], 3, seed) for seed in range(workers)]

    def work(session: Session) -> None:
        params = copied(start)
        optimizer = DistributedOptimizer(SGD(params), clip_norm=clip)
        for step in gradients[session.rank]:
            optimizer.zero_grad()
            sum((param * grad).sum() for param, grad in zip(params, step, strict=True)).backward()
            optimizer.step()
            assert_equal([param.grad for param in params], step)

    with kind(workers, servers) as job:
        job.run(work)


@pytest.mark.parametrize("workers", [1, 2])
def test_two_optimizers_leave_each_others_gradients_alone(kind: type[ThreadJob], workers: int) -> None:
    """The second steps on a gradient that was made before the first had its answer."""
    start = made_params([LARGE, LARGE])
    gradients = [made_gradients([LARGE, LARGE], 4, seed) for seed in range(workers)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizers = [DistributedOptimizer(SGD([param])) for param in params]
        for step in gradients[session.rank]:
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum((param * grad).sum() for param, grad in zip(params, step, strict=True)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach().clone() for param in params]

    wanted = copied(start)
    optimizer = SGD(wanted)
    for step in mean_of(gradients):
        set_gradients(wanted, step)
        optimizer.step()
    with kind(workers) as job:
        for got in job.run(work):
            assert_close(got, [param.detach() for param in wanted], rtol=1e-9)


@on_both
def test_under_delay_a_later_backward_does_not_change_a_push_under_way(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server looks at the first push when two more gradients have been made."""
    start, gradients = made_params([(3, 2)]), made_gradients([(3, 2)], 6)
    made, plain_update, in_time = threading.Event(), Shard.update, []

    def update(self: Shard, *arguments: Any) -> None:
        in_time.append(made.wait(10))
        plain_update(self, *arguments)

    monkeypatch.setattr(Shard, "update", update)

    def work(session: Session) -> torch.Tensor:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        for number, (gradient,) in enumerate(gradients):
            optimizer.zero_grad()
            (params[0] * gradient).sum().backward()
            assert all(params[0].grad.data_ptr() != flat.views[0].data_ptr() for flat in optimizer._reducer.copier._buffers)
            if number == 2:
                made.set()
            optimizer.step()
        optimizer.consolidate()
        return params[0].detach().clone()

    with ThreadJob(1, 1, "delay:2") as job:
        got = job.run(work)
    assert in_time == [True] * 6
    assert_close(got, [start[0].detach() - 0.1 * sum(gradient for (gradient,) in gradients)], rtol=1e-9)


@on_both
@pytest.mark.parametrize("servers", [1, 2])
def test_what_was_sent_ahead_of_a_skipped_step_does_not_count_for_the_next(
    wire: str, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 is skipped. In step 2 the second gradient is the same as in step 1, and was not made anew."""
    start, gradients = made_params([(40,), (50,)]), made_gradients([(40,), (50,)], 4)
    repeated: list[Any] = []
    plain_again = Outstanding.send_again

    def send_again(self: Outstanding, shard: int, send: SendMessage) -> None:
        repeated.append(self.push.id)
        plain_again(self, shard, send)

    monkeypatch.setattr(Outstanding, "send_again", send_again)

    def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100, backoff_factor=1.0 - 1e-16)
        for number, (one, other) in enumerate(gradients):
            params[0].grad = None
            if number != 2:
                params[1].grad = None
                scaler.scale((params[1] * other).sum()).backward()
            scaler.scale((params[0] * one * (torch.inf if number == 1 else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach().clone() for param in params]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        return train(params, DistributedOptimizer(SGD(params)))

    alone = copied(start)
    wanted = train(alone, SGD(alone))
    with ThreadJob(1, servers, retry=0.5) as job:
        (got,) = job.run(work)
    assert_close(got, wanted, rtol=1e-9)
    assert job.sequencer.statistics[0].steps == 4
    assert repeated == []

"""Rows of tables are changed exactly once by every push, whatever is sent twice, lost or cut off on the way.

Each occurrence of an id has the gradient 1 and rules are plain sums, so the end is a count: of a table that workers mirror,
of one on the servers, and of an array on a clock of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lossy
import pytest
import torch
from helpers import assert_close
from lossy import Fate, LossyJob, UnreliableChannel, channels_of, disturb, repeat
from torch import nn

from polytempo.client.requests import Outstanding
from polytempo.protocol.messages import Answer, AnyMessage, Pull, PulledRows, Push
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.kv import KV, Array
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

WORKERS, STEPS, ROWS = 3, 10, 17
ALL = torch.arange(ROWS)
Prepare = Callable[[Session], None]
#: The mode, and how much of a push is applied.
MODES = [("bsp", 1 / 3), ("asp", 1 / 3), ("asp,scale=1", 1.0), ("ssp:1", 1 / 3), ("every:3", 1 / 3), ("delay:2", 1 / 3)]


def ids_of(worker: int, step: int) -> torch.Tensor:
    """Some ids, which come again after a while."""
    generator = torch.Generator().manual_seed(10 * worker + step % 4)
    return torch.randint(0, ROWS - 1, (6,), generator=generator)


def counts() -> torch.Tensor:
    """How often each id has come; the last never."""
    everything = torch.cat([ids_of(worker, step) for worker in range(WORKERS) for step in range(STEPS)])
    return torch.bincount(everything, minlength=ROWS).double()


@pytest.fixture(autouse=True)
def _pulls_are_disturbed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "REPEATED", (*lossy.REPEATED, Pull, PulledRows))


class Tables(nn.Module):
    """One table that workers mirror, and one that is on the servers."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        zeros = torch.zeros(ROWS, 2, dtype=torch.float64)
        self.mirrored = nn.Embedding.from_pretrained(zeros, freeze=False, sparse=True)
        self.served = ServerEmbedding(None, 2, rule="sgd", start="zeros", dtype=torch.float64, cache_keys=cached)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mirrored(ids).sum() + self.served(ids).sum()


def push_all(job: ThreadJob, prepare: Prepare, cached: bool = False, ahead: bool = False) -> list[Any]:
    """Every worker pushes its rows, all wait until all are done, and each looks at what the job holds."""
    done = threading.Barrier(WORKERS)

    def work(session: Session) -> list[torch.Tensor]:
        model = Tables(cached)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        array = KV({"count": Array(ROWS, dtype=torch.float64, cache_keys=cached)})
        prepare(session)
        for step in range(STEPS):
            ids = ids_of(session.rank, step)
            optimizer.zero_grad()
            model(ids).backward()
            if ahead:
                model.served.prefetch(ids_of(session.rank, step + 1))
            optimizer.step()
            array["count"].push(torch.ones(len(ids)), rows=ids)
        optimizer.consolidate()
        array.finish()
        done.wait(50)
        optimizer.consolidate()
        result = [model.mirrored.weight.detach().clone(), model.served.pull(ALL), array["count"].pull().result()]
        done.wait(50)
        return result

    return job.run(work)


def assert_once(job: ThreadJob, results: list[Any], scale: float) -> None:
    wanted = counts()
    moved = (-scale * wanted).unsqueeze(1).expand(-1, 2)
    for mirrored, served, array in results:
        assert_close([mirrored, served], [moved, moved], rtol=1e-9)
        assert torch.equal(array, wanted)
    updates = STEPS if job.plan.sync == "bsp" else STEPS * WORKERS
    for optimizer_id in ("0", "1"):
        assert [server.executor.state.optimizer_shards[optimizer_id].version for server in job.servers] == [
            updates
        ] * job.plan.shards


def as_it_is(session: Session) -> None:
    pass


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.proof), 3])
@pytest.mark.parametrize(("sync", "scale"), MODES)
def test_the_end_is_a_count(sync: str, scale: float, servers: int) -> None:
    with ThreadJob(WORKERS, servers, sync) as job:
        results = push_all(job, as_it_is)
        assert_once(job, results, scale)


@pytest.mark.parametrize(("samples", "moved"), [((1, 1), 0.5), ((1, 3), 0.25), ((3, 1), 0.75), ((0, 1), 0.0)], ids=str)
def test_who_pushes_no_rows_in_a_round_counts_in_their_mean(samples: tuple[int, int], moved: float) -> None:
    """Its gradient of those rows is zero."""

    def work(session: Session) -> list[torch.Tensor]:
        model = Tables(cached=False)
        other = nn.Parameter(torch.zeros(1))
        both = torch.optim.SGD([*model.parameters(), other], lr=1.0)
        optimizer = DistributedOptimizer(both, model)
        loss = model(torch.tensor([3])) if session.rank == 0 else other.sum()
        loss.backward()
        optimizer.step(samples=samples[session.rank])
        return [model.mirrored.weight.detach()[2:4, 0].clone(), model.served.pull(torch.tensor([2, 3]))[:, 0]]

    with ThreadJob(2, 2) as job:
        for got in job.run(work):
            assert [rows.tolist() for rows in got] == [[0, -moved]] * 2


def twice(session: Session) -> None:
    """Every push is sent again before anybody waits for its answer."""
    client = session.client
    assert client is not None
    push = client.push

    def push_twice(waiting: Outstanding, *ahead: Any) -> None:
        push(waiting, *ahead)
        repeat(client, waiting.push.id.optimizer_id)

    client.push = push_twice  # type: ignore[method-assign]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:1", "delay:2"])
def test_a_push_sent_twice_counts_once(sync: str, servers: int, cached: bool) -> None:
    with ThreadJob(WORKERS, servers, sync, retry=0.05) as job:
        results = push_all(job, twice, cached=cached, ahead=True)
        assert_once(job, results, 1 / WORKERS)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("sync", ["asp", "bsp", "delay:2"])
def test_a_connection_replaced_in_the_middle_of_an_exchange_loses_and_doubles_nothing(sync: str, cached: bool) -> None:
    job = ThreadJob(WORKERS, 2, sync, retry=0.05)

    def cut(session: Session) -> None:
        client = session.client
        assert client is not None
        push = client.push

        def push_and_cut(waiting: Outstanding, *ahead: Any) -> None:
            push(waiting, *ahead)
            if waiting.push.id.step % 2 == 0:
                shard = (waiting.push.id.step // 2 + session.rank) % 2
                client.connections.reconnect(shard, job.connect(shard, client.pool), client.hello)

        client.push = push_and_cut  # type: ignore[method-assign]

    with job:
        results = push_all(job, cut, cached=cached, ahead=sync != "asp")
        assert_once(job, results, 1 / WORKERS)


def now_and_then(seed: int, copies: int) -> Fate:
    """One message in five, in no order that the repeats of several pushes could fall in step with."""
    chance = random.Random(seed)
    return lambda message, outward: copies if chance.random() < 0.2 else 1


@pytest.mark.parametrize("copies", [pytest.param(0, id="lost", marks=pytest.mark.long), pytest.param(2, id="doubled")])
@pytest.mark.parametrize(
    ("sync", "servers", "cached"),
    [
        pytest.param("asp", 1, False, marks=pytest.mark.proof),
        ("asp", 2, True),
        ("bsp", 2, False),
        pytest.param("bsp", 2, True, marks=pytest.mark.proof),
        ("delay:2", 2, True),
    ],
)
def test_messages_lost_or_doubled_in_either_direction_change_nothing(
    sync: str, servers: int, cached: bool, copies: int
) -> None:
    channels: list[UnreliableChannel] = []

    def prepare(session: Session) -> None:
        disturb(session, lambda shard: now_and_then(WORKERS * shard + session.rank, copies))
        channels.extend(channels_of(session))

    with LossyJob(WORKERS, servers, sync, retry=0.05) as job:
        results = push_all(job, prepare, cached=cached, ahead=servers == 2)
        assert_once(job, results, 1 / WORKERS)
    assert all(channel.disturbed > 1 for channel in channels)


def losing(kinds: tuple[type, ...], numbers: tuple[int, ...]) -> Fate:
    """Messages of these kinds are lost when they are the n-th."""
    seen: Iterator[int] = iter(range(1000))

    def fate(message: AnyMessage, outward: bool) -> int:
        return 0 if isinstance(message, kinds) and next(seen) in numbers else 1

    return fate


@pytest.mark.parametrize("kind", [Pull, PulledRows, Push, Answer])
def test_a_list_that_was_lost_before_it_was_remembered_is_sent_again(kind: type) -> None:
    """The worker takes it for known from then on; the server says that it is not."""
    with LossyJob(WORKERS, 2, "asp", retry=0.05) as job:
        results = push_all(job, lambda session: disturb(session, lambda _: losing((kind,), (0, 1, 5))), cached=True)
        assert_once(job, results, 1 / WORKERS)


def test_what_came_ahead_is_of_the_answer_that_counts() -> None:
    """The answer to a push is lost, another worker changes the row, and the answer that comes again has the row as it is."""
    turns = [threading.Barrier(2) for _ in range(2)]

    def work(session: Session) -> float:
        model = nn.ModuleDict({"served": ServerEmbedding(None, 1, rule="sgd", lr=1.0, start="zeros"), "x": nn.Linear(1, 1)})
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        one = torch.tensor([3])

        def step() -> None:
            optimizer.zero_grad()
            model["served"](one).sum().backward()
            optimizer.step()

        if session.rank == 1:
            turns[0].wait(20)  # worker 0's answer is lost by now
            step()
            turns[1].wait(20)
            return 0.0
        lost: list[bool] = []

        def fate(message: AnyMessage, outward: bool) -> int:
            if isinstance(message, Answer) and not lost:
                lost.append(True)
                turns[0].wait(20)
                turns[1].wait(20)  # worker 1 has changed the row
                return 0
            return 1

        disturb(session, lambda _: fate)
        model["served"].prefetch(one)
        step()
        return float(model["served"](one).detach())

    with LossyJob(2, 1, "asp,scale=1", retry=0.05) as job:
        assert job.run(work)[0] == -2.0

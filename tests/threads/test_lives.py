"""Workers that die in the middle of a push, come back, or load a state while others go on: nothing is half applied."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import assert_close, check_record, copied, made_gradients, made_params, set_gradients, until
from lossy import LossyJob, UnreliableChannel, disturb, first_answers
from sessions import within

from polytempo.client.client import Client
from polytempo.errors import UsageError
from polytempo.protocol.messages import AnyMessage, Failed, Push, Saved
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

LR = 0.1
SHAPES = [(5, 3), (7,)]
START = made_params(SHAPES)
GRADIENTS = made_gradients(SHAPES, 8)


class Dies(Exception):
    """A worker's end."""


def made(session: Session) -> tuple[list[torch.nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    return params, DistributedOptimizer(torch.optim.SGD(params, lr=LR))


def after(*steps: int, scale: float = 1.0) -> list[torch.Tensor]:
    return [
        start.detach() - LR * scale * sum(GRADIENTS[step][i] for step in steps)  # type: ignore[operator]
        for i, start in enumerate(START)
    ]


@pytest.mark.parametrize("reached", [0, 1])
@pytest.mark.parametrize("sync", ["asp,scale=1", "bsp"])
def test_a_push_that_reached_one_shard_of_two_when_its_worker_died_is_applied_on_none(sync: str, reached: int) -> None:
    results: list[list[torch.Tensor]] = []

    def die(name: str, step: int) -> None:
        until(lambda: job.servers[reached].facts()["arrived"] == 1, "the push is at one shard")
        raise Dies

    def work(session: Session) -> None:
        params, optimizer = made(session)
        client = session.client
        assert client is not None
        if session.rank == 1:
            disturb(session, lambda shard: lambda message, outward: int(shard == reached or not isinstance(message, Push)))
            client.wait_for_release = die  # type: ignore[method-assign]
            set_gradients(params, GRADIENTS[7])
            optimizer.step()
        until(lambda: job.sequencer.statistics[1].left_at is not None, "worker 1 is gone")
        for step in (0, 1, 2):
            set_gradients(params, GRADIENTS[step])
            optimizer.step()
        optimizer.consolidate()
        results.append([param.detach().clone() for param in params])

    with LossyJob(2, 2, sync) as job, pytest.raises(Dies):
        job.run(work)
    assert_close(results[0], after(0, 1, 2), rtol=1e-12)
    assert [server.facts()["arrived"] for server in job.servers] == [0, 0]


def come_back(job: ThreadJob, rank: int, incarnation: int) -> Session:
    pool = Pool()
    channels = [job.connect(index, pool) for index in range(job.plan.shards)]
    return Session(Client(channels, rank, incarnation, pool, job.retry), job.job, rank)


@pytest.mark.parametrize("sync", ["asp,scale=1", "ssp:1,scale=1", "bsp"])
def test_a_worker_that_comes_back_starts_from_the_jobs_values_at_the_slowest_ones_step(sync: str, tmp_path: Any) -> None:
    back, gone, came = threading.Event(), threading.Event(), threading.Event()

    def stays(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session)
        for step in (0, 1, 2):
            if step == 1:
                assert gone.wait(10)
            set_gradients(params, GRADIENTS[step])
            optimizer.step()
        back.set()
        assert came.wait(10)
        set_gradients(params, GRADIENTS[3])
        optimizer.step()
        optimizer.consolidate()
        return [param.detach().clone() for param in params]

    def leaves(session: Session) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
        params, optimizer = made(session)
        set_gradients(params, GRADIENTS[0])
        optimizer.step()
        session.close("failed")
        gone.set()
        assert back.wait(10)
        again = come_back(job, 1, 1)
        params, optimizer = within(again, made)
        first, seen = int(optimizer.stats["step"]), [param.detach().clone() for param in params]
        came.set()
        set_gradients(params, GRADIENTS[3])
        optimizer.step()
        optimizer.consolidate()
        again.close()
        return first, seen, [param.detach().clone() for param in params]

    with ThreadJob(2, 2, sync, record=tmp_path) as job:
        _, (first, seen, _) = job.run(lambda session: stays(session) if session.rank == 0 else leaves(session))  # type: ignore[arg-type,return-value]
    assert first == 3
    assert_close(seen, after(0, 0, 1, 2) if sync != "bsp" else after(0, 1, 2), rtol=1e-12)
    check_record(tmp_path)


def test_a_state_that_is_loaded_again_because_its_answer_was_lost_does_not_undo_steps() -> None:
    """Worker 0 loads a state and misses the answer; worker 1 pushes; then worker 0 asks again."""
    saved = trained_state()
    loaded = threading.Event()

    def work(session: Session) -> float:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.Adam(params, lr=0.01))
        if session.rank == 0:

            def later() -> None:
                loaded.set()
                until(lambda: job.sequencer.statistics[1].steps == 3, "worker 1 has pushed")

            disturb(session, lambda shard: first_answers([-2], later) if shard == 0 else None)
            optimizer.load_state_dict(copy.deepcopy(saved))
        else:
            assert loaded.wait(10)
            for step in (0, 1, 2):
                set_gradients(params, GRADIENTS[step])
                optimizer.step()
        return float(optimizer.state_dict()["state"][0]["step"])

    with LossyJob(2, 2, "asp,momentum=server", retry=0.05) as job:
        counts = job.run(work)
    assert counts[0] == 5 + 3


def trained_state() -> dict[str, Any]:
    params = copied(START)
    plain = torch.optim.Adam(params, lr=0.01)
    for step in range(5):
        set_gradients(params, GRADIENTS[step])
        plain.step()
    return plain.state_dict()


def test_a_worker_of_an_earlier_life_is_refused() -> None:
    with ThreadJob(1) as job:
        newer = come_back(job, 0, 1)
        with pytest.raises(UsageError, match="an earlier incarnation"):
            come_back(job, 0, 0)
        newer.close()


def test_unreliable_channels_are_counted() -> None:
    """The wrapper of these tests itself: what it is told to lose does not arrive."""
    with LossyJob(1, 1, "asp", retry=0.05) as job:

        def work(session: Session) -> int:
            params, optimizer = made(session)
            lost: list[int] = []

            def fate(message: AnyMessage, outward: bool) -> int:
                if isinstance(message, Push) and message.attempt == 0:
                    lost.append(message.id.step)
                    return 0
                return 1

            disturb(session, lambda shard: fate)
            for step in (0, 1):
                set_gradients(params, GRADIENTS[step])
                optimizer.step()
            client = session.client
            assert client is not None
            channel = client.connections.channels[0]
            assert isinstance(channel, UnreliableChannel)
            assert lost == [0, 1]
            return channel.disturbed

        assert job.run(work) == [2]


@pytest.mark.parametrize("item", [Failed(cause="no memory"), Saved(shard=1, name="x", file="y", digest="z", tensors={})])
def test_a_server_that_fails_when_the_first_is_gone_still_tells_its_workers(item: Failed | Saved) -> None:
    """The report of its shard executor cannot be delivered any more: it stops, and its thread does not die of it."""
    told: list[str] = []
    with ThreadJob(1, 2) as job:
        pass
    second = job.servers[1]
    second._stop = told.append  # type: ignore[method-assign,assignment]
    second.executor._out.append(item)
    second._deliver()
    assert len(told) == 1


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_that_waits_in_a_round_is_applied_although_its_worker_died(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards have it and the job counted it: from then on it survives its worker."""
    with ThreadJob(2, servers) as job:

        def work(session: Session) -> list[torch.Tensor]:
            params, optimizer = made(session)
            set_gradients(params, GRADIENTS[session.rank])
            if session.rank == 1:
                assert session.client is not None
                monkeypatch.setattr(session.client, "wait_for_release", lambda name, step: None)
                optimizer.step()
                until(lambda: job.sequencer.statistics[1].steps == 1, "the push is counted")
                session.close("lost")
                return []
            until(lambda: job.sequencer.statistics[1].state == "lost", "worker 1 is gone")
            optimizer.step()
            return [param.detach() for param in params]

        got, _ = job.run(work)
        left_over = [server.facts()["arrived"] for server in job.servers]
    wanted = [p.detach() - LR * (a + b) / 2 for p, a, b in zip(START, GRADIENTS[0], GRADIENTS[1], strict=True)]
    assert_close(got, wanted)
    assert left_over == [0] * servers

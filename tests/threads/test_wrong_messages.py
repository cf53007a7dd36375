"""Whatever a member of the job sends, late, twice, out of turn or plainly wrong: it may be turned away; the job goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy
import pytest
import torch
from helpers import until
from msgspec.structs import replace
from sessions import within
from torch import nn

from polytempo.client.requests import Question
from polytempo.errors import JobEnded, PeerError, UsageError
from polytempo.protocol.log import Drop, Save
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Arrived,
    Assigned,
    Entries,
    Expecting,
    Failed,
    Finish,
    Gone,
    Heartbeat,
    Hello,
    Keep,
    Leave,
    MetricReport,
    Norm,
    NormTotal,
    PartialPush,
    Pull,
    Push,
    PushStatus,
    ReadRequest,
    Register,
    Repeat,
    Saved,
    StatusRequest,
    Stop,
    StoreGet,
    StoreSet,
    Welcome,
    encode,
)
from polytempo.protocol.push import FirstValues, Measures, NewState, PushedGradient
from polytempo.protocol.values import (
    BufferRange,
    Keys,
    OptimizerSpec,
    Position,
    PushId,
    RowPart,
    SentBucket,
    TableInfo,
    TensorInfo,
    Want,
)
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.channel import Bytes

pytestmark = pytest.mark.timeout(60)

ME, SIZE = 1, 6
MINE = PushId("0", ME, 0, 0)
GOOD = Push(id=MINE, body=PushedGradient(hyper=({"lr": 0.1},)))
STATE = PushId("0", ME, 0, -2)
WHOLE = [numpy.zeros(4 * SIZE, dtype=numpy.uint8)]
TENSOR = TensorInfo("w", (2,), "float32", 0)
PLAN = OptimizerSpec(sync="asp", apply="server", optimizer="SGD", tensors=(TENSOR,), groups=({"lr": 0.1},))


@dataclass
class Case:
    """What is sent; whether its sender hears why it cannot be, and whether its connection is closed for it."""

    message: AnyMessage
    buffers: tuple[Bytes, ...] = ()
    told: bool = True
    closed: bool = True


class Idea(msgspec.Struct, tag="idea", array_like=True):
    """What no push brings."""


def bytes_of(*sizes: int) -> tuple[Bytes, ...]:
    return tuple(numpy.zeros(size, dtype=numpy.uint8) for size in sizes)


def push(**changes: Any) -> Case:
    """Of the head."""
    return Case(replace(GOOD, **changes), bytes_of(4 * SIZE))


def measured(**changes: Any) -> Case:
    return push(measures=Measures(**changes))


def brings(*sizes: int, **changes: Any) -> Case:
    """Of the body; buffers of these sizes."""
    return Case(replace(GOOD, body=replace(GOOD.body, **changes)), bytes_of(*sizes))


def register(name: str = "9", **changes: Any) -> Case:
    """Of an optimizer that is not there yet."""
    return Case(Register(optimizer_id=name, optimizer_spec=replace(PLAN, **changes)))


def harmless(message: AnyMessage, *buffers: Bytes) -> Case:
    return Case(message, buffers, told=False, closed=False)


def by_the_mode(case: Case) -> Case:
    """Refused by the sequencer, which tells the worker."""
    return Case(case.message, case.buffers, closed=False)


OF_A_WORKER = {
    # Pushes.
    "a push with an unknown track": push(id=PushId("7", ME, 0, 0)),
    "a push for another worker": push(id=PushId("0", 0, 0, 0)),
    "a push of another life": push(id=PushId("0", ME, 3, 0)),
    "a push out of turn": by_the_mode(push(id=PushId("0", ME, 0, 5))),
    "a push before the first step": push(id=PushId("0", ME, 0, -5)),
    "a weight that is no number": measured(samples=math.nan),
    "a weight without end": measured(samples=math.inf),
    "a weight below nothing": measured(samples=-1.0),
    "a count of steps below one": measured(count=0),
    "a time that is no number": measured(computed=math.nan),
    "an exchange of a time that is no number": measured(exchanged=math.inf),
    "samples that are no number": measured(size=math.nan),
    "places that the epoch's order does not have": measured(positions=(Position(0, 4, done=((0, 4),), length=2),)),
    "a part of the data that there is not": measured(positions=(Position(0, 4, part=2, parts=2),)),
    "pushes of its own below nothing": push(own=-1),
    "a fence below nothing": brings(fence=-1),
    "a fence without shared memory": brings(fence=1),
    "an unknown kind": push(body=Idea()),
    "a seed for a step": push(body=FirstValues()),
    "a state for a step": push(body=NewState(state=b"")),
    "a state that is none": Case(Push(id=STATE, body=NewState(state=b"\xc1"))),
    "a state of another model": Case(Push(id=STATE, body=NewState(state=b"\x91\x94\xa7float16\x00\x02\x80"))),
    "too many groups": brings(4 * SIZE, hyper=({"lr": 0.1}, {"lr": 0.1})),
    "no learning rate": brings(4 * SIZE, hyper=({"momentum": 0.1},)),
    "a learning rate that is a word": brings(4 * SIZE, hyper=({"lr": "fast"},)),
    "a tensor that is not there": brings(4 * SIZE, absent=(5,)),
    "a tensor below the first": brings(4 * SIZE, absent=(-1,)),
    "no buffers": Case(GOOD),
    "too many buffers": Case(GOOD, bytes_of(4 * SIZE, 4 * SIZE)),
    "a short buffer": Case(GOOD, bytes_of(4 * SIZE - 4)),
    "rows of a table that is not there": brings(4 * SIZE, 8, 4, rows=(RowPart(3),)),
    "rows that did not come": brings(rows=(RowPart(0),)),
    "wants of a table that is not there": brings(4 * SIZE, 8, wants=(Want(-1),)),
    "pieces outside the shard": brings(4 * SIZE, patches=(BufferRange(0, 8, 8 + 4 * SIZE),)),
    "buckets that never came": harmless(brings(sent_buckets=(SentBucket(0, 1),)).message),
    "a bucket that is not as long as it says": Case(
        PartialPush(id=MINE, bucket=0, serial=0, pieces=(BufferRange(0, 0, 9),)), bytes_of(4)
    ),
    # Other things a worker says.
    "an unknown mode": by_the_mode(register(sync="sometimes")),
    "an unknown way to apply": register(apply="magic"),
    "an unknown optimizer": register(optimizer="os.system"),
    "a rate that is a word": register(groups=({"lr": "fast"},)),
    "a pair that is a word": register(optimizer="Adam", groups=({"lr": 0.1, "betas": "both"},)),
    "an unknown dtype": register(tensors=(TensorInfo("w", (2,), "object", 0),)),
    "a shape below nothing": register(tensors=(TensorInfo("w", (-2,), "float32", 0),)),
    "a group that is not there": register(tensors=(TensorInfo("w", (2,), "float32", 4),)),
    "a clip norm of nothing": register(clip_norm=math.nan),
    "an unknown filter": register(push_filter="magic"),
    "a table of nothing": register(tables=(TableInfo("t", 10, 0),)),
    "a table without end": register(tables=(TableInfo("t", 1 << 60, 1 << 20),)),
    "a table with an unknown rule": register(tables=(TableInfo("t", 10, 1, rule="magic"),)),
    "an optimizer with a long name": register("9" * 1000),
    "an optimizer made twice": by_the_mode(Case(Register(optimizer_id="0", optimizer_spec=PLAN))),
    "a read of nothing known": Case(ReadRequest(optimizer_id="0", worker=ME, request=1, what="minds")),
    "a read for another": Case(ReadRequest(optimizer_id="0", worker=0, request=1, what="params")),
    "a read of an unknown track": by_the_mode(Case(ReadRequest(optimizer_id="7", worker=ME, request=1, what="params"))),
    "a question about nothing": harmless(PushStatus(what="weather", optimizer_id="7", number=-3)),
    "a repeat of what was never answered": harmless(Repeat(id=MINE, place=77)),
    "a repeat for another": Case(Repeat(id=PushId("0", 0, 0, 0), place=1)),
    "an end without a reason": Case(Leave(worker=ME, incarnation=0, reason="bored")),
    "an end of nobody": Case(Leave(worker=9, incarnation=0, reason="finished")),
    "a metric for another": Case(MetricReport(worker=0, values={"a": 1.0})),
    "a notice that is too long": Case(StoreSet(key="k", value="v" * 5000)),
    "a look at nothing": harmless(StoreGet(key="nothing")),
    "something to keep outside": Case(Keep(optimizer_id="0", checkpoint="../../etc", state=b"\x90")),
    "something to keep that is nothing": Case(Keep(optimizer_id="0", checkpoint="step-00000001", state=b"\xc1")),
    "a pull of an unknown track": Case(Pull(optimizer_id="7", request=1, table=0, span=(0, 1))),
    "a pull of a table that is not there": Case(Pull(optimizer_id="0", request=1, table=4, span=(0, 1))),
    "a pull without rows": Case(Pull(optimizer_id="0", request=1, table=0)),
    "a pull of half an id": Case(Pull(optimizer_id="0", request=1, table=0, keys=Keys(1, False)), bytes_of(5)),
    "somebody else": Case(Hello(role="worker", rank=0)),
    # What others say.
    "an arrival": Case(Arrived(shard=0, id=MINE)),
    "a norm": Case(Norm(shard=0, optimizer_id="0", version=1, square=1.0)),
    "a total": Case(NormTotal(optimizer_id="0", version=1, square=1.0)),
    "a save": Case(Saved(shard=0, name="step-00000001", file="f", digest="d", tensors=[])),
    "a failure": Case(Failed(cause="none")),
    "entries of the log": Case(Entries(entries=(Drop(id=MINE), Save(name="x")))),
    "a welcome": Case(Welcome(size=9, shards=9)),
    "an answer": Case(Answer(optimizer_id="0", shard=0, exchange=0, place=0, step=9, version=9, stop=True)),
    "an end of another's": Case(Gone(worker=0, incarnation=0, reason="lost")),
    "a stop": Case(Stop(cause="because")),
    "a question for the launcher": Case(StatusRequest()),
    "an end of the job": Case(Finish(exit_status=0)),
    "expectations": Case(Expecting(job={}, ranks=(0,))),
    "a beat": Case(Heartbeat()),
    "ranks": Case(Assigned(job={}, ranks=(0,))),
}


def trains(session: Session, before_the_last: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Three steps."""
    param = nn.Parameter(torch.zeros(SIZE))
    optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
    for step in range(3):
        if step == 2:
            before_the_last()
        param.grad = torch.ones(SIZE)
        optimizer.step()
    optimizer.consolidate()
    return param.detach().clone()


def job_with_a_wrong_member(misbehaves: Callable[[Session, ThreadJob], None]) -> ThreadJob:
    """Worker 0 makes steps while and after worker 1 does what it does; the job then ends well."""

    def work(session: Session) -> torch.Tensor | None:
        if session.rank == ME:
            param = nn.Parameter(torch.zeros(SIZE))
            DistributedOptimizer(torch.optim.SGD([param], lr=0.1))
            misbehaves(session, job)
            done.append(True)
            return None
        return trains(session, lambda: until(lambda: bool(done), "worker 1 has done it"))

    done: list[bool] = []
    with ThreadJob(2, 1, "asp", retry=0.05) as job:
        values = job.run(work)[0]
        assert values is not None
        assert bool((values < 0).all()), "three steps were made"
        assert bool(torch.isfinite(values).all())
        assert all(thread.is_alive() for thread in job._threads)
    assert job.sequencer.statistics[0].state == "finished"
    assert job.summary["workers"][0]["steps"] == 3
    return job


@pytest.mark.parametrize("what", OF_A_WORKER)
def test_a_worker_that_sends_what_cannot_be_is_turned_away_and_the_job_goes_on(what: str) -> None:
    case = OF_A_WORKER[what]
    told: list[str] = []

    def misbehaves(session: Session, job: ThreadJob) -> None:
        client = session.client
        assert client is not None
        client.connections.channels[0].send(encode(case.message), case.buffers)
        try:
            behind = Question(StoreGet(key="manifest/0"))  # answered behind whatever is said of the message
            client.requests.start(behind)
            while behind.answers is None:
                client.connections.receive(1.0)
        except (UsageError, PeerError) as error:
            told.append(str(error))
        session.client = None
        client.close()

    job = job_with_a_wrong_member(misbehaves)
    assert len(told) == case.told
    assert all("\n" not in line for line in told)
    closed = [line for line in job.notices if line.startswith("the connection of worker 1 was closed: ")]
    assert len(closed) == case.closed, job.notices


def test_what_is_said_before_and_after_a_workers_time_changes_nothing() -> None:
    """Push before Register, Leave twice, and everything else after it."""

    def misbehaves(session: Session, job: ThreadJob) -> None:
        client = session.client
        assert client is not None
        channel = client.connections.channels[0]
        leave = Leave(worker=ME, incarnation=0, reason="finished")
        for message, buffers in [(leave, ()), (leave, ()), (GOOD, WHOLE), (leave, ()), (Heartbeat(), ())]:
            channel.send(encode(message), buffers)
        until(lambda: job.sequencer.statistics[ME].state == "finished", "it has left")
        session.client = None
        client.close()

    job_with_a_wrong_member(misbehaves)


OF_A_SERVER = {
    "speaks for another": Norm(shard=0, optimizer_id="0", version=1, square=1.0),
    "has saved what nobody asked for": Saved(shard=1, name="step-9", file="f", digest="d", tensors=[]),
    "says what workers say": Leave(worker=0, incarnation=0, reason="finished"),
}


@pytest.mark.parametrize("what", OF_A_SERVER)
def test_a_server_that_sends_what_cannot_be_ends_the_job_with_the_cause(what: str) -> None:
    """Its part of the model is lost with it."""
    with ThreadJob(1, 2, "asp") as job:
        session = job.session(0)
        channel = job.servers[1]._to_coordinator
        assert channel is not None
        channel.send(encode(OF_A_SERVER[what]))
        with pytest.raises(JobEnded, match="server 1 was turned away: "):
            within(session, trains)
        session.abandon()


OF_THE_LAUNCHER = {
    "a worker that is not there": Gone(worker=9, incarnation=0, reason="lost"),
    "a worker before the first": Gone(worker=-1, incarnation=0, reason="lost"),
    "an end without a reason": Gone(worker=1, incarnation=0, reason="bored"),
    "ranks that are not there": Expecting(job={}, ranks=(0, 9)),
    "ranks that are there twice": Expecting(job={}, ranks=(1, 1)),
}


@pytest.mark.parametrize("what", OF_THE_LAUNCHER)
def test_a_launcher_that_says_what_cannot_be_ends_the_job_with_the_cause(what: str) -> None:
    with ThreadJob(1, 1, "asp") as job:
        session = job.session(0)
        job._launcher.send(encode(OF_THE_LAUNCHER[what]))
        with pytest.raises(JobEnded, match="the launcher is gone: "):
            within(session, trains)
        session.abandon()

"""What a user's profiler shows of a job: ranges by the name of what travels, in each way of travel; and none without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import loss_of, small_batches, small_model
from piped import batches, layered, mse
from torch.autograd import profiler

import polytempo.profile_ranges
from polytempo.pipeline.pipeline import Pipeline
from polytempo.reducer import pushes, sums
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train import communication
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

Work = Callable[[Session], Any]

STEPS = 4


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "LIMIT", 100)
    monkeypatch.setattr(sums, "BUCKET", 100)


def train(session: Session) -> None:
    model, steps = small_model(), small_batches(STEPS, [4] * 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step[session.rank]).backward()
        optimizer.step()
    optimizer.consolidate()


def in_stages(session: Session) -> None:
    pipe = Pipeline(layered(), loss=mse, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), microbatches=2)
    for x, y in batches(2, 4):
        pipe.step(x, y)


def together(session: Session) -> None:
    tensor, parts = torch.ones(2), [torch.ones(2), torch.ones(2)]
    communication.all_reduce(tensor)
    communication.broadcast(tensor, 0)
    communication.all_gather(parts, tensor)
    communication.reduce_scatter(tensor, parts)
    communication.barrier()
    if session.rank == 0:
        communication.send(tensor, 1)
    else:
        communication.recv(tensor, 0)


def servers(sync: str = "bsp", via: str = "ps", wire: str = "memory") -> ThreadJob:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadJob, "wire", wire)
        return ThreadJob(2, sync=sync, via=via)


#: A job of two workers, what they do, and the ranges of worker 0.
WAYS: dict[str, tuple[Callable[[], Any], Work, set[str]]] = {
    "servers": (servers, train, {"push", "push bucket 0", "push bucket 1", "wait"}),
    "servers that share memory": (lambda: servers(wire="ipc"), train, {"push", "wait"}),
    "asynchronous": (lambda: servers("ssp:1"), train, {"push", "wait", "pull"}),
    "workers that share memory": (lambda: servers(via="allreduce"), train, {"push", "wait", "all_reduce in shared memory"}),
    "collectives": (
        lambda: GroupJob(2),
        train,
        {"all_reduce bucket 0", "all_reduce bucket 1", "all_reduce", "wait all_reduce", "all_gather", "wait all_gather"},
    ),
    "local": (lambda: servers("local:2"), train, {"push", "wait", "average"}),
    "local among workers": (
        lambda: servers("local:2", "allreduce"),
        train,
        {"push", "wait", "average", "all_reduce in shared memory"},
    ),
    "gossip": (lambda: servers("gossip:ring", "allreduce"), train, {"push", "wait", "mix", "send", "recv"}),
    "adpsgd": (lambda: servers("adpsgd:ring", "allreduce"), train, {"push", "wait", "mix", "send"}),
    "anytime": (lambda: servers("anytime:4"), train, {"wait round"}),
    "pipeline": (lambda: GroupJob(2), in_stages, {"send stage 1", "receive stage 1", "wait"}),
    "calls of a script": (
        lambda: GroupJob(2),
        together,
        {"all_reduce", "wait all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "wait barrier", "send"},
    ),
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_a_trace_has_the_ranges_of_this_way_of_travel(way: str) -> None:
    make, work, wanted = WAYS[way]

    def profiled(session: Session) -> set[str]:
        if session.rank:  # a profiler is the process's, and traces the thread that starts it
            work(session)
            return set()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work(session)
        return {event.name for event in profile.events()}

    with make() as job:
        found = job.run(profiled)[0]
    ours = {name.removeprefix("polytempo::") for name in found if name.startswith("polytempo::")}
    assert wanted <= ours, ours


@ways
def test_no_range_is_made_where_no_profiler_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    class Noted(profiler.record_function):  # type: ignore[misc]
        def __init__(self, name: str, args: str | None = None) -> None:
            super().__init__(name, args)
            made.append(name)

    monkeypatch.setattr(profiler, "record_function", Noted)
    make, work, _ = WAYS[way]
    with make() as job:
        job.run(work)
    assert [name for name in made if "polytempo" in name] == []
    assert polytempo.profile_ranges.profiled("push") is polytempo.profile_ranges.profiled("wait", "all_reduce")


def test_calls_by_torchs_names() -> None:
    dist.init_process_group("polytempo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), 0)
            dist.barrier()
    finally:
        dist.destroy_process_group()
    names = {event.name for event in profile.events()}
    assert {"polytempo::all_reduce", "polytempo::broadcast", "polytempo::barrier"} <= names

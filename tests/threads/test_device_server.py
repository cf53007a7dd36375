"""Servers whose values are on a device, seen from a worker of raw messages: what arrives when, and what never does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from device_worker import DeviceWorker, joined, spec_of
from helpers import until

from polytempo.device.exchange_fences import ANSWERED
from polytempo.device.host_device import HostDevice
from polytempo.protocol.messages import Answer, Gone, Refused, Repeat, encode
from polytempo.protocol.values import PushId
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

SHAPES = ((5, 3), (4,), (7, 2))


def some(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice, dtype=dtype) for shape in SHAPES]


def workers_of(job: ThreadJob, device: HostDevice, sync: str, **more: object) -> list[DeviceWorker]:
    start, spec = some(0), spec_of(some(0), sync, **more)  # type: ignore[arg-type]
    workers = [joined(job, device, rank, spec, start) for rank in range(job.plan.size)]
    for worker in workers:
        worker.begin()
    assert [worker.share() for worker in workers] == [[""] * job.plan.shards] * len(workers)
    return workers


def sgd(start: Sequence[torch.Tensor], *gradients: Sequence[torch.Tensor], lr: float = 0.1) -> list[torch.Tensor]:
    mean = [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]
    return [value - lr * gradient for value, gradient in zip(start, mean, strict=True)]


def close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other) for one, other in zip(got, wanted, strict=True))


def arrived(job: ThreadJob) -> int:
    return sum(server.facts()["arrived"] for server in job.servers)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_push_counts_when_its_fence_is_reached_and_its_answer_lies_in_the_landing(servers: int) -> None:
    with ThreadJob(1, servers, "asp", device="stand-in") as job:
        (worker,) = workers_of(job, HostDevice(), "asp")
        wanted = some(0)
        for step in range(1, 4):
            fence = worker.announce()
            assert [worker.status(shard) for shard in range(servers)] == ["received"] * servers
            assert not any(fences.reached(ANSWERED, fence) for fences in worker.fences)
            assert arrived(job) == 0
            worker.write(some(step))
            worker.answered()
            wanted = sgd(wanted, some(step))
            assert close(worker.parameters(), wanted)
        worker.close()


def test_a_round_waits_for_the_last_fence_and_not_for_the_last_header() -> None:
    with ThreadJob(2, 1, "bsp", device="stand-in") as job:
        workers = workers_of(job, HostDevice(), "bsp")
        for worker in workers:
            worker.announce()
        workers[1].write(some(2))
        until(lambda: arrived(job) == 1, "the push of worker 1 arrives")
        assert workers[0].status() == "received"
        assert not workers[1].fences[0].reached(ANSWERED, 1)
        workers[0].write(some(1))
        for worker in workers:
            worker.answered()
            assert close(worker.parameters(), sgd(some(0), some(1), some(2)))
            worker.close()


def test_the_pending_push_of_a_worker_that_goes_is_never_applied_and_its_memory_is_given_back() -> None:
    """Worker 1 has announced a push when it dies, and its memory is written later, as if a part of it were on its way."""
    device = HostDevice()
    with ThreadJob(2, 1, "asp", device="stand-in") as job:
        workers = workers_of(job, device, "asp")
        mapped = device.allocated
        workers[1].announce()
        assert workers[1].status() == "received"
        workers[1].close()
        job._launcher.send(encode(Gone(worker=1, incarnation=0, reason="lost", cause="was killed")))
        until(lambda: len(job.servers[0].executor.state.shares) == 1, "the server gives up the memory of worker 1")
        workers[1].write(some(9))
        for step in range(1, 3):
            workers[0].announce()
            workers[0].write(some(step))
            workers[0].answered()
        assert close(workers[0].parameters(), sgd(sgd(some(0), some(1)), some(2)))
        assert (arrived(job), job.servers[0]._inbox._pending) == (0, {})
        assert workers[1].fences[0].reached(ANSWERED, 1 << 20)  # released: a stream that waited there would go on
        del workers[1]
        assert device.allocated == mapped // 2
        workers[0].close()


def test_a_push_that_was_counted_survives_its_worker() -> None:
    """In a barrier: worker 0's push is complete, worker 0 dies, worker 1's comes; both are in the update, as on the CPU."""
    device = HostDevice()
    with ThreadJob(2, 1, "bsp", device="stand-in") as job:
        workers = workers_of(job, device, "bsp")
        workers[0].announce()
        workers[0].write(some(1))
        until(lambda: arrived(job) == 1, "the push of worker 0 arrives")
        workers[0].close()
        until(lambda: job.servers[0].facts()["workers"] == [1], "the server hears that worker 0 is gone")
        workers[1].announce()
        workers[1].write(some(2))
        workers[1].answered()
        assert close(workers[1].parameters(), sgd(some(0), some(1), some(2)))
        workers[1].close()


def test_a_later_incarnation_shares_memory_of_its_own() -> None:
    device = HostDevice()
    with ThreadJob(2, 1, "asp", device="stand-in") as job:
        workers = workers_of(job, device, "asp")
        workers[1].announce()
        workers[1].close()
        again = joined(job, device, 1, workers[1].spec, some(0), incarnation=1)
        again.begin()
        assert again.share() == [""]
        again.announce()
        again.write(some(3))
        again.answered()
        assert close(again.parameters(), sgd(some(0), some(3), lr=0.05))  # of two workers each has half a step
        assert set(job.servers[0].executor.state.shares) == {("0", 0, 0), ("0", 1, 1)}
        again.close()
        workers[0].close()


def test_an_answer_without_values_and_a_skipped_push_set_their_fences_too() -> None:
    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        (worker,) = workers_of(job, HostDevice(), "asp")
        worker.landing["float64"].tensor(torch.float64).fill_(7.0)
        worker.announce(values=False)
        worker.write(some(1))
        worker.answered()
        assert set(worker.values["float64"].tolist()) == {7.0}  # nothing was written there
        worker.announce(skip=True)
        worker.write(some(1))
        worker.answered()
        assert close(worker.parameters(), sgd(some(0), some(1)))
        worker.close()


def test_a_push_that_is_sent_twice_is_counted_once() -> None:
    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        (worker,) = workers_of(job, HostDevice(), "asp")
        worker.announce()
        worker.exchange -= 1
        worker.announce(attempt=1)
        worker.write(some(1))
        worker.answered()
        assert close(worker.parameters(), sgd(some(0), some(1)))
        worker.close()


def test_a_landing_is_written_once_however_often_its_answer_is_asked_for() -> None:
    """The answer's header was lost, and the other worker goes on: what the stream of the first has read stays."""
    with ThreadJob(2, 1, "asp", device="stand-in") as job:
        workers = workers_of(job, HostDevice(), "asp")
        workers[0].announce()
        workers[0].write(some(1))
        _, answer, _ = workers[0].next(Answer)
        first = workers[0].landing["float64"].tensor(torch.float64).clone()
        workers[1].announce()
        workers[1].write(some(2))
        workers[1].answered()
        identity = PushId("0", 0, 0, workers[0].step)
        workers[0].channels[0].send(encode(Repeat(id=identity, place=answer.place)))
        _, again, _ = workers[0].next(Answer)
        assert (again.fence, again.exchange) == (1, answer.exchange)
        assert again.place > answer.place
        assert torch.equal(workers[0].landing["float64"].tensor(torch.float64), first)
        for worker in workers:
            worker.close()


@pytest.mark.parametrize(("first", "second"), [("stand-in", None), (None, "stand-in"), ("stand-in", "stand-in")], ids=str)
def test_checkpoints_travel_between_servers_on_a_device_and_on_the_cpu(
    tmp_path: Path, first: str | None, second: str | None
) -> None:
    ends = []
    for devices in ((first, second), (None, None)):
        folder = tmp_path / str(len(ends))
        for turn, device in enumerate(devices):
            resume = folder if turn else None
            with ThreadJob(1, 2, "bsp", checkpoint=folder, checkpoint_every=2, resume=resume, device=device) as job:
                (end,) = job.run(_three_steps)
        ends.append(end)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def _three_steps(session: Session) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(tensor) for tensor in some(0)]
    optimizer = DistributedOptimizer(torch.optim.Adam(params, lr=0.05))
    for step in range(1, 5):
        for param, gradient in zip(params, some(step), strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach().clone() for param in params]


def test_the_summary_says_where_the_values_were() -> None:
    for device, said in (("stand-in", "cpu"), (None, None)):
        with ThreadJob(1, 1, "asp", device=device) as job:
            job.run(_three_steps)
        assert job.summary.get("values_on") == said


def test_a_server_that_is_out_of_memory_says_so_in_one_line() -> None:
    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")
        said = job.servers[0].executor._out_of_memory(error)
    assert said == (
        "server 0 is out of memory on the GPU: 20.00 GiB was asked for; use --server-device cpu, a smaller model or batch, "
        "or fewer processes on this GPU"
    )


def test_a_server_that_stops_releases_its_workers() -> None:
    with ThreadJob(2, 2, "bsp", device="stand-in") as job:
        workers = workers_of(job, HostDevice(), "bsp")
        workers[0].announce()
        workers[0].write(some(1))
        fences = [each for worker in workers for each in worker.fences]
        assert not any(each.reached(ANSWERED, 1) for each in fences)
    until(lambda: all(each.reached(ANSWERED, 1) for each in fences), "the servers release the fences of both workers")
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identity": "another"}, "device another is not reachable from host"),
        ({"gradients": ()}, "expected gradients of [264] bytes, got []"),
    ],
)
def test_memory_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        worker = joined(job, HostDevice(), 0, spec_of(some(0), "asp"), some(0))
        worker.begin()
        (refusal,) = worker.share(**changes)
        assert reason in refusal
        assert worker.share() == [""]
        worker.close()


def test_servers_on_the_cpu_and_modes_that_need_host_memory_refuse() -> None:
    for sync, more, device, reason in (
        ("asp", {}, None, "the values of server 0 are in the memory of the CPU"),
        ("delay:1", {}, "stand-in", "several pushes of a worker in flight needs"),
        ("asp", {"push_filter": "bf16"}, "stand-in", "compression needs pushes and answers in host memory"),
    ):
        job = ThreadJob(1, 1, sync, device=device)
        job.wire = "ipc"
        with job:
            worker = joined(job, HostDevice(), 0, spec_of(some(0), sync, **more), some(0))  # type: ignore[arg-type]
            worker.begin()
            assert reason in worker.share()[0]
            worker.close()


def test_a_fence_without_shared_memory_is_refused() -> None:
    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        worker = joined(job, HostDevice(), 0, spec_of(some(0), "asp"), some(0))
        worker.begin()
        worker.announce()
        assert "shares no device memory with this server" in worker.next(Refused)[1].reason
        worker.close()

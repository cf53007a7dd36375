"""BSP among workers whose gradients stay on devices: as one process on the joint batch, whatever the devices' lateness."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_equal, loss_of, small_batches, small_model, trained_alone, weights
from torch import nn

from polytempo.device.device import Devices
from polytempo.device.host_device import HostDevice
from polytempo.reducer.peers import PeerExchange
from polytempo.reducer.sums import DeviceSums
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)


def is_on_device(optimizer: DistributedOptimizer) -> bool:
    reducer: Any = optimizer._reducer
    assert isinstance(reducer, PeerExchange)
    return isinstance(reducer.sums, DeviceSums)


class LateReader(HostDevice):
    """Reads one slot after another, and takes its time in between."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def weighted_sum(
        self, terms: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, divisor: float = 1.0
    ) -> None:
        self.rounds += 1
        total = torch.zeros_like(out)
        for term, weight in zip(reversed(terms), reversed(weights), strict=True):
            threading.Event().wait(0.003)
            total += weight * term
        out.copy_(total / divisor)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_on_devices_are_one_process_on_the_joint_batch(workers: int) -> None:
    """Also where one reads the others' slots late: they are not filled again before."""
    model, data = small_model().double(), small_batches(12, (6,) * workers)
    inner = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=True)  # noqa: E731
    late = LateReader()

    def work(session: Session) -> list[torch.Tensor]:
        if session.rank == 1:
            session.devices = Devices(late)
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(inner(list(mine.parameters())), mine)
        assert is_on_device(optimizer)
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return weights(mine)

    with ThreadJob(workers, via="allreduce", device="stand-in") as job:
        found = job.run(work)
    assert late.rounds == len(data)
    for got in found:
        assert_close(got, trained_alone(model, inner, data), rtol=1e-9)


def test_weights_strides_and_values_of_one_worker() -> None:
    """Workers start from the values of one; samples weigh; weights in channels_last are reduced in their own order."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)

    models = [made(7), made(7)]
    for param in models[1].parameters():
        param.data += 5.0  # it takes the values of the first
    data = torch.randn(2, 3, 3, 5, 5, generator=torch.Generator().manual_seed(1))

    def work(session: Session) -> list[torch.Tensor]:
        mine = models[session.rank]
        optimizer = DistributedOptimizer(torch.optim.Adam(mine.parameters(), lr=0.1), mine)
        assert is_on_device(optimizer)
        assert not mine[0].weight.is_contiguous()
        for step in data:
            optimizer.zero_grad()
            batch = step[:2] if session.rank == 0 else step[2:]
            mine(batch).square().mean().backward()
            optimizer.step(samples=len(batch))
        return weights(mine)

    with ThreadJob(2, via="allreduce", device="stand-in") as job:
        found = job.run(work)
    alone = made(7)
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for step in data:
        optimizer.zero_grad()
        alone(step).square().mean().backward()
        optimizer.step()
    assert_equal(*found)
    assert_close(found[0], weights(alone), rtol=1e-4)


@pytest.mark.parametrize("differ", ["unreachable", "strides", "on the CPU"])
def test_workers_that_cannot_share_device_memory_go_by_the_host(differ: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        if session.rank == 1:
            if differ == "unreachable":
                session.devices = Devices(HostDevice("another"))
            elif differ == "on the CPU":
                session.devices = Devices()
            else:
                mine = mine.to(memory_format=torch.channels_last)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine)
        assert not is_on_device(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            (mine(torch.full((2, 3, 5, 5), 1.0 + session.rank + number)) ** 2).mean().backward()
            optimizer.step()
        return weights(mine)

    with ThreadJob(2, via="allreduce", device="stand-in") as job:
        found = job.run(work)
    assert_close(found[0], found[1])


def test_a_worker_that_ends_is_not_waited_for() -> None:
    model, data = small_model().double(), small_batches(6, (6, 6))

    def work(session: Session) -> int:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine)
        assert is_on_device(optimizer)
        for step in data[: 6 if session.rank == 0 else 3]:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return int(optimizer.stats["step"])

    with ThreadJob(2, via="allreduce", device="stand-in") as job:
        assert job.run(work) == [6, 3]


def test_at_most_two_flat_copies_of_the_parameters_are_added() -> None:
    model = small_model()

    def work(session: Session) -> int:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine)
        return int(optimizer._reducer.traffic().device_bytes)

    with ThreadJob(2, via="allreduce", device="stand-in") as job:
        found = job.run(work)
    assert found == [2 * sum(param.nbytes for param in model.parameters())] * 2


def test_workers_without_a_sequencer_reduce_buckets_on_devices() -> None:
    """As under torchrun: flat buffers are on the device, and so are the group's slots."""
    model, data = small_model(), small_batches(6, (6, 6))
    inner = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(inner(list(mine.parameters())), mine)
        assert optimizer._reducer.copier.on_device
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        assert all(group.route.slots is not None for group in optimizer._part.groups())
        return weights(mine)

    with GroupJob(2) as job:
        for session in job.sessions:
            session.devices = Devices(HostDevice())
        found = job.run(work)
    for got in found:
        assert_close(got, trained_alone(model, inner, data), rtol=1e-9)

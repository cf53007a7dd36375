"""What torch does in C++ with a group and its `Work`, on one rank: nothing waits for ever, nothing is left undone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo  # noqa: F401  registers the back end
from polytempo.torch_backend.process_group import TorchGroup
from polytempo.torch_backend.work import KEPT, TaskWork

#: Nothing here takes nearly so long, unless it waits for ever.
PATIENCE = 20.0


@pytest.fixture
def group() -> Iterator[TorchGroup]:
    dist.init_process_group("polytempo", store=dist.HashStore(), rank=0, world_size=1)
    assert isinstance(dist.group.WORLD, TorchGroup)
    yield dist.group.WORLD
    dist.destroy_process_group()


def soon(call: Callable[[], object]) -> None:
    """It returns, where it could wait for ever in C++."""
    returned = list[bool]()
    thread = threading.Thread(target=lambda: returned.append(call() is None), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert returned


def trained(make: Callable[[nn.Module], nn.Module]) -> list[list[float]]:
    """A model with buffers, which DDP hands to the group in each forward, after some steps."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = make(inner), torch.optim.SGD(inner.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return [value.flatten().tolist() for value in inner.state_dict().values()]


# The compiler.


@pytest.mark.usefixtures("group")
def test_a_compiled_ddp_model_trains_as_a_plain_one() -> None:
    plain = trained(lambda model: model)
    assert trained(lambda model: torch.compile(DistributedDataParallel(model), backend="eager")) == plain
    assert trained(lambda model: DistributedDataParallel(torch.compile(model, backend="eager"))) == plain


@pytest.mark.usefixtures("group")
def test_collectives_in_a_compiled_function() -> None:
    @torch.compile(backend="eager")
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.all_reduce(tensor)
        return tensor + 1

    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


# The half of a `Work` that C++ keeps.


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("over_all", [False, True])
def test_ddp_waits_in_backward_for_a_work_that_python_has_dropped(over_all: bool) -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 2))
        with model.join(divide_by_initial_world_size=over_all):
            for _ in range(3):
                model(torch.randn(6, 4)).sum().backward()

    soon(train)


def test_works_that_are_dropped_unawaited_hold_little(group: TorchGroup) -> None:
    """A script may never wait for what it sends: the last of them are kept, without their tensors."""
    large = [torch.ones(100) for _ in range(KEPT + 10)]
    seen = [weakref.ref(tensor) for tensor in large]
    for tensor in large:
        group.allreduce([tensor])
    group.barrier().wait()
    del large, tensor
    gc.collect()
    assert not [there for there in seen if there() is not None]
    assert len(group._dropped) == KEPT
    awaited = group.allreduce([torch.ones(1)])
    awaited.wait()
    asked = group.allreduce([torch.ones(1)])
    asked.get_future().wait()
    before = list(group._dropped)
    del awaited, asked
    assert list(group._dropped) == before


# Futures.


def test_a_future_is_done_when_its_work_has_been_waited_for(group: TorchGroup) -> None:
    for _ in range(100):
        work = group.allreduce([torch.ones(1)])
        work.wait()
        assert work.get_future().done()
        before = group.allreduce([torch.ones(1)])
        future = before.get_future()
        before.wait()
        assert future.done()
        assert future.value()[0].tolist() == [1.0]


def test_a_future_asked_for_before_the_end_is_done_after_it(group: TorchGroup) -> None:
    """The task is held up, so that the future is completed by another thread, while this one waits."""
    for _ in range(20):
        task = HeldTask()
        work = TaskWork([task], [torch.ones(1)], [0], group._dropped)  # type: ignore[list-item]
        future = work.get_future()
        assert not future.done()
        ending = threading.Thread(target=task.end)
        ending.start()
        work.wait()
        assert future.done()
        ending.join()


class HeldTask:
    """Ends when told; callbacks are called after those that wait have gone on."""

    error: Any = None
    result: Any = None

    def __init__(self) -> None:
        self._ended, self._callbacks = threading.Event(), list[Callable[[Any], object]]()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, _: float | None) -> None:
        self._ended.wait()

    def when_done(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def order_stream(self) -> None:
        pass

    def end(self) -> None:
        self._ended.set()
        for callback in self._callbacks:
            callback(self)

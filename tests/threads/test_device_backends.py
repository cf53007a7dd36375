"""A back end of torch for one device beside this one: each call goes to the back end of its tensors' device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo  # noqa: F401  registers the back end
from polytempo.torch_backend.device_backends import CALLS
from polytempo.torch_backend.process_group import TorchGroup
from polytempo.torch_backend.work import CallError, TaskWork


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def open_alone(backend: str, **options: Any) -> TorchGroup:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    group = dist.group.WORLD
    assert isinstance(group, TorchGroup)
    return group


def test_calls_go_to_the_back_end_of_their_device() -> None:
    """gloo takes the tensors on the CPU, where polytempo has those on the GPU."""
    group = open_alone("cpu:gloo,cuda:polytempo")
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert group._get_backend(torch.device("cuda")) is group
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert not isinstance(work, TaskWork)
    assert work is not None
    work.wait()
    outputs: list[Any] = [None]
    dist.all_gather_object(outputs, {"a": 1})
    assert outputs == [{"a": 1}]
    dist.barrier()
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    small = dist.new_group([0])
    assert isinstance(small, TorchGroup)
    assert set(small.beside) == {"cpu"}


def test_one_back_end_for_all_devices_stays_alone() -> None:
    group = open_alone("polytempo")
    assert not group.beside
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert isinstance(work, TaskWork)
    work.wait()


def test_what_torch_has_registered_agrees_with_the_group() -> None:
    """Torch 2.15 asks the default back end of every group with devices, in C++, when it is made."""
    group = open_alone("polytempo")
    assert torch.device("cpu") in group._device_types
    refusing = [dist.ProcessGroup._get_backend(group, device) for device in group._device_types]
    assert not group._has_hooks()  # by the default back end; torch warns where there is none
    assert [(one.rank(), one.size()) for one in refusing] == [(0, 1)] * len(group._device_types)
    assert group.get_backend(torch.device("cpu")) is group
    for one in refusing:  # a call that came past the group would not be made: it must not seem so
        with pytest.raises(RuntimeError, match="error_on_collective"):
            one.allreduce([torch.ones(3)])
    dist.destroy_process_group()
    group = open_alone("cpu:gloo,cuda:polytempo")
    assert isinstance(dist.ProcessGroup._get_backend(group, torch.device("cpu")), dist.ProcessGroupGloo)
    assert not group._has_hooks()


def test_every_call_is_handed_over() -> None:
    """Names of calls differ between versions of torch: what torch has and this group has is in the list."""
    of_torch = {name for name in vars(dist.ProcessGroup) if callable(getattr(dist.ProcessGroup, name, None))}
    not_of_tensors = {
        "barrier",
        "shutdown",
        "abort",
        "set_timeout",
        "monitored_barrier",
        "getBackendName",
        "get_group_store",
    }
    own = {name for name in vars(TorchGroup) if not name.startswith("__")} & of_torch
    calls = {name for name in own if name.removeprefix("_").startswith(("all", "reduce", "broadcast", "gather", "scatter"))}
    assert calls | {"send", "recv", "recv_anysource"} <= set(CALLS) | not_of_tensors


class FakeNccl:
    """What torch's class for NCCL is asked for; gloo underneath."""

    asked: ClassVar[list[tuple[int, int, Any]]] = []

    class Options:
        _timeout: Any = None
        global_ranks_in_group: Any = None
        group_name = ""

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        cls.asked.append((rank, size, options))
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


def test_nccl_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    FakeNccl.asked.clear()
    group = open_alone("cpu:polytempo,cuda:nccl")
    assert group._get_backend(torch.device("cpu")) is group
    assert group._get_backend(torch.device("cuda")) is not group
    ((rank, size, options),) = FakeNccl.asked
    assert (rank, size, options.global_ranks_in_group) == (0, 1, [0])
    assert options._timeout.total_seconds() > 0
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert isinstance(work, TaskWork)
    work.wait()


def test_what_is_not_there_is_refused_by_name() -> None:
    if not dist.is_nccl_available():
        with pytest.raises(CallError, match="this torch has no NCCL; use cuda:polytempo"):
            open_alone("cpu:polytempo,cuda:nccl")

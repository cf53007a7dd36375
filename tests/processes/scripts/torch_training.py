"""Models that torch trains over a group: polytempo's (None) or gloo's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_calls import RANK


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))


def trained(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 5) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + RANK))
        net(batch).square().mean().backward()
        optimizer.step()
    return [getattr(value, "full_tensor", value.detach)() for value in net.parameters()]


def ddp(group: Any) -> Any:
    return trained(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.002))


def ddp_with_a_hook_that_waits(group: Any) -> Any:
    net = DistributedDataParallel(model(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(net)


def ddp_compiled(group: Any) -> Any:
    return trained(torch.compile(DistributedDataParallel(model(), process_group=group), backend="eager"))


def ddp_joined(group: Any) -> Any:
    """Ranks with more batches than others; the mean is over those that have one, or over all."""
    found = []
    for over_all in (False, True):
        net = DistributedDataParallel(model(), process_group=group)
        with net.join(divide_by_initial_world_size=over_all):
            found.append(trained(net, steps=3 + 2 * RANK))
    return found


def zero_joined(group: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9)
    with Join([net, optimizer], divide_by_initial_world_size=False):
        return trained(net, optimizer, steps=3 + 2 * RANK)


def sharded(group: Any) -> Any:
    mesh, net = DeviceMesh.from_group(group or dist.group.WORLD, "cpu"), model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return trained(net)


def dtensor(group: Any) -> Any:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    torch.manual_seed(1)
    left, right = torch.randn(6, 8), torch.randn(8, 6)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    product = rows @ distribute_tensor(right, mesh, [Replicate()])
    partial = rows.redistribute(placements=[Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    return product.full_tensor(), partial.redistribute(placements=[Shard(1)]).full_tensor(), rows.sum().full_tensor()


TRAINING: list[tuple[str, Callable[[Any], Any]]] = [
    ("DDP", ddp),
    ("DDP, PowerSGD", ddp_with_a_hook_that_waits),
    ("DDP, compiled", ddp_compiled),
    ("DDP, join", ddp_joined),
    ("ZeRO, join", zero_joined),
    ("fully_shard", sharded),
    ("DTensor", dtensor),
]

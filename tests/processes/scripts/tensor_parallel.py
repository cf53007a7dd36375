"""Layers split over processes: torch's DTensor over our back end, and ours with dropout; `ok NAME` where it is right."""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import polytempo as pt
from polytempo.collectives.world import open_by_name
from polytempo.tensor_parallel.cross_entropy import parallel_loss
from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.tensor_parallel.plan import find_plan, parallelize

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)).double()


def results(model: nn.Module) -> dict[str, Tensor]:
    """Output and all gradients, whole."""
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters()} | {"x": x.grad, "output": output.detach()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in grads.items()}


def dtensor_over_our_back_end() -> None:
    assert dist.group.WORLD is not None
    split = mlp()
    parallelize_module(split, DeviceMesh.from_group(dist.group.WORLD, "cpu"), PLAN)
    assert isinstance(split[0].weight, DTensor)
    for name, value in results(mlp()).items():
        torch.testing.assert_close(results(split)[name], value, rtol=1e-10, atol=1e-10)
        split.zero_grad()


def replicated_parameters_with_dropout(group: RankTensorGroup) -> None:
    """Dropout in and outside split regions: ten steps, after which what is replicated is bitwise equal on all ranks."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.3, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), layer, nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 11))
    before, loss = copy.deepcopy(model), partial(pt.cross_entropy, dim=-1)
    plan = find_plan(model, SIZE, {"0": "vocab"}, loss)
    assert plan.logits is not None
    parallelize(model, plan, group)
    loss = parallel_loss(loss, group, plan.logits[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ids, target = torch.randint(11, (2, 4, 6))
    for _ in range(10):
        optimizer.zero_grad()
        loss(model(ids), target).backward()
        optimizer.step()
    for name, param in model.named_parameters():
        if name not in plan.sharding:
            assert not torch.equal(param, before.get_parameter(name)), name
            for other in group.all_gather(param.detach().unsqueeze(0), 0):
                assert torch.equal(other, param), name
    draws = group.all_gather(torch.rand(3).unsqueeze(0), 0)
    assert torch.equal(draws[0], draws[1])  # the common generators are still alike


def main() -> None:
    timeout = timedelta(seconds=40)
    dist.init_process_group("polytempo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=SIZE, timeout=timeout)
    dtensor_over_our_back_end()
    print("ok DTensor")
    world = open_by_name(sys.argv[1], RANK, SIZE)
    replicated_parameters_with_dropout(RankTensorGroup(world.all_ranks))
    print("ok dropout")
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

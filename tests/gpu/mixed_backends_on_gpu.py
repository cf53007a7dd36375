"""Run by `test_torch_backend_on_gpu.py`, with one rank: NCCL for tensors on the GPU, polytempo for those on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
from polytempo.torch_backend.work import TaskWork

device = torch.device("cuda", 0)
dist.init_process_group("cpu:polytempo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
group = dist.group.WORLD
assert group is not None
assert isinstance(group._get_backend(device), dist.ProcessGroupNCCL)
for place in (device, torch.device("cpu")):
    x = torch.arange(1000.0, device=place)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert isinstance(work, TaskWork) == (place.type == "cpu")
    work.wait()
    assert torch.equal(x.cpu(), torch.arange(1000.0))
    out = torch.empty(1000, device=place)
    dist.all_gather_into_tensor(out, x)
    assert torch.equal(out, x)
dist.barrier()
found: list[object] = [None]
dist.all_gather_object(found, "mine")
assert found == ["mine"]
model = DistributedDataParallel(nn.Linear(20, 3).to(device), device_ids=[0])
model(torch.ones(4, 20, device=device)).sum().backward()
small = dist.new_group([0])
dist.all_reduce(torch.ones(3, device=device), group=small)
dist.destroy_process_group()
print("ok mixed", flush=True)

pt.init()
x = torch.ones(1000, device=device)
side = torch.cuda.Stream(device)
with torch.cuda.stream(side):
    torch.cuda._sleep(20_000_000)
    x.add_(1)
    pt.all_reduce(x, op="mean", algorithm="native")  # NCCL, which takes one rank a GPU
    assert float(x.sum()) == 2000
parts = [torch.empty(1000, device=device)]
pt.all_gather(parts, x, algorithm="native")
assert torch.equal(parts[0], x)
pt.shutdown()
print("ok native", flush=True)

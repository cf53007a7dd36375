"""Run by `test_torch_backend_on_gpu.py`: a script of Horovod's, with its model on a GPU that all ranks share."""

from __future__ import annotations

import os

import torch
from torch import nn

import polytempo.horovod as hvd

torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
hvd.init()
rank, size = hvd.rank(), hvd.size()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
device = torch.device(os.environ.get("TRIED_ON", "cuda"))


def keep_busy() -> None:
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def calls() -> None:
    """What is made on the stream before a call is in it, and what follows `synchronize()` has its result."""
    total = sum(range(1, size + 1))
    for number in range(1, 20):
        keep_busy()
        x = torch.full((200_000,), float(number * (rank + 1)), device=device)
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        doubled = hvd.synchronize(handle) * 2
        assert doubled.device.type == device.type
        assert float(doubled.min()) == float(doubled.max()) == 2 * number * total
        mean = hvd.allreduce(x)
        torch.testing.assert_close(mean, torch.full_like(x, number * total / size))
    several = [torch.full((100 * (index + 1),), float(rank + index), device=device) for index in range(5)]
    for index, found in enumerate(hvd.grouped_allreduce(several, op=hvd.Sum)):
        assert torch.equal(found, torch.full_like(found, size * index + sum(range(size))))
    small = hvd.allreduce(torch.full((1000,), rank + 1.0, device=device), compression=hvd.Compression.fp16)
    assert torch.equal(small, torch.full_like(small, total / size))
    assert torch.equal(
        hvd.allgather(torch.full((2, 3), float(rank), device=device))[2 * rank], torch.full((3,), float(rank), device=device)
    )
    assert float(hvd.broadcast(torch.tensor([float(rank)], device=device), 1)) == 1


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def training() -> None:
    inputs = torch.randn(12, size, 8, 20, generator=torch.Generator().manual_seed(1)).to(device)
    model, alone = network(rank), network(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    train(model, optimizer, inputs[:, rank])
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), inputs.flatten(1, 2))
    flat = nn.utils.parameters_to_vector([param.detach() for param in model.parameters()])
    torch.testing.assert_close(flat, nn.utils.parameters_to_vector(alone.parameters()).detach(), rtol=1e-4, atol=1e-4)
    copies = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(other, flat) for other in copies)


calls()
print("ok calls", flush=True)
training()
print("ok training", flush=True)
hvd.shutdown()

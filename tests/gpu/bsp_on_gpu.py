"""A worker of a bsp job without servers on one GPU: equal to one process, and to itself; what it took goes to a file."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import polytempo as pt

STEPS = 20


def made() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1152, 10),
    ]
    return nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, size: int) -> None:
    data = torch.randn(STEPS, size, 16, 3, 16, 16, generator=torch.Generator().manual_seed(1)).cuda()
    for number, step in enumerate(data):
        batch = step.flatten(0, 1) if rank is None else step[rank]
        optimizer.zero_grad()
        if rank is not None and (number + rank) % 3 == 0:
            torch.cuda._sleep(3_000_000)  # a worker whose gradient is late
        model(batch).square().mean().backward()
        optimizer.step()


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    pt.init()
    rank, size = pt.rank(), pt.size()
    ends = []
    for _ in range(2):
        model = made()
        model[1].eval()  # statistics of a joint batch are others
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
        optimizer = pt.DistributedOptimizer(inner, model)
        assert optimizer._reducer.copier.on_device, "gradients went through the host"
        assert "torchrun" in sys.argv or optimizer._reducer.mean.may_read_in_place(inner), "the mean is copied"
        train(model, optimizer, rank, size)
        ends.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True)), "two runs differ"
    alone = made()
    alone[1].eval()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, nesterov=True), None, size)
    for got, wanted in zip(ends[0], alone.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-3, atol=1e-5)
    flat = torch.cat([param.reshape(-1) for param in ends[0]])
    rows = [torch.empty_like(flat) for _ in range(size)]
    pt.all_gather(rows, flat)
    assert all(torch.equal(row, flat) for row in rows), "replicas differ"
    # A slow reader and a fast writer: the mean of known gradients, some thousand rounds.
    weight = nn.Parameter(torch.zeros(200_000, device="cuda"))
    optimizer = pt.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), nn.ParameterList([weight]))
    began, rounds = time.perf_counter(), 500 if "torchrun" in sys.argv else 2000
    wrong = torch.zeros((), device="cuda")
    expected = 0.0
    for number in range(rounds):
        weight.grad = torch.full_like(weight, float(number % 7 + rank))
        if number % 10 == rank:
            torch.cuda._sleep(1_000_000)
        optimizer.step()
        expected -= number % 7 + (size - 1) / 2
        wrong += (weight.detach() != expected).sum()
    took = (time.perf_counter() - began) / rounds * 1e3
    assert float(wrong) == 0, f"{float(wrong)} elements were wrong"
    if rank == 0:
        sys.stdout.write(f"bsp on one GPU: as one process; {took:.2f} ms a round of {size} workers\n")
        sys.stdout.flush()


main()

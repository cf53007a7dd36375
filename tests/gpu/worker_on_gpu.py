"""Run by `test_worker.py`: what a PyTorch script on a GPU expects of a step over servers on the device."""

from __future__ import annotations

import copy
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import polytempo as pt

torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
pt.init()
rank, size, here = pt.rank(), pt.size(), pt.local_device()
generator = torch.Generator().manual_seed(1)
images = torch.randn(64, 3, 8, 8, generator=generator).to(here)
labels = torch.randint(0, 10, (64,), generator=generator).to(here)
mine = slice(rank, None, size)


def network(layout: torch.memory_format = torch.channels_last) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 16, 1), torch.nn.ReLU(), torch.nn.Flatten())
    return torch.nn.Sequential(*layers, torch.nn.Linear(16 * 36, 10)).to(here).to(memory_format=layout)


def wrapped(model: torch.nn.Module, **options: object) -> pt.DistributedOptimizer:
    return pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, **options)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: slice, steps: int = 8, dtype: torch.dtype | None = None
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def plain(model: torch.nn.Module, steps: int = 8, dtype: torch.dtype | None = None) -> torch.nn.Module:
    alone = copy.deepcopy(model)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9), slice(None), steps, dtype)
    return alone


def the_device_is_chosen_and_current() -> None:
    assert here == torch.device("cuda", pt.local_rank() % torch.cuda.device_count())
    assert torch.cuda.current_device() == here.index


def memory_is_stated() -> None:
    model = network()
    flat = sum(param.nbytes for param in model.parameters())
    optimizer = wrapped(model)
    assert optimizer.stats["device_bytes"] == 2 * flat, (optimizer.stats["device_bytes"], flat)
    train(model, optimizer, mine, 2)
    assert optimizer.stats["device_bytes"] == 2 * flat


def formats_and_autocast_train_as_one_process() -> None:
    for layout, dtype in (
        (torch.contiguous_format, None),
        (torch.channels_last, None),
        (torch.channels_last, torch.bfloat16),
    ):
        model = network(layout)
        alone = plain(model, dtype=dtype)
        train(model, wrapped(model), mine, dtype=dtype)
        assert difference(alone, model) < (1e-5 if dtype is None else 2e-2), (layout, dtype, difference(alone, model))


def a_step_does_not_wait_for_the_gpu() -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, mine, 4)  # the first steps compare gradients with other workers', which takes a copy
    large = torch.randn(6000, 6000, device=here)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, mine, 3)
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        for _ in range(40):
            torch.mm(large, large)
        done = torch.cuda.Event()
        optimizer.step()
        done.record()
        assert not done.query(), "step() has waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert optimizer.stats["step"] == 8


def what_is_not_finite_is_counted() -> None:
    model = network()
    optimizer = wrapped(model)
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, float("inf") if step == 1 else 0.0)
        optimizer.step()
    assert optimizer.stats["nonfinite"] == 1


def grad_scaler_skips_an_overflow() -> None:
    model, scaler = network(), torch.amp.GradScaler("cuda")
    optimizer = wrapped(model)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(images[mine]), labels[mine])
        before = [param.detach().clone() for param in model.parameters()]
        scaler.scale(loss * (float("inf") if (step, rank) == (2, 0) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 2), step
    assert optimizer.stats["step"] == 5
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def cuda_graphs_of_forward_and_backward() -> None:
    model = network()
    alone = plain(model, steps=6)
    optimizer = wrapped(model)
    x, y = images[mine].clone(), labels[mine].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch's documentation warms up
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        cross_entropy(model(x), y).backward()
    for _ in range(6):
        graph.replay()
        optimizer.step()
    assert difference(alone, model) < 1e-5, difference(alone, model)
    refused = torch.cuda.CUDAGraph()
    with pytest.raises(pt.UsageError, match="capture of a CUDA graph"), torch.cuda.graph(refused):
        optimizer.step()
    graph.replay()
    optimizer.step()
    assert optimizer.stats["step"] == 7


def a_compiled_model() -> None:
    model = network()
    alone = plain(model, steps=4)
    optimizer = wrapped(model)
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    backend = "inductor" if headers and shutil.which("cc") else "aot_eager"  # triton builds a file in C
    compiled = torch.compile(model, backend=backend)
    train(compiled, optimizer, mine, 4)
    assert difference(alone, model) < 1e-4, difference(alone, model)


def what_the_servers_hold_can_be_read_and_replaced() -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, mine, 3)
    state = optimizer.state_dict()
    assert all("momentum_buffer" in entry for entry in state["state"].values())
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.consolidate()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer.push_parameters()
    train(model, optimizer, mine, 1)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


CHECKS: list[Callable[[], None]] = [
    the_device_is_chosen_and_current,
    memory_is_stated,
    formats_and_autocast_train_as_one_process,
    a_step_does_not_wait_for_the_gpu,
    what_is_not_finite_is_counted,
    grad_scaler_skips_an_overflow,
    cuda_graphs_of_forward_and_backward,
    what_the_servers_hold_can_be_read_and_replaced,
]
if "compiled" in sys.argv:
    CHECKS.append(a_compiled_model)
for check in CHECKS:
    began = time.perf_counter()
    check()
    print(f"rank {rank}: {check.__name__} in {time.perf_counter() - began:.2f} s", flush=True)
if "short of memory" in sys.argv:
    torch.empty(1 << 50, device=here)

"""CUDA values that leave the device: compression computed on the GPU gives what the CPU gives, and jobs whose parameters
are on a GPU and whose servers are not end as jobs on the CPU do. Servers and workers are threads of this process, connected
by sockets with shared memory ("ipc"), or without, as between hosts ("memory")."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.world import open_in_threads
from polytempo.compression.chain import parse_chain
from polytempo.compression.encoding import as_bytes
from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(120),
]

CHAINS = ("bf16", "fp16", "int8", "sign", "topk:0.01", "topk:0.1+bf16", "significant:0.5", "significant:0.5+fp16")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GPU = torch.device("cuda", 0)


def feed(seed: int, size: int, dtype: torch.dtype, bad: bool) -> torch.Tensor:
    """Values of very different sizes, of which many are equal in size."""
    dice = torch.Generator().manual_seed(seed)
    values = torch.randint(-60, 61, (size,), generator=dice).double() / 7
    values *= 10.0 ** torch.randint(-3, 3, (size,), generator=dice)
    if bad:
        values[torch.randint(size, (3,), generator=dice)] = torch.tensor([torch.inf, -torch.inf, torch.nan]).double()
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_on_the_gpu_equals_the_cpus(text: str, dtype: torch.dtype) -> None:
    """Messages bit for bit where all values are numbers, what is read and held back always; also decoded on the GPU."""
    spec, loose = parse_chain(text), text == "sign" and dtype == torch.float64
    for size in (3, 1000, 300_007):
        host, device = spec.new(size, dtype), spec.new(size, dtype, GPU)
        for step in range(4):
            values = feed(step, size, dtype, bad=step == 2)
            expected = host.encode(values)
            encoded = device.encode_tensors(values.to(GPU))
            assert all(part.device == GPU for part in encoded)
            got = [as_bytes(part.cpu()) for part in encoded]
            if loose:  # the mean is added up in another order: its last digits may differ
                torch.testing.assert_close(encoded[0].cpu(), torch.from_numpy(expected[0].view("float64")), equal_nan=True)
                device.load(host.state())
                got[0] = expected[0]
            elif step != 2:
                assert [part.tobytes() for part in got] == [part.tobytes() for part in expected], (size, step)
            read = spec.decode(expected, size, dtype)
            for other in (spec.decode(got, size, dtype), spec.decode(got, size, dtype, GPU).cpu()):
                torch.testing.assert_close(other, read, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(device.residual, host.residual), (size, step)
    again = spec.new(size, dtype, GPU)
    again.load(device.state())
    assert torch.equal(again.residual, host.residual)


# Jobs.

SHAPES = ((700, 300), (5,), (16, 3, 3, 3), (), (900, 1200))
STEPS = 6


def made_params(device: torch.device) -> list[torch.nn.Parameter]:
    dice = torch.Generator().manual_seed(1)
    params = []
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=dice).to(torch.bfloat16 if number == 1 else torch.float32)
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        params.append(torch.nn.Parameter(values.to(device)))
    return params


def train(session: Session, device: torch.device, options: Mapping[str, Any], touch: str = "") -> list[torch.Tensor]:
    """Steps with the same gradients, bit for bit, on every device."""
    params, dice = made_params(device), torch.Generator().manual_seed(7 + session.rank)
    inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    optimizer = pt.DistributedOptimizer(inner, named_parameters=named, **options)
    for step in range(STEPS):
        factors = [torch.randn(param.shape, generator=dice).to(param.dtype).to(device) for param in params]
        used = [pair for number, pair in enumerate(zip(params, factors, strict=True)) if (number, step) != (0, 2)]
        optimizer.zero_grad()
        torch.stack([(param * factor).sum().float() for param, factor in used]).sum().backward()
        for param in params:
            if touch and param.grad is not None and param.dim() != 1:
                (param.grad.data if touch == "data" else param.grad).mul_(0.5)
        optimizer.step()
    optimizer.consolidate()
    return [param.detach().cpu() for param in params]


def both(wire: str, workers: int, servers: int, sync: str, options: Mapping[str, Any], touch: str = "") -> list[Any]:
    """The parameters of worker 0, from a job on the CPU and one on the GPU."""
    found = []
    for device in (torch.device("cpu"), GPU):
        kind = type("Job", (ThreadJob,), {"wire": wire})
        with kind(workers, servers, sync) as job:
            found.append(job.run(lambda session, device=device: train(session, device, options, touch))[0])
    return found


@pytest.mark.parametrize("wire", ["ipc", "memory"])
@pytest.mark.parametrize(
    ("workers", "servers", "sync", "options"),
    [
        (1, 1, "asp", {}),
        (2, 2, "bsp", {}),
        (1, 2, "delay:2", {}),
        (1, 2, "asp", {"compression": "bf16"}),
        (2, 2, "bsp", {"compression": "topk:0.1+bf16"}),
        (1, 1, "asp", {"compression": {"push": "sign", "pull": "bf16"}}),
        (1, 1, "delay:1", {"compression": "fp16"}),
    ],
    ids=str,
)
def test_servers_on_the_cpu_get_the_same_bits_from_a_gpu(
    wire: str, workers: int, servers: int, sync: str, options: Mapping[str, Any]
) -> None:
    """They apply the update, so the parameters are the same bits."""
    for touch in ("", "data", "counted") if not options else ("",):
        expected, got = both(wire, workers, servers, sync, options, touch)
        if sync == "ssp:0":  # two workers, whose pushes are applied in any order
            assert all(
                torch.allclose(a.float(), b.float(), atol=1e-5, rtol=1e-2) for a, b in zip(expected, got, strict=True)
            )
        else:
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), touch


@pytest.mark.parametrize("wire", ["ipc", "memory"])
@pytest.mark.parametrize(
    ("workers", "sync", "options"),
    [
        (1, "asp", {"apply": "delta"}),
        (2, "bsp", {"apply": "delta"}),
        (1, "downpour:push=2,fetch=3", {}),
        (2, "local:2", {}),
        (2, "diloco:4,fragments=2,overlap=1", {}),
        (2, "adacomm:2", {}),
    ],
    ids=str,
)
def test_updates_on_the_gpu_end_as_on_the_cpu(wire: str, workers: int, sync: str, options: Mapping[str, Any]) -> None:
    expected, got = both(wire, workers, 1, sync, options)
    for one, other in zip(expected, got, strict=True):
        loose = one.dtype == torch.bfloat16  # each operation rounds to two or three digits, on a GPU not after each
        torch.testing.assert_close(other, one, rtol=1e-2 if loose else 1e-5, atol=3e-2 if loose else 1e-5)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_gradient_that_is_not_finite_is_refused_by_name(compression: str) -> None:
    def work(session: Session) -> None:
        params = made_params(GPU)
        named = [(f"p{number}", param) for number, param in enumerate(params)]
        optimizer = pt.DistributedOptimizer(
            torch.optim.SGD(params, lr=0.1), named_parameters=named, nonfinite="refuse", compression=compression
        )
        for param in params:
            param.grad = torch.zeros_like(param)
        params[2].grad[0, 0, 0, 0] = torch.inf
        optimizer.step()

    with ThreadJob(1, 1, "asp") as job, pytest.raises(UsageError, match="p2 has a gradient that is not finite"):
        job.run(work)


# Collectives by messages.


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving-doubling"])
def test_collectives_by_messages_of_tensors_on_the_gpu(algorithm: str) -> None:
    """On streams of the callers, which the calls are in order with."""
    size, length = 2, 3_000_001

    def work(group: RankGroup) -> None:
        mine = torch.full((length,), float(group.rank + 1))
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            there, other = mine.to(GPU, non_blocking=True), torch.zeros(5, 4, device=GPU).t()
            torch.cuda._sleep(20_000_000)
            for value in range(3):
                there.fill_(group.rank + value + 1.0)
                other.fill_(value)
                group.all_reduce([there, other], "mean", algorithm).wait()
                assert bool((there == value + 1.5).all() & (other == value).all()), value
            there.fill_(7.0 if group.rank == 1 else 0.0)
            group.broadcast([there, other], 1, "tree").wait()
            assert bool((there == 7).all())
            parts = [torch.zeros(1000, device=GPU) for _ in range(size)]
            group.all_gather(parts, torch.full((1000,), group.rank + 1.0, device=GPU), "ring").wait()
            assert [float(part.mean()) for part in parts] == [1.0, 2.0]
            message = torch.full((length,), 3.0, device=GPU) if group.rank == 0 else torch.zeros(length, device=GPU)
            (send(group, message, 1) if group.rank == 0 else receive(group, message, 0)).wait()
            assert bool((message == 3).all())

    worlds = open_in_threads(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(work, [world.all_ranks for world in worlds]))
    finally:
        for world in worlds:
            world.close(politely=False)

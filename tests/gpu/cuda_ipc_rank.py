"""One rank of some that share a GPU: every collective, operation and dtype against the host's, in CUDA IPC memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "threads"))
from calls import COMBINES, DTYPES, OPS, Call, means_something

from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import ON_DEVICE
from polytempo.collectives.world import open_by_name


class OnGpu(Call):
    """The same call with tensors on the GPU."""

    def values(self, rank: int, to: int = 0) -> torch.Tensor:
        return super().values(rank, to).cuda()

    def empty(self) -> torch.Tensor:
        return super().empty().cuda()


def check_all(group: RankGroup) -> None:
    names = [name for name in ON_DEVICE if name != "barrier"]
    calls = [OnGpu(name, size=7, dtype=dtype, root=1) for name in names for dtype in DTYPES]
    calls += [
        OnGpu(name, size=1001, op=op, dtype=dtype)
        for name in COMBINES
        for op in OPS
        for dtype in DTYPES
        if op != "sum" and means_something(op, dtype)
    ]
    for call in calls:
        call.make(group).check(call)
    assert group.route.slots is not None
    assert not group.route.slots.refused
    assert not group.buffers._buffers, "something went through host memory"


def check_sums(group: RankGroup) -> None:
    """Of more than a slot holds, of many tensors, with strides: as the host's; the same bits on all ranks and again."""
    bits = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(group.rank)
        mine = [torch.randn(n, generator=generator) for n in (20_000_003, 17, 1000, 5)]
        mine.append(torch.randn(64, 30, generator=generator).t())
        there = [tensor.cuda() for tensor in mine]
        group.all_reduce(there, "mean").wait()
        group.all_reduce(mine, "mean", algorithm="shared-memory").wait()
        for got, wanted in zip(there, mine, strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
        sums = torch.stack([tensor.double().sum() for tensor in there]).cpu()
        rows = [torch.empty_like(sums) for _ in range(group.size)]
        group.all_gather(rows, sums).wait()
        assert all(torch.equal(row, sums) for row in rows)
        bits.append([tensor.clone() for tensor in there])
    assert all(torch.equal(one, two) for one, two in zip(*bits, strict=True))


def check_streams(group: RankGroup) -> None:
    """The call sees what the caller's stream was given before, and the caller's stream sees the result; no host waits."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for number in range(20):
            x = torch.zeros(500_000, device="cuda")
            torch.cuda._sleep(2_000_000)
            x += group.rank + number
            task = group.all_reduce([x], background=number % 2 == 0)
            task.wait()
            y = x * 1.0
            wanted = float(sum(range(group.size)) + group.size * number)
            assert bool((y == wanted).all()), (number, float(y[0]), wanted)


def check_stress(group: RankGroup, rounds: int) -> None:
    """A fast writer and slow readers: some ranks' streams are late at random, calls are made ahead."""
    import random

    chance = random.Random(group.rank)
    tasks, found = [], []
    for number in range(rounds):
        x = torch.full((40_000,), float(number % 1000 + group.rank), device="cuda")
        if chance.random() < 0.1:
            torch.cuda._sleep(chance.randrange(1_000_000))
        tasks.append(group.all_reduce([x], background=True))
        found.append(x)
        if len(tasks) == 50 or number == rounds - 1:
            base = number + 1 - len(tasks)
            for offset, (task, x) in enumerate(zip(tasks, found, strict=True)):
                task.wait()
                wanted = float(group.size * ((base + offset) % 1000) + sum(range(group.size)))
                assert bool((x == wanted).all()), (base + offset, x.unique()[:5].tolist(), wanted)
            tasks, found = [], []


def figures(group: RankGroup) -> None:
    for nbytes in (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20):
        times = {}
        for how in ("cuda-ipc", "shared-memory"):
            x = torch.ones(nbytes // 4, device="cuda")
            for number in range(13):
                if number == 3:
                    torch.cuda.synchronize()
                    group.barrier().wait()
                    began = time.perf_counter()
                group.all_reduce([x], "mean", algorithm=how).wait()
            torch.cuda.synchronize()
            times[how] = (time.perf_counter() - began) / 10 * 1e3
        if group.rank == 0:
            print(
                f"all_reduce of {nbytes >> 10} KB by {group.size}: " + ", ".join(f"{k} {v:.3f} ms" for k, v in times.items())
            )


def main() -> None:
    name, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.cuda.init()
    world = open_by_name(name, rank, size)
    group = world.all_ranks
    group.route.floor = 0
    for part in (check_all, check_sums, check_streams, lambda g: check_stress(g, 4000 // size), figures):
        began = time.perf_counter()
        part(group)
        if rank == 0:
            print(f"{getattr(part, '__name__', part)}: {time.perf_counter() - began:.1f} s", flush=True)
    world.close()


if __name__ == "__main__":
    main()

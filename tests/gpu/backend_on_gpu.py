"""Run by `test_torch_backend_on_gpu.py`: torch.distributed over polytempo with tensors on a GPU that all ranks share.

Torch's calls on streams, DDP with and without a hook, FSDP2 and DTensor, in one process for each rank: `ok NAME` for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import polytempo  # noqa: F401  tells torch the word

DEVICE = torch.device(os.environ.get("TRIED_ON", "cuda:0"))
ON_GPU = DEVICE.type == "cuda"
#: Of a vector; its sum over ranks is easily checked.
LENGTH = 3_000_000
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def keep_busy() -> None:
    """Some milliseconds of work on the current stream: what is not ordered behind it reads too early."""
    if ON_GPU:
        torch.cuda._sleep(20_000_000)


def waited(work: Any) -> None:
    assert work is not None
    work.wait()


def each_call() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))

    def mine() -> torch.Tensor:
        keep_busy()
        return torch.arange(1000.0, device=DEVICE) * (rank + 1)

    plain = torch.arange(1000.0, device=DEVICE)
    x = mine()
    dist.all_reduce(x)
    assert x.device == DEVICE
    assert torch.equal(x, plain * total)
    x = mine()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert torch.equal(x, plain * size)
    x = mine()
    dist.broadcast(x, 1)
    assert torch.equal(x, plain * 2)
    parts = [torch.empty(1000, device=DEVICE) for _ in range(size)]
    dist.all_gather(parts, mine())
    assert all(torch.equal(part, plain * (other + 1)) for other, part in enumerate(parts))
    x = mine()
    dist.reduce(x, 0)
    assert torch.equal(x, plain * (total if rank == 0 else rank + 1))
    out = torch.empty(1000 // size, device=DEVICE)
    dist.reduce_scatter(out, list(mine().chunk(size)))
    assert torch.equal(out, plain.chunk(size)[rank] * total)
    dist.all_to_all(parts, [mine() + other for other in range(size)])
    assert all(torch.equal(part, plain * (other + 1) + rank) for other, part in enumerate(parts))
    if rank == 0:
        dist.send(mine(), 1)
    elif rank == 1:
        got = torch.empty(1000, device=DEVICE)
        dist.recv(got, 0)
        assert torch.equal(got, plain)
    half = mine().half()
    dist.all_reduce(half, dist.ReduceOp.AVG)
    torch.testing.assert_close(half.float(), plain * total / size, rtol=1e-3, atol=1e-3)
    dist.barrier()
    dist.barrier(device_ids=[0] if ON_GPU else None)


def on_streams() -> None:
    """A call is behind the stream it was made on, and what follows `wait()` on the stream that waited is behind the call."""
    size = dist.get_world_size()
    side = torch.cuda.Stream(DEVICE) if ON_GPU else None
    for number in range(30):
        with torch.cuda.stream(side):
            keep_busy()
            x = torch.full((LENGTH,), float(number), device=DEVICE)
            work = dist.all_reduce(x, async_op=True)
            other = torch.full((LENGTH,), 2.0, device=DEVICE)  # memory of `x` must not be used for it
            waited(work)
            y = x + 1
            del x
        other.mul_(2)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        assert float(y.min()) == float(y.max()) == size * number + 1
    works, tensors = [], [torch.full((LENGTH,), float(number), device=DEVICE) for number in range(8)]
    for tensor in tensors:
        keep_busy()
        works.append(dist.all_reduce(tensor, async_op=True))
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        value = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        assert float(value.min()) == float(value.max()) == 2 * size * number
        assert float(tensor.sum()) == size * number * LENGTH


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(size)]
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, 0)
    assert told == ["from 0"]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3)
    return nn.Sequential(*layers).to(DEVICE)


def train(model: nn.Module, batches: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def check_alike(model: nn.Module) -> None:
    """Replicas are the same to the bit."""
    flat = nn.utils.parameters_to_vector([param.detach() for param in model.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(other, flat) for other in others)


def ddp(hook: Any = None, tolerance: float = 1e-4, **options: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(12, size, 8, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model, alone = network(), network()
    together = DistributedDataParallel(model, device_ids=[0] if ON_GPU else None, bucket_cap_mb=1, **options)
    if hook is not None:
        together.register_comm_hook(None, hook)
    train(together, inputs[:, rank])
    train(alone, inputs.flatten(1, 2))
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    check_alike(model)


def as_one_process() -> None:
    ddp()


def with_views() -> None:
    ddp(gradient_as_bucket_view=True, static_graph=True)


def with_a_hook() -> None:
    ddp(fp16_compress_hook, 1e-2)


def own_hook(state: object, bucket: Any) -> Any:
    """As in torch's documentation: a future, and work on its value."""
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] * 1.0)


own_hook.__annotations__.clear()  # torch compares them with its own class, and they are texts


def with_a_hook_of_futures() -> None:
    ddp(own_hook)


def sharded() -> None:
    """FSDP2 and DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (size,))
    if ON_GPU:
        torch.cuda.set_device(DEVICE)  # the mesh has set the one of this rank's number, where there is one
    whole = torch.arange(8.0 * size, device=DEVICE).view(2 * size, 4)
    split = distribute_tensor(whole, mesh, [Shard(0)])
    assert split.to_local().shape == (2, 4)
    assert torch.equal(split.full_tensor(), whole)
    inputs = torch.randn(6, size, 8, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model, alone = network(), network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, inputs[:, rank])
    train(alone, inputs.flatten(1, 2))
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]


CHECKS: tuple[Callable[[], None], ...] = (
    *(each_call, on_streams, objects, as_one_process, with_views, with_a_hook, with_a_hook_of_futures),
    sharded,
)


def main() -> None:
    options = {"device_id": DEVICE} if ON_GPU else {}
    dist.init_process_group("polytempo", timeout=timedelta(seconds=60), **options)
    for check in CHECKS:
        check()
        print("ok", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a script of torch does with process groups, over polytempo, and over gloo beside it: `ok NAME` where it is right.

The default group is polytempo's; that of gloo has the same ranks. Whatever is computed over both must be the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch_calls import CALLS, RANK, SIZE
from torch_training import TRAINING

import polytempo  # noqa: F401  tells torch the word


def the_plain_three() -> None:
    if RANK == 0:
        dist.send(torch.arange(3.0), 1)
        request = dist.isend(torch.arange(4.0), 1, tag=1)
        assert request is not None
        request.wait()
    elif RANK == 1:
        got, later = torch.empty(3), torch.empty(4)
        request = dist.irecv(later, 0, tag=1)
        assert request is not None
        assert dist.recv(got, 0) == 0
        request.wait()
        assert got.tolist() == [0, 1, 2]
        assert later.tolist() == [0, 1, 2, 3]
        assert request.is_completed()
    pair = dist.new_group([0, 1])
    if RANK < 2:
        tensor = torch.tensor([RANK + 1.0])
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=pair)
        assert tensor.item() == 3
        dist.destroy_process_group(pair)


def mean_and_futures() -> None:
    tensor, threads = torch.full((4,), float(RANK)), list[str]()
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
    assert work is not None

    def then(future: Any) -> Any:
        threads.append(threading.current_thread().name)
        nested = dist.all_reduce(torch.ones(2), async_op=True)
        assert nested is not None
        return future.value()[0] + nested.get_future().wait()[0][0]

    wanted = (SIZE - 1) / 2
    assert torch.equal(work.get_future().then(then).wait(), torch.full((4,), wanted + SIZE))
    assert threads[0] in ("MainThread", "polytempo-futures")  # the first, where the call had ended before it was asked
    assert torch.equal(tensor, torch.full((4,), wanted))
    assert work.is_success()


def mean_of_integers() -> None:
    """Rounded towards zero, as by NCCL; gloo has none."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        mine = (torch.tensor([-5, 4, 7]) * (RANK + 1)).to(dtype)
        total = sum((torch.tensor([-5, 4, 7]) * (rank + 1)).to(dtype) for rank in range(SIZE))
        wanted = torch.div(total, SIZE, rounding_mode="trunc").to(dtype)
        everywhere, at_root, part = mine.clone(), mine.clone(), torch.empty(3, dtype=dtype)
        dist.all_reduce(everywhere, dist.ReduceOp.AVG)
        dist.reduce(at_root, 0, dist.ReduceOp.AVG)
        dist.reduce_scatter(part, [mine.clone() for _ in range(SIZE)], dist.ReduceOp.AVG)
        for found in (everywhere, at_root if RANK == 0 else wanted, part):
            assert torch.equal(found, wanted), (dtype, found, wanted)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("there was no error")


def different_shapes() -> None:
    group = dist.new_group()
    text = error_of(lambda: dist.all_reduce(torch.ones(3 + (RANK == 1)), group=group))
    assert "all_reduce(sum, float32[3])" in text, text
    assert "all_reduce(sum, float32[4])" in text, text
    again = torch.ones(3)
    work = dist.all_reduce(again, group=group, async_op=True)  # the group goes on with the next call
    assert work is not None
    work.wait()
    assert work.is_success()
    assert again.tolist() == [SIZE] * 3
    works = [dist.all_reduce(torch.ones(3 + (RANK == 1)), group=group, async_op=True) for _ in range(3)]
    for failed in works:
        assert failed is not None
        assert "float32[4]" in error_of(failed.get_future().wait)
        assert not failed.is_success()
    gathered = [torch.zeros(1) for _ in range(SIZE)]
    dist.all_gather(gathered, torch.tensor([float(RANK)]), group=group)
    assert torch.cat(gathered).tolist() == list(range(SIZE))


def refusals() -> None:
    assert "dense" in error_of(lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    premultiplied = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    assert "PREMUL_SUM" in error_of(lambda: dist.all_reduce(torch.ones(2), premultiplied))
    assert "to itself" in error_of(lambda: dist.isend(torch.ones(2), RANK))
    assert "pg_options" in error_of(lambda: dist.new_group(pg_options=object()))


def who_is_missing() -> None:
    world = dist.group.WORLD
    assert world is not None
    world.monitored_barrier(timedelta(seconds=10))
    if RANK != 1:
        text = error_of(lambda: world.monitored_barrier(timedelta(seconds=0.3)))
        assert "Rank 1 failed to pass" in text, text
    dist.barrier()
    if RANK == 1:
        assert "Rank 1 failed to pass" in error_of(lambda: world.monitored_barrier(timedelta(seconds=0.3)))


def timeouts() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if RANK == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
        assert "rank 0 has waited" in text, text
        assert "for rank" in text, text
    dist.barrier()


def splits() -> None:
    """Ranks are those of the group that is split; the others need not come."""
    world = dist.group.WORLD
    assert world is not None
    last = world.split_group([SIZE - 1, 0], timeout=timedelta(seconds=30), group_name="ends", group_desc="first and last")
    if RANK in (0, SIZE - 1):
        assert (last.size(), last.rank(), last.group_name) == (2, int(RANK > 0), "ends")
        assert last.group_desc == "first and last"
        tensor = torch.tensor([RANK + 1.0])
        last.allreduce([tensor]).wait()
        assert tensor.item() == SIZE + 1
        alone = last.split_group([last.rank()])
        assert (alone.size(), alone.ranks) == (1, [RANK])
        alone.barrier().wait()
    else:
        assert last is None
    for ranks in ([], [0, 0], [SIZE], [-1]):
        assert "each once" in error_of(lambda ranks=ranks: world.split_group(ranks))
    assert "opts" in error_of(lambda: world.split_group([RANK], opts=dist.AllreduceOptions()))
    assert "new_group" in error_of(lambda: world.merge_remote_group(dist.HashStore(), 2, timedelta(seconds=1)))
    assert "split" in error_of(lambda: dist.split_group(world, [[0, 1]]))  # torch keeps it for GPUs and NCCL


def names() -> None:
    world, alone = dist.group.WORLD, dist.new_group([1])
    assert world is not None
    assert (dist.get_backend(), world.name(), world.rank(), world.size()) == ("polytempo", "polytempo", RANK, SIZE)
    if RANK == 1:
        assert (dist.get_process_group_ranks(alone), dist.get_rank(alone)) == ([1], 0)
        dist.barrier(alone)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def main() -> None:
    store = f"file://{sys.argv[1]}"
    dist.init_process_group("polytempo", init_method=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=40))
    gloo = dist.new_group(backend="gloo")
    for name, call in [*CALLS, *TRAINING]:
        same(call(None), call(gloo))
        print("ok", name)
    means = mean_and_futures, mean_of_integers
    for check in (the_plain_three, *means, different_shapes, refusals, who_is_missing, timeouts, splits, names):
        check()
        print("ok", check.__name__)
    dist.destroy_process_group()
    dist.init_process_group("polytempo", init_method=store + "-2", rank=RANK, world_size=SIZE)
    dist.barrier()
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    assert work is not None
    work.get_future().then(lambda future: future.value())
    print("ok again")  # and the process ends without another word, whatever is under way


if __name__ == "__main__":
    main()

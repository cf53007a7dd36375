"""Each of Horovod's calls, with what must come out of it. For 2 ranks or more, in an empty folder."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import polytempo.horovod as hvd

torch.set_num_threads(1)
hvd.init()
hvd.init()  # again: nothing
rank, size = hvd.rank(), hvd.size()
all_ranks = range(size)
total = sum(all_ranks)


def equal(found: torch.Tensor, expected: torch.Tensor | list[float]) -> None:
    wanted = torch.as_tensor(expected, dtype=found.dtype)
    assert found.shape == wanted.shape, f"{found.shape} is not {wanted.shape}"
    assert torch.allclose(found, wanted), f"{found} is not {wanted}"


def reductions() -> None:
    ramp = torch.arange(6.0).view(2, 3)
    equal(hvd.allreduce(ramp + rank), ramp + total / size)
    equal(hvd.allreduce((ramp + rank).t(), op=hvd.Sum), (ramp * size + total).t())
    equal(hvd.allreduce(ramp + rank, op=hvd.Min), ramp)
    equal(hvd.allreduce(ramp + rank, op=hvd.Max), ramp + size - 1)
    equal(hvd.allreduce(torch.full((2,), 2.0), op=hvd.Product), [2.0**size] * 2)
    equal(hvd.allreduce(torch.tensor([-3, 3]) * (rank + 1), average=True), [int(-3 * (size + 1) / 2), 3 * (size + 1) // 2])
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), [1.5 * size] * 2)
    equal(hvd.allreduce(torch.full((3,), 2049.0), compression=hvd.Compression.fp16), [2048.0] * 3)
    large = torch.full((2 * size,), 60000.0, dtype=torch.float16)  # of which the sum is no number
    equal(hvd.allreduce(large), large)
    equal(hvd.reducescatter(large), large[:2])
    one, two, three = hvd.grouped_allreduce([ramp, torch.tensor([rank]), ramp.t() * rank], op=hvd.Sum)
    equal(one, ramp * size)
    equal(two, [total])
    equal(three, ramp.t() * total)
    places = [torch.full((2, 2), float(rank)).t(), torch.full((3,), 1.0 + rank)]
    assert hvd.grouped_allreduce_(places)[0] is places[0]
    equal(places[0], torch.full((2, 2), total / size))
    equal(places[1], [1 + total / size] * 3)
    handles = [hvd.allreduce_async_(torch.full((500,), float(rank + i)), name=f"t{i}") for i in range(10)]
    for i, handle in enumerate(handles):
        equal(hvd.synchronize(handle), [total / size + i] * 500)
        assert hvd.poll(handle)


def an_asynchronous_call_does_not_wait() -> None:
    """The others call only once this file is there."""
    launched = Path("launched")
    while rank and not launched.exists():
        threading.Event().wait(0.01)
    handle = hvd.allreduce_async(torch.ones(2))
    hvd.allreduce_async(torch.ones(3))
    if rank == 0:
        assert not hvd.poll(handle)
        launched.touch()
    equal(hvd.synchronize(handle), [1.0, 1.0])


def moves() -> None:
    expected = [float(q) for q in all_ranks for _ in range(q)]
    equal(hvd.allgather(torch.full((rank, 2), float(rank)))[:, 0], expected)  # rank 0 has nothing
    equal(hvd.allgather(torch.tensor([rank])), list(all_ranks))
    equal(hvd.allgather(torch.ones(0, 3)), torch.ones(0, 3))
    long, short = hvd.grouped_allgather([torch.ones(rank + 1), torch.tensor([True])])
    assert (len(long), short.tolist()) == (total + size, [True] * size)
    equal(hvd.broadcast(torch.tensor([rank]), size - 1), [size - 1])
    square = torch.full((2, 2), float(rank)).t()
    assert hvd.broadcast_(square, 1) is square
    equal(square, torch.ones(2, 2))
    rows = torch.arange(2.0 * size) + 100 * rank
    equal(hvd.alltoall(rows), [100.0 * q + 2 * rank + i for q in all_ranks for i in range(2)])
    splits = [rank if q == 0 else 1 for q in all_ranks]
    output, received = hvd.alltoall(torch.full((sum(splits), 2), rank), splits=torch.tensor(splits))
    assert received.tolist() == (list(all_ranks) if rank == 0 else [1] * size)
    equal(output[:, 0], [q for q in all_ranks for _ in range(int(received[q]))])
    column = torch.arange(5).view(5, 1)
    mine = hvd.reducescatter(column + rank, op=hvd.Sum)
    equal(hvd.allgather(mine), column * size + total)
    assert len(mine) == 5 // size + (rank < 5 % size)
    equal(hvd.reducescatter(torch.ones(2 * size) * rank), [total / size] * 2)


def gradients() -> None:
    """Horovod's: of a mean, of a sum, of what was gathered, sent and exchanged."""
    for call, expected in (
        (lambda t: hvd.allreduce(t), 1.0),
        (lambda t: hvd.allreduce(t, op=hvd.Sum), float(size)),
        (lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[1], float(size)),
        (lambda t: hvd.allgather(t[: rank + 1]), None),
        (lambda t: hvd.broadcast(t, 1), float(rank == 1)),
        (lambda t: hvd.reducescatter(t, op=hvd.Sum), float(size)),
        (lambda t: hvd.reducescatter(t), 1.0),
    ):
        leaf = torch.ones(2 * size, 2, requires_grad=True)
        call(leaf).sum().backward()
        if expected is None:
            equal(leaf.grad[:, 0], [float(row <= rank) for row in range(2 * size)])
        else:
            equal(leaf.grad, torch.full((2 * size, 2), expected))
    leaf = torch.ones(size, requires_grad=True)
    (hvd.alltoall(leaf) * (rank + 1)).sum().backward()
    equal(leaf.grad, [q + 1.0 for q in all_ranks])


def plain_data() -> None:
    thing = {"rank": rank, 3: (1, [2.5, None], b"x"), "t": torch.ones(2)}
    for other, found in enumerate(hvd.allgather_object(thing)):
        assert (found["rank"], found[3], found["t"].tolist()) == (other, thing[3], [1, 1])
    assert hvd.broadcast_object(["root", rank] if rank == 1 else None, root_rank=1) == ["root", 1]


def sets() -> None:
    ends = hvd.add_process_set([size - 1, 0])
    only = hvd.add_process_set([1])
    assert (ends.ranks, ends.process_set_id, only.process_set_id) == ([0, size - 1], 1, 2)
    if only.included():
        equal(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=only), [1.0])
    if ends.included():
        assert ends.rank() == (rank != 0)
        equal(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=ends), [size - 1])
        equal(hvd.allgather(torch.tensor([rank]), process_set=ends), [0, size - 1])
        equal(hvd.broadcast(torch.tensor([rank]), size - 1, process_set=ends), [size - 1])
        assert hvd.broadcast_object(rank, size - 1, process_set=ends) == size - 1
        hvd.barrier(process_set=ends)
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), process_set=ends)
        hvd.broadcast_parameters(model.named_parameters(), 0, process_set=ends)
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        equal(model.weight.grad, [[(size - 1) / 2] * 2])
    hvd.barrier()
    assert hvd.remove_process_set(ends)


def joins() -> None:
    """Rank r goes on for r more rounds."""
    for more in range(rank):
        left = size - 1 - more  # ranks that are in this round
        equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), [left] * 3)
        equal(hvd.allreduce(torch.ones(3)), [left / size] * 3)
        equal(hvd.allreduce(torch.tensor([7]), op=hvd.Min), [7])
        equal(hvd.allreduce(torch.tensor([-7.0]), op=hvd.Max), [-7])
        equal(hvd.allreduce(torch.tensor([2], dtype=torch.int8), op=hvd.Product), [2**left])
        hvd.barrier()
    assert hvd.join() == size - 1
    assert hvd.join() == size - 1  # all at once: the highest


reductions()
an_asynchronous_call_does_not_wait()
moves()
gradients()
plain_data()
sets()
joins()
print("all right")
hvd.shutdown()
assert not hvd.is_initialized()

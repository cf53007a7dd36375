"""What goes wrong in Horovod scripts: all ranks say so, by Horovod's types of errors, and go on. For 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import polytempo
import polytempo.horovod as hvd

torch.set_num_threads(1)


def a_failed_init_leaves_nothing_behind() -> None:
    first = hvd.ProcessSet([0])
    for sets in ([first, [0]], [first, [0, 99]], [[1, 1]]):
        error_of(lambda sets=sets: hvd.init(process_sets=sets), ValueError)
        assert not hvd.is_initialized()
        assert first.process_set_id is None
    hvd.init(process_sets=[first])
    assert first.process_set_id == 1
    text = error_of(lambda: hvd.init(process_sets=[[1], [0]]), ValueError)  # it has a job already, which goes on
    assert "there is a process set of [0] already" in text
    assert hvd.add_process_set([1]).process_set_id == 2
    hvd.shutdown()
    assert first.process_set_id is None


def error_of(call: Callable[[], Any], kind: type[Exception] = hvd.HorovodInternalError) -> str:
    found: Exception | None = None
    try:
        call()
    except kind as error:
        found = error
    assert isinstance(found, polytempo.PolytempoError), found
    return str(found)


def check_alive() -> None:
    """After a mistake."""
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def ranks_that_call_different_things() -> None:
    x, layer = torch.ones(4), torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    for first, second, words in (
        (lambda: hvd.allreduce(x), lambda: hvd.allreduce(x.view(2, 2)), "allreduce(4 float32, Average) with another shape"),
        (lambda: hvd.allreduce(x), lambda: hvd.allreduce(x.int()), "where rank 1 calls allreduce(4 int32, Average)"),
        (lambda: hvd.allreduce(x), lambda: hvd.allreduce(x, prescale_factor=2.0), "with another factor"),
        (lambda: hvd.allreduce(x), lambda: hvd.broadcast(x, 0), "rank 0 calls allreduce(4 float32, Average) where rank 1"),
        (
            lambda: hvd.allgather(x),
            lambda: hvd.allgather(x.double()),
            "allgather(float32) where rank 1 calls allgather(float64)",
        ),
        (lambda: hvd.allgather(x), lambda: hvd.allgather(x.view(2, 2)), "with another shape"),
        (lambda: hvd.broadcast(x, 0), lambda: hvd.broadcast(x, 1), "root_rank=0) where rank 1 calls"),
        (lambda: hvd.alltoall(x), lambda: hvd.alltoall(x.view(2, 2)), "with another shape"),
        (lambda: hvd.reducescatter(x), lambda: hvd.reducescatter(x[:2]), "reducescatter(2 float32, Average)"),
        (lambda: hvd.allreduce(x, name="a"), lambda: hvd.allreduce(x, name="b"), "name='a') where rank 1 calls allreduce(4"),
        (lambda: hvd.allreduce(x, name="a"), lambda: hvd.allgather(x, name="a"), "allgather(float32, name='a'), and all"),
        (optimizer.step, hvd.barrier, "rank 0 calls step() where rank 1 calls barrier"),
    ):
        text = error_of(first if rank == 0 else second)
        assert words in text or rank == 1, text
        assert "all ranks must make the same calls" in text
        check_alive()


def models_that_differ() -> None:
    """Their buckets differ, and their steps: both groups go on."""
    layer = torch.nn.Linear(2, 2 + rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    layer(torch.ones(1, 2)).sum().backward()
    assert "step()" in error_of(optimizer.step)
    check_alive()
    layer.zero_grad()
    optimizer.zero_grad()
    assert "step()" in error_of(optimizer.step)


def only_the_call_that_differs_fails() -> None:
    """Others are under way before and after it."""
    handles = [hvd.allreduce_async(torch.ones(2 + (n == 1 and rank)), op=hvd.Sum) for n in range(4)]
    for number, handle in enumerate(handles):
        if number == 1:
            error_of(handle.wait)
            error_of(lambda handle=handle: hvd.synchronize(handle))  # again
        else:
            assert hvd.synchronize(handle).tolist() == [size] * 2


def names_under_way() -> None:
    kept = hvd.allreduce_async(torch.ones(2), name="twice")
    text = error_of(lambda: hvd.allreduce_async(torch.ones(2), name="twice"), hvd.DuplicateNameError)
    assert "allreduce by the name 'twice' has not ended yet" in text
    assert issubclass(hvd.DuplicateNameError, ValueError)
    other = hvd.broadcast_async(torch.ones(2), 0, name="twice")  # another kind of call has names of its own
    for handle in (kept, other):
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(2), name="twice").tolist() == [1, 1]


def names_in_any_order() -> None:
    """Rank 1 calls them from the last to the first, and waits for each in between where it can."""
    numbers = range(20)
    order = numbers if rank == 0 else reversed(numbers)
    handles = {n: hvd.allreduce_async(torch.full((n + 1,), float(n)), name=f"layer {n}", op=hvd.Sum) for n in order}
    handles[20] = hvd.allgather_async(torch.tensor([rank]))
    if rank == 0:
        assert hvd.synchronize(handles[19]).tolist() == [19.0 * size] * 20
    for n in numbers:
        assert hvd.synchronize(handles[n]).tolist() == [n * float(size)] * (n + 1)
    assert handles[20]().tolist() == list(range(size))
    late = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum) if rank == 0 else None
    assert hvd.allreduce(torch.ones(2), name="first", op=hvd.Sum).tolist() == [size] * 2
    if late is None:
        late = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
    while not hvd.poll(late):
        pass
    assert hvd.synchronize(late).tolist() == [size]
    check_alive()


def joined_ranks_are_not_hurt() -> None:
    """By calls that cannot go on without them: these fail where they are made, and join() ends well."""
    if rank == 0:
        assert hvd.join() == 1
    else:
        for call in (
            lambda: hvd.allgather(torch.ones(4)),
            lambda: hvd.broadcast(torch.ones(4), 1),
            lambda: hvd.alltoall(torch.ones(4)),
            lambda: hvd.reducescatter(torch.ones(4)),
            lambda: hvd.broadcast_object(3),
        ):
            assert "rank 0 has called join()" in error_of(call, RuntimeError)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [1, 1]
        assert hvd.join() == 1
    check_alive()


def what_the_root_cannot_send() -> None:
    class Odd:
        pass

    model = torch.nn.Linear(2, 2)
    odd = torch.optim.SGD(model.parameters(), 0.1)
    odd.param_groups[0]["odd"] = Odd() if rank == 0 else 1
    for call in (
        lambda: hvd.broadcast_object(Odd() if rank == 0 else 3),
        lambda: hvd.allgather_object([Odd() if rank == 1 else 3]),
        lambda: hvd.broadcast_optimizer_state(odd),
        lambda: polytempo.broadcast_optimizer_state(odd),
    ):
        text = error_of(call, ValueError)
        assert "expected plain data" in text, text
        assert "got Odd" in text, text
        check_alive()
    error_of(lambda: hvd.broadcast_optimizer_state(odd, 0, "a name"), TypeError)


def a_model_by_position() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.5)
    hvd.broadcast_optimizer_state(optimizer, 0, model if rank == 0 else torch.nn.Linear(1, 1))
    assert optimizer.param_groups[0]["lr"] == 0.1
    hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=model)


def splits_and_operations() -> None:
    for splits in ([1, 1], (1, 1), torch.tensor([1, 1]), torch.tensor([1, 1], dtype=torch.int32)):
        output, received = hvd.alltoall(torch.tensor([2.0 * rank, 2.0 * rank + 1]), splits=splits)
        assert output.tolist() == [float(rank), 2.0 + rank]
        assert received.dtype == (splits.dtype if isinstance(splits, torch.Tensor) else torch.int32)
    for splits in (torch.ones(2), [1.0, 1.0], 1):
        error_of(lambda splits=splits: hvd.alltoall(torch.ones(2), splits=splits), ValueError)
    assert hvd.allreduce(torch.ones(1), op=1).tolist() == [size]
    assert hvd.reducescatter(torch.full((2,), float(rank)), op=4).tolist() == [1.0]
    error_of(lambda: hvd.allreduce(3), TypeError)


def sparse_tensors() -> None:
    """Rows of all ranks; rank 1 has none at first."""
    dense = torch.zeros(6, 3)
    dense[rank] = rank
    dense[5] = 2.0
    for op, share in ((hvd.Sum, 1), (hvd.Average, size)):
        handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name=f"sparse {op}", op=op)
        found = handle() if op is hvd.Sum else hvd.synchronize(handle)
        assert found.is_sparse
        assert torch.allclose(found.to_dense(), hvd.allreduce(dense, op=hvd.Sum) / share)


def sparse_gradients(kind: Any, sparse_as_dense: bool, factor: float) -> None:
    """As one process on the joint batch; a dense layer beside it, and a step in which one rank has nothing."""
    torch.manual_seed(3)
    mine, joint = (torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True) for _ in range(2))
    head, joint_head = (torch.nn.Linear(4, 1) for _ in range(2))
    for one in (mine, joint, head, joint_head):
        for param in one.parameters():
            hvd.broadcast_(param.data, 0)
    joint.load_state_dict(mine.state_dict())
    joint_head.load_state_dict(head.state_dict())
    wrapped, plain = kind(mine.parameters(), lr=0.1), kind(joint.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped, sparse_as_dense=sparse_as_dense, gradient_predivide_factor=factor)
    hvd.broadcast_optimizer_state(optimizer, 0, mine)
    for step in range(4):
        ids = torch.randint(0, 50, (size, 5, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        plain.zero_grad()
        if step != 2 or rank == 0:
            head(mine(ids[rank])).sum().backward()
        optimizer.step()
        assert mine.weight.grad.is_sparse
        used = ids if step != 2 else ids[:1]
        (joint_head(joint(used.reshape(-1, 3))).sum() / size).backward()
        plain.step()
    assert torch.allclose(mine.weight, joint.weight, atol=1e-6), (kind, sparse_as_dense)


def sparse_gradients_after_a_join() -> None:
    """Rank 1 goes on for two steps: the first is the one in which all learn that gradients are sparse."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    table.weight.data.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0))
    for _ in range(2 * rank):
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert hvd.join() == 1
    if rank:
        assert torch.allclose(table.weight[1], torch.full((2,), 1 - 2 / size))


a_failed_init_leaves_nothing_behind()
hvd.init()
rank, size = hvd.rank(), hvd.size()
ranks_that_call_different_things()
models_that_differ()
only_the_call_that_differs_fails()
names_under_way()
names_in_any_order()
joined_ranks_are_not_hurt()
what_the_root_cannot_send()
a_model_by_position()
splits_and_operations()
sparse_tensors()
for optimizer_kind in (torch.optim.SparseAdam, torch.optim.SGD):
    for dense in (False, True):
        sparse_gradients(optimizer_kind, dense, 1.0 if dense else 2.0)
sparse_gradients_after_a_join()
print("all right")
hvd.shutdown()

"""Horovod's names in a job of one: what each call gives, what is refused, what travels as plain data."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import polytempo.horovod as hvd
from polytempo.errors import PeerError, UsageError
from polytempo.horovod.gradient_buckets import GradientBucket, GradientStamp, ReductionOptions, bucket_indices
from polytempo.horovod.negotiation import Call, CallKind, Matching, call_of, decode_call, digest, encode_call
from polytempo.train.safe_serialization import decode, encode

ARGUMENTS: dict[str, Any] = {"prescale_factor": 2.0, "postscale_factor": 3.0}


@pytest.fixture
def alone() -> Iterator[None]:
    hook = sys.excepthook
    hvd.init()
    yield
    hvd.shutdown()
    sys.excepthook = hook


def test_before_init() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(UsageError, match=r"call polytempo\.init"):
        hvd.rank()
    with pytest.raises(UsageError, match=r"call polytempo\.init"):
        hvd.allreduce(torch.ones(1))


@pytest.mark.usefixtures("alone")
def test_who_is_there() -> None:
    hvd.init()  # again: nothing
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    built = [getattr(hvd, f"{name}_built")() for name in ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")]
    assert not any((*built, hvd.mpi_enabled(), hvd.gloo_enabled(), hvd.mpi_threads_supported()))
    with pytest.raises(UsageError, match="comm"):
        hvd.init(comm=[0])


def test_names() -> None:
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    with pytest.raises(AttributeError, match=r"hvd\.elastic is not offered by polytempo.horovod"):
        _ = hvd.elastic
    with pytest.raises(AttributeError, match="has no attribute 'allreduse'"):
        _ = hvd.allreduse
    assert not hasattr(hvd, "run")


@pytest.mark.usefixtures("alone")
def test_reductions_of_one() -> None:
    x = torch.arange(6.0).view(2, 3).t()  # not contiguous
    assert torch.equal(hvd.allreduce(x), x)
    assert torch.equal(hvd.allreduce(x, op=hvd.Max, **ARGUMENTS), x * 6)
    assert torch.equal(hvd.allreduce(torch.tensor([3, -3]), prescale_factor=0.5), torch.tensor([1, -1]))
    one, two = hvd.grouped_allreduce([x, torch.tensor([1, 2])], average=False)
    assert torch.equal(one, x)
    assert two.tolist() == [1, 2]
    y = x.clone()
    assert hvd.allreduce_(y, **ARGUMENTS) is y
    assert torch.equal(y, x * 6)
    handle = hvd.grouped_allreduce_async_([y], **ARGUMENTS)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle)[0] is y
    assert torch.equal(y, x * 36)
    assert hvd.synchronize(hvd.allreduce_async(x, name="x")) is not x


@pytest.mark.usefixtures("alone")
def test_other_calls_of_one() -> None:
    x = torch.arange(6.0).view(3, 2)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda tensor: hvd.broadcast(tensor, 0)):
        result = call(x)
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    output, received = hvd.alltoall(x, splits=torch.tensor([3]))
    assert torch.equal(output, x)
    assert received.tolist() == [3]
    assert hvd.broadcast_(x, 0) is x
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(x, op=hvd.Sum, postscale_factor=2.0)), x * 2)
    assert [t.shape for t in hvd.grouped_allgather([x, x[:1]])] == [(3, 2), (1, 2)]
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object((1, 2)) == [(1, 2)]
    assert hvd.join() == 0
    hvd.barrier()


@pytest.mark.usefixtures("alone")
def test_gradients_of_one() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda tensor: hvd.broadcast(tensor, 0)):
        x.grad = None
        (call(x, **({"op": hvd.Sum} if call is hvd.allreduce else {})) * 2).sum().backward()
        assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    y = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert y.dtype == torch.float32
    y.mul_(2)  # what comes out may be changed
    y.sum().backward()
    with pytest.raises(UsageError, match="op=Min has no gradient"):
        hvd.allreduce(x, op=hvd.Min).sum().backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "op=Adasum is not offered"),
        (lambda: hvd.allreduce(torch.ones(1), op=7), "expected op to be one of Average, Sum, Min, Max, Product .* got 7"),
        (lambda: hvd.allreduce(torch.ones(1), op=2), "op=Adasum is not offered"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "both name the operation; give op alone"),
        (lambda: hvd.allreduce(3), "needs tensors, got int"),
        (lambda: hvd.allreduce(torch.ones(2, 2).to_sparse()), r"use \.to_dense\(\)"),
        (lambda: hvd.grouped_allreduce([]), "at least one tensor"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "got a single number"),
        (lambda: hvd.alltoall(torch.ones(3), splits=[2]), r"with the sum 3, got \[2\]"),
        (
            lambda: hvd.alltoall(torch.ones(3), splits=3),
            "expected splits to be a tensor or a list of 1 whole numbers, got 3",
        ),
        (
            lambda: hvd.alltoall(torch.ones(3), splits=torch.tensor([3.0])),
            r"whole numbers, got torch\.float32; use splits\.int",
        ),
        (lambda: hvd.alltoall(torch.ones(3), splits=[3.0]), r"1 whole numbers, got \[3\.0\]"),
        (lambda: hvd.sparse_allreduce_async(torch.ones(3)), r"needs a sparse tensor .* got layout torch\.strided"),
        (lambda: hvd.sparse_allreduce_async(torch.ones(3).to_sparse(), op=hvd.Max), "op=Average or op=Sum for a sparse"),
        (lambda: hvd.broadcast(torch.ones(1), 1), r"root_rank to be one of \[0\], got 1"),
        (lambda: hvd.synchronize(7), "expected a handle"),
        (lambda: hvd.add_process_set([0, 1]), "ranks from 0 to 0"),
        (lambda: hvd.add_process_set([0, 0]), "each once"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])), "is not registered; call add_process_set"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=0), "expected process_set to be a ProcessSet, got 0"),
        (lambda: hvd.broadcast_parameters({"a": 3}), "needs tensors, got int for a"),
        (lambda: hvd.broadcast_object(object()), "expected plain data .* got object; other objects would need pickles"),
        (lambda: hvd.allgather_object({"a": {"b": len}}), "got builtin_function_or_method"),
    ],
)
def test_refusals_are_one_line(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "call",
    [
        *(hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_),
        *(hvd.reducescatter, hvd.reducescatter_async),
        lambda tensor, op: hvd.grouped_allreduce([tensor], op=op),
        lambda tensor, op: hvd.grouped_reducescatter([tensor], op=op),
        lambda tensor, op: hvd.grouped_reducescatter_async([tensor], op=op),
        lambda tensor, op: hvd.sparse_allreduce_async(tensor.to_sparse(), op=op),
    ],
)
def test_adasum_is_also_the_error_that_horovod_raises(call: Any) -> None:
    with pytest.raises(RuntimeError, match="op=Adasum is not offered") as refusal:
        call(torch.ones(2), op=hvd.Adasum)
    assert isinstance(refusal.value, UsageError)


@pytest.mark.usefixtures("alone")
def test_process_sets_come_and_go() -> None:
    mine = hvd.add_process_set([0])
    assert (mine.process_set_id, mine.ranks, mine.size(), mine.rank(), mine.included()) == (1, [0], 1, 0, True)
    assert torch.equal(hvd.allreduce(torch.ones(1), process_set=mine), torch.ones(1))
    with pytest.raises(UsageError, match="already"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(mine)
    assert not hvd.remove_process_set(mine)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.global_process_set.ranks == [0]


# The optimizer.


def model_and(kind: Any = torch.optim.SGD, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, kind(model.parameters(), **({"lr": 0.1} | options))


@pytest.mark.usefixtures("alone")
def test_alone_the_optimizer_is_the_one_it_wraps() -> None:
    model, plain = model_and(torch.optim.Adam)
    other, inner = model_and(torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    wrapped = hvd.DistributedOptimizer(inner, named_parameters=other.named_parameters())
    later = torch.optim.lr_scheduler.ExponentialLR(wrapped, 1.0)
    assert isinstance(wrapped, torch.optim.Adam)
    for _ in range(3):
        for network, optimizer in ((model, plain), (other, wrapped)):
            optimizer.zero_grad()
            network(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        scheduler.step()
        later.step()
        plain.param_groups[0]["lr"] *= 0.5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    wrapped.load_state_dict(plain.state_dict())
    assert wrapped.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    hvd.broadcast_optimizer_state(wrapped)
    wrapped.synchronize()
    with wrapped.skip_synchronize():
        wrapped.step()


@pytest.mark.usefixtures("alone")
def test_what_an_optimizer_refuses() -> None:
    model, plain = model_and()
    refused = {
        "more than once": {"named_parameters": [("a", model.weight), ("a", model.bias)]},
        "parameter 1 of the optimizer is not among": {"named_parameters": [("weight", model.weight)]},
        "pairs of a name and a parameter": {"named_parameters": model.parameters()},
        "backward_passes_per_step to be 1 or more": {"backward_passes_per_step": 0},
        "needs op=Average": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "op=Average or op=Sum for an optimizer": {"op": hvd.Max},
        "op=Adasum is not offered": {"op": hvd.Adasum},
    }
    for words, options in refused.items():
        with pytest.raises(UsageError, match=words):
            hvd.DistributedOptimizer(plain, **options)
    wrapped = hvd.DistributedOptimizer(plain)
    with pytest.raises(UsageError, match="wrapped already"):
        hvd.DistributedOptimizer(wrapped)
    with pytest.raises(UsageError, match="before wrapping"):
        wrapped.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))


def test_buckets_go_backwards_and_keep_dtypes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.horovod.gradient_buckets.CAPACITY", 16)
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float32, torch.float64, torch.float32)
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    assert bucket_indices(params) == [[4], [5, 3], [1], [2, 0]]
    assert bucket_indices(params, [params[5]]) == [[4], [3, 2], [1], [0]]


def test_a_stamp_differs_for_a_gradient_that_was_changed_or_replaced() -> None:
    grad = torch.arange(4.0)
    before = GradientStamp(grad)
    assert before == GradientStamp(grad)
    assert before != GradientStamp(grad.clone())
    assert GradientStamp(None) == GradientStamp(None) != before
    grad.mul_(2)
    assert before != GradientStamp(grad)


def test_a_bucket_knows_which_parameters_had_no_gradient() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2).t()), torch.nn.Parameter(torch.zeros(3))]
    bucket = GradientBucket(params, ReductionOptions(hvd.Average, hvd.Compression.none))
    params[0].grad = torch.arange(4.0).view(2, 2)
    bucket.fill()
    params[0].grad = None
    bucket.assign_gradients()
    assert torch.equal(params[0].grad, torch.arange(4.0).view(2, 2))
    assert params[1].grad is None


def test_a_sparse_gradient_is_not_in_a_bucket_or_comes_out_sparse() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]).to_sparse(1)
    apart, dense = (
        GradientBucket([param], ReductionOptions(hvd.Average, hvd.Compression.none, sparse_as_dense=it))
        for it in (False, True)
    )
    for bucket in (apart, dense):
        bucket.fill()
    assert apart.sparse_params() == [param]
    assert not apart.had_dense(param)
    assert dense.sparse_params() == []
    param.grad = None  # as on a rank that had none
    dense.assign_gradients()
    assert param.grad.is_sparse
    assert param.grad.to_dense().tolist() == [[0, 0], [1, 2], [0, 0]]


# Which calls belong together.

REDUCE = Call(CallKind.ALLREDUCE, op=1, count=10)
WAIT, JOIN, BARRIER = Call(CallKind.WAIT), Call(CallKind.JOIN), Call(CallKind.BARRIER)


def named(name: str) -> Call:
    return call_of(CallKind.ALLREDUCE, name, op=1, count=10)


def test_a_record_comes_back_as_it_was() -> None:
    for call in (
        REDUCE,
        JOIN,
        named("x"),
        call_of(CallKind.BROADCAST, "layer.weight", dtype=3, root=1, scale=digest(2.0), own=-1),
    ):
        assert decode_call(encode_call(call)) == call
    long = call_of(CallKind.ALLGATHER, "ä" * 60)
    assert (decode_call(encode_call(long)).key, decode_call(encode_call(long)).name) == (long.key, "ä" * 28)


def test_calls_that_differ_are_named() -> None:
    assert [match.error for match in Matching([0, 1]).match_round([REDUCE, REDUCE]).matches] == [""]
    for calls, words in (
        ([REDUCE, REDUCE, BARRIER], "rank 0 calls allreduce(10 float32, Sum) where rank 2 calls barrier;"),
        ([REDUCE, replace(REDUCE, shape=7)], "allreduce(10 float32, Sum) with another shape; all ranks must"),
        ([REDUCE, replace(REDUCE, scale=7)], "allreduce(10 float32, Sum) with another factor; all ranks must"),
        ([Call(CallKind.STEP, count=1), Call(CallKind.STEP, count=2)], "step() with another size"),
    ):
        table = Matching(range(len(calls)))
        (match,) = table.match_round(calls).matches
        assert words in match.error
        assert set(match.calls) == set(range(len(calls)))
        assert [match.error for match in table.match_round([REDUCE] * len(calls)).matches] == [""], "later calls go on"


def test_named_calls_come_in_any_order() -> None:
    """Each rank calls three in its own order; a rank that waits adds nothing."""
    table, a, b, c = Matching([0, 1, 2]), named("a"), named("b"), named("c")
    assert table.match_round([a, b, c]).matches == []
    assert [match.key[0] for match in table.match_round([b, c, b]).matches] == [b.key]
    heard = table.match_round([c, a, a])
    assert [match.key[0] for match in heard.matches] == [a.key, c.key], "in the order in which they were first called"
    assert all(not match.error and len(match.calls) == 3 for match in heard.matches)
    assert table.match_round([a, WAIT, a]).matches == []
    assert [match.key[0] for match in table.match_round([WAIT, a, b]).matches] == [a.key]


def test_when_all_wait_all_are_told() -> None:
    table = Matching([0, 1])
    assert table.match_round([named("a"), named("b")]).matches == []
    texts = [match.error for match in table.match_round([WAIT, WAIT]).matches]
    assert len(texts) == 2
    assert (
        "rank 0 calls allreduce(10 float32, Sum, name='a') where rank 1 calls allreduce(10 float32, Sum, name='b')"
        in texts[0]
    )
    assert "and all ranks wait; all ranks must make the same calls, by name" in texts[1]
    assert [match.error for match in table.match_round([named("a"), named("a")]).matches] == [""], "later calls go on"
    assert table.match_round([named("c"), WAIT]).matches == []
    (match,) = table.match_round([WAIT, WAIT]).matches
    assert "rank 0 calls allreduce(10 float32, Sum, name='c') where rank 1 calls nothing" in match.error


def test_what_goes_on_after_a_join() -> None:
    table = Matching([0, 1])
    for kind in (CallKind.ALLREDUCE, CallKind.STEP, CallKind.BARRIER):
        (match,) = table.match_round([Call(kind), JOIN]).matches
        assert (match.error, set(match.calls)) == ("", {0})
    (match,) = table.match_round([Call(CallKind.BROADCAST, count=3), JOIN]).matches
    assert "rank 0 calls broadcast(3 float32, root_rank=0), but rank 1 has called join()" in match.error
    assert table.match_round([JOIN, JOIN]).last == 0, "the last one to come"
    assert [match.error for match in table.match_round([REDUCE, REDUCE]).matches] == [""], "calls are counted anew"
    assert table.match_round([named("a"), named("b")]).matches == []
    assert [set(match.calls) for match in table.match_round([JOIN, WAIT]).matches] == [{1}]
    heard = table.match_round([JOIN, JOIN])
    assert ([set(match.calls) for match in heard.matches], heard.last) == ([{0}], 1), "called before it joined"


# Plain data.

THINGS = [
    None,
    True,
    -3,
    1 << 70,
    2.5,
    "ä",
    b"\x00",
    [1, [2, (3,)]],
    (),
    {1: "a", "b": [None], (2, 3): {}},
    OrderedDict(x=1),
    {1, 2},
]


@pytest.mark.parametrize("thing", THINGS, ids=repr)
def test_plain_data_comes_back_as_it_was(thing: Any) -> None:
    back = decode(encode(thing))
    assert back == thing
    assert type(back) is type(thing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(2, 3).to(dtype).t(), torch.tensor(1).to(dtype), torch.empty(0, 2, dtype=dtype)):
        back = decode(encode({"t": tensor}))["t"]
        assert back.dtype == dtype
        assert torch.equal(back, tensor)
        aside: list[torch.Tensor] = []
        apart: list[torch.Tensor] = []
        described = decode(encode([tensor], aside), apart)
        assert aside[0] is tensor or aside[0].data_ptr() == tensor.data_ptr()
        assert described[0] is apart[0]
        assert apart[0].shape == tensor.shape


def test_arrays_come_back() -> None:
    for array in (np.arange(6.0).reshape(2, 3).T, np.float32(2.5), np.array(["a", "bc"]), np.zeros((0, 2))):
        back = decode(encode(array))
        assert type(back) is type(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_objects_and_rubbish_are_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    for thing in (object(), np.array([object()]), 1j, torch.nn.Linear(1, 1), range(3), itself):
        with pytest.raises(UsageError, match="expected plain data"):
            encode(thing)
    for data in (b"", b"\x91\xa1z", b"\x94\xa1T\xa4load\x90\xc4\x00", b"\xc1"):
        with pytest.raises(PeerError, match="expected plain data from another rank"):
            decode(data)

"""A shard whose values are on a GPU against the same shard on the CPU: every optimizer, means, clipping, missing gradients,
state in and out, values in host memory. All in this process; jobs are in `test_equal_to_cpu.py` and `test_worker.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from polytempo.protocol.messages import Push
from polytempo.protocol.push import PushedChange, PushedGradient, PushedValues
from polytempo.protocol.values import PushId
from polytempo.server.optimizer_state import ELEMENTWISE, WHOLE, as_bytes, as_tensor, pack, unpack

sys.path.append(str(Path(__file__).parents[1] / "tensors"))

from shards import Stores

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(120),
]

SHAPES = ((65, 33), (4,), (7, 2), (128, 50), (3, 3))
MATRICES = ((65, 33), (40, 4), (12, 6))


@pytest.fixture(scope="module")
def gpu() -> Any:
    from polytempo.device.cuda_device import CudaDevice

    return CudaDevice(0)


def some(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice).to(dtype) for shape in shapes]


def hyper_for(optimizer: str) -> tuple[dict[str, Any], ...]:
    first: dict[str, Any] = {"lr": 0.05}
    if optimizer in ("SGD", "RMSprop"):
        first["momentum"] = 0.9
    return (first,)


def both(
    gpu: Any, optimizer: str, shards: int = 2, shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, **more: Any
) -> list[Stores]:
    start = some(0, shapes, dtype)
    with gpu.own_stream():
        return [Stores(start, shards, optimizer, hyper_for(optimizer), device=device, **more) for device in (None, gpu)]


def same(pair: list[Stores], tolerance: float = 2e-5) -> None:
    torch.cuda.synchronize()  # values are read on another stream than they were written on
    for here, there in zip(pair[0].values(), pair[1].values(), strict=True):
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)


def feed(gpu: Any, pair: list[Stores], act: Callable[[Stores], None]) -> None:
    for stores in pair:
        with gpu.own_stream():
            act(stores)


@pytest.mark.parametrize("optimizer", [*ELEMENTWISE, "AsuP"])
def test_every_elementwise_optimizer_ends_as_on_the_cpu(gpu: Any, optimizer: str) -> None:
    pair = both(gpu, optimizer)
    for step in range(1, 8):
        feed(gpu, pair, lambda stores, step=step: stores.update((1.0, some(step)), (3.0, some(step + 100))))  # type: ignore[misc]
    same(pair)
    assert all(flat.device == gpu.place for store in pair[1].stores for flat in store.values.values())


@pytest.mark.parametrize("optimizer", WHOLE)
def test_optimizers_of_whole_tensors_end_as_on_the_cpu(gpu: Any, optimizer: str) -> None:
    pair = both(gpu, optimizer, shapes=MATRICES)
    for step in range(1, 4):
        feed(gpu, pair, lambda stores, step=step: stores.update((1.0, some(step, MATRICES))))  # type: ignore[misc]
    same(pair, 5e-2 if optimizer == "Muon" else 1e-4)  # Muon computes in bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(gpu: Any, dtype: torch.dtype) -> None:
    pair = both(gpu, "SGD", dtype=dtype)
    for step in range(1, 4):
        feed(gpu, pair, lambda stores, step=step: stores.update((1.0, some(step, dtype=dtype)), (2.0, some(9, dtype=dtype))))  # type: ignore[misc]
    same(pair, 1e-12 if dtype == torch.float64 else 2e-2)


def test_clipping_deltas_values_and_missing_gradients(gpu: Any) -> None:
    pair = both(gpu, "Adam", shards=1, clip_norm=0.5)
    gradients: list[Any] = some(1)
    for missing in (None, 1, 3, None, 1):
        given = [None if index == missing else gradient for index, gradient in enumerate(gradients)]
        feed(gpu, pair, lambda stores, given=given: stores.step(given))  # type: ignore[misc]
    same(pair)
    assert len(pair[1].stores[0].optimizer.segments) > 1
    for kind in (PushedChange, PushedValues):
        pair = both(gpu, "SGD", apply="delta")
        feed(gpu, pair, lambda stores, kind=kind: stores.update((1.0, some(1)), (3.0, some(2)), kind=kind, rate=0.5))  # type: ignore[misc]
        same(pair)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "NAdam", "Adagrad", "ASGD"])
def test_state_travels_between_cpu_and_gpu(gpu: Any, optimizer: str) -> None:
    """Three steps on the one, state and values to the other, three steps there; against six on the CPU."""
    plain = both(gpu, optimizer, shards=1)[0]
    for step in range(1, 7):
        plain.step(some(step))
    for source, target in ((0, 1), (1, 0), (1, 1)):
        first, second = both(gpu, optimizer, shards=1)[source], both(gpu, optimizer, shards=1)[target]
        with gpu.own_stream():
            for step in range(1, 4):
                first.step(some(step))
            description, buffers = pack(first.state())
            second.stores[0].seed([as_bytes(flat) for flat in first.stores[0].values.values()])
            second.stores[0].load_state(unpack(description, buffers))
            for step in range(4, 7):
                second.step(some(step))
            same([plain, second])


def test_values_in_host_memory_are_of_one_state_and_are_copied_once_for_it(gpu: Any) -> None:
    stores = both(gpu, "SGD", shards=1)[1]
    store = stores.stores[0]
    with gpu.own_stream():
        lent = [store.lend(worker) for worker in range(3)]
        assert len({id(memory) for memory, _ in lent}) == 1
        before = [bytes(buffer) for buffer in lent[0][0]]
        stores.step(some(1))
        after, back = store.lend(0)
        assert [bytes(buffer) for buffer in lent[0][0]] == before != [bytes(buffer) for buffer in after]
        for stretch, buffer in zip(store.stretches, after, strict=True):
            assert torch.equal(as_tensor(buffer, stretch.dtype), store.values[stretch.dtype].cpu())
        for _, returned in lent:
            returned()
        back()
        stores.step(some(2))
        again, _ = store.lend(0)
        assert any(again is memory for memory in (lent[0][0], after))  # memory that is back is used again


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_an_update_makes_the_host_wait_for_nothing(gpu: Any) -> None:
    """Torch itself raises where a call synchronises; the gradients are on the device, as shared ones are."""
    for optimizer in ("SGD", "Adam", "AdamW", "RMSprop", "NAdam"):
        store = both(gpu, optimizer, shards=1)[1].stores[0]
        gradients = [torch.ones_like(flat) for flat in store.values.values()]
        with gpu.own_stream():
            for step in range(4):
                if step == 2:  # state is made, kernels are loaded
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    parts = [
                        (
                            Push(id=PushId("0", worker, 0, step), body=PushedGradient(hyper=hyper_for(optimizer))),
                            1.0,
                            gradients,
                        )
                        for worker in (0, 1)
                    ]
                    store.update(parts, 1.0, True, lambda square: square)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

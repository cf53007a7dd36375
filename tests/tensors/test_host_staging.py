"""Staging between parameters on a device and flat buffers of the host: with copies that are late, as a GPU's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.test_device_buffer import parameters

from polytempo.compression.chain import parse_chain
from polytempo.device.copy_stream import CopyMark, CopyStream
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.copier import Copier
from polytempo.reducer.device_moves import HostStaging, common, runs_of
from polytempo.reducer.flat_buffer import describe
from polytempo.reducer.servers import PushFilters
from polytempo.transport.buffer_pool import Pool

settled = settings(max_examples=25, deadline=None, derandomize=True, database=None)
CPU = torch.device("cpu")


class LateCopies(CopyStream):
    """A copy is made when something waits for it, and not before: who does not wait reads what was there."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.made = 0
        self.copied: list[int] = []  #: bytes of each copy

    def follow(self) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes
        self.queue.append(lambda: target.copy_(source))
        self.copied.append(target.nbytes)

    def mark(self) -> CopyMark:
        return LateMark(self, len(self.queue))

    def run(self, upto: int) -> None:
        while self.made < upto:
            self.queue[self.made]()
            self.made += 1


class LateMark(CopyMark):
    def __init__(self, copies: LateCopies, upto: int) -> None:
        self._copies, self._upto = copies, upto

    def reached(self) -> bool:
        return self._copies.made >= self._upto

    def wait(self) -> None:
        self._copies.run(self._upto)

    def hold(self) -> None:
        self._copies.run(self._upto)


def layout_of(params: list[torch.Tensor], shards: int) -> Layout:
    return lay_out(describe(params, [str(i) for i in range(len(params))], [0] * len(params)), shards)


def staged(params: list[torch.Tensor], layout: Layout) -> tuple[Copier, LateCopies]:
    """A copier that takes parameters on the CPU for parameters on a GPU."""
    copier, copies = Copier(params, layout, Pool()), LateCopies()
    copier.staging = HostStaging(params, layout, CPU, copies)
    return copier, copies


@settled
@given(st.integers(0, 50), st.integers(1, 3))
def test_staged_is_as_on_the_host(seed: int, shards: int) -> None:
    ours, theirs = parameters(seed), parameters(seed)
    layout = layout_of(ours, shards)
    (device, copies), host = staged(ours, layout), Copier(theirs, layout, Pool())
    buffers = device.next_buffer(), host.next_buffer()
    for buffer in buffers:
        for flat in buffer.tensors.values():
            flat.fill_(3.0)
    absent = [copier.gather(buffer, lambda p: p.grad) for copier, buffer in zip((device, host), buffers, strict=True)]
    assert sorted(absent[0]) == sorted(absent[1])
    assert len(copies.copied) == 2 * len(layout.sizes)  # one a dtype, and whether it is finite
    for dtype, flat in buffers[1].tensors.items():
        assert torch.equal(buffers[0].tensors[dtype], flat)
        flat.mul_(2)
    parts = dict(enumerate(buffers[1].parts))
    for copier in (device, host):
        copier.scatter(parts)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))
    assert device.holds(parts)
    assert device.watch.is_clean()
    for copier in (device, host):
        copier.scatter_gradients(parts, absent[1])
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or (torch.equal(mine.grad, other.grad) and mine.grad.stride() == other.grad.stride())


def test_what_is_not_finite_is_found_without_a_look_at_the_host_buffer() -> None:
    params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(3))]
    copier, _ = staged(params, layout_of(params, 1))
    buffer = copier.next_buffer()
    for bad in (None, float("nan"), float("inf"), None):
        for param in params:
            param.grad = torch.ones_like(param)
        if bad is not None:
            params[1].grad[2] = bad
        copier.gather(buffer, lambda p: p.grad)
        assert buffer.is_finite(everything=True) == (bad is None)
    buffer.views[1][0] = float("nan")  # written here, after the gathering
    assert not buffer.is_finite(everything=False)


@pytest.mark.parametrize("text", ["bf16", "topk:0.2", "sign", "significant:0.3+fp16"])
def test_what_is_encoded_in_the_twin_is_what_the_host_encodes(text: str) -> None:
    """And only encoded bytes are copied."""
    ours, theirs = parameters(3), parameters(3)
    layout, spec = layout_of(ours, 2), parse_chain(text)
    (device, copies), host = staged(ours, layout), Copier(theirs, layout, Pool())
    filters = PushFilters(spec, layout, device.staging), PushFilters(spec, layout)
    assert [one.on_device for one in filters] == [True, False]
    for factor in (1.0, 0.5, -2.0):
        buffers = device.next_buffer(), host.next_buffer()
        for param in (param for param in (*ours, *theirs) if param.grad is not None):
            param.grad.mul_(factor)
        device.collect(buffers[0], lambda p: p.grad)
        host.gather(buffers[1], lambda p: p.grad)
        assert buffers[0].is_finite(everything=True)
        copies.copied.clear()
        expected, got = filters[1].of(buffers[1]), filters[0].of(buffers[0])
        assert [[part.tobytes() for part in parts] for parts in got] == [[p.tobytes() for p in parts] for parts in expected]
        assert sum(copies.copied) == sum(part.nbytes for parts in expected for part in parts)
    again = PushFilters(spec, layout, device.staging)
    again.load(filters[1].state())
    for dtype, residual in filters[0].state().items():
        assert torch.equal(again.state()[dtype], residual)
    host.gather(buffers[1], lambda p: p.grad)  # values of the host, through chains of the device
    device.gather(buffers[0], lambda p: p.grad)
    expected, got = filters[1].of(buffers[1]), filters[0].of(buffers[0])
    assert [[part.tobytes() for part in parts] for parts in got] == [[p.tobytes() for p in parts] for parts in expected]


@settled
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from(["float32", "float64"])), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_runs_cover_staged_tensors_once_and_nothing_else(tensors: list[tuple[int, bool, str]], shards: int) -> None:
    infos = [TensorInfo(str(i), (size,), dtype, 0) for i, (size, _, dtype) in enumerate(tensors)]
    layout = lay_out(infos, shards)
    chosen = [i for i, (_, is_staged, _) in enumerate(tensors) if is_staged]
    runs = runs_of(layout.places, chosen)
    covered = [(run.dtype, at) for run in runs for at in range(run.start, run.stop)]
    wanted = [(p.info.dtype, at) for p in layout.places if p.index in chosen for at in range(p.start, p.stop)]
    assert sorted(covered) == sorted(wanted)
    assert len(covered) == len(set(covered))
    assert all((a.dtype, a.stop) != (b.dtype, b.start) for a in runs for b in runs)  # none could be joined
    parts = [part for stretches in layout.shards for stretch in stretches for part in common(stretch, runs)]
    assert sorted((part.dtype, at) for part in parts for at in range(part.start, part.stop)) == sorted(wanted)

"""Tensors of a GPU in collectives through the host: chunks are used when they are here, with copies that are late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.test_host_staging import LateCopies

from polytempo.collectives import flattening
from polytempo.collectives.flattening import StagedCopy
from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import algorithms_for
from polytempo.collectives.world import open_in_threads

settled = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@settled
@given(st.integers(0, 500), st.sampled_from([64, 256, 4096]), st.data())
def test_a_part_is_here_when_it_is_needed(size: int, chunk: int, data: st.DataObject) -> None:
    source, copies = torch.arange(size, dtype=torch.float32) + 1, LateCopies()
    staged = StagedCopy(source, copies, chunk)
    staged.whole.fill_(-1)
    assert sum(copies.copied) == source.nbytes
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        staged.need(staged.whole[start:stop])
        assert torch.equal(staged.whole[start:stop], source[start:stop])
        assert copies.made <= len(copies.queue)
    staged.need(torch.zeros(3))  # another tensor
    staged.all()
    assert torch.equal(staged.whole, source)


def test_not_more_is_waited_for_than_is_needed() -> None:
    copies = LateCopies()
    staged = StagedCopy(torch.ones(1024), copies, 1024)
    staged.need(staged.whole[10:20])
    assert copies.made == 1
    staged.need(staged.whole[300:520])
    assert copies.made == 3


@pytest.mark.parametrize("algorithm", sorted(set(algorithms_for("all_reduce")) - {"cuda-ipc"}))
def test_collectives_use_chunks_that_have_arrived(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flattening, "on_one_gpu", lambda tensors: True)
    monkeypatch.setattr(flattening, "copy_stream", lambda place: LateCopies())
    monkeypatch.setattr(StagedCopy.__init__, "__defaults__", (None, 4096))
    size = 4
    terms = [
        [torch.randn(5000, generator=torch.Generator().manual_seed(r)), torch.full((3, 7), r + 1.0)] for r in range(size)
    ]
    half = [torch.full((2000,), 1000.0 * (r + 1), dtype=torch.float16) for r in range(size)]
    wanted = [sum(parts) for parts in zip(*terms, strict=True)]

    def work(group: RankGroup) -> None:
        mine = [tensor.clone() for tensor in terms[group.rank]]
        group.all_reduce(mine, "sum", algorithm).wait()
        for got, total in zip(mine, wanted, strict=True):
            torch.testing.assert_close(got, total)
        mean = half[group.rank].clone()
        group.all_reduce([mean], "mean", algorithm).wait()
        assert bool((mean == 2500).all())
        shown = [tensor.clone() for tensor in terms[group.rank]]
        group.broadcast(shown, 1).wait()
        assert all(torch.equal(one, other) for one, other in zip(shown, terms[1], strict=True))
        into = terms[group.rank][0].clone()
        group.reduce(into, 2).wait()
        torch.testing.assert_close(into, wanted[0] if group.rank == 2 else terms[group.rank][0])

    worlds = open_in_threads(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(work, [world.all_ranks for world in worlds]))
    finally:
        for world in worlds:
            world.close(politely=False)

"""What a table does on a GPU, computed on the CPU: sums of gradients, and ids that are made unique where they are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.tables.row_batches import coalesce
from polytempo.train.server_embedding import ServerEmbedding
from polytempo.train.sparse_embedding import RowCopies

CPU = torch.device("cpu")
some_ids = st.lists(st.integers(0, 30), min_size=1, max_size=20)


@settings(max_examples=80, deadline=None)
@given(forwards=st.lists(st.sets(st.integers(0, 20), min_size=1), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_gradients_of_forwards_are_summed_as_on_the_cpu_to_the_bit(forwards: list[set[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    found = [(torch.tensor(sorted(ids)), torch.randn(len(ids), 3, generator=generator)) for ids in forwards]
    ids, values = RowCopies().fetched(found)
    wanted = coalesce(torch.cat([one for one, _ in found]), torch.cat([rows for _, rows in found]))
    assert torch.equal(ids, wanted[0])
    assert torch.equal(values.wait(), wanted[1])


@settings(max_examples=80, deadline=None)
@given(ids=some_ids, padding=st.sampled_from([None, 0, 7, 30, 99]), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_ids_are_looked_up_on_a_gpu_as_on_the_cpu(ids: list[int], padding: int | None, dtype: torch.dtype) -> None:
    embedding, given = ServerEmbedding(31, 2, padding_idx=padding), torch.tensor(ids, dtype=dtype).view(1, -1)
    wanted, found = embedding._look_up(given), embedding._look_up_there(given, CPU)
    assert torch.equal(found.unique, wanted.unique)
    assert torch.equal(found.places, wanted.places)
    assert found.padded == wanted.padded


def test_ids_out_of_range_are_refused_as_on_the_cpu() -> None:
    for embedding in (ServerEmbedding(10, 2), ServerEmbedding(10, 2, padding_idx=3)):
        for wrong in (torch.tensor([3, 1, 10]), torch.tensor([-1, 3]), torch.tensor([0.5, 2])):
            said = []
            for look_up in (embedding._look_up, lambda ids, one=embedding: one._look_up_there(ids, CPU)):
                try:
                    look_up(wrong)
                except UsageError as error:
                    said.append(str(error))
            assert len(said) == 2
            assert said[0] == said[1]


def test_what_prefetch_found_is_used_for_the_same_unchanged_tensor_only() -> None:
    embedding, ids = ServerEmbedding(10, 2), torch.tensor([3, 1])
    embedding.prefetch(ids)
    lookup = embedding._known(ids)
    assert lookup is not None
    assert lookup.unique.tolist() == [1, 3]
    assert embedding._known(ids.clone()) is None
    ids[0] = 5
    assert embedding._known(ids) is None
    with torch.inference_mode():
        other = torch.tensor([1])
        embedding.prefetch(other)
        assert embedding._known(other) is None

"""What a replica takes in a step of `fit`: the same samples under every strategy, none twice, also after interruptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from polytempo.errors import UsageError, WrongType
from polytempo.strategy.sample_source import SampleSource


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.tensor([float(index)]), index


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(index)]), index) for index in range(self.count))


def pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(float(count)).unsqueeze(1), torch.arange(count)


def taken(source: SampleSource, epoch: int, parts: Any, replicas: int) -> list[list[list[int]]]:
    """For each replica its batches."""
    return [[y.tolist() for _, y in source.training(epoch, parts, replica, replicas)] for replica in range(replicas)]


@given(
    st.integers(1, 60),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=4
    ),
)
def test_no_sample_is_taken_twice_however_often_a_run_is_interrupted_and_by_whatever_resumed(
    count: int, runs: list[tuple[int, int, list[int]]]
) -> None:
    """Each run has its own number of replicas and batch size, and replicas that are not in step."""
    parts: list[dict[str, Any]] = []
    seen: Counter[int] = Counter()
    for replicas, each, stops in runs:
        if count < replicas * each:
            continue
        source = SampleSource(pair(count), replicas * each, True, 7)
        steps = source.steps(parts)
        assert steps is not None
        batches = taken(source, 3, parts, replicas)
        assert [len(mine) for mine in batches] == [steps] * replicas
        made = [min(stop, steps) for stop in stops[:replicas]]
        for mine, stop in zip(batches, made, strict=True):
            for batch in mine[:stop]:
                assert len(batch) == each
                seen.update(batch)
        parts.append({"size": replicas, "taken": [stop * each for stop in made]})
    assert all(number == 1 for number in seen.values())
    rest = taken(SampleSource(pair(count), 1, True, 7), 3, parts, 1)[0]
    assert Counter(sample for batch in rest for sample in batch) + seen == Counter(range(count))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_step_has_the_same_samples_for_any_number_of_replicas(replicas: int) -> None:
    source = SampleSource(pair(50), 12, True, 0)
    (whole,) = taken(source, 1, [], 1)
    shared = taken(source, 1, [], replicas)
    assert len(whole) == 4
    for step, batch in enumerate(whole):
        assert sorted(sample for mine in shared for sample in mine[step]) == sorted(batch)


def test_a_resumed_run_goes_on_with_the_same_batches() -> None:
    source = SampleSource(pair(40), 6, True, 0)
    whole = taken(source, 0, [], 2)
    rest = taken(source, 0, [{"size": 2, "taken": [9, 9]}], 2)
    assert rest == [mine[3:] for mine in whole]
    assert source.steps([{"size": 2, "taken": [9, 9]}]) == 3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = [taken(SampleSource(pair(30), 30, True, seed), epoch, [], 1) for seed in (0, 1) for epoch in (0, 1)]
    assert all(order[i] != order[j] for i in range(4) for j in range(i))
    assert taken(SampleSource(pair(30), 30, False, 0), 5, [], 1) == [[list(range(30))]]


@pytest.mark.parametrize(
    "data",
    [Numbers(23), TensorDataset(*pair(23)), DataLoader(Numbers(23), 4), Stream(23), DataLoader(Stream(23), 4), pair(23)],
    ids=["dataset", "tensor dataset", "loader", "stream", "loader of a stream", "tensors"],
)
def test_every_kind_of_data_gives_the_same_batches(data: Any) -> None:
    source = SampleSource(
        data, None if isinstance(data, DataLoader) else 4, None if isinstance(data, DataLoader) else False, 0
    )
    parts = [{"size": 2, "taken": [2, 4]}]
    expected = [[[4, 8], [10, 12], [14, 16], [18, 20]], [[6, 9], [11, 13], [15, 17], [19, 21]]]
    assert taken(source, 0, parts, 2) == expected
    evaluated = [[y.tolist() for _, y in source.evaluation(replica, 2)] for replica in (0, 1)]
    assert evaluated == [[[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]], [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22]]]
    x, y = next(source.evaluation(0, 1))
    assert torch.equal(x.squeeze(1), y.double().float())


def test_a_loader_keeps_its_order_and_its_collate() -> None:
    loader = DataLoader(
        Numbers(8), 4, shuffle=True, collate_fn=lambda samples: ("inputs", torch.tensor([s[1] for s in samples]))
    )
    source = SampleSource(loader, None, None, 0)
    assert source.shuffle
    assert source.batch_size == 4
    (x, y), _ = source.training(0, [], 0, 1)
    assert x == "inputs"
    assert len(y) == 4
    assert source.example()[0] == ("inputs",)


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (3, {}, "data: expected a Dataset, a DataLoader or a pair of tensors (inputs, targets), got int"),
        ((torch.zeros(3), torch.zeros(2)), {}, "data: expected as many targets as inputs, got 3 and 2"),
        (pair(10), {"batch_size": 16}, "data: expected at least one batch of 16, got 10 samples; use batch_size=10"),
        (Stream(3), {"shuffle": True}, "an IterableDataset has its own order; leave out shuffle=True"),
        (DataLoader(Stream(3), num_workers=2), {}, "read in the process of each rank, got num_workers=2; use num_workers=0"),
        (DataLoader(Numbers(9), sampler=[1, 2, 3]), {}, "cannot share out a list (sampler=); give fit the data set itself"),
    ],
)
def test_data_that_cannot_be_shared_out_is_refused(data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        SampleSource(data, options.get("batch_size", 2), options.get("shuffle"), 0)
    assert said in str(caught.value)


def test_batches_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(
        WrongType, match=r"expected batches of \(inputs, targets\), got 3 values; several inputs go into one"
    ):
        next(SampleSource(TensorDataset(*[torch.zeros(4)] * 3), 2, False, 0).training(0, [], 0, 1))

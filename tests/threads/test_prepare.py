"""`prepare`: one call stands for the lines that make a script distributed."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model
from sessions import under
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.prepare import prepare

pytestmark = pytest.mark.timeout(30)

MODEL = small_model()
DATA = TensorDataset(torch.arange(48), torch.randn(48, 5, dtype=torch.float64))


def trained(session: Session, epochs: int, batch: int = 4, **options: Any) -> list[list[int]]:
    """What a worker's share of each epoch was, in a plain loop."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(DATA, batch_size=batch, shuffle=True)
    model, optimizer, loader = prepare(model, optimizer, loader, **options)
    seen = []
    for _ in range(epochs):
        seen.append([])
        for index, x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step(samples=len(x))
            seen[-1] += index.tolist()
    return seen


def test_epochs_are_shared_out_in_another_order_each() -> None:
    with ThreadJob(3) as job:
        workers = job.run(lambda session: trained(session, 2, clip_norm=1.0))
    for epoch in (0, 1):
        assert sorted(index for seen in workers for index in seen[epoch]) == list(range(48))
    assert workers[0][0] != workers[0][1]
    assert job.notices == []


def test_the_loader_ends_with_the_budget_and_a_resumed_job_goes_on(tmp_path: Path) -> None:
    with ThreadJob(2, limits=Limits(steps=6), checkpoint=tmp_path) as job:
        first = job.run(lambda session: trained(session, 3))
    assert [[len(epoch) for epoch in seen] for seen in first] == [[12, 0, 0], [12, 0, 0]]
    with ThreadJob(2, resume=tmp_path) as job:
        second = job.run(lambda session: trained(session, 2))
    assert sorted(index for seen in [*first, *second] for index in seen[0]) == list(range(48))
    assert sorted(index for seen in second for index in seen[1]) == list(range(48))


def scheduled(session: Session, count: int, batch: int = 4, **about: Any) -> list[tuple[int, int, int, list[int]]]:
    """Of each epoch of a training: its number, the loader's length, the batches that came, and their samples."""
    model = small_model()
    loader = DataLoader(DATA, batch_size=batch, shuffle=True, **about)
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    seen = []
    for epoch in loader.epochs(count):
        batches = []
        for index, x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            batches.append(index.tolist())
        seen.append((epoch, len(loader), len(batches), [index for one in batches for index in one]))
    return seen


@pytest.mark.parametrize(("steps", "left"), [(6, [(0, 3), (1, 6)]), (12, [(1, 6)]), (18, [(1, 3)]), (24, [])])
def test_a_resumed_training_has_the_epochs_that_are_left_and_its_loader_the_length_of_a_whole_one(
    steps: int, left: list[tuple[int, int]], tmp_path: Path
) -> None:
    with ThreadJob(2, limits=Limits(steps=steps), checkpoint=tmp_path) as job:
        first = job.run(lambda session: scheduled(session, 2))
    with ThreadJob(2, resume=tmp_path) as job:
        second = job.run(lambda session: scheduled(session, 2))
    for seen in second:
        assert [(epoch, batches) for epoch, _, batches, _ in seen] == left
    assert {length for seen in (*first, *second) for _, length, _, _ in seen} == {6}
    for epoch in (0, 1):
        used = [index for seen in (*first, *second) for number, _, _, part in seen if number == epoch for index in part]
        assert sorted(used) == list(range(48))


def test_an_epoch_of_which_only_dropped_samples_are_left_is_over(tmp_path: Path) -> None:
    with ThreadJob(2, limits=Limits(steps=8), checkpoint=tmp_path) as job:  # 48 = 4 joint batches of 2 x 5, and 8 samples
        assert [len(part) for *_, part in job.run(lambda session: scheduled(session, 3, 5, drop_last=True))[0]] == [20]
    with ThreadJob(2, resume=tmp_path) as job:
        seen = job.run(lambda session: scheduled(session, 3, 5, drop_last=True))[0]
    assert [(epoch, batches) for epoch, _, batches, _ in seen] == [(1, 4), (2, 4)]


@pytest.mark.parametrize("sync", ["anytime:auto", "anytime:auto,micro=2", "bsp+balance,micro=4"])
def test_in_modes_with_micro_batches_the_joint_batch_is_what_the_script_asked_for(sync: str) -> None:
    with ThreadJob(2, sync=sync) as job:
        workers = job.run(lambda session: micro_batches(session))
    micro = int(sync.rpartition("=")[2]) if "micro" in sync else 8
    assert {len(batch) for batches, _ in workers for batch in batches} == {8 // micro}
    assert {index for batches, _ in workers for batch in batches for index in batch} == set(range(48))
    assert {length for _, length in workers} == {48 // (8 // micro) // 2}


def micro_batches(session: Session) -> tuple[list[list[int]], int]:
    """The batches of an epoch, where the script asks for 8 samples a worker; and the loader's length."""
    model = small_model()
    loader = DataLoader(DATA, batch_size=8)
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    batches = []
    for index, x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        batches.append(index.tolist())
    return batches, len(loader)


def test_a_loader_keeps_all_but_its_sampler() -> None:
    generator = torch.Generator()
    session = Session(None, JobFacts(4, ()), 1)
    session.parent = "a test, so that no others are looked for"
    made = DataLoader(
        DATA,
        batch_size=5,
        num_workers=1,
        collate_fn=list,
        drop_last=True,
        timeout=7,
        worker_init_fn=print,
        generator=generator,
        multiprocessing_context="spawn",
        prefetch_factor=3,
        persistent_workers=True,
    )
    model = small_model()
    _, _, shared = under(session, prepare, model, torch.optim.SGD(model.parameters(), lr=0.1), made)
    assert (shared.batch_size, shared.num_workers, shared.collate_fn, shared.drop_last) == (5, 1, list, True)
    assert (shared.timeout, shared.worker_init_fn, shared.generator, shared.prefetch_factor) == (7, print, generator, 3)
    assert shared.multiprocessing_context is made.multiprocessing_context
    assert shared.persistent_workers
    assert list(shared.sampler) == list(range(1, 48, 4)), "in order, as it was"
    assert len(shared) == 2


class Endless(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter(())


class Special(DataLoader[Any]):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: [1, 2], "expected a torch DataLoader, got list"),
        (lambda: Special(DATA), "expected a torch DataLoader, got Special"),
        (lambda: DataLoader(Endless()), "got an IterableDataset, which has no places to share out"),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1]]), r"a list \(batch_sampler=\); make it yourself with sampler=pt"),
        (lambda: DataLoader(DATA, sampler=[1, 2]), r"cannot share out a list \(sampler=\)"),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, num_samples=7)),
            "RandomSampler that leaves out or repeats samples",
        ),
    ],
)
def test_a_loader_that_cannot_be_made_again_is_refused(loader: Any, words: str) -> None:
    model = small_model()
    with pytest.raises(UsageError, match=words) as refused:
        under(
            Session(None, JobFacts(1, ()), 0),
            prepare,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader(),
        )
    assert "\n" not in str(refused.value)


def test_what_a_worker_that_is_epochs_behind_has_not_done_is_done_after_a_resume(tmp_path: Path) -> None:
    ended = threading.Event()

    def uneven(session: Session) -> list[tuple[int, list[int]]]:
        """Worker 0 comes to the third epoch while worker 1 is in its first."""
        model, seen = copy.deepcopy(MODEL), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = prepare(model, optimizer, DataLoader(DATA, batch_size=4, shuffle=True))
        for epoch in loader.epochs(3):
            for index, x in loader:
                if session.rank == 1 and len(seen) == 2 and not session.job.resumed:
                    assert ended.wait(20)
                    return seen
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                seen.append((epoch, index.tolist()))
        ended.set()
        return seen

    with ThreadJob(2, sync="asp", limits=Limits(samples=2 * 4 + 15 * 4), checkpoint=tmp_path) as job:
        first = job.run(uneven)
    assert [epoch for epoch, _ in first[0]][-1] == 2
    with ThreadJob(2, sync="asp", resume=tmp_path) as job:
        second = job.run(uneven)
    for epoch in range(3):
        used = [index for seen in (*first, *second) for number, part in seen if number == epoch for index in part]
        assert sorted(used) == list(range(48))

"""DistributedSampler: workers share an epoch, and after a resume exactly what was not trained on is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import begun, copied, made_params, set_gradients, until
from sessions import under

from polytempo.launcher.job_facts import JobFacts
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedSampler

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

START = made_params([(3,)])


def epoch(
    session: Session, length: int, batch: int, steps: int | None = None, number: int | None = None, told: bool = True
) -> list[list[int]]:
    """One worker's batches in an epoch, of which it trains on the first `steps`."""
    params = copied(START)
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    sampler = DistributedSampler(range(length))
    if number is not None:
        sampler.set_epoch(number)
    seen = []
    indices = iter(sampler)
    while steps is None or len(seen) < steps:
        own = [index for _, index in zip(range(batch), indices, strict=False)]
        if not own:
            break
        set_gradients(params, [torch.ones(3)])
        optimizer.step(samples=len(own) if told else None)
        seen.append(own)
    return seen


def flat(of_workers: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return sorted(index for seen in of_workers for batch in seen for index in batch)


def run(workers: int, sync: str = "bsp", *, length: int = 36, batch: int = 3, **options: Any) -> list[list[list[int]]]:
    steps, told = options.pop("steps", None), options.pop("told", True)
    number = options.pop("number", None)
    with ThreadJob(workers, 1, sync, **options) as job:
        return job.run(
            lambda session: epoch(
                session, length, batch, steps[session.rank] if isinstance(steps, list) else steps, number, told
            )
        )


@pytest.mark.parametrize("told", [True, False], ids=["told the samples", "counting what is drawn"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_before_and_after_a_resume_partition_the_epoch(before: int, after: int, told: bool, tmp_path: Path) -> None:
    """36 samples: 12 before, 24 after, so that nothing needs to be used twice."""
    batch = 12 // before // 2 if before < 4 else 3
    steps = 12 // before // batch
    first = run(before, batch=batch, steps=steps, told=told, checkpoint=tmp_path)
    second = run(after, batch=2, told=told, resume=tmp_path)
    assert len(flat(first)) == 12
    assert sorted(flat(first) + flat(second)) == list(range(36))


def test_workers_that_are_unequally_far_lose_and_repeat_nothing(tmp_path: Path) -> None:
    first = run(3, "asp", steps=[1, 4, 2], checkpoint=tmp_path)
    second = run(3, "asp", resume=tmp_path)
    assert len(flat(first)) == 21
    assert sorted(flat(first) + flat(second)) == list(range(36))


def test_two_interruptions_in_one_epoch(tmp_path: Path) -> None:
    first = run(2, steps=2, checkpoint=tmp_path)  # 12
    second = run(3, batch=2, steps=2, resume=tmp_path, checkpoint=tmp_path)  # 12
    third = run(4, resume=tmp_path)
    assert [len(flat(part)) for part in (first, second, third)] == [12, 12, 12]
    assert sorted(flat(first) + flat(second) + flat(third)) == list(range(36))


def test_only_what_the_checkpoint_holds_counts_as_trained_on(tmp_path: Path) -> None:
    """The job dies in step 5; the checkpoint is of step 4."""
    died: dict[int, list[list[int]]] = {}

    def work(session: Session) -> None:
        died[session.rank] = epoch(session, 36, 3, steps=5)
        raise ArithmeticError

    with ThreadJob(2, 1, checkpoint=tmp_path, checkpoint_every=4) as job:
        with pytest.raises(ArithmeticError):
            job.run(work)
        until(lambda: (tmp_path / "step-00000004").exists(), "the checkpoint is whole")
        job.close(1)
    trained = flat([own[:4] for own in died.values()])
    rest = run(2, resume=tmp_path)
    assert sorted(trained + flat(rest)) == list(range(36))


def test_after_a_resume_the_saved_epoch_goes_on_and_the_next_one_is_whole(tmp_path: Path) -> None:
    first = run(2, steps=3, number=5, checkpoint=tmp_path)
    with ThreadJob(3, 1, resume=tmp_path) as job:

        def work(session: Session) -> tuple[int, list[int], list[int]]:
            sampler = DistributedSampler(range(36))
            start, rest = sampler.epoch, list(sampler)
            sampler.set_epoch(start + 1)
            return start, rest, list(sampler)

        results = job.run(work)
    assert [start for start, _, _ in results] == [5, 5, 5]
    assert sorted(flat(first) + [index for _, rest, _ in results for index in rest]) == list(range(36))
    assert sorted(index for _, _, following in results for index in following) == list(range(36))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12: a job in threads has threads
def test_a_loader_that_reads_ahead_does_not_count_what_was_not_trained_on(tmp_path: Path) -> None:
    def work(session: Session) -> list[int]:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        sampler = DistributedSampler(range(36))
        loader = torch.utils.data.DataLoader(list(range(36)), batch_size=3, num_workers=2, sampler=sampler, timeout=60)
        seen: list[int] = []
        for _, batch in zip(range(2), begun(loader), strict=False):
            set_gradients(params, [torch.ones(3)])
            optimizer.step(samples=len(batch))
            seen += batch.tolist()
        return seen

    with ThreadJob(2, 1, checkpoint=tmp_path) as job:
        first = job.run(work)
    assert [len(own) for own in first] == [6, 6]
    assert sorted(first[0] + first[1] + flat(run(3, batch=4, resume=tmp_path))) == list(range(36))


# Several samplers.


def trained_beside(
    session: Session, steps: int, looking: str, batch: int = 3, workers: int = 0, told: bool = True
) -> tuple[list[int], list[int]]:
    """Trains on the first batches of 36 samples, and looks at 40 others, or at the same, between steps; what was seen."""
    params = copied(START)
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    data, others = list(range(36)), list(range(40))
    sampler = DistributedSampler(data)
    checking = DistributedSampler(others, training=False if looking == "told" else None)
    loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=workers, sampler=sampler)
    looked_at = loader if looking == "the same" else torch.utils.data.DataLoader(others, batch_size=8, sampler=checking)
    kept = iter(checking)
    trained: list[int] = []
    seen: list[int] = []

    def look() -> None:
        if looking == "part":
            seen.append(int(next(iter(looked_at))[0]))
        elif looking in ("told", "without gradients"):
            with torch.set_grad_enabled(looking == "told"):
                seen.append(next(kept))
        else:
            seen.extend(index for x in looked_at for index in x.tolist())

    look()
    for _, x in zip(range(steps), begun(loader), strict=False):
        set_gradients(params, [torch.ones(3)])
        optimizer.step(samples=len(x) if told else None)
        trained += x.tolist()
        look()
    return trained, list(checking)


@pytest.mark.parametrize("looking", ["others", "the same", "part", "told", "without gradients"])
@pytest.mark.parametrize("told", [True, False], ids=["told the samples", "counting what is drawn"])
def test_data_that_is_looked_at_between_steps_does_not_disturb_the_position(
    looking: str, told: bool, tmp_path: Path
) -> None:
    with ThreadJob(2, 1, checkpoint=tmp_path) as job:
        first = job.run(lambda session: trained_beside(session, 2, looking, told=told))
    with ThreadJob(3, 1, resume=tmp_path) as job:
        second = job.run(lambda session: trained_beside(session, 12, looking, batch=4, told=told))
    assert sorted(index for trained, _ in [*first, *second] for index in trained) == list(range(36))
    assert {index for _, checked in second for index in checked} == set(range(40)), "validation sees everything"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_loader_that_has_read_the_epoch_ahead_keeps_its_position_beside_an_evaluation(tmp_path: Path) -> None:
    with ThreadJob(2, 1, checkpoint=tmp_path) as job:  # 18 samples each, in 6 batches; four are fetched ahead
        first = job.run(lambda session: trained_beside(session, 4, "others", workers=2))
    with ThreadJob(2, 1, resume=tmp_path) as job:
        second = job.run(lambda session: trained_beside(session, 12, "others"))
    assert sorted(index for trained, _ in [*first, *second] for index in trained) == list(range(36))


def test_several_samplers_train_and_each_goes_on_where_it_was(tmp_path: Path) -> None:
    def work(session: Session, steps: int) -> list[list[int]]:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        samplers = [DistributedSampler(range(24)), DistributedSampler(range(12))]
        passes = [iter(sampler) for sampler in samplers]
        seen: list[list[int]] = [[], []]
        for _ in range(steps):
            drawn = [[i for _, i in zip(range(4 // (k + 1)), passes[k], strict=False)] for k in (0, 1)]
            if not drawn[0]:
                break
            set_gradients(params, [torch.ones(3)])
            optimizer.step(samples=len(drawn[0]))
            for own, more in zip(seen, drawn, strict=True):
                own += more
        return seen

    with ThreadJob(2, 1, checkpoint=tmp_path) as job:
        first = job.run(lambda session: work(session, 1))
    with ThreadJob(1, 1, resume=tmp_path) as job:
        second = job.run(lambda session: work(session, 99))
    for which, length in ((0, 24), (1, 12)):
        assert sorted(i for seen in [*first, *second] for i in seen[which]) == list(range(length))


def test_positions_of_a_version_that_knew_one_sampler_are_the_first_ones() -> None:
    facts = JobFacts(2, (), positions=({"epoch": 3, "size": 1, "taken": [30]},))
    session = Session(None, facts, 0)
    train, check = (under(session, DistributedSampler, range(36)) for _ in range(2))
    assert (train.epoch, len(list(train)), len(list(check))) == (3, 3, 18)
    assert len(train) == len(check) == 18, "the length is a whole epoch's"


@pytest.mark.parametrize("taken_before", [30, 36])
def test_a_script_that_never_sets_the_epoch_gets_whole_passes_after_the_interrupted_one(taken_before: int) -> None:
    facts = JobFacts(1, (), positions=({"epoch": 0, "size": 1, "taken": [taken_before]},))
    session = Session(None, facts, 0)
    sampler = under(session, DistributedSampler, range(36))
    passes: list[list[int]] = []
    for _ in range(3):
        passes.append([])
        for index in sampler:
            passes[-1].append(index)
            session.ledger.trained(1)
    assert [len(one) for one in passes] == [36 - taken_before, 36, 36]


# One epoch.


def alone(rank: int, size: int, seed: int = 0) -> Session:
    return Session(None, JobFacts(size, (), seed=seed), rank)


def taken(size: int, length: int, **options: Any) -> list[list[int]]:
    epoch_number = options.pop("epoch", 0)
    result = []
    for rank in range(size):
        sampler = under(alone(rank, size), DistributedSampler, range(length), **options)
        sampler.set_epoch(epoch_number)
        result.append(list(sampler))
        assert len(result[-1]) == len(sampler)
    return result


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", range(1, 8))
def test_shares_are_those_of_torchs_sampler(size: int, drop_last: bool) -> None:
    for length in range(25):
        ordered = taken(size, length, shuffle=False, drop_last=drop_last)
        theirs = torch.utils.data.DistributedSampler
        for rank, share in enumerate(ordered):
            assert share == list(theirs(range(length), size, rank, shuffle=False, drop_last=drop_last)), (length, rank)
        shuffled = taken(size, length, drop_last=drop_last)
        assert [len(share) for share in shuffled] == [len(share) for share in ordered]
        if not drop_last:
            assert {index for share in shuffled for index in share} == set(range(length))


def test_drop_last_uses_nothing_twice() -> None:
    shares = taken(3, 11, drop_last=True)
    assert [len(share) for share in shares] == [3, 3, 3]
    assert len({index for share in shares for index in share}) == 9


def test_the_order_is_the_seeds_and_the_epochs() -> None:
    assert taken(2, 20) == taken(2, 20)
    assert taken(2, 20) != taken(2, 20, epoch=1)
    assert taken(2, 20) != taken(2, 20, seed=1)
    assert taken(2, 6, shuffle=False) == [[0, 2, 4], [1, 3, 5]]

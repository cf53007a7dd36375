"""`bsp+balance` in live jobs: shares follow the speed, and the update is that of one process on the joint batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from balanced import INPUTS, MODEL, TARGETS, Seen, Trainee, made_optimizer, one_process, samples_of, trained, uneven
from helpers import assert_close, begun, check_record, loss_of
from local_blocks import HostsJob

from polytempo.errors import PolytempoError
from polytempo.launcher.job_facts import JobFacts
from polytempo.reducer import sums
from polytempo.reducer.sums import BucketSums
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.communication import Group
from polytempo.train.prepare import prepare
from polytempo.train.sampler import DistributedBatchSampler, DistributedSampler

pytestmark = pytest.mark.timeout(60)

SYNC = "bsp+balance"


def run(way: str, sync: str, work: Any, workers: int = 3, **options: Any) -> list[Any]:
    """Call `work(session)` on each worker of a job over servers, shared memory, collectives with a sequencer, or ballots."""
    if way == "ballots":
        with GroupJob(workers) as group:
            for session in group.sessions:
                session.job = replace(session.job, sync=sync)
            return group.run(work)
    if way == "hosts":
        with HostsJob(workers, sync, **options) as hosts:
            return hosts.run(work)
    with ThreadJob(workers, 2, sync, via={"servers": "ps", "memory": "allreduce"}[way], **options) as job:
        return job.run(work)


WAYS = ["servers", "memory", "hosts", "ballots"]


@pytest.mark.parametrize("way", WAYS)
def test_shares_follow_the_speed_and_the_update_is_that_of_one_process(way: str) -> None:
    seen: list[Seen] = run(way, SYNC, trained)
    sizes = [[len(batch) for batch in one.rounds] for one in seen]
    assert all(sum(joint) == 18 for joint in list(zip(*sizes, strict=True))[:5])
    assert (sizes[2][0], sizes[2][7]) == (6, 2), "a quarter of the others' speed"
    assert (sizes[0][17], sizes[2][17]) == (2, 8), "within 10 rounds of the change the first has the small share"
    assert samples_of(seen) == sorted([*range(200)] * 2)
    expected = one_process(seen)
    for one in seen:
        assert_close(one.values, expected, 1e-9)


@pytest.mark.parametrize("sync", [SYNC, "bsp+balance,micro=2"])
def test_a_record_is_checked_and_replayed(sync: str, tmp_path: Path) -> None:
    run("memory", sync, trained, record=tmp_path)
    lines = check_record(tmp_path)
    assert any(line.get("weights") for line in lines if line["kind"] == "release"), "new shares are in it"


@pytest.mark.parametrize("way", ["delta", "device"])
def test_updates_on_the_worker_and_values_on_a_device_are_the_same(way: str) -> None:
    """`apply="delta"`; and memory that is shared as on one GPU, where a step does not wait for its answer otherwise."""
    options: dict[str, Any] = {"apply": "delta"} if way == "delta" else {}
    job = {"device": "stand-in"} if way == "device" else {}
    seen: list[Seen] = run("servers", SYNC, lambda session: trained(session, **options), **job)
    assert [len(seen[2].rounds[step]) for step in (0, 7)] == [6, 2]
    assert samples_of(seen) == sorted([*range(200)] * 2)
    assert_close(seen[1].values, one_process(seen), 1e-9)


@pytest.mark.parametrize("way", ["hosts", "ballots"])
def test_buckets_that_leave_during_backward_have_the_weight_of_their_batch(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cost the numbers of samples differ in each step: but for the first, no bucket is reduced twice."""
    reduced: list[int] = []
    reduce = BucketSums._reduce

    def counted(rounds: BucketSums, number: int, background: bool) -> Any:
        reduced.append(number)
        return reduce(rounds, number, background)

    monkeypatch.setattr(sums, "BUCKET", 64)
    monkeypatch.setattr(BucketSums, "_reduce", counted)
    work = lambda session: trained(session, 96, 8, 1, cost=lambda index: 1.0 + (index * 37 % 50) ** 2)  # noqa: E731
    seen: list[Seen] = run(way, SYNC, work, 2)
    sizes = [len(part) for part in seen[0].rounds]
    assert len(set(sizes)) > 2
    buckets = max(reduced) + 1
    assert buckets > 1
    assert len(reduced) == 2 * buckets * (len(sizes) + 2), "the first again, and one without data at the end"
    assert_close(seen[1].values, one_process(seen), 1e-9)


def micro_batches(session: Session, length: int = 190, epochs: int = 2, loaded: bool = True, **options: Any) -> Seen:
    """Some epochs of micro-batches of 3, by `sampler=` and a fixed `batch_size` or by `batch_sampler=`."""
    trainee = Trainee(session, uneven, options)
    indices = torch.arange(length)
    if loaded:
        sampler: Any = DistributedSampler(range(length), batch_size=3)
        loader = torch.utils.data.DataLoader(indices, batch_size=3, sampler=sampler)
    else:
        sampler = DistributedBatchSampler(range(length), 6)  # cut in two micro-batches
        loader = torch.utils.data.DataLoader(indices, batch_sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        trainee.train(loader)
    return trainee.seen


@pytest.mark.parametrize("loaded", [True, False], ids=["sampler", "batch sampler"])
@pytest.mark.parametrize("way", WAYS)
def test_with_micro_a_share_is_whole_micro_batches(way: str, loaded: bool) -> None:
    seen: list[Seen] = run(way, "bsp+balance,micro=2", lambda session: micro_batches(session, loaded=loaded))
    counts = [[-(-len(part) // 3) for part in one.rounds] for one in seen]
    joint = [sum(parts) for parts in zip(*counts, strict=True)]
    assert joint == [*[6] * 10, 4] * 2, "64 micro-batches, the last of which is short"
    assert counts[2][0] == 2
    assert counts[2][7] == 1
    assert sorted(len(batch) for one in seen for batch in one.steps)[:3] == [1, 1, 3]
    assert samples_of(seen) == sorted([*range(190)] * 2)
    expected = one_process(seen)
    for one in seen:
        assert_close(one.values, expected, 1e-9)


def test_the_mean_of_a_round_of_micro_batches_is_clipped() -> None:
    seen: list[Seen] = run("servers", "bsp+balance,micro=2", lambda session: micro_batches(session, clip_norm=0.2))
    assert_close(seen[0].values, one_process(seen, clip=0.2), 1e-9)


# The data.


def resumed(session: Session, length: int, each: int, steps: int | None, sync: str) -> Seen:
    trainee = Trainee(session)
    if "micro" in sync:
        sampler: Any = DistributedBatchSampler(range(length), 4)
    elif "balance" in sync:
        sampler = DistributedBatchSampler(range(length), each)
    else:
        sampler = torch.utils.data.BatchSampler(DistributedSampler(range(length)), each, drop_last=False)
    return trainee.train(sampler, steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, SYNC), (2, SYNC)),
        ((2, SYNC), (4, "bsp")),
        ((3, "bsp+balance,micro=2"), (2, SYNC)),
        ((3, "bsp"), (2, "bsp+balance,micro=2")),
    ],
    ids=str,
)
def test_before_and_after_a_resume_each_sample_is_used_once(
    before: tuple[int, str], after: tuple[int, str], tmp_path: Path
) -> None:
    """The second job saves too, and a third one goes on with what is left."""
    parts, length = [], 120
    for number, (workers, sync) in enumerate([before, after, (3, SYNC)]):
        steps = None if number == 2 else 4
        options = {"resume": tmp_path} if number else {}
        with ThreadJob(workers, 1, sync, checkpoint=tmp_path, checkpoint_every=1, **options) as job:
            parts.append(job.run(lambda session, steps=steps, sync=sync: resumed(session, length, 4, steps, sync)))
    pushed = [index for part in parts for seen in part for batch in seen.rounds for index in batch]
    assert sorted(pushed) == list(range(length))


def test_what_is_pushed_and_not_applied_is_not_done(tmp_path: Path) -> None:
    """The last worker ends before its third step: the others' third pushes are applied without it, its samples are left."""

    def work(session: Session) -> Seen:
        return Trainee(session, lambda rank, step: 1.0).train(
            DistributedBatchSampler(range(60), 4), 3 if session.rank < 2 else 2
        )

    with ThreadJob(3, 1, SYNC, checkpoint=tmp_path) as job:
        first = job.run(work)
    with ThreadJob(3, 1, SYNC, resume=tmp_path) as job:
        second = job.run(lambda session: resumed(session, 60, 4, None, SYNC))
    assert len(samples_of(first)) == 32
    assert sorted(samples_of(first) + samples_of(second)) == list(range(60))


@pytest.mark.parametrize("way", ["servers", "memory"])
def test_the_others_take_over_the_share_of_a_worker_that_ends(way: str) -> None:
    def work(session: Session) -> Seen:
        sampler = DistributedBatchSampler(range(180), 6)
        return Trainee(session, lambda rank, step: 1.0).train(sampler, 4 if session.rank == 1 else None)

    seen: list[Seen] = run(way, SYNC, work)
    sizes = [[len(part) for part in one.rounds] for one in seen]
    assert sizes[1] == [6] * 4
    assert [one + other for one, other in zip(sizes[0], sizes[2], strict=True)][-4:] == [18] * 4
    assert_close(seen[0].values, seen[2].values, 1e-12)


@pytest.mark.parametrize("way", ["hosts", "ballots"])
def test_after_all_have_joined_the_next_epoch_is_everyones(way: str) -> None:
    """Worker 1 leaves the first epoch early, and waits until the others are through with theirs."""

    def work(session: Session) -> list[int]:
        trainee, sampler = Trainee(session), DistributedBatchSampler(range(90), 3)
        trainee.train(sampler, 3 if session.rank == 1 else None)
        trainee.optimizer.join()
        before = len(trainee.seen.steps)
        sampler.set_epoch(1)
        trainee.train(sampler)
        trainee.optimizer.join()
        return [index for batch in trainee.seen.steps[before:] for index in batch]

    taken = run(way, SYNC, work)
    assert all(taken)
    assert sorted(index for mine in taken for index in mine) == list(range(90))


def test_after_a_resume_the_saved_epoch_goes_on_and_the_next_one_is_whole(tmp_path: Path) -> None:
    def work(session: Session, epochs: int, steps: int | None) -> tuple[int, Seen]:
        trainee = Trainee(session)
        sampler = DistributedBatchSampler(range(50), 3)
        start = sampler.epoch
        for epoch in range(start, start + epochs):
            sampler.set_epoch(epoch)
            trainee.train(sampler, steps if epoch == start + epochs - 1 else None)
        return start, trainee.seen

    with ThreadJob(2, 1, SYNC, checkpoint=tmp_path) as job:
        first = [seen for _, seen in job.run(lambda session: work(session, 2, 3))]
    with ThreadJob(3, 1, SYNC, resume=tmp_path) as job:
        results = job.run(lambda session: work(session, 2, None))
    assert [start for start, _ in results] == [1, 1, 1]
    assert sorted(samples_of(first) + samples_of([seen for _, seen in results])) == sorted([*range(50)] * 3)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12: a job in threads has threads
@pytest.mark.parametrize("sync", [SYNC, "bsp+balance,micro=2"])
def test_a_loader_that_reads_ahead_gets_every_sample_once_and_counts_what_was_trained_on(sync: str, tmp_path: Path) -> None:
    """An epoch with an evaluation on the same data in it, one that is left early, and what is left of it after a resume."""

    def loaded(session: Session, epochs: int, leave: int | None) -> Seen:
        trainee = Trainee(session, lambda rank, step: [1.0, 0.25][rank])
        sampler = DistributedBatchSampler(range(90), 3)
        loader = torch.utils.data.DataLoader(
            torch.arange(90), batch_sampler=sampler, num_workers=2, persistent_workers=True, timeout=60
        )
        start = sampler.epoch
        for epoch in range(start, start + epochs):
            sampler.set_epoch(epoch)
            trainee.train(begun(loader), leave if epoch == start + epochs - 1 else None)
            with torch.no_grad():
                list(DistributedBatchSampler(range(90), 3))
        return trainee.seen

    with ThreadJob(2, 1, sync, checkpoint=tmp_path) as job:
        first = job.run(lambda session: loaded(session, 2, 8))
    sizes = [len(one.rounds[5]) for one in first]
    assert sizes[0] > sizes[1], "shares have changed, behind what was read ahead"
    whole = [index for seen in first for batch in seen.steps for index in batch]
    assert len(set(whole)) == 90
    with ThreadJob(2, 1, sync, resume=tmp_path) as job:
        second = job.run(lambda session: loaded(session, 1, None))
    pushed = [index for seen in first + second for batch in seen.rounds for index in batch]
    assert sorted(pushed) == sorted([*range(90)] * 2)


# What is refused, and what is not.


def refused(sync: str, work: Any, workers: int = 2, **options: Any) -> str:
    with pytest.raises(PolytempoError) as caught, ThreadJob(workers, 1, sync, **options) as job:
        job.run(work)
    return str(caught.value)


def test_a_step_on_batches_that_were_not_dealt_says_the_two_ways_out() -> None:
    def plain(session: Session) -> Seen:
        return Trainee(session).train(torch.utils.data.BatchSampler(DistributedSampler(range(20)), 2, drop_last=False))

    text = refused(SYNC, plain)
    assert "batch_sampler=pt.DistributedBatchSampler" in text
    assert "bsp+balance,micro=8 with sampler=pt.DistributedSampler(data, batch_size=...)" in text
    assert "expected DistributedSampler(..., batch_size=)" in refused("bsp+balance,micro=2", plain)


def test_shards_that_are_not_one_for_each_rank_are_refused() -> None:
    def sharded(session: Session) -> Seen:
        return Trainee(session).train(DistributedBatchSampler(range(20), 2, num_replicas=1, rank=0))

    assert "gives shard 0 of 1" in refused(SYNC, sharded)


def test_groups_of_some_ranks_are_refused() -> None:
    def grouped(session: Session) -> None:
        Trainee(session, options={"group": Group((session.rank,), None)})

    assert "shares a data set among all 2 ranks" in refused(SYNC, grouped)


def test_no_sync_is_refused_where_batches_differ_in_size() -> None:
    def accumulating(session: Session) -> None:
        with Trainee(session).optimizer.no_sync():
            pass

    assert "step() itself accumulates" in refused(SYNC, accumulating)


def test_a_scheduler_that_is_stepped_by_micro_batch_is_refused_once_workers_differ() -> None:
    def scheduled(session: Session) -> None:
        trainee = Trainee(session)
        scheduler = torch.optim.lr_scheduler.StepLR(trainee.optimizer, 1, 0.9)
        for batch in DistributedBatchSampler(range(90), 3):
            trainee.train([batch])
            scheduler.step()

    text = refused("bsp+balance,micro=2", scheduled, 3)
    assert "hyper-parameters differ: lr" in text
    assert "call scheduler.step() once a round" in text


def test_a_scheduler_that_is_stepped_by_round_is_not() -> None:
    def scheduled(session: Session) -> list[torch.Tensor]:
        trainee = Trainee(session)
        scheduler = torch.optim.lr_scheduler.StepLR(trainee.optimizer, 1, 0.9)
        for batch in DistributedBatchSampler(range(90), 3):
            before = trainee.optimizer.stats["step"]
            trainee.train([batch])
            if trainee.optimizer.stats["step"] > before:
                scheduler.step()
        return trainee.seen.values

    first, *others = run("memory", "bsp+balance,micro=2", scheduled)
    for other in others:
        assert_close(other, first, 1e-12)


def test_a_micro_batch_that_is_not_finite_is_left_out() -> None:
    """What a GradScaler says: `found_inf` of the first micro-batch of worker 0."""

    def scaled(session: Session) -> list[torch.Tensor]:
        trainee = Trainee(session, lambda rank, step: 1.0)
        optimizer: Any = trainee.optimizer
        for number, batch in zip(range(2), DistributedBatchSampler(range(16), 8, shuffle=False), strict=False):
            optimizer.grad_scale = torch.tensor(1.0)
            optimizer.found_inf = torch.tensor(float(session.rank == 0 and number == 0))
            trainee.train([batch])
        return trainee.seen.values

    values = run("servers", "bsp+balance,micro=2", scaled, 2)
    model = copy.deepcopy(MODEL)
    plain = made_optimizer(model)
    loss_of(model, (INPUTS[4:16], TARGETS[4:16])).backward()
    plain.step()
    assert_close(values[0], [param.detach() for param in model.parameters()], 1e-9)


def test_samples_that_the_script_gives_weigh_the_step() -> None:
    def weighed(session: Session) -> list[torch.Tensor]:
        trainee = Trainee(session)
        for batch in DistributedBatchSampler(range(4), 2, shuffle=False):
            trainee.optimizer.zero_grad()
            loss_of(trainee.model, (INPUTS[batch], TARGETS[batch])).backward()
            trainee.optimizer.step(samples=1 + 2 * session.rank)
        return [param.detach() for param in trainee.model.parameters()]

    values = run("servers", SYNC, weighed, 2)
    model = copy.deepcopy(MODEL)
    plain = made_optimizer(model)
    parts = [loss_of(model, (INPUTS[start : start + 2], TARGETS[start : start + 2])) for start in (0, 2)]
    (parts[0] / 4 + parts[1] * 3 / 4).backward()
    plain.step()
    assert_close(values[0], [param.detach() for param in model.parameters()], 1e-9)


def test_prepare_makes_the_loader_that_the_mode_needs() -> None:
    def prepared(session: Session) -> list[int]:
        model = copy.deepcopy(MODEL)
        loader = torch.utils.data.DataLoader(torch.arange(60), batch_size=3, shuffle=True)
        model, optimizer, loader = prepare(model, made_optimizer(model), loader)
        seen = []
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, (INPUTS[batch], TARGETS[batch])).backward()
            optimizer.step()
            seen += batch.tolist()
        return seen

    for sync in (SYNC, "bsp+balance,micro=2"):
        assert sorted(index for seen in run("memory", sync, prepared) for index in seen) == list(range(60))


def test_a_job_of_one_takes_the_joint_batch() -> None:
    for sync in (SYNC, "bsp+balance,micro=2"):
        session = Session(None, JobFacts(1, (), sync), 0)
        with as_current(session):
            seen = trained(session, 40, 4, 1)
        assert [len(part) for part in seen.rounds][:2] == [4, 4]
        assert [len(part) for part in seen.steps][:2] == ([4, 4] if sync == SYNC else [2, 2])
        assert_close(seen.values, one_process([seen]), 1e-9)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_in_other_modes_shares_are_even(sync: str) -> None:
    def plain(session: Session) -> Seen:
        sampler = DistributedBatchSampler(range(31), 4)
        assert len(sampler) == 4
        return Trainee(session).train(sampler)

    seen: list[Seen] = run("servers", sync, plain, 2)
    assert [[len(batch) for batch in one.steps] for one in seen] == [[4, 4, 4, 4]] * 2
    assert set(samples_of(seen)) == set(range(31))


def test_what_a_sample_costs_deals_out_long_ones() -> None:
    """Lengths from 1 to 100: without `cost` the workers' costs differ by more than by 10 %."""
    lengths = [1 + (index * index * 37) % 100 for index in range(192)]

    def costly(session: Session) -> Seen:
        trainee = Trainee(session, lambda rank, step: 1.0)
        return trainee.train(DistributedBatchSampler(range(192), 16, cost=lengths.__getitem__))

    seen: list[Seen] = run("servers", SYNC, costly)
    first = [sum(lengths[index] for index in one.rounds[0]) for one in seen]
    assert max(first) / min(first) < 1.05
    assert samples_of(seen) == list(range(192))
    assert_close(seen[0].values, one_process(seen), 1e-9)

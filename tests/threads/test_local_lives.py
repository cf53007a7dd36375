"""Blocks of local steps when workers die, come back, and jobs are broken off; records, bytes, compression."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, assert_equal, check_record, loss_of, small_batches, small_model, until, weights
from local_blocks import WAYS, Blocks, HostsJob, job_by, sgd, train_in_blocks
from sessions import within
from test_lives import come_back
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from worlds import hosts_of_threads

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

EXACT = 1e-9


def step_on(optimizer: DistributedOptimizer, model: nn.Module, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step(samples=len(batch[0]))


def wrapped(model: nn.Module, sync: str, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(sgd(list(model.parameters())), model, sync=sync, **options)


# Members.


def test_a_joiner_starts_at_a_block_with_anchor_and_outer_momentum(tmp_path: Path) -> None:
    """Worker 1 dies inside the second block, which is averaged without it, and is back for the third."""
    batches, sync = small_batches(6, [4, 2]), "diloco:2"
    models = [small_model(), small_model(), small_model(seed=8)]
    gone, back = threading.Event(), threading.Event()

    def stays(session: Session) -> list[torch.Tensor]:
        optimizer = wrapped(models[0], sync)
        for number, step in enumerate(batches):
            if number == 3:
                assert gone.wait(20)
            if number == 4:
                assert back.wait(20)
            step_on(optimizer, models[0], step[0])
        return weights(models[0])

    def leaves(session: Session) -> list[torch.Tensor]:
        optimizer = wrapped(models[1], sync)
        for step in batches[:3]:
            step_on(optimizer, models[1], step[1])
        session.close("failed")
        gone.set()
        until(lambda: job.sequencer.statistics[0].steps == 4, "the second block is over")
        again = come_back(job, 1, 1)
        optimizer = within(again, lambda session: wrapped(models[2], sync))
        seen = weights(models[2])
        back.set()
        for step in batches[4:]:
            step_on(optimizer, models[2], step[1])
        again.close()
        return seen

    plain = Blocks(2)
    plain.step(batches[0]), plain.step(batches[1]), plain.diloco()
    plain.step(batches[2]), plain.step(batches[3])
    plain.samples[1] = 0.0
    plain.diloco()
    anchor = [value.clone() for value in plain.anchor]
    plain.step(batches[4]), plain.step(batches[5]), plain.diloco()
    with ThreadJob(2, 2, sync, record=tmp_path) as job:
        found, seen = job.run(lambda session: leaves(session) if session.rank else stays(session))
    assert_close(seen, anchor, EXACT)
    assert_close(found, plain.anchor, EXACT)
    assert_close(weights(models[2]), plain.anchor, EXACT)
    check_record(tmp_path)


@pytest.mark.parametrize("sync", ["local:3", "diloco:3"])
def test_a_rank_that_dies_inside_a_block_is_left_out_of_its_average(sync: str) -> None:
    batches = small_batches(6, [4, 2, 3])
    models = [small_model() for _ in range(3)]

    def train(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = wrapped(model, sync)
        for number, step in enumerate(batches):
            if session.rank == 2 and number == 4:
                session.abandon()
                return []
            step_on(optimizer, model, step[session.rank])
        return weights(model)

    plain = Blocks(3)
    for number, step in enumerate(batches, start=1):
        plain.step(step)
        if number == 6:
            plain.samples[2] = 0.0
        if number % 3 == 0:
            plain.average() if sync == "local:3" else plain.diloco()
    job = GroupJob(3, least=2)
    found: dict[int, list[torch.Tensor]] = {}
    threads = [
        threading.Thread(target=lambda s=session: found.update({s.rank: within(s, train)})) for session in job.sessions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for session in job.sessions:
        session.abandon()
    assert_equal(found[0], found[1])
    assert_close(found[0], plain.anchor, EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_workers_of_different_length_end_without_waiting_for_ever(way: str) -> None:
    counts, models = (9, 4, 2), [small_model() for _ in range(3)]
    batches = small_batches(9, [4, 4, 4])

    def train(session: Session) -> int:
        optimizer = wrapped(models[session.rank], "local:4")
        for step in batches[: counts[session.rank]]:
            step_on(optimizer, models[session.rank], step[session.rank])
        return int(optimizer.stats["step"])

    with job_by(way, 3, "local:4") as job:
        assert job.run(train) == list(counts)


@pytest.mark.parametrize("sync", ["local:4", "adacomm:4,every=0.000000001", "diloco:4,fragments=2,overlap=1"])
def test_between_hosts_the_sequencer_says_the_period(tmp_path: Path, sync: str) -> None:
    batches = small_batches(10, [4, 2])
    figures = lambda optimizer, model, session: [optimizer.stats["period"], optimizer.stats["averages"]]  # noqa: E731
    models: dict[str, list[torch.Tensor]] = {}

    def keep(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> Any:
        models[f"{session.rank}"] = list(model.parameters())
        return figures(optimizer, model, session)

    here = train_in_blocks(HostsJob(2, sync, record=tmp_path), sync, batches, at_end=keep)
    among = [param.detach().clone() for param in models["0"]]
    assert here == train_in_blocks(job_by("shared memory", 2, sync), sync, batches, at_end=keep)
    assert_close(among, [param.detach() for param in models["0"]], EXACT)
    lines = check_record(tmp_path)
    assert sum(line.get("count", 1) for line in lines if line["kind"] == "push") == 20


@pytest.mark.parametrize("sync", ["bsp", "local:2", "adacomm:2,every=0.000000001", "diloco:2,fragments=2"])
def test_epochs_of_different_length_end_together_between_hosts(sync: str, tmp_path: Path) -> None:
    """A worker that has called join() is still a member, for which the sequencer waits."""
    models, batches = [small_model(), small_model()], small_batches(5, [4, 4])

    def train(session: Session) -> list[torch.Tensor]:
        optimizer = wrapped(models[session.rank], sync)
        for _ in range(2):
            for step in batches[: 2 if session.rank else 5]:
                step_on(optimizer, models[session.rank], step[session.rank])
            optimizer.join()
        return weights(models[session.rank])

    with HostsJob(2, sync, record=tmp_path) as job:
        one, other = job.run(train)
    assert_equal(one, other)
    assert job.summary["steps"] == 14
    check_record(tmp_path)


def test_bytes_between_hosts_fall_as_one_over_the_period() -> None:
    """Over sockets, as two hosts: a ring of two sends the model once for each average, and a ballot."""

    def sent(sync: str) -> int:
        model = lambda: nn.Linear(5, 20000, dtype=torch.float64)  # noqa: E731
        models, batch = [model(), model()], (torch.ones(1, 5).double(), torch.ones(1, 20000).double())

        def train(session: Session) -> int:
            here.name = f"host {session.rank}"
            optimizer = wrapped(models[session.rank], sync)
            step_on(optimizer, models[session.rank], batch)
            begun = optimizer.stats["bytes_sent"]
            for _ in range(16):
                step_on(optimizer, models[session.rank], batch)
            return int(optimizer.stats["bytes_sent"] - begun)

        with hosts_of_threads() as here, HostsJob(2, sync) as job:
            return job.run(train)[0]

    each, model_bytes = sent("local:1") / 16, 6 * 20000 * 8
    assert each == pytest.approx(model_bytes, rel=0.01)
    assert [sent("local:4"), sent("local:16")] == [4 * each, each]
    assert sent("adacomm:8,every=0.000000001") == 6 * each  # blocks of 8, 4, 2, 1, 1 and 1, of a loss that is flat


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["local:4", "diloco:4", "local:4,momentum=0.3"])
def test_a_block_that_ends_early_may_be_at_another_step_of_a_schedule(way: str, sync: str) -> None:
    counts, models, batches = (11, 5), [small_model(), small_model()], small_batches(11, [4, 4])

    def train(session: Session) -> int:
        optimizer = wrapped(models[session.rank], sync)
        scheduler = StepLR(optimizer, 1, gamma=0.9)
        for step in batches[: counts[session.rank]]:
            step_on(optimizer, models[session.rank], step[session.rank])
            scheduler.step()
        return int(optimizer.stats["step"])

    with job_by(way, 2, sync) as job:
        assert job.run(train) == list(counts)
    assert all(value.isfinite().all() for model in models for value in weights(model))


# Checkpoints.


@pytest.mark.parametrize("sync", ["diloco:2", "local:2,momentum=0.5", "local:2", "diloco:2,fragments=2"])
def test_a_job_goes_on_from_a_checkpoint_with_anchor_and_outer_momentum(tmp_path: Path, sync: str) -> None:
    """The optimizer of the local steps has no state here: it is each worker's own, and the script's to save."""
    batches = small_batches(12, [4, 2])
    whole = train_in_blocks(ThreadJob(2, 2, sync), sync, batches)
    train_in_blocks(ThreadJob(2, 2, sync, checkpoint=tmp_path, checkpoint_every=3), sync, batches[:6])
    rest = train_in_blocks(ThreadJob(2, 3, sync, resume=tmp_path), sync, batches[6:], model=lambda: small_model(seed=4))
    if "fragments" not in sync:  # whose turns begin anew
        assert_close(rest[0], whole[0], EXACT)
    assert all(value.isfinite().all() for value in rest[0])


# The record, the budget, and what travels.


@pytest.mark.parametrize(
    "sync", ["local:2", "local:3,after=2", "adacomm:3,every=0.000000001", "diloco:4,fragments=2,overlap=1"]
)
@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_the_record_is_that_of_the_policy(tmp_path: Path, sync: str, via: str) -> None:
    train_in_blocks(ThreadJob(3, sync=sync, via=via, record=tmp_path), sync, small_batches(9, [4, 2, 3]))
    lines = check_record(tmp_path)
    assert sum(line.get("count", 1) for line in lines if line["kind"] == "push") == 27
    assert sum(line["samples"] for line in lines if line["kind"] == "push") == 81
    assert all(line["period"] >= 1 for line in lines if line["kind"] == "release")


def sent_bytes(way: str, sync: str, steps: int, compression: Any = None) -> float:
    """Bytes sent by a worker, less those of starting the job: of a model that dwarfs the messages."""
    model = lambda: nn.Linear(5, 20000, dtype=torch.float64)  # noqa: E731
    batches = [[(torch.ones(1, 5).double(), torch.ones(1, 20000).double())] * 2] * steps
    begun: dict[int, int] = {}

    def first(optimizer: DistributedOptimizer, own: nn.Module, session: Session) -> None:
        begun.setdefault(session.rank, optimizer.stats["bytes_sent"])

    def last(optimizer: DistributedOptimizer, own: nn.Module, session: Session) -> int:
        return int(optimizer.stats["bytes_sent"]) - begun[session.rank]

    job, options = job_by(way, 2, sync), {"compression": compression} if compression else {}
    return float(train_in_blocks(job, sync, batches, at_end=last, after_step=first, model=model, **options)[0])


@pytest.mark.parametrize("way", ["servers", "shared memory"])
def test_bytes_fall_as_one_over_the_period(way: str) -> None:
    """After 17 steps of which the first is not counted, `local:1` has sent 16 models, `local:4` 4 and `local:16` one."""
    each = sent_bytes(way, "local:1", 17) / 16
    assert sent_bytes(way, "local:4", 17) == pytest.approx(4 * each, rel=0.02)
    assert sent_bytes(way, "local:16", 17) == pytest.approx(1 * each, rel=0.02)
    assert sent_bytes(way, "diloco:4", 17) == pytest.approx(4 * each, rel=0.02)
    assert sent_bytes(way, "adacomm:4,every=3600", 17) == pytest.approx(4 * each, rel=0.02)
    halved = sent_bytes(way, "adacomm:8,every=0.000000001,gamma=0.5", 17)  # periods 8, 4, 2, 1, 1, 1
    assert halved <= 6 * each * 1.02


# Compression.


@pytest.mark.parametrize("sync", ["local:2", "diloco:2", "local:2,momentum=0.3"])
def test_differences_that_travel_whole_make_the_same_averages(sync: str) -> None:
    batches = small_batches(8, [4, 2])
    whole = train_in_blocks(ThreadJob(2, 2, sync), sync, batches)
    sent = train_in_blocks(ThreadJob(2, 2, sync), sync, batches, compression="topk:1")
    assert_close(sent[0], whole[0], EXACT)


@pytest.mark.parametrize(
    "compression", ["bf16", "topk:0.25", "int8", "topk:0.5+bf16", {"push": "int8", "pull": "int8"}], ids=str
)
@pytest.mark.parametrize("sync", ["local:4", "diloco:4"])
def test_compression_of_differences_composes(sync: str, compression: Any) -> None:
    batches = [[batch] * 2 for batch in small_batches(1, [8])[0]] * 60
    loss = lambda values: loss_of(with_values(values), batches[0][0]).item()  # noqa: E731
    whole = train_in_blocks(ThreadJob(2, 2, sync), sync, batches)
    sent = train_in_blocks(ThreadJob(2, 2, sync, via="auto"), sync, batches, compression=compression)
    assert_equal(sent[0], sent[1])
    assert loss(sent[0]) <= loss(whole[0]) + 0.1 * (loss(weights(small_model())) - loss(whole[0]))


def with_values(values: list[torch.Tensor]) -> nn.Module:
    model = small_model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)
    return model


def test_compression_sends_fewer_bytes() -> None:
    plain = sent_bytes("servers", "diloco:4", 17)
    assert sent_bytes("servers", "diloco:4", 17, "int8") < 0.2 * plain
    assert sent_bytes("servers", "diloco:4", 17, "topk:0.01") < 0.05 * plain


def test_compression_needs_servers() -> None:
    with pytest.raises(UsageError, match="compression is for what goes to and from servers; use via='ps'"):
        train_in_blocks(GroupJob(2), "local:2", small_batches(2, [4, 4]), compression="bf16")


# Post-local starts.


@pytest.mark.parametrize("way", WAYS)
def test_a_post_local_start_averages_each_step_at_first(way: str) -> None:
    batches, plain = small_batches(11, [4, 4]), Blocks(2)
    for number, step in enumerate(batches, start=1):
        plain.step(step)
        if number <= 3 or (number - 3) % 4 == 0:
            plain.average()
    found = train_in_blocks(job_by(way, 2, "local:4,after=3"), "local:4,after=3", batches)
    assert_close(found[0], plain.anchor, EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_a_post_local_start_ends_with_the_first_decay_of_the_rate(way: str) -> None:
    models, batches = [small_model(), small_model()], small_batches(8, [4, 4])

    def train(session: Session) -> list[int]:
        optimizer = wrapped(models[session.rank], "local:2,after=decay")
        scheduler, found = StepLR(optimizer, 3), []
        for step in batches:
            step_on(optimizer, models[session.rank], step[session.rank])
            scheduler.step()
            found.append(optimizer.stats["averages"])
        return found

    with job_by(way, 2, "local:2,after=decay") as job:
        assert job.run(train) == [[1, 2, 3, 4, 4, 5, 5, 6]] * 2  # the fourth step is the first at the lower rate


# Refusals, and steps that count for nothing.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["local:2", "diloco:2"])
def test_hyper_parameters_that_differ_are_refused_by_name(way: str, sync: str) -> None:
    models = [small_model(), small_model()]

    def train(session: Session) -> None:
        optimizer = wrapped(models[session.rank], sync)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + session.rank)
        for step in small_batches(2, [4, 4]):
            step_on(optimizer, models[session.rank], step[session.rank])

    with pytest.raises(UsageError, match="lr"), job_by(way, 2, sync) as job:
        job.run(train)


def test_gradients_are_not_averaged() -> None:
    with pytest.raises(UsageError, match=r"synchronize\(\) averages gradients, and local:2 averages values"):
        train_in_blocks(
            job_by("shared memory", 2, "local:2"),
            "local:2",
            small_batches(2, [4, 4]),
            after_step=lambda o, m, s: o.synchronize(),
        )


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_are_skipped_or_weigh_nothing_leave_the_values(way: str) -> None:
    batches, models = small_batches(4, [4, 4]), [small_model(), small_model()]

    def train(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = wrapped(model, "local:2")
        for number, step in enumerate(batches):
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            if session.rank == 1 and number == 0:
                optimizer.step(samples=0)
            elif session.rank == 1 and number == 3:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)  # as GradScaler sets them
                optimizer.step(samples=4)
            else:
                optimizer.step(samples=4)
        return weights(model)

    plain = Blocks(2)
    for number, step in enumerate(batches):
        kept = [param.detach().clone() for param in plain.models[1].parameters()]
        plain.step(step)
        if number in (0, 3):
            with torch.no_grad():
                for param, value in zip(plain.models[1].parameters(), kept, strict=True):
                    param.copy_(value)
        if number == 0:
            plain.samples[1] = 0.0
        if number % 2:
            plain.average()
    with job_by(way, 2, "local:2") as job:
        found = job.run(train)
    assert_close(found[0], plain.anchor, EXACT)


def test_gradients_accumulate_inside_no_sync() -> None:
    batches, models = small_batches(4, [4, 4]), [small_model(), small_model()]

    def train(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = wrapped(model, "local:1")
        for one, other in (batches[:2], batches[2:]):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss_of(model, one[session.rank]).backward()
            loss_of(model, other[session.rank]).backward()
            optimizer.step()
        return weights(model)

    with job_by("shared memory", 2, "local:1") as job:
        found = job.run(train)
    plain = Blocks(2)
    for one, other in (batches[:2], batches[2:]):
        for model, optimizer, first, second in zip(plain.models, plain.optimizers, one, other, strict=True):
            optimizer.zero_grad()
            loss_of(model, first).backward()
            loss_of(model, second).backward()
            optimizer.step()
        plain.samples = [1.0, 1.0]
        plain.average()
    assert_close(found[0], plain.anchor, EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_block_momentum_averages_where_the_rate_is_0(way: str) -> None:
    """As at the end of a schedule: there is no unit for the momentum, and the block's steps are not lost."""
    batches, models = small_batches(4, [4, 4]), [small_model(), small_model()]
    rates = [1.0, 1.0, 1.0, 0.0]

    def train(session: Session) -> list[torch.Tensor]:
        optimizer = wrapped(models[session.rank], "local:2,momentum=0.5")
        scheduler = LambdaLR(optimizer, lambda step: rates[min(step, 3)])
        for step in batches:
            step_on(optimizer, models[session.rank], step[session.rank])
            scheduler.step()
        return weights(models[session.rank])

    with job_by(way, 2, "local:2,momentum=0.5") as job:
        found = job.run(train)
    plain = Blocks(2)
    plain.step(batches[0]), plain.step(batches[1]), plain.block_momentum(0.5, 0.1)
    plain.step(batches[2]), plain.average()
    assert_close(found[0], plain.anchor, EXACT)


def test_values_that_are_not_finite_are_counted_or_refused_by_name() -> None:
    def spoil(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> None:
        with torch.no_grad():
            model[2].weight[0, 0] = torch.nan  # type: ignore[index,operator]

    batches, job = small_batches(3, [4]), lambda: job_by("servers", 1, "local:2")
    count = train_in_blocks(job(), "local:2", batches, at_end=lambda o, m, s: o.stats["nonfinite"], after_step=spoil)
    assert count == [1]
    with pytest.raises(UsageError, match=r"worker 0, step 2: .*\d.weight has a value that is not finite"):
        train_in_blocks(job(), "local:2", batches, after_step=spoil, nonfinite="refuse")

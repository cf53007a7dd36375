"""Decoupled DiLoCo in live jobs: no worker waits, each change is merged once, a slow or dead worker delays no other."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    copied,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    until,
    weights,
)
from local_blocks import job_by, train_in_blocks
from lossy import LossyJob, disturb, every
from test_lives import come_back
from torch import nn

from polytempo.errors import UsageError
from polytempo.protocol.messages import AnyMessage, Push
from polytempo.records.files import read_events
from polytempo.records.lines import RecordLine, of_optimizer
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport import deadline

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

EXACT = 1e-9
SHAPES = [(3, 2), (5,), (4,)]
START = made_params(SHAPES)
STEPS = 22
#: Gradients that do not depend on the values: with rate 1 a local step subtracts one, whatever has come meanwhile.
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=40 + worker) for worker in range(4)]


def made(sync: str | None = None, **options: Any) -> tuple[list[nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    return params, DistributedOptimizer(torch.optim.SGD(params, lr=1.0), sync=sync, **options)


def values(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def steps(
    params: Sequence[nn.Parameter], optimizer: DistributedOptimizer, rank: int, first: int, last: int, samples: float = 1.0
) -> None:
    for step in range(first, last):
        set_gradients(params, GRADIENTS[rank][step])
        optimizer.step(samples=samples)


def on_servers(job: ThreadJob, names: Sequence[str] = ("0",)) -> list[torch.Tensor]:
    """What the servers hold, as tensors of the model; of an ended job, all of it: no worker waits for the last merge."""
    shards = [[server.executor.state.optimizer_shards[name].values["float64"] for server in job.servers] for name in names]
    flat = torch.cat([part.clone() for parts in shards for part in parts])
    sizes = [param.numel() for param in START]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]


def merged_again(
    lines: Sequence[RecordLine], indices: Sequence[int], rate: float = 0.7, momentum: float = 0.9
) -> list[torch.Tensor]:
    """The model, from the record alone: which local steps each push holds, and which pushes each merge."""
    model = [START[index].detach().clone() for index in indices]
    speed = [torch.zeros_like(value) for value in model]
    made: dict[int, int] = {}
    pending: dict[int, tuple[float, list[torch.Tensor]]] = {}
    for line in lines:
        if line["kind"] == "push":
            worker, count = line["worker"], line.get("count", 1)
            first = made.get(worker, 0)
            made[worker] = first + count
            own = GRADIENTS[worker][first : first + count]
            change = [sum((step[index] for step in own), torch.zeros(SHAPES[index])) for index in indices]
            pending[worker] = line["samples"] ** 2 / max(count, 1), change
        elif line["kind"] == "discard":
            del pending[line["worker"]]
        elif line["kind"] == "apply" and line["server"] == 0:
            parts = [pending.pop(worker) for worker in line["workers"]]
            total = sum(weight for weight, _ in parts)
            for index in range(len(indices)) if total else ():
                delta = sum(weight * change[index] for weight, change in parts) / total
                speed[index] = momentum * speed[index] + delta
                model[index] = model[index] - rate * (delta + momentum * speed[index])
    assert not pending
    return model


# It is DiLoCo where it must be.


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", ["", ",fragments=2", ",outer_lr=1,outer_momentum=0.5"])
def test_a_quorum_of_all_and_an_unbounded_grace_are_diloco_bit_for_bit(workers: int, options: str) -> None:
    batches = small_batches(10, [4] * workers)  # the last block is not a whole one
    rounds = f"diloco:4{options}"
    merges = f"diloco:4,quorum={workers},grace=inf{options}"
    models: dict[str, list[nn.Module]] = {rounds: [], merges: []}
    for sync, found in models.items():
        keep = lambda optimizer, model, session, found=found: found.append(model)  # noqa: E731
        train_in_blocks(job_by("servers", workers, sync), sync, batches, momentum, at_end=keep)
    for one, other in zip(models[rounds], models[merges], strict=True):
        assert_equal(weights(one), weights(other))


@pytest.mark.parametrize("compression", ["bf16", "topk:0.3", "fp16"])
def test_compression_of_what_is_sent_changes_it_alike(compression: str) -> None:
    batches = small_batches(8, [4, 4])
    found = [
        train_in_blocks(job_by("servers", 2, sync), sync, batches, momentum, compression=compression)[0]
        for sync in ("diloco:4", "diloco:4,quorum=2,grace=inf")
    ]
    assert_equal(found[0], found[1])


def test_what_lossy_compression_holds_back_is_all_that_the_servers_lack() -> None:
    optimizers: list[DistributedOptimizer] = []

    def work(session: Session) -> None:
        params, optimizer = made(compression={"push": "topk:0.3"})
        optimizers.append(optimizer)
        for first in range(0, 20, 4):
            steps(params, optimizer, 0, first, first + 4)
            wait_for_answer(session, optimizer)
        steps(params, optimizer, 0, 20, STEPS)

    with ThreadJob(1, 2, "diloco:4,quorum=1,grace=0,outer_lr=1,outer_momentum=0") as job:
        job.run(work)
    held = on_servers(job)
    reducer = optimizers[0]._reducer
    assert reducer is not None
    kept = reducer.filters.state()["float64"].split([param.numel() for param in START])
    for index, start in enumerate(START):
        whole = sum(step[index] for step in GRADIENTS[0])
        assert_close([start.detach() - held[index] + kept[index].view(SHAPES[index])], [whole], EXACT)
    assert any(part.abs().sum() > 0 for part in kept)


# No worker waits, and nothing is lost.


def test_a_worker_whose_push_is_not_answered_goes_on_as_if_it_were_alone(tmp_path: Path) -> None:
    """Worker 1 has joined, and does nothing until worker 0 has made all its steps."""
    done = threading.Event()

    def work(session: Session) -> list[torch.Tensor] | None:
        params, optimizer = made()
        if session.rank == 0:
            steps(params, optimizer, 0, 0, 20)
            alone = values(params)
            assert (optimizer.stats["left_out"], optimizer.stats["averages"]) == (4, 0)
            done.set()
            return alone
        assert done.wait(30)
        steps(params, optimizer, 1, 0, 4)
        return None

    with ThreadJob(2, 1, "diloco:4,quorum=2,grace=0", record=tmp_path) as job:
        found = job.run(work)[0]
    held = on_servers(job)
    plain = [start.detach() - sum(g[i] for g in GRADIENTS[0][:20]) for i, start in enumerate(START)]
    assert found is not None
    assert_close(found, plain, EXACT)
    lines = check_record(tmp_path)
    pushes = [(line["worker"], line.get("count", 1)) for line in lines if line["kind"] == "push"]
    assert pushes[:2] == [(0, 4), (1, 4)]  # four turns of worker 0 were left out
    assert sorted(pushes[2:]) in ([(0, 16)], [(0, 16), (1, 0)])  # and their steps came with the next
    assert_close(held, merged_again(lines, range(3)), EXACT)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "sync", ["diloco:4,quorum=2,grace=0", "diloco:3,quorum=3,grace=0.005", "diloco:2,quorum=1,grace=0", "diloco:4,quorum=2"]
)
def test_each_local_step_is_merged_once_whatever_the_order(sync: str, servers: int, tmp_path: Path) -> None:
    def work(session: Session) -> list[nn.Parameter]:
        params, optimizer = made()
        steps(params, optimizer, session.rank, 0, STEPS - 5 * session.rank, samples=2.0 + session.rank)
        return params

    with ThreadJob(4, servers, sync, record=tmp_path) as job:
        params = job.run(work)
    held = on_servers(job)
    lines = check_record(tmp_path)
    assert_close(held, merged_again(lines, range(3)), EXACT)
    assert any(all(torch.allclose(a, b) for a, b in zip(values(own), held, strict=True)) for own in params)
    made_steps = [
        sum(line.get("count", 1) for line in lines if line["kind"] == "push" and line["worker"] == w) for w in range(4)
    ]
    assert made_steps == [STEPS - 5 * rank for rank in range(4)]
    assert job.summary["steps"] == sum(made_steps)
    assert job.summary["waiting"] == 0


@pytest.mark.parametrize("sync", ["diloco:4,quorum=2,grace=0,fragments=2", "diloco:6,quorum=3,grace=0.002,fragments=3"])
def test_each_fragment_has_merges_of_its_own(sync: str, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params, optimizer = made()
        steps(params, optimizer, session.rank, 0, STEPS - 3 * session.rank)

    with ThreadJob(3, 1, sync, record=tmp_path) as job:
        job.run(work)
        names = list(job.sequencer.clocks)
    held = on_servers(job, names)
    check_record(tmp_path)
    parts = {2: [(0,), (1, 2)], 3: [(0,), (1,), (2,)]}[len(names)]
    for name, part in zip(names, parts, strict=True):
        lines = list(of_optimizer(read_events(tmp_path), name))
        assert_close([held[index] for index in part], merged_again(lines, part), EXACT)


@pytest.mark.parametrize(
    "jobs",
    [range(6), pytest.param(range(6, 50), marks=pytest.mark.long), pytest.param(range(50, 100), marks=pytest.mark.proof)],
    ids=["few", "many", "more"],
)
def test_random_jobs_end_and_merge_each_change_once(jobs: range, tmp_path: Path) -> None:
    """Any quorum, up to all; workers that leave at any moment wait for each other's merges, of every fragment."""
    for seed in jobs:
        dice = random.Random(seed)
        workers, fragments = dice.randint(2, 4), dice.randint(1, 3)
        quorum, grace = dice.randint(workers - 1, workers), dice.choice(("0", "0.001", "auto"))
        period, drop = fragments * dice.randint(1, 3), dice.choice(("", ",drop=1"))
        sync = f"diloco:{period},quorum={quorum},grace={grace},fragments={fragments}{drop}"
        counts = [dice.randint(0, STEPS) for _ in range(workers)]

        def work(session: Session, counts: list[int] = counts, seed: int = seed) -> None:
            params, optimizer = made()
            own = random.Random(f"{seed} {session.rank}")
            for step in range(counts[session.rank]):
                steps(params, optimizer, session.rank, step, step + 1, samples=1.0 + session.rank)
                if own.random() < 0.03:
                    optimizer.consolidate()

        with ThreadJob(workers, dice.randint(1, 2), sync, record=tmp_path / str(seed)) as job:
            job.run(work)
            names = list(job.sequencer.clocks)
        held = on_servers(job, names)
        assert check_record(tmp_path / str(seed))
        parts: list[tuple[int, ...]] = {1: [(0, 1, 2)], 2: [(0,), (1, 2)], 3: [(0,), (1,), (2,)]}[fragments]
        for name, part in zip(names, parts, strict=True):
            lines = list(of_optimizer(read_events(tmp_path / str(seed)), name))
            assert_close([held[index] for index in part], merged_again(lines, part), EXACT)


def test_a_worker_that_stood_still_catches_up(tmp_path: Path) -> None:
    """Worker 2 makes two steps and stops; the others merge without it. Then it goes on, and its work is merged."""
    stopped, others = threading.Event(), threading.Barrier(3)

    def work(session: Session) -> None:
        params, optimizer = made()
        if session.rank == 2:
            steps(params, optimizer, 2, 0, 2)
            stopped.set()
            others.wait(30)
            steps(params, optimizer, 2, 2, STEPS)
            return
        assert stopped.wait(30)
        for step in range(12):
            steps(params, optimizer, session.rank, step, step + 1)
            if step % 4 == 3:  # its turn: it waits for the merge, to have a known number of them
                wait_for_answer(session, optimizer)
        others.wait(30)
        steps(params, optimizer, session.rank, 12, STEPS)

    with ThreadJob(3, 1, "diloco:4,quorum=2,grace=0", record=tmp_path) as job:
        job.run(work)
    held = on_servers(job)
    lines = check_record(tmp_path)
    assert_close(held, merged_again(lines, range(3)), EXACT)
    merges = [line for line in lines if line["kind"] == "apply"]
    assert [line["workers"] for line in merges[:3]] == [[0, 1]] * 3
    late = next(line for line in merges if 2 in line["workers"])
    assert late["staleness"][late["workers"].index(2)] >= 3
    after = [line["staleness"][line["workers"].index(2)] for line in merges if 2 in line["workers"]][1:]
    assert after
    assert max(after) < 3  # it has the newest values


def poll(session: Session) -> None:
    assert session.client is not None
    with session.lock:
        session.client.poll()


def wait_for_answer(session: Session, optimizer: DistributedOptimizer) -> None:
    reducer = optimizer._reducer
    assert reducer is not None
    until(lambda: poll(session) or not reducer.client_state.outstanding, "the merge")  # type: ignore[func-returns-value]


def test_a_worker_that_dies_is_not_waited_for_and_comes_back_to_the_newest_values(tmp_path: Path) -> None:
    died, merged, came = threading.Event(), threading.Event(), threading.Event()

    def stays(session: Session) -> None:
        params, optimizer = made()
        assert died.wait(30)
        for first in (0, 4):
            steps(params, optimizer, 0, first, first + 4)
            wait_for_answer(session, optimizer)
        merged.set()
        assert came.wait(30)

    def dies(session: Session) -> None:
        params, optimizer = made()
        steps(params, optimizer, 1, 0, 3)
        session.close("failed")  # inside its first block
        died.set()
        assert merged.wait(30)
        again = come_back(job, 1, 1)
        with as_current(again):
            params, optimizer = made()
        assert_equal(values(params), on_servers(job))
        came.set()
        again.close()

    with ThreadJob(2, 1, "diloco:4,quorum=2,grace=0", record=tmp_path) as job:
        job.run(lambda session: stays(session) if session.rank == 0 else dies(session))
    lines = check_record(tmp_path)
    assert [line["workers"] for line in lines if line["kind"] == "apply"] == [[0], [0]]
    joins = [(line["worker"], line["step"]) for line in lines if line["kind"] == "join"]
    assert joins[2:] == [(1, 2)]


def test_a_quorum_is_merged_when_its_grace_is_over_though_nothing_else_happens() -> None:
    done = threading.Event()

    def work(session: Session) -> None:
        params, optimizer = made()
        if session.rank == 1:
            assert done.wait(30)
            return
        steps(params, optimizer, 0, 0, 4)
        wait_for_answer(session, optimizer)
        done.set()

    with ThreadJob(2, 1, "diloco:4,quorum=1,grace=0.02") as job:
        job.run(work)
    assert job.summary["updates"] >= 1


def test_a_worker_that_leaves_names_the_ranks_whose_pushes_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deadline, "FIRST_REPORT", 0.1)
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().err)
        return "for workers 1: the merge has pushes of 1 worker, its quorum is 2" in "".join(said)

    def work(session: Session) -> None:
        params, optimizer = made()
        if session.rank == 0:
            steps(params, optimizer, 0, 0, 5)
        else:
            until(heard, "a report of rank 0")

    with ThreadJob(2, 1, "diloco:4,quorum=2,grace=0,fragments=2", retry=0.02) as job:
        job.run(work)


def test_a_change_of_too_old_an_anchor_is_dropped_and_its_worker_goes_on_from_the_newest_values(tmp_path: Path) -> None:
    made_three = threading.Event()

    def work(session: Session) -> list[torch.Tensor] | None:
        params, optimizer = made()
        if session.rank == 0:
            for first in (0, 4, 8):
                steps(params, optimizer, 0, first, first + 4)
                wait_for_answer(session, optimizer)
            made_three.set()
            return None
        assert made_three.wait(30)
        steps(params, optimizer, 1, 0, 4)
        wait_for_answer(session, optimizer)
        steps(params, optimizer, 1, 4, 5)
        return values(params)

    with ThreadJob(2, 1, "diloco:4,quorum=1,grace=0,drop=2", record=tmp_path) as job:
        found = job.run(work)[1]
    held = on_servers(job)
    lines = check_record(tmp_path)
    reasons = [line["reason"] for line in lines if line["kind"] == "discard"]
    assert reasons == ["staleness 3 is above 2"]
    assert_close(held, merged_again(lines, range(3)), EXACT)
    before = [line for line in lines if line.get("worker") != 1 and line.get("workers") != [1]]
    newest = merged_again(before, range(3))
    assert found is not None
    assert_close(found, [value - step for value, step in zip(newest, GRADIENTS[1][4], strict=True)], EXACT)
    assert job.summary["discarded"] == 1


@pytest.mark.parametrize("copies", [0, 2])
def test_lost_and_doubled_messages_are_made_good_without_a_wait(copies: int, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params, optimizer = made()
        disturb(session, lambda shard: every(3, copies))
        steps(params, optimizer, session.rank, 0, STEPS)
        disturb(session, lambda shard: every(4, copies))

    with LossyJob(2, 2, "diloco:2,quorum=1,grace=0", retry=0.02, record=tmp_path) as job:
        job.run(work)
    held = on_servers(job)
    assert_close(held, merged_again(check_record(tmp_path), range(3)), EXACT)


def test_a_push_that_is_lost_is_found_by_asking_while_local_steps_go_on() -> None:
    lost: list[Push] = []

    def fate(message: AnyMessage, outward: bool) -> int:
        if isinstance(message, Push) and not lost:
            lost.append(message)
            return 0
        return 1

    def work(session: Session) -> None:
        params, optimizer = made()
        disturb(session, lambda shard: fate)

        def step_and_look() -> bool:
            steps(params, optimizer, 0, 0, 1)
            return bool(optimizer.stats["averages"])

        until(step_and_look, "the merge of a push that was lost")

    with LossyJob(1, 1, "diloco:4,quorum=1,grace=0", retry=0.02) as job:
        job.run(work)
    assert len(lost) == 1


# Values.


def test_one_worker_consolidates_alone_and_what_is_unsent_goes_with_its_next_push() -> None:
    def work(session: Session) -> list[torch.Tensor] | None:
        params, optimizer = made()
        if session.rank == 1:
            assert done.wait(30)
            return None
        steps(params, optimizer, 0, 0, 4)
        wait_for_answer(session, optimizer)
        steps(params, optimizer, 0, 4, 6)
        optimizer.consolidate()
        shown = values(params)
        optimizer.consolidate()  # again: nothing is lost
        assert_equal(shown, values(params))
        steps(params, optimizer, 0, 6, 8)
        wait_for_answer(session, optimizer)
        optimizer.consolidate()
        done.set()
        return [*shown, *values(params)]

    done = threading.Event()
    with ThreadJob(2, 1, "diloco:4,quorum=1,grace=0,outer_lr=1,outer_momentum=0") as job:
        found = job.run(work)[0]
    assert found is not None
    for index, start in enumerate(START):
        at = [start.detach() - sum(g[index] for g in GRADIENTS[0][:n]) for n in (4, 8)]
        assert_close([found[index], found[3 + index]], at, EXACT)


def test_a_consolidation_while_a_push_is_not_merged_loses_nothing(tmp_path: Path) -> None:
    shown, taken = threading.Event(), threading.Event()

    def work(session: Session) -> list[torch.Tensor] | None:
        params, optimizer = made()
        if session.rank == 1:
            assert shown.wait(30)
            steps(params, optimizer, 1, 0, 4)
            assert taken.wait(30)
            return None
        steps(params, optimizer, 0, 0, 6)  # the first four are pushed
        optimizer.consolidate()
        assert_equal(values(params), values(START))
        steps(params, optimizer, 0, 6, 7)
        shown.set()
        wait_for_answer(session, optimizer)
        steps(params, optimizer, 0, 7, 8)  # the answer is taken after it; then the fragment has its turn
        found = values(params)
        taken.set()
        return found

    with ThreadJob(2, 1, "diloco:4,quorum=2,grace=0", record=tmp_path) as job:
        found = job.run(work)[0]
    held = on_servers(job)
    lines = check_record(tmp_path)
    assert_close(held, merged_again(lines, range(3)), EXACT)
    first = next(index for index, line in enumerate(lines) if line["kind"] == "apply")
    anchor = merged_again(lines[: first + 1], range(3))
    assert found is not None
    own = [sum(step[index] for step in GRADIENTS[0][6:8]) for index in range(3)]
    assert_close(found, [value - change for value, change in zip(anchor, own, strict=True)], EXACT)


def test_module_buffers_travel_with_the_values_where_they_are_averaged() -> None:
    """In a job of one, with outer rate 1: a consolidation gives back what was merged, the rest follows at the end."""
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(10)]

    def model_of() -> nn.Module:
        return made_from_seed(3, lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))).double()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[torch.Tensor]) -> None:
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    shown: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []

    def work(session: Session) -> nn.Module:
        model = model_of()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, buffers="mean")
        train(model, optimizer, batches[:4])
        wait_for_answer(session, optimizer)
        train(model, optimizer, batches[4:6])
        running = floats(model)[4]
        optimizer.consolidate()
        shown.extend(floats(model))
        moved.append(running - shown[4])
        return model

    def floats(model: nn.Module) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in model.state_dict().values() if tensor.is_floating_point()]

    with ThreadJob(1, 1, "diloco:4,quorum=1,grace=0,outer_lr=1,outer_momentum=0") as job:
        (model,) = job.run(work)
    plain = model_of()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches[:4])
    assert_close(shown, floats(plain), EXACT)
    assert moved[0].abs().max() > 1e-3  # the running mean of two more batches
    assert_close([floats(model)[4]], [shown[4] + moved[0]], EXACT)  # was pushed at the end


def test_before_the_first_merge_a_consolidation_leaves_a_worker_its_own_buffers() -> None:
    """The servers hold what rank 0 had at the start; nothing of what happens between is lost or doubled."""

    class Seen(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.full((3,), start))

    models = [Seen(5.0), Seen(50.0)]  # all start from rank 0's

    def work(session: Session) -> list[float]:
        model = models[session.rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, buffers="mean")
        found = [float(model.seen[0])]
        for step in range(4):
            set_gradients([model.weight], [torch.ones(2)])
            model.seen += (1.0, 10.0)[session.rank]
            optimizer.step()
            if session.rank == 0 and step in (1, 2):
                optimizer.consolidate()
                found.append(float(model.seen[0]))
        return found

    with ThreadJob(2, 1, "diloco:4,quorum=2,grace=0") as job:
        assert job.run(work) == [[5.0, 7.0, 8.0], [5.0]]
    assert [float(model.seen[0]) for model in models] == [27.0, 27.0]  # 5 and the mean of 4 and 40


def test_a_budget_counts_local_steps_and_stops_all() -> None:
    def work(session: Session) -> int:
        params, optimizer = made()
        made_steps = 0
        while not session.should_stop():
            steps(params, optimizer, session.rank, made_steps % STEPS, made_steps % STEPS + 1)
            made_steps += 1
            poll(session)
        return made_steps

    with ThreadJob(2, 1, "diloco:4,quorum=1,grace=0", limits=Limits(steps=200)) as job:
        found = job.run(work)
    assert sum(found) == job.summary["steps"] >= 200


def test_a_checkpoint_holds_what_is_merged_and_a_job_goes_on_from_it(tmp_path: Path) -> None:
    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made()
        first = values(params)
        steps(params, optimizer, session.rank, 0, 8)
        return first

    sync = "diloco:2,quorum=2,grace=0,fragments=2"
    with ThreadJob(2, 2, sync, checkpoint=tmp_path, checkpoint_every=1) as job:
        job.run(work)
        names = list(job.sequencer.clocks)
    held = on_servers(job, names)
    with ThreadJob(2, 1, sync, resume=tmp_path, record=tmp_path / "record") as job:
        found = job.run(work)
    assert_equal(found[0], held)
    assert_equal(found[1], held)
    check_record(tmp_path / "record")


def test_making_this_workers_values_the_jobs_is_refused() -> None:
    def work(session: Session) -> str:
        _, optimizer = made()
        with pytest.raises(UsageError) as refused:
            optimizer.push_parameters()
        return str(refused.value)

    with ThreadJob(1, 1, "diloco:4,quorum=1") as job:
        (said,) = job.run(work)
    assert "push_parameters() is not possible in diloco:" in said
    assert "\n" not in said

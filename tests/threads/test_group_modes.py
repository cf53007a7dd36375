"""Modes on groups: bounds hold inside each group and couple no other; budgets count the main group; losses are named."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from grouped import GROUPS, MODELS, WAYS, group_of, ranks_of, run_in, trained_in_groups
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    copied,
    joined,
    loss_of,
    made_params,
    set_gradients,
    small_batches,
    trained_alone,
    until,
    weights,
)
from torch import nn

import polytempo as pt
from polytempo.errors import RankLost, UsageError
from polytempo.mesh import ReplicaRanks
from polytempo.records.files import read_events, read_meta
from polytempo.records.lines import of_optimizer
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires, pytest.mark.long]

START = made_params([(4,)])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def made(rank: int, main: int = 0, **options: object) -> tuple[list[nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    inner = torch.optim.SGD(params, lr=0.1)
    return params, DistributedOptimizer(inner, group=ranks_of(rank, main), **options)  # type: ignore[arg-type]


def step(params: list[nn.Parameter], optimizer: DistributedOptimizer, samples: float | None = None) -> None:
    set_gradients(params, [torch.ones(4)])
    optimizer.step(samples=samples)


# Bounds.


@pytest.mark.parametrize("sync", ["ssp:1", "bsp"])
def test_a_group_that_stalls_does_not_hold_another(sync: str, tmp_path: Path) -> None:
    """Rank 3 waits until the main group is through with 20 steps; ranks 0 and 2 keep their bound meanwhile."""
    through, steps = threading.Event(), 20

    def work(session: Session) -> None:
        params, optimizer = made(session.rank)
        for number in range(steps):
            if session.rank == 3 and number == 2:
                assert through.wait(30)
                until(lambda: bool(job.sequencer.clocks["0@1"].policy.room), "rank 1 to be held by this one")
            step(params, optimizer)
        if session.rank == 0:
            through.set()

    with ThreadJob(4, 1, sync, record=tmp_path) as job:
        job.run(work)
    lines = check_record(tmp_path)
    assert {line["worker"] for line in lines if line["kind"] == "push"} == {0, 2}
    others = list(of_optimizer(read_events(tmp_path), "0@1"))
    assert {line["worker"] for line in others if line["kind"] == "push"} == {1, 3}
    held = [line for line in others if line["kind"] == "hold" and line["waiting_for"] == [3]]
    assert held, "rank 1 was never held by rank 3"
    assert not [line for line in lines if line["kind"] == "hold" and set(line["waiting_for"]) & {1, 3}]
    assert read_meta(tmp_path)["job"]["members"] == {"0": [0, 2], "0@1": [1, 3]}


def test_asp_shares_the_rate_among_the_members() -> None:
    """Two members: 6 pushes of 1 at the rate 0.1 / 2."""

    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session.rank)
        for _ in range(3):
            step(params, optimizer)
        until(lambda: optimizer._reducer is not None and _version(optimizer) >= 6, "all pushes")
        optimizer.consolidate()
        return [param.detach() for param in params]

    with ThreadJob(4, 2, "asp") as job:
        results = job.run(work)
    for rank in range(4):
        assert_close(results[rank], [START[0].detach() - 6 * 0.1 / 2])


def _version(optimizer: DistributedOptimizer) -> int:
    optimizer.consolidate()
    assert optimizer._reducer is not None
    return optimizer._reducer.client_state.version


# Blocks of local steps.


def averaged_blocks(group: tuple[int, ...], batches: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[torch.Tensor]:
    """local:2 by hand: two steps of each member's own, then the mean."""
    models = [copy.deepcopy(MODELS[group_of(group[0])]) for _ in group]
    optimizers = [sgd(list(model.parameters())) for model in models]
    for number, batch in enumerate(batches, 1):
        for rank, model, optimizer in zip(group, models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch[rank]).backward()
            optimizer.step()
        if number % 2 == 0:
            with torch.no_grad():
                for parts in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(parts) / len(parts)  # type: ignore[arg-type]
                    for part in parts:
                        part.copy_(mean)
    return weights(models[0])


@pytest.mark.parametrize("way", WAYS)
def test_local_steps_are_averaged_within_each_group(way: str) -> None:
    batches = small_batches(6, (4, 4, 4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        return trained_in_groups(session, sgd, batches, sync="local:2")[0]

    results = run_in(way, work, "local:2")
    for group in GROUPS:
        for rank in group:
            assert_close(results[rank], averaged_blocks(group, batches), rtol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_fragments_have_clocks_in_each_group(way: str, tmp_path: Path) -> None:
    """Models with different numbers of tensors: the optimizers after them still have the same names on all ranks."""
    batches = small_batches(8, (4, 4, 4, 4))

    def work(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine, _ = trained_in_groups(session, sgd, batches, sync="diloco:4,fragments=2")
        params, optimizer = made(session.rank, sync="bsp")
        step(params, optimizer)
        return mine, weights(nn.ParameterList(params))

    results = run_in(way, work, "diloco:4,fragments=2", record=tmp_path)
    if way != "collectives":
        check_record(tmp_path)
        assert list(read_meta(tmp_path)["job"]["members"]) >= ["0", "0.1", "0.1@1", "0@1", "1", "1@1"]
    for one, other in GROUPS:
        assert_equal(results[one][0], results[other][0])
        assert_close(results[one][1], [START[0].detach() - 0.1])


# Agreement beside the steps.


@pytest.mark.parametrize("way", WAYS)
def test_synchronize_and_buffers_are_means_of_the_group(way: str) -> None:
    def work(session: Session) -> tuple[float, float]:
        model = nn.BatchNorm1d(1, affine=True).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, group=ranks_of(session.rank), buffers="mean")
        with torch.no_grad():
            model.running_mean.fill_(float(session.rank))
        set_gradients(list(model.parameters()), [torch.full((1,), float(session.rank))] * 2)
        optimizer.synchronize()
        mean = float(model.weight.grad)
        optimizer.step()
        optimizer.consolidate()
        return mean, float(model.running_mean)

    results = run_in(way, work)
    assert results == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]


# Budgets.


@pytest.mark.parametrize("via", ["ps", "allreduce"])
@pytest.mark.parametrize("main", [0, 1])
def test_the_main_group_counts_the_budget_and_stops_together(main: int, via: str) -> None:
    def work(session: Session) -> int:
        params, optimizer = made(session.rank, main)
        steps = 0
        while not session.should_stop() and steps < 8:
            step(params, optimizer, samples=10)
            steps += 1
        return steps

    with ThreadJob(4, 1, "bsp", limits=Limits(samples=100), via=via) as job:
        steps = job.run(work)
    assert [steps[rank] for rank in GROUPS[main]] == [5, 5]
    assert [steps[rank] for rank in GROUPS[1 - main]] == [8, 8], "the main group's answers alone say when to stop"
    assert job.summary["samples"] == 100


@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_a_group_of_one_makes_plain_steps_and_the_main_one_counts(via: str) -> None:
    """Rank 1 is the main group, alone; ranks 0 and 2 are two groups of one."""
    batches = small_batches(8, (4, 4, 4))

    def work(session: Session) -> tuple[list[torch.Tensor], int]:
        model = copy.deepcopy(MODELS[0])
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, group=ReplicaRanks((session.rank,), session.rank == 1))
        for batch in batches:
            if session.rank == 1 and session.should_stop():
                break
            optimizer.zero_grad()
            loss_of(model, batch[session.rank]).backward()
            optimizer.step(samples=4)
        return weights(model), int(optimizer.stats["step"])

    with ThreadJob(3, 1, "ssp:2", limits=Limits(steps=5), via=via) as job:
        results = job.run(work)
    assert [steps for _, steps in results] == [8, 5, 8]
    assert (job.summary["steps"], job.summary["samples"]) == (5, 20)
    for rank, (got, steps) in enumerate(results):
        own = [[batch[rank]] for batch in batches[:steps]]
        wanted = trained_alone(MODELS[0], lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), own)
        assert_equal(got, wanted)


# Groups of the public kind.


def test_groups_side_by_side_all_learn_that_the_budget_is_used_up() -> None:
    """Of ranks 0 and 2, which count it, and of rank 1 alone."""

    def work(session: Session) -> int:
        groups = [pt.new_group([0, 2]), pt.new_group([1])]
        params = copied(START)
        optimizer = pt.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), group=groups[session.rank % 2])
        steps = 0
        while not pt.should_stop():
            step(params, optimizer)
            steps += 1
        return steps

    with ThreadJob(3, 1, "bsp", limits=Limits(steps=6)) as job:
        steps = job.run(work)
    assert (steps[0], steps[2], job.summary["steps"]) == (3, 3, 6)


def test_a_public_group_trains_together_and_that_of_rank_0_is_the_main_one() -> None:
    batches = small_batches(4, (4, 4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        groups = [pt.new_group([0, 2]), pt.new_group([1])]
        model = copy.deepcopy(MODELS[0])
        optimizer = pt.DistributedOptimizer(sgd(list(model.parameters())), model, group=groups[session.rank % 2])
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch[session.rank]).backward()
            optimizer.step()
        return weights(model)

    with ThreadJob(3, 1, "bsp") as job:
        results = job.run(work)
    assert job.summary["steps"] == 8
    for rank, members in enumerate([(0, 2), (1,), (0, 2)]):
        own = [[joined([batch[member] for member in members])] for batch in batches]
        assert_close(results[rank], trained_alone(MODELS[0], sgd, own), rtol=1e-9)


# Refusals.


@pytest.mark.parametrize(
    ("sync", "group", "text"),
    [
        ("bsp", ReplicaRanks((1, 2)), "rank 0 is not in the group of ranks 1, 2; give DistributedOptimizer the group"),
        ("bsp", ReplicaRanks((0, 7)), "expected a group of ranks 0 to 2, got ranks 0, 7"),
        (
            "gossip:ring",
            ReplicaRanks((0, 1)),
            "gossip:ring mixes models between neighbours among all 3 ranks, and the group",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_before_anything_starts(sync: str, group: ReplicaRanks, text: str) -> None:
    def work(session: Session) -> None:
        if session.rank == 0:
            params = copied(START)
            DistributedOptimizer(torch.optim.SGD(params, lr=0.1), group=group)

    with ThreadJob(3, 1, sync) as job, pytest.raises(UsageError, match=text):
        job.run(work)


@pytest.mark.parametrize("way", WAYS)
def test_members_that_differ_are_refused(way: str) -> None:
    """The models of one group differ; in the other group they are alike."""

    def work(session: Session) -> None:
        params = copied(START) if session.rank != 3 else made_params([(5,)])
        DistributedOptimizer(torch.optim.SGD(params, lr=0.1), group=ranks_of(session.rank))

    with pytest.raises(UsageError, match=r"rank 1 has .* where rank 3 has|models of workers"):
        run_in(way, work)


# Losses.


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_rank_is_named_at_its_group_and_does_not_concern_another(way: str) -> None:
    """Rank 3 fails after two steps: rank 1 is told at once, ranks 0 and 2 make all of their steps."""
    named: dict[int, RankLost] = {}
    finished: dict[int, int] = {}

    def work(session: Session) -> None:
        params, optimizer = made(session.rank)
        for number in range(12):
            if session.rank == 3 and number == 2:
                raise ZeroDivisionError
            try:
                step(params, optimizer)
            except RankLost as lost:
                named[session.rank] = lost
                break
            finished[session.rank] = number + 1

    with pytest.raises(ZeroDivisionError):
        run_in(way, work)
    assert [(rank, lost.ranks) for rank, lost in named.items()] == [(1, (3,))]
    assert "rank 3" in str(named[1])
    # It may be told before the answer to its last step; and the thread of rank 3 leaves by `close`, which between hosts
    # takes part once more.
    assert finished.pop(1) in ((1, 2, 3) if way == "hosts" else (1, 2))
    assert finished == {0: 12, 2: 12, 3: 2}

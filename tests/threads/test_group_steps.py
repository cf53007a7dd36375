"""Optimizers on groups of ranks: each group trains as if the others were not there, over every way."""

from __future__ import annotations

import pytest
import torch
from grouped import GROUPS, MODELS, WAYS, group_of, run_in, trained_in_groups
from helpers import MakeOptimizer, assert_close, small_batches, trained_alone

from polytempo.mesh import ReplicaRanks
from polytempo.session.session import Session
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires, pytest.mark.long]

STEPS = 12


def momentum(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("make", [momentum, lambda p: torch.optim.Adam(p, lr=0.01)], ids=["momentum", "adam"])
@pytest.mark.parametrize("way", WAYS)
def test_each_group_equals_one_process_on_its_own_batches(way: str, make: MakeOptimizer) -> None:
    batches = small_batches(STEPS, (4, 4, 4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        return trained_in_groups(session, make, batches)[0]

    results = run_in(way, work)
    for group in GROUPS:
        own = [[step[rank] for rank in group] for step in batches]
        wanted = trained_alone(MODELS[group_of(group[0])], make, own)
        for rank in group:
            assert_close(results[rank], wanted, rtol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_a_group_that_run_out_of_data_are_not_waited_for(way: str) -> None:
    """Ranks leave after 7, 2, 4 and 5 steps; the means of a group are those of the ranks that still have data."""
    steps = (7, 2, 4, 5)
    batches = small_batches(max(steps), (4, 4, 4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        return trained_in_groups(session, momentum, batches[: steps[session.rank]])[0]

    results = run_in(way, work)
    for group in GROUPS:
        last = max(group, key=lambda rank: steps[rank])
        own = [[step[rank] for rank in group if number < steps[rank]] for number, step in enumerate(batches[: steps[last]])]
        assert_close(results[last], trained_alone(MODELS[group_of(last)], momentum, own), rtol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_successive_optimizers_may_have_other_groups(way: str) -> None:
    """Groups of different sizes, of one rank too: the names and numbers of a group are the same on its members."""
    partitions = [[(0, 1), (2,), (3,)], [(0,), (1, 2, 3)], [(0, 3), (1, 2)], [(0, 1, 2, 3)], [(0, 2), (1, 3)]]

    def work(session: Session) -> list[float]:
        values = []
        for groups in partitions:
            ranks = next(group for group in groups if session.rank in group)
            param = torch.nn.Parameter(torch.zeros(len(ranks)))
            optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), group=ReplicaRanks(ranks, 0 in ranks))
            for _ in range(2):
                param.grad = torch.full_like(param, -float(session.rank))
                optimizer.step()
            values.append(param[0].item())
        return values

    results = run_in(way, work)
    for rank, values in enumerate(results):
        mine = [next(group for group in groups if rank in group) for groups in partitions]
        assert values == pytest.approx([2 * sum(group) / len(group) for group in mine])

"""A machine measured between threads: all ranks know the same, of each kind of link and group that there is."""

from __future__ import annotations

import pytest
import torch
from worlds import Hosts, close_all, everywhere, open_worlds

from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.strategy import links
from polytempo.strategy.costs import Machine
from polytempo.strategy.links import measure_machine
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)


def measured(monkeypatch: pytest.MonkeyPatch, size: int, hosts: Hosts | None = None) -> Machine:
    monkeypatch.setattr(links, "SECONDS", 0.001)
    worlds = open_worlds("memory", size, hosts)
    try:
        first, *others = everywhere(worlds, lambda world: measure_machine(world))
    finally:
        close_all(worlds)
    assert all(other == first for other in others)
    assert isinstance(first, Machine)
    return first


def test_links_and_reductions_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = measured(monkeypatch, 4)
    assert machine.hosts == ((0, 1, 2, 3),)
    assert len(machine.cores) == 1
    assert machine.cores[0] >= 1
    assert machine.inside.latency > 0
    assert (machine.between, machine.reduce_between) == (None, None)
    assert [(one.axis, one.ranks, one.hosts) for one in machine.reductions] == [("tensor", 2, 1), ("tensor", 4, 1)]
    assert machine.reduction("tensor", [2, 3]) == machine.reduce_inside == machine.reductions[0].link
    assert machine.reduction("data", [2, 3]) is None
    assert machine.contention >= 1
    assert machine.action_s >= 0


def test_links_and_reductions_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = measured(monkeypatch, 3, ((0, 1), (2,)))
    assert machine.between is not None
    assert machine.between.latency > 0
    assert [(one.ranks, one.hosts) for one in machine.reductions] == [(3, 2)]
    assert machine.reduce_inside is None  # no group of two: three ranks have none
    apart = measured(monkeypatch, 2, ((0,), (1,)))
    assert apart.inside == apart.between
    assert (apart.contention, len(apart.cores)) == (1.0, 2)
    assert apart.reduce_between == apart.reductions[0].link


def test_one_rank_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.get_rng_state()
    machine = measured(monkeypatch, 1)
    assert torch.equal(drawn, torch.get_rng_state())
    assert (machine.hosts, machine.reductions, machine.inside.seconds(100)) == (((0,),), (), 0)


def test_the_data_axis_beside_the_main_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SECONDS", 0.001)
    monkeypatch.setattr(links, "GRADIENTS", 1 << 12)
    param = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]

    def work(session: Session) -> Machine:
        machine = measure_machine(session.world(), session=session)
        assert measure_machine(session.world(), session=session).hosts == machine.hosts  # once more
        optimizer = DistributedOptimizer(torch.optim.SGD([param[session.rank]], 0.5))
        param[session.rank].sum().backward()
        optimizer.step()
        return machine

    with ThreadJob(2, via="allreduce") as job:
        first, second = job.run(work)
    assert first == second
    assert [(one.axis, one.ranks) for one in first.reductions] == [("tensor", 2), ("data", 2)]
    assert first.data_inside == first.reduction("data", [0, 1])
    assert torch.equal(param[0], torch.full((3,), 0.5))
    assert job.summary["updates"] == 1


def test_nothing_is_left_of_measured_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job without a coordinator ranks that leave wait for the other ranks of each optimizer."""
    monkeypatch.setattr(links, "SECONDS", 0.001)
    monkeypatch.setattr(links, "GRADIENTS", 1 << 12)

    def work(session: Session) -> tuple[int, int, int]:
        measure_machine(session.world(), session=session)
        DistributedOptimizer(torch.optim.SGD([params[session.rank]], 0.5))
        return session.optimizers, len(session.leaving.of[LeavingStep.JOIN]), len(session.leaving.standbys)

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    with GroupJob(2) as job:
        assert job.run(work) == [(1, 1, 0)] * 2

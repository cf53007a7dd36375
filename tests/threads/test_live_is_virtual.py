"""Live equals virtual, for every mode: what machines were told in a live job, told to fresh machines, gives the same orders
in their order; and the recorded events of the job, told to a fresh policy, give the recorded actions."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from balanced import INPUTS, TARGETS
from helpers import check_record, loss_of, small_batches, small_model

from polytempo.session.session import Session
from polytempo.sync.machine import Abandon, Compute, Computed, MachineEntry, PushStep, SendPush
from polytempo.sync.spec import MODES, parse_spec
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedBatchSampler

pytestmark = pytest.mark.timeout(60)

STEPS, WORKERS = 12, 3

#: Every mode, with the options that change what its machine does.
LIVE = (
    *("bsp", "bsp+backup:1", "ssp:1", "dssp:1..4", "dssp-paper:1..4", "asp", "every:4", "delay:0", "delay:3", "asup"),
    *("gossip:ring", "gossip:ring,overlap=1", "gossip:exp", "adpsgd:ring", "downpour:push=2,fetch=3", "downpour"),
    *("local:3", "local:4,after=2", "adacomm:3", "diloco:4,fragments=2,overlap=1", "diloco:4,quorum=2"),
    *("diloco:4,fragments=2,quorum=2", "anytime:auto,micro=2", "anytime:0.01", "anytime:0.01,late=keep"),
    *("easgd:3", "easgd:4,rho=0.5,overlap=1"),
)
DEALT = ("bsp+balance", "bsp+balance,micro=2", "anytime:auto,micro=2", "anytime:0.01,late=keep")


def test_every_mode_is_here() -> None:
    assert {parse_spec(sync).mode.name for sync in (*LIVE, *DEALT)} == set(MODES)


def trained(sync: str, work: Any, record: Path) -> dict[int, list[MachineEntry]]:
    """What the machines of a live job were told, and what they ordered: fresh ones order the same."""
    logs: dict[int, list[MachineEntry]] = defaultdict(list)

    def logged(session: Session) -> None:
        session.machine_log = logs[session.rank].append
        model = small_model()
        work(session, model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model))

    with ThreadJob(WORKERS, 1, sync, record=record) as job:
        job.run(logged)
    for rank, told in logs.items():
        fresh = parse_spec(sync).machine(rank)
        assert [tuple(fresh.handle(one.event, one.now, one.part)) for one in told] == [one.orders for one in told]
    check_record(record)
    return logs


def orders_of(told: list[MachineEntry], kind: Any) -> list[Any]:
    return [order for one in told for order in one.orders if isinstance(order, kind)]


@pytest.mark.parametrize("sync", LIVE)
def test_fresh_machines_give_the_same_orders(sync: str, tmp_path: Path) -> None:
    def work(session: Session, model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        for batches in small_batches(STEPS, [4] * WORKERS):
            optimizer.zero_grad()
            loss = loss_of(model, batches[session.rank])
            loss.backward()
            optimizer.step()

    logs = trained(sync, work, tmp_path)
    for rank in range(WORKERS):
        told = logs[rank]
        assert sum(isinstance(one.event, Computed) for one in told) == STEPS
        pushed = [order for order in orders_of(told, PushStep | SendPush) if isinstance(order, PushStep) or not order.part]
        abandoned = len(orders_of(told, Abandon))
        assert sum(1 if isinstance(order, PushStep) else order.count for order in pushed) == STEPS - abandoned


@pytest.mark.parametrize("sync", DEALT)
def test_fresh_machines_give_the_same_orders_where_samplers_deal(sync: str, tmp_path: Path) -> None:
    """The orders say by which shares: as many as there are changes of them, the same to all workers."""

    def work(session: Session, model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        for batch in DistributedBatchSampler(range(100), 4):
            took = len(batch) * (1.0, 1.0, 4.0)[session.rank]
            optimizer.zero_grad()
            loss_of(model, (INPUTS[batch], TARGETS[batch])).backward()
            session.computed = lambda now, took=took: took  # type: ignore[method-assign,misc]
            optimizer.step()

    logs = trained(sync, work, tmp_path)
    weights = [{order.weights for order in orders_of(logs[rank], Compute)} for rank in range(WORKERS)]
    assert weights[0] == weights[1] == weights[2]
    assert (len(weights[0]) > 1) == sync.startswith("bsp+balance")

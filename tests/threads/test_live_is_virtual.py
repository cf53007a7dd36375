"""Live equals virtual: what machines were told in a live job, told to fresh machines, gives the same orders in their order;
and the recorded events of the job, told to a fresh policy, give the recorded actions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import check_record, loss_of, small_batches, small_model

from polytempo.session.session import Session
from polytempo.sync.machine import Computed, Orders, PushStep, SendPush, WorkerEvent, WorkerMachine
from polytempo.sync.spec import Spec, parse_spec
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

STEPS, WORKERS = 12, 3

#: The modes whose worker's half is performed by the driver.
MODES = (
    *("bsp", "bsp+backup:1", "ssp:1", "dssp:1..4", "asp", "every:4", "delay:0", "delay:3", "asup"),
    *("gossip:ring", "gossip:ring,overlap=1", "gossip:exp", "adpsgd:ring", "downpour:push=3,fetch=2", "downpour"),
    *("local:3", "local:4,after=2", "diloco:4,fragments=2,overlap=1", "diloco:4,quorum=2", "diloco:4,fragments=2,quorum=2"),
)


@dataclass(frozen=True)
class MachineEntry:
    """What a machine was told, and what it ordered then."""

    event: WorkerEvent
    now: float
    part: int
    orders: Orders


class LoggedMachine:
    """A machine whose events and orders are logged."""

    def __init__(self, machine: WorkerMachine, log: list[MachineEntry]) -> None:
        self._machine, self._log = machine, log

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        orders = self._machine.handle(event, now, part)
        self._log.append(MachineEntry(event, now, part, tuple(orders)))
        return orders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def of_first(order: PushStep | SendPush) -> bool:
    return isinstance(order, PushStep) or not order.part


@pytest.mark.parametrize("sync", MODES)
def test_fresh_machines_give_the_same_orders(sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: dict[int, list[MachineEntry]] = defaultdict(list)
    fresh_machine = Spec.machine

    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for batches in small_batches(STEPS, [4] * WORKERS):
            optimizer.zero_grad()
            loss_of(model, batches[session.rank]).backward()
            optimizer.step()

    with ThreadJob(WORKERS, 1, sync, record=tmp_path) as job, monkeypatch.context() as patch:
        patch.setattr(Spec, "machine", lambda spec, rank: LoggedMachine(fresh_machine(spec, rank), logs[rank]))
        job.run(work)
    spec = parse_spec(sync)
    for rank in range(WORKERS):
        told, fresh = logs[rank], spec.machine(rank)
        assert [tuple(fresh.handle(one.event, one.now, one.part)) for one in told] == [one.orders for one in told]
        assert sum(isinstance(one.event, Computed) for one in told) == STEPS
        pushed = [order for one in told for order in one.orders if isinstance(order, PushStep | SendPush)]
        assert sum(1 if isinstance(order, PushStep) else order.count for order in pushed if of_first(order)) == STEPS
    check_record(tmp_path)

"""A second shard that is given the same log with the same pushes holds the same bits, and says the same, to the bit.

A job runs; beside each of its servers the entries that its shard carries out are kept, with copies of the pushes they name
and of what came of them. When the job is over another `ShardState` gets them, in another thread and without the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from helpers import MakeOptimizer, loss_of, small_batches, small_model
from tabled import lookup_batches, lookup_model
from torch import nn

from polytempo.protocol.log import Reply, Update
from polytempo.protocol.messages import AnyMessage
from polytempo.server.optimizer_state import as_bytes
from polytempo.server.shard_executor import Pushes, Report, ShardState, TotalNorm, Work, WorkerReply
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool

pytestmark = pytest.mark.timeout(30)

WORKERS, STEPS = 3, 8
#: A message, and the bytes of its buffers.
Said = tuple[bytes, list[bytes]]


@dataclass
class Carried:
    """An entry, as it was when it was carried out, and what came of it."""

    entry: Work
    pushes: Pushes
    norms: list[float] = field(default_factory=list)  # of the whole update
    said: list[Said] = field(default_factory=list)


def said(reports: Sequence[Report]) -> list[Said]:
    plain: list[tuple[AnyMessage, Sequence[Any]]] = [
        (report.message, report.buffers) if isinstance(report, WorkerReply) else (report, ()) for report in reports
    ]
    return [(msgspec.msgpack.encode(message), [bytes(buffer) for buffer in buffers]) for message, buffers in plain]


def watched(state: ShardState) -> list[Carried]:
    """What this shard carries out from now on."""
    log: list[Carried] = []
    carry_out = state.carry_out

    def kept(entry: Work, pushes: Pushes, total_norm: TotalNorm) -> list[Report]:
        copies = {identity: (push, [buffer.copy() for buffer in buffers]) for identity, (push, buffers) in pushes.items()}
        one = Carried(entry, copies)  # type: ignore[arg-type]
        log.append(one)

        def total(norm: Any) -> float:
            one.norms.append(total_norm(norm))
            return one.norms[-1]

        reports = carry_out(entry, pushes, total)
        one.said = said(reports)
        return reports

    state.carry_out = kept  # type: ignore[method-assign]
    return log


def second(first: ShardState, log: Sequence[Carried]) -> tuple[ShardState, list[list[Said]]]:
    """Another shard that is given this log, and what it says to each entry."""
    state, heard = ShardState(first.shard, first.shards, Pool(), first.workers), []
    with torch.no_grad():
        for one in log:
            norms = iter(one.norms)
            heard.append(said(state.carry_out(one.entry, one.pushes, lambda norm, norms=norms: next(norms))))  # type: ignore[misc]
    return state, heard


def content(state: ShardState) -> dict[str, Any]:
    """All that a shard holds of each optimizer, in bytes."""
    result: dict[str, Any] = {}
    for name, shard in state.optimizer_shards.items():
        result[f"{name} version"] = shard.version
        result |= {f"{name} {dtype}": bytes(as_bytes(flat)) for dtype, flat in shard.values.items()}
        for one in shard.state():
            tensors = {key: bytes(as_bytes(value)) for key, value in one.state.items() if isinstance(value, torch.Tensor)}
            result[f"{name} {one.dtype} {one.start} to {one.stop}"] = tensors
        result |= {f"{name} table {key}": bytes(as_bytes(value)) for key, value in shard.rows.saved().items()}
        result[f"{name} clocks"] = shard.rows.saved_clocks()
    return result


def run(sync: str, make: MakeOptimizer, tables: bool = False, **options: Any) -> list[tuple[ShardState, list[Carried]]]:
    """A job of three workers and two servers; each shard and what it has carried out."""
    model = lookup_model() if tables else small_model(dtype=torch.float32)
    batches: list[Any] = (lookup_batches if tables else small_batches)(STEPS, (2, 3, 4))

    def work(session: Session) -> None:
        mine: nn.Module = lookup_model() if tables else small_model(dtype=torch.float32)
        mine.load_state_dict(model.state_dict())
        optimizer = DistributedOptimizer(make(list(mine.parameters())), mine, **options)
        for number, step in enumerate(batches):
            optimizer.zero_grad()
            inputs, targets = step[session.rank]
            loss_of(mine, (inputs if tables else inputs.float(), targets if tables else targets.float())).backward()
            if number % 3 == 2 and not tables:
                mine[0].bias.grad = None  # its part of a segment is left alone: the segment is split
            optimizer.step()
        if not tables:
            optimizer.state_dict()

    with ThreadJob(WORKERS, 2, sync) as job:
        states = [server.executor.state for server in job.servers]
        logs = [watched(state) for state in states]
        job.run(work)
    return list(zip(states, logs, strict=True))


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


CASES: dict[str, Callable[[], list[tuple[ShardState, list[Carried]]]]] = {
    "rounds": lambda: run("bsp", adam),
    "rounds, clipped": lambda: run("bsp", momentum, clip_norm=0.1),
    "rounds, late ones dropped": lambda: run("bsp+backup:1", momentum),
    "rounds, deltas": lambda: run("bsp", adam, apply="delta"),
    "no barrier": lambda: run("asp,momentum=server", adam),
    "no barrier, deltas": lambda: run("asp", adam),
    "no barrier, compressed": lambda: run("asp", momentum, compression="topk:0.3"),
    "a bound, rates by staleness": lambda: run("ssp:1,lr=staleness", momentum),
    "several in flight": lambda: run("delay:2", lambda params: torch.optim.Adagrad(params, lr=0.05)),
    "several in flight, compensated": lambda: run("delay:2,dc=0.4", momentum),
    "several steps a push": lambda: run("downpour:push=2,fetch=2", lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "blocks": lambda: run("diloco:2,quorum=2,grace=0,fragments=2", plain),
    "elastic": lambda: run("easgd:2,rho=0.1", plain),
    "tables": lambda: run("bsp", lambda p: torch.optim.Adagrad(p, lr=0.1), tables=True),
    "tables, no barrier": lambda: run("asp", plain, tables=True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_second_shard_on_the_same_log_holds_the_same_bits(case: str) -> None:
    for first, log in CASES[case]():
        assert sum(isinstance(one.entry, Update) for one in log) > 1
        assert sum(isinstance(one.entry, Reply) for one in log) > WORKERS
        copy, heard = second(first, log)
        assert content(copy) == content(first)
        assert heard == [one.said for one in log]


def test_the_same_pushes_in_another_order_make_other_bits() -> None:
    """Else the test above would prove nothing."""
    first, log = run("asp,momentum=server", adam)[0]
    updates = [index for index, one in enumerate(log) if isinstance(one.entry, Update)]
    one, other = updates[1:3]
    log[one], log[other] = log[other], log[one]
    assert content(second(first, log)[0]) != content(first)

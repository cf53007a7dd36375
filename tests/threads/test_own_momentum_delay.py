"""Under `delay` a worker with momentum of its own computes on the values it has read and its pushes that are unanswered."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import MakeOptimizer, check_record, copied, until
from own_momentum import START, ByHand, Tensors, Turn, differentiate, gradient, played

from polytempo.protocol.messages import Gone, encode
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

RULES: dict[str, tuple[MakeOptimizer, float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1), 0.5),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.02), 0.5**0.75),
}
WORKERS, DELAY = 2, 3
ORDER = [0, 1, 0, 0, 1, 1, 0, 1] * 3


class Seen(NamedTuple):
    """What a worker had before a step."""

    worker: int
    number: int
    values: Tensors
    version: int  #: of the values that it has read
    unanswered: list[int]  #: its own pushes
    staleness: int  #: of the last that was answered


def watched(seen: list[Seen]) -> Any:
    def turn(one: Turn) -> None:
        state = one.optimizer._reducer.client_state  # type: ignore[union-attr]
        values = [param.detach().clone() for param in one.params]
        seen.append(Seen(one.worker, one.number, values, state.version, sorted(state.outstanding), state.staleness))
        differentiate(one)
        one.optimizer.step()

    return turn


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("options", "decay"), [("", 1.0), (",decay=0.8", 0.8)])
@pytest.mark.parametrize("name", RULES)
def test_what_it_computes_on_is_what_it_has_read_and_all_that_is_under_way(
    name: str, options: str, decay: float, servers: int, tmp_path: Path
) -> None:
    """The other workers' pushes under way are taken to be like its own: with two workers, each of its own counts twice."""
    make, scale = RULES[name]
    seen: list[Seen] = []
    job_options = {"record": tmp_path}
    end, _, _ = played(f"delay:{DELAY}{options}", make, watched(seen), order=ORDER, servers=servers, job_options=job_options)
    hands, pushed, factors = [ByHand(make) for _ in range(WORKERS)], {}, {}
    for one in seen:
        key = one.worker, one.number
        pushed[key] = flat(hands[one.worker].change(one.values, gradient(one.values, *key)))
    path = [flat([start.detach() for start in START])]
    applied = [line for line in check_record(tmp_path) if line["kind"] == "apply" and line["server"] == 0]
    counts = [0] * WORKERS
    for line in applied:
        (worker,), (stale,) = line["workers"], line["staleness"]
        path.append(path[-1] + scale * decay**stale * pushed[worker, counts[worker]])
        counts[worker] += 1
    torch.testing.assert_close(flat(end), path[-1], rtol=1e-10, atol=1e-12)
    for one in seen:
        under_way = torch.zeros_like(path[0])
        for step in one.unanswered:
            under_way += WORKERS * scale * factors[one.worker, step] * pushed[one.worker, step]
        torch.testing.assert_close(flat(one.values), path[one.version] + under_way, rtol=1e-9, atol=1e-11)
        factors[one.worker, one.number] = decay**one.staleness
    assert max(len(one.unanswered) for one in seen) == DELAY


def test_one_that_runs_ahead_alone_makes_the_steps_that_it_would_make_without_a_delay() -> None:
    """No answer comes while it makes all the steps that it may."""
    make, _ = RULES["SGD"]
    gate, seen = threading.Event(), list[Seen]()

    def turn(one: Turn) -> None:
        if one.number == 0:
            hold_up(one.job, gate)
        if one.number == DELAY:
            threading.Thread(target=gate.set).start()
        watched(seen)(one)

    end, _, _ = played(f"delay:{DELAY},momentum=lookahead", make, turn, order=[0] * 8, servers=1)
    hand, now = ByHand(make, spike=0), flat([start.detach() for start in START])
    for one in seen:
        torch.testing.assert_close(flat(one.values), now, rtol=1e-10, atol=1e-12)
        now = now + flat(hand.change(one.values, gradient(one.values, 0, one.number)))
    assert [len(one.unanswered) for one in seen[: DELAY + 1]] == [0, 1, 2, 3]
    torch.testing.assert_close(flat(end), now, rtol=1e-10, atol=1e-12)


def hold_up(job: ThreadJob, gate: threading.Event) -> None:
    """Keep the store's thread busy."""
    keeper = job.servers[0].executor.state
    carry_out = keeper.carry_out

    def held_up(*given: Any) -> Any:
        assert gate.wait(20)
        return carry_out(*given)

    keeper.carry_out = held_up  # type: ignore[method-assign]


@pytest.mark.parametrize("name", RULES)
def test_who_has_left_has_nothing_under_way(name: str) -> None:
    """Worker 1 leaves, and servers scale by the number of those that are there: so does worker 0."""
    make, _ = RULES[name]
    seen = list[Seen]()

    def work(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(make(params))
        if session.rank == 1:
            return
        until(lambda: job.sequencer.statistics[1].left_at is not None, "worker 1 is gone")
        job._launcher.send(encode(Gone(worker=1, incarnation=0, reason="finished")))
        until(lambda: 1 in known(session), "worker 0 knows")
        for number in range(6):
            watched(seen)(Turn(0, number, params, optimizer, job))

    def known(session: Session) -> set[int]:
        assert session.client is not None
        session.client.ask_who_departed(0.01)
        return session.client.departed

    with ThreadJob(2, 1, f"delay:{DELAY}") as job:
        job.run(work)
    hand, now = ByHand(make), flat([start.detach() for start in START])
    for one in seen:
        torch.testing.assert_close(flat(one.values), now, rtol=1e-10, atol=1e-12)
        now = now + flat(hand.change(one.values, gradient(one.values, 0, one.number)))
    assert len(seen) == 6

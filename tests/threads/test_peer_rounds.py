"""`anytime` over all-reduce, its exchange alone: exactly the workers of a round make its mean, and replicas stay alike."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from by_hand import STATEFUL, assert_same_state
from helpers import Batch, assert_close, assert_equal, loss_of, small_batches, small_model, until, weights
from torch import nn
from worlds import alone as alone_on_hosts
from worlds import open_worlds

from polytempo.collectives.world import World
from polytempo.errors import RankLost, UsageError
from polytempo.protocol.push import Measures
from polytempo.protocol.values import ClosedRound
from polytempo.reducer.deadline_peers import DeadlinePeers, GroupSums
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.sync.directives import NextDeadline
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.round_exchange import KEPT, HandedState, PeerRounds, RoundMean

pytestmark = pytest.mark.timeout(60)


def worlds_of(hosts: int) -> list[World]:
    """Links of three workers on several hosts; none where they are on one, and make their own."""
    return open_worlds("memory", hosts, alone_on_hosts(hosts)) if hosts > 1 else []


def place(session: Session, worlds: Sequence[World]) -> None:
    """Put a worker on its host."""
    if worlds:
        session.use(worlds[session.rank])
        session.job = replace(session.job, meeting="")


class RoundOutcome(NamedTuple):
    """How a round has ended for a worker."""

    step: int
    starts: NextDeadline
    closed: ClosedRound
    content: Any


class Driver:
    """One worker: a model, its optimizer, and rounds of which the test says when they end."""

    def __init__(self, model: nn.Module, make: Any, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = DistributedOptimizer(make(list(self.model.parameters())), self.model, **options)
        # Its communication thread: here the test says when rounds end.
        self.optimizer._session.leaving.run(LeavingStep.CLOSE)
        reducer = self.optimizer._reducer
        assert isinstance(reducer, DeadlinePeers)
        reducer.given_up = False
        self.rounds = PeerRounds(reducer, self.optimizer._wrapped)
        self.buffer = self.rounds.buffers()[0]
        self.samples, self.count = 0, 0

    def add(self, batch: Batch) -> None:
        """A micro-batch."""
        self.model.zero_grad()
        loss_of(self.model, batch).backward()
        with torch.no_grad():
            for index, param in enumerate(self.model.parameters()):
                view = self.buffer.views[index]
                view.add_(param.grad, alpha=len(batch[0])) if self.count else view.copy_(param.grad * len(batch[0]))
        self.samples, self.count = self.samples + len(batch[0]), self.count + 1

    def exchange(self, busy: bool = False) -> RoundOutcome:
        total = self.buffer if self.count else None
        measures = Measures(samples=float(self.samples), count=self.count, computed=0.01, busy=busy)
        self.samples = self.count = 0
        known = len(self.rounds.pending)
        self.rounds.exchange(total, self.optimizer._wrapped.hyper(), measures, ())
        reducer, content = self.rounds.reducer, self.rounds.pending[known:]
        return RoundOutcome(
            reducer.step, reducer.directive, reducer.client_state.answer.closed, content[0] if content else None
        )

    def round(self, batches: Sequence[Batch]) -> RoundOutcome:
        for batch in batches:
            self.add(batch)
        outcome = self.exchange()
        self.rounds.install()
        return outcome

    def state(self) -> tuple[list[torch.Tensor], dict]:
        return weights(self.model), copy.deepcopy(self.optimizer.inner.state_dict())


def alone(model: nn.Module, make: Any, rounds: Sequence[Sequence[Batch]], divisors: Sequence[float]) -> tuple[list, dict]:
    """One process that takes the same samples, with the same divisor."""
    model = copy.deepcopy(model)
    optimizer = make(list(model.parameters()))
    for batches, divisor in zip(rounds, divisors, strict=True):
        optimizer.zero_grad()
        total = sum(len(batch[0]) for batch in batches)
        for batch in batches:
            (loss_of(model, batch) * len(batch[0]) / (divisor or total)).backward()
        if batches:
            optimizer.step()
    return weights(model), optimizer.state_dict()


def assert_alike(states: Sequence[tuple[list, dict]]) -> None:
    for values, state in states[1:]:
        assert_equal(values, states[0][0])
        for index, entries in states[0][1]["state"].items():
            for name, value in entries.items():
                assert torch.equal(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value))


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize(("hosts", "divide"), [(1, "expected"), (1, "actual"), (3, "expected")])
def test_rounds_are_those_of_one_process(make: Any, hosts: int, divide: str) -> None:
    """Counts change from round to round, and a worker may have none."""
    model, data, worlds = small_model(), small_batches(30, (4, 2, 6)), worlds_of(hosts)
    counts = [(1, 2, 3), (2, 0, 1), (3, 1, 0), (0, 0, 0), (1, 3, 2), (2, 2, 2)]
    taken = [
        [data[5 * number + micro][rank] for rank in range(3) for micro in range(counts[number][rank])]
        for number in range(len(counts))
    ]

    def work(session: Session) -> tuple[list[float], tuple[list, dict]]:
        place(session, worlds)
        driver, divisors = Driver(model, make), []
        for number, count in enumerate(counts):
            mine = [data[5 * number + micro][session.rank] for micro in range(count[session.rank])]
            divisors.append(driver.round(mine).closed.divisor)
        return divisors, driver.state()

    with ThreadJob(3, sync=f"anytime:30,divide={divide}", via="allreduce") as job:
        results = job.run(work)
    assert_alike([state for _, state in results])
    values, state = alone(model, make, taken, results[0][0])
    assert_close(results[0][1][0], values, rtol=1e-9)
    assert_same_state(results[0][1][1], state)


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
def test_a_worker_that_computes_keeps_means_and_applies_them_in_order(make: Any) -> None:
    model, data = small_model(), small_batches(KEPT + 1, (4, 2, 6))

    def work(session: Session) -> tuple[list[float], tuple[list, dict]]:
        driver, outcomes = Driver(model, make), []
        busy = session.rank == 2
        for number in range(KEPT):
            if not busy:
                outcomes.append(driver.round([data[number][session.rank]]))
                continue
            outcomes.append(driver.exchange(busy=True))
            assert driver.rounds.has_room == (number + 1 < KEPT)
        if busy:
            assert_equal(weights(driver.model), weights(model))
            driver.rounds.install()
            assert driver.rounds.has_room
        outcomes.append(driver.round([data[KEPT][session.rank]]))
        return [outcome.closed.divisor for outcome in outcomes], driver.state()

    with ThreadJob(3, sync="anytime:30", via="allreduce") as job:
        results = job.run(work)
    assert_alike([state for _, state in results])
    taken = [[batch for rank, batch in enumerate(step) if rank != 2 or step is data[KEPT]] for step in data]
    values, state = alone(model, make, taken, results[0][0])
    assert_close(results[0][1][0], values, rtol=1e-9)
    assert_same_state(results[0][1][1], state)


@pytest.mark.parametrize(
    ("make", "source_is_busy", "hosts"),
    [("momentum", False, 1), ("adam", True, 1), ("adam", False, 3), ("momentum", True, 3)],
    ids=["source at the barrier", "source computes", "source at the barrier, hosts", "source computes, hosts"],
)
def test_a_worker_that_has_missed_rounds_gets_values_and_state(make: str, source_is_busy: bool, hosts: int) -> None:
    """Worker 2 lets three rounds pass; rounds of the others close without it. Its next push is discarded, and worker 0
    hands over what it has, and the means that it has yet to apply itself."""
    model, data, worlds = small_model(), small_batches(5, (4, 2, 6)), worlds_of(hosts)
    passed = threading.Event()

    def work(session: Session) -> tuple[list, tuple, tuple]:
        place(session, worlds)
        driver, outcomes = Driver(model, STATEFUL[make]), []
        computes = source_is_busy and session.rank == 0
        if session.rank == 2:
            assert passed.wait(20)
            driver.add(data[0][2])  # on the weights of the first round: it must not count
            outcomes.append(driver.exchange())
            driver.rounds.install()
        else:
            for number in range(3):
                driver.add(data[number][session.rank])
                outcomes.append(driver.exchange())
                if not computes:
                    driver.rounds.install()
            passed.set()
            if session.rank == 1:
                until(lambda: 2 in job.sequencer.clocks["0"].policy._behind, "the push of worker 2 to be discarded")
            driver.add(data[3][session.rank])
            outcomes.append(driver.exchange())
            assert outcomes[-1].starts.catching_up == (2,)
            driver.rounds.install()
        caught_up = driver.state()
        outcomes.append(driver.round([data[4][session.rank]]))
        return outcomes, caught_up, driver.state()

    with ThreadJob(3, sync="anytime:0.25", via="allreduce") as job:
        results = job.run(work)
    assert_alike([state for _, state, _ in results])
    assert_alike([state for _, _, state in results])
    behind = results[2][0][0]
    assert (behind.step, behind.starts.behind) == (4, 4)
    if not source_is_busy:
        taken = [step[:2] for step in data[:4]] + [data[4]]
        divisors = [outcome.closed.divisor for outcome in results[0][0]]
        values, state = alone(model, STATEFUL[make], taken, divisors)
        assert_close(results[2][2][0], values, rtol=1e-9)
        assert_same_state(results[2][2][1], state)


def test_the_round_sets_the_hyper_parameters() -> None:
    """Schedulers that are stepped by micro-batch stand at different places: the update is made with the values of the lowest
    rank that contributed, on all workers, and each keeps its own."""
    model, data = small_model(), small_batches(2, (4, 2))
    rates = [(0.1, 0.4), (0.2, 0.3)]  # by round, by worker

    def work(session: Session) -> tuple[list[float], tuple[list, dict]]:
        driver, divisors = Driver(model, STATEFUL["adam"]), []
        for number, step in enumerate(data):
            group = driver.optimizer.param_groups[0]
            group["lr"] = rates[number][session.rank]
            mine = [step[session.rank]] if (number, session.rank) != (1, 0) else []
            divisors.append(driver.round(mine).closed.divisor)
            assert group["lr"] == rates[number][session.rank]
            assert group["betas"] == (0.9, 0.999)
        return divisors, driver.state()

    with ThreadJob(2, sync="anytime:30", via="allreduce") as job:
        results = job.run(work)
    assert_alike([state for _, state in results])
    wanted = copy.deepcopy(model)
    optimizer = STATEFUL["adam"](list(wanted.parameters()))
    for batches, rate, divisor in zip([data[0], data[1][1:]], [0.1, 0.3], results[0][0], strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        total = sum(len(batch[0]) for batch in batches)
        for batch in batches:
            (loss_of(wanted, batch) * len(batch[0]) / (divisor or total)).backward()
        optimizer.step()
    assert_close(results[0][1][0], weights(wanted), rtol=1e-9)


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_worker_that_dies_after_its_push(hosts: int) -> None:
    """Its push is in the round. On one host its sum is there, and counts; between hosts it is lost, and the others add up
    theirs. Both go on."""
    model, data = small_model(), small_batches(2, (4, 2, 6))
    pushed, worlds = threading.Event(), worlds_of(hosts)

    def work(session: Session) -> tuple[list[float], tuple[list, dict]] | None:
        place(session, worlds)
        driver = Driver(model, STATEFUL["momentum"])
        if session.rank == 2:
            driver.add(data[0][2])
            hyper = driver.optimizer._wrapped.hyper()
            driver.rounds.reducer.begin(driver.buffer, hyper, Measures(samples=6, computed=0.01))
            pushed.set()
            session.world().close(politely=False)
            return None
        assert pushed.wait(20)
        divisors = [driver.round([step[session.rank]]).closed.divisor for step in data]
        return divisors, driver.state()

    with ThreadJob(3, sync="anytime:0.2", via="allreduce") as job:
        first, second, _ = job.run(work)
    assert first is not None
    assert second is not None
    assert_alike([first[1], second[1]])
    taken = [data[0] if hosts == 1 else data[0][:2], data[1][:2]]
    values, _ = alone(model, STATEFUL["momentum"], taken, [first[0][0] or 12, first[0][1]])
    assert_close(first[1][0], values, rtol=1e-9)


def test_a_rank_whose_sum_is_missing_ends_where_another_has_it() -> None:
    model, data, worlds = small_model(), small_batches(1, (4, 2, 6)), worlds_of(3)
    lost = RankLost("rank 2 is gone: rank 1 needs it", (2,))

    def work(session: Session) -> None:
        place(session, worlds)
        driver = Driver(model, STATEFUL["momentum"])
        sums = driver.rounds.reducer.sums
        assert isinstance(sums, GroupSums)
        if session.rank == 1:
            sums.make = lambda result, closed: sums._make_again(list(result.tensors.values()), closed, lost)
        else:
            sums.make = lambda result, closed: sums._messages.note(closed.ranks, 2 * closed.step + 1)
        driver.round([data[0][session.rank]])

    with (
        ThreadJob(3, sync="anytime:30", via="allreduce") as job,
        pytest.raises(RankLost, match="rank 0 has that round"),
    ):
        job.run(work)


def test_a_worker_that_was_stopped_between_its_push_and_the_sum_sees_that_it_has_missed_the_round() -> None:
    """On one host no worker waits for it: two rounds later its place is written again, and it catches up."""
    model, data = small_model(), small_batches(5, (4, 2, 6))
    goes_on = threading.Event()

    def work(session: Session) -> tuple[list[RoundOutcome], tuple[list, dict]]:
        driver, outcomes = Driver(model, STATEFUL["adam"]), []
        if session.rank == 2:
            sums = driver.rounds.reducer.sums
            make = sums.make
            sums.make = lambda result, closed: (goes_on.wait(20), make(result, closed))[1]
            outcomes.append(driver.round([data[0][2]]))  # it is in the round, and comes too late for the sum
            sums.make = make
        else:
            outcomes += [driver.round([data[number][session.rank]]) for number in range(3)]
            goes_on.set()
            until(lambda: 2 in job.sequencer.clocks["0"].policy._behind, "the push of worker 2 to be discarded")
            outcomes.append(driver.round([data[3][session.rank]]))
        outcomes.append(driver.round([data[4][session.rank]]))
        return outcomes, driver.state()

    with ThreadJob(3, sync="anytime:0.25", via="allreduce") as job:
        results = job.run(work)
    assert_alike([state for _, state in results])
    assert [type(outcome.content) for outcome in results[2][0]] == [HandedState, RoundMean]
    taken = [data[0], data[1][:2], data[2][:2], data[3][:2], data[4]]
    values, state = alone(model, STATEFUL["adam"], taken, [outcome.closed.divisor for outcome in results[0][0]])
    assert_close(results[2][1][0], values, rtol=1e-9)
    assert_same_state(results[2][1][1], state)


def test_without_a_sequencer_it_is_refused() -> None:
    def work(session: Session) -> None:
        model = small_model()
        DistributedOptimizer(STATEFUL["adam"](list(model.parameters())), model, sync="anytime:1")

    with GroupJob(2) as job, pytest.raises(UsageError, match="needs the sequencer of polytempo run"):
        job.run(work)

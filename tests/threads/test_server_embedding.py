"""A `ServerEmbedding` learns as an embedding in this process does, wherever its rows are and however they come."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import Batch, assert_close, assert_equal, joined, loss_of, made_from_seed
from sessions import within
from tabled import DIM, USED, VOCABULARY, Lookup, count_pulls, lookup_batches
from torch import nn

from polytempo.launcher.job_facts import JobFacts
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

STEPS, SIZES, LR = 8, (6, 6, 6), 0.1
RULES = ["sgd", "adagrad", "rowwise-adagrad", "adam"]
ALL = torch.arange(VOCABULARY)
#: The rows before the first step, those after the last, and the other weights.
Trained = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def served(rule: str = "sgd", **options: object) -> Lookup:
    """A model whose embedding is on the servers."""
    given = {"lr": LR, "dtype": torch.float64, **options}
    return made_from_seed(0, lambda: Lookup(ServerEmbedding(VOCABULARY, DIM, rule=rule, **given)))  # type: ignore


def wrap(model: nn.Module, session: Session, **options: object) -> DistributedOptimizer:
    dense = torch.optim.SGD(model.parameters(), lr=0.2)
    return DistributedOptimizer(dense, model, **options)  # type: ignore[arg-type]


def train(
    session: Session, model: Lookup, batches: Sequence[Sequence[Batch]], prefetch: bool = False, **options: object
) -> Trained:
    mine = copy.deepcopy(model)
    optimizer = wrap(mine, session, **options)
    start = mine.embedding.pull(ALL)
    for number, step in enumerate(batches):
        optimizer.zero_grad()
        loss_of(mine, step[session.rank]).backward()
        if prefetch and number + 1 < len(batches):
            mine.embedding.prefetch(batches[number + 1][session.rank][0])
        optimizer.step()
    return start, mine.embedding.pull(ALL), [p.detach().clone() for p in mine.out.parameters()]


def in_a_job(workers: int, servers: int, sync: str, work: Callable[[Session], Trained]) -> Trained:
    """What all workers end with, which must be one thing."""
    with ThreadJob(workers, servers, sync) as job:
        results = job.run(work)
    for start, rows, rest in results[1:]:
        assert_equal([start, rows, *rest], [results[0][0], results[0][1], *results[0][2]])
    return results[0]


class Reference:
    """The rules once more, row by row."""

    def __init__(self, rule: str, rows: torch.Tensor) -> None:
        self.rule, self.rows = rule, rows
        self.first = [torch.zeros(DIM, dtype=torch.float64) for _ in rows]
        self.second = [torch.zeros(DIM, dtype=torch.float64) for _ in rows]
        self.pushes = [0] * len(rows)

    def step(self, one: int, gradient: torch.Tensor) -> None:
        self.pushes[one] += 1
        n, row, square = self.pushes[one], self.rows[one], gradient * gradient
        if self.rule == "sgd":
            row -= LR * gradient
        elif self.rule == "adagrad":
            self.second[one] += square
            row -= LR * gradient / (self.second[one].sqrt() + 1e-10)
        elif self.rule == "rowwise-adagrad":
            self.second[one] += square.mean()
            row -= LR * gradient / (self.second[one].sqrt() + 1e-10)
        else:
            self.first[one] = 0.9 * self.first[one] + 0.1 * gradient
            self.second[one] = 0.999 * self.second[one] + 0.001 * square
            top, bottom = self.first[one] / (1 - 0.9**n), self.second[one] / (1 - 0.999**n)
            row -= LR * top / (bottom.sqrt() + 1e-8)


def trained_here(model: Lookup, start: torch.Tensor, rule: str, batches: Sequence[Sequence[Batch]]) -> list[torch.Tensor]:
    """Dense gradients of the joint batch, in this process."""
    twin = Lookup(nn.Embedding.from_pretrained(start.clone(), freeze=False))
    twin.out.load_state_dict(model.out.state_dict())
    reference = Reference(rule, twin.embedding.weight.data)
    rest = torch.optim.SGD(twin.out.parameters(), lr=0.2)
    for step in batches:
        twin.zero_grad()
        loss_of(twin, joined(step)).backward()
        for one in joined(step)[0].unique().tolist():
            reference.step(one, twin.embedding.weight.grad[one])
        rest.step()
    return [twin.embedding.weight.detach(), *(p.detach() for p in twin.out.parameters())]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (3, 2)])
def test_it_learns_as_a_dense_embedding_on_the_joint_batch(rule: str, workers: int, servers: int) -> None:
    model, batches = served(rule), lookup_batches(STEPS, SIZES[:workers])
    start, rows, rest = in_a_job(workers, servers, "bsp", lambda session: train(session, model, batches))
    assert_close([rows, *rest], trained_here(model, start, rule, batches), rtol=1e-12)
    assert torch.equal(rows[USED:], start[USED:])
    assert not torch.equal(rows[:USED], start[:USED])


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_it_learns_as_torch_does(name: str) -> None:
    """The same against torch's own optimizers."""
    model, batches = served(name), lookup_batches(STEPS, (6, 6))
    start, rows, rest = in_a_job(2, 2, "bsp", lambda session: train(session, model, batches))
    twin = Lookup(nn.Embedding.from_pretrained(start.clone(), freeze=False))
    twin.out.load_state_dict(model.out.state_dict())
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    both = [kind(twin.embedding.parameters(), lr=LR), torch.optim.SGD(twin.out.parameters(), lr=0.2)]
    for step in batches:
        twin.zero_grad()
        loss_of(twin, joined(step)).backward()
        for one in both:
            one.step()
    assert_close([rows, *rest], [p.detach() for p in twin.parameters()], rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_servers_does_not_matter_to_the_bit(rule: str) -> None:
    model, batches = served(rule), lookup_batches(STEPS, (6, 6))
    results = [in_a_job(2, servers, "bsp", lambda s: train(s, model, batches)) for servers in (1, 2, 3)]
    for start, rows, rest in results[1:]:
        assert_equal([start, rows, *rest], [results[0][0], results[0][1], *results[0][2]])


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("sync", ["asp", "ssp:2", "delay:0", "every:1", "alone", "delta"])
def test_one_worker_learns_the_same_to_the_bit_in_every_mode(rule: str, sync: str) -> None:
    model, batches = served(rule), lookup_batches(STEPS, (6,))
    wanted = in_a_job(1, 2, "bsp", lambda s: train(s, model, batches))
    if sync == "alone":
        got = within(Session(None, JobFacts(1, ()), 0), lambda session: train(session, model, batches))
    elif sync == "delta":
        got = in_a_job(1, 2, "asp", lambda s: train(s, model, batches, apply="delta"))
        assert_close([*got[:2], *got[2]], [*wanted[:2], *wanted[2]], rtol=1e-12)
        return  # the dense change is added, not subtracted: the last bit may differ
    else:
        got = in_a_job(1, 2, sync, lambda s: train(s, model, batches, prefetch=True))
    assert_equal([*got[:2], *got[2]], [*wanted[:2], *wanted[2]])


def test_in_rounds_the_wrapped_optimizer_may_run_on_the_workers() -> None:
    model, batches = served("adagrad"), lookup_batches(STEPS, (6, 6))
    start, rows, rest = in_a_job(2, 2, "bsp", lambda s: train(s, model, batches, apply="delta"))
    assert_close([rows, *rest], trained_here(model, start, "adagrad", batches), rtol=1e-12)


# Ids.


def one_step(
    ids: torch.Tensor, servers: int = 2, rows: int | None = VOCABULARY, look_at: torch.Tensor = ALL
) -> torch.Tensor:
    """How far rows have moved after one step in which each occurrence of an id has the gradient 1."""

    def work(session: Session) -> torch.Tensor:
        embedding = ServerEmbedding(rows, DIM, rule="sgd", lr=0.5, dtype=torch.float64, start="zeros")
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)
        embedding(ids).sum().backward()
        optimizer.step()
        return -2 * embedding.pull(look_at)[:, 0]

    with ThreadJob(1, servers) as job:
        return job.run(work)[0]


@pytest.mark.parametrize("servers", [1, 3])
def test_neither_order_nor_shape_of_ids_matters_and_duplicates_add_up(servers: int) -> None:
    ids = torch.tensor([7, 0, 7, 3, 19, 3, 7, 11])
    counts = torch.bincount(ids, minlength=VOCABULARY).double()
    orders = [ids, ids.flip(0), ids.sort().values, ids.view(2, 4), ids.view(2, 2, 2), ids.int()]
    for given in orders:
        assert torch.equal(one_step(given, servers), counts)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_an_empty_batch_is_a_step_that_changes_no_row(shape: tuple[int, ...]) -> None:
    assert torch.equal(one_step(torch.empty(shape, dtype=torch.int64)), torch.zeros(VOCABULARY, dtype=torch.float64))


@pytest.mark.parametrize("servers", [1, 3])
def test_any_id_is_one_in_a_table_without_a_bound(servers: int) -> None:
    ids = torch.tensor([2**62 + 5, 0, 2**63 - 1, 2**62 + 5, 2**62 - 1])
    look_at = torch.tensor([2**62 + 5, 2**63 - 1, 2**62 - 1, 0, 2**62 + 4])
    assert one_step(ids, servers, None, look_at).tolist() == [2, 1, 1, 1, 0]


def test_first_values_depend_on_seed_name_and_id_and_the_seed_alone_tells_jobs_apart() -> None:
    def start(servers: int, name: str = "a", **options: int) -> torch.Tensor:
        def work(session: Session) -> torch.Tensor:
            model = nn.ModuleDict({name: ServerEmbedding(None, DIM, **options), "b": nn.Linear(1, 1)})
            wrap(model, session)
            return model[name].pull(ALL)

        with ThreadJob(1, servers) as job:
            return job.run(work)[0]

    assert torch.equal(start(1), start(3))
    assert not torch.equal(start(1), start(1, seed=1))
    assert not torch.equal(start(1), start(1, name="c"))
    assert float(start(1).abs().max()) <= 0.5  # 1 / sqrt(4)


# What is pulled and pushed.


def on_one_worker(work: Callable[[Session, Lookup, DistributedOptimizer], object], sync: str = "bsp") -> None:
    def worker(session: Session) -> None:
        model = served()
        work(session, model, wrap(model, session))

    with ThreadJob(1, 2, sync) as job:
        job.run(worker)


def test_looking_without_gradients_pulls_and_pushes_nothing() -> None:
    def work(session: Session, model: Lookup, optimizer: DistributedOptimizer) -> None:
        before = model.embedding.pull(ALL)
        with torch.no_grad():
            model(ALL.view(-1, 2).repeat(1, 2)[:, :3])
        model.eval()
        optimizer.step()
        assert torch.equal(model.embedding.pull(ALL), before)

    on_one_worker(work)


@pytest.mark.parametrize("prefetched", [False, True])
def test_several_forwards_in_a_step_add_up(prefetched: bool) -> None:
    def work(session: Session, model: Lookup, optimizer: DistributedOptimizer) -> None:
        embedding = model.embedding
        if prefetched:
            embedding.prefetch(torch.tensor([1, 2]))
            optimizer.step()
        before = embedding.pull(ALL)
        loss = embedding(torch.tensor([1, 2])).sum() + embedding(torch.tensor([2, 1])).sum()
        (loss + embedding(torch.tensor([2, 3])).sum()).backward()
        optimizer.step()
        wanted = torch.zeros(VOCABULARY, dtype=torch.float64)
        wanted[1:4] = torch.tensor([2.0, 3.0, 1.0])
        assert_close([(before - embedding.pull(ALL))[:, 0]], [LR * wanted], rtol=1e-12)

    on_one_worker(work)


def test_gradients_are_accumulated_and_dropped_as_those_of_parameters_are() -> None:
    def work(session: Session, model: Lookup, optimizer: DistributedOptimizer) -> None:
        embedding = model.embedding
        before = embedding.pull(ALL)
        embedding(torch.tensor([9])).sum().backward()
        optimizer.zero_grad()
        with optimizer.no_sync():
            for one in (4, 5, 4):
                embedding(torch.tensor([one])).sum().backward()
        embedding(torch.tensor([5])).sum().backward()
        embedding(torch.tensor([6]))  # looked at, but not differentiated
        optimizer.step()
        moved = (before - embedding.pull(ALL))[:, 0]
        assert_close([moved[4:7]], [LR * torch.tensor([2.0, 2.0, 0.0], dtype=torch.float64)], rtol=1e-12)
        assert float(moved[9]) == 0

    on_one_worker(work)


# Ahead of time.


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("cache_keys", [False, True])
def test_prefetched_rows_are_those_that_would_be_pulled_and_cost_no_message(
    workers: int, servers: int, cache_keys: bool
) -> None:
    model, batches = served("adagrad", cache_keys=cache_keys), lookup_batches(STEPS, SIZES[:workers])
    asked: dict[bool, list[int]] = {False: [], True: []}

    def work(session: Session, prefetch: bool) -> Trained:
        pulls = count_pulls(session)
        result = train(session, model, batches, prefetch=prefetch)
        asked[prefetch].append(len({pull.request for pull in pulls}))
        return result

    plain = in_a_job(workers, servers, "bsp", lambda s: work(s, False))
    ahead = in_a_job(workers, servers, "bsp", lambda s: work(s, True))
    assert_equal([*ahead[:2], *ahead[2]], [*plain[:2], *plain[2]])
    assert asked == {False: [STEPS + 2] * workers, True: [1 + 2] * workers}  # the first and last look at all rows count, too


def test_what_was_not_prefetched_is_pulled_and_what_was_is_good_for_one_step() -> None:
    def work(session: Session, model: Lookup, optimizer: DistributedOptimizer) -> None:
        embedding = model.embedding
        rows = embedding.pull(ALL)
        pulls = count_pulls(session)
        embedding.prefetch(torch.tensor([8, 2, 8, 4]))
        optimizer.step()
        assert torch.equal(embedding(torch.tensor([[2, 9], [8, 2]])), rows[[2, 9, 8, 2]].view(2, 2, DIM))
        assert [ids.tolist() for ids in pulls.ids()] == [[9]]
        optimizer.step()
        embedding(torch.tensor([2]))
        assert [ids.tolist() for ids in pulls.ids()] == [[9], [2]]

    on_one_worker(work)


def test_rows_that_came_before_a_skipped_step_are_not_used_after_it() -> None:
    """Under asp the others have gone on."""

    def work(session: Session, model: Lookup, optimizer: DistributedOptimizer) -> None:
        embedding, pulls = model.embedding, count_pulls(session)
        embedding.prefetch(torch.tensor([2]))
        optimizer.step()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        optimizer.step()
        pulls.clear()
        embedding(torch.tensor([2]))
        assert len(pulls) == 1

    on_one_worker(work, "asp")


# What else steers a step.


def test_a_scaler_changes_nothing_and_a_skipped_step_changes_no_row() -> None:
    batches = lookup_batches(STEPS, (6,))
    model = served("adam")

    def scaled(session: Session) -> Trained:
        mine = copy.deepcopy(model)
        optimizer = wrap(mine, session)
        start = mine.embedding.pull(ALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (batch,) in enumerate(batches):
            for bad in [True, False] if number == 3 else [False]:
                optimizer.zero_grad()
                loss = loss_of(mine, batch) * (torch.inf if bad else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return start, mine.embedding.pull(ALL), [p.detach().clone() for p in mine.out.parameters()]

    plain = in_a_job(1, 2, "bsp", lambda s: train(s, model, batches))
    got = in_a_job(1, 2, "bsp", scaled)
    assert_equal([*got[:2], *got[2]], [*plain[:2], *plain[2]])


@pytest.mark.parametrize(("lr", "moves"), [(None, [0.4, 0.2, 0.1]), (0.3, [0.3, 0.3, 0.3])])
def test_without_a_rate_of_its_own_it_follows_the_optimizers(lr: float | None, moves: list[float]) -> None:
    def work(session: Session) -> list[float]:
        model = served(lr=lr)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.4), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        moved, one = [], torch.tensor([1])
        for _ in moves:
            before = model.embedding.pull(one)
            optimizer.zero_grad()
            model.embedding(one).sum().backward()
            optimizer.step()
            scheduler.step()
            moved.append(float((before - model.embedding.pull(one))[0, 0]))
        return moved

    with ThreadJob(1, 2) as job:
        assert job.run(work)[0] == pytest.approx(moves, rel=1e-12)


@pytest.mark.parametrize(
    ("sync", "own", "least"),
    [
        ("bsp", True, 6),
        ("asp", True, 6),
        ("ssp:1", True, 6),
        ("every:2", True, 6),
        ("downpour:push=2,fetch=2", False, 0),
        ("delay:2", False, 0),
    ],
)
def test_prefetched_rows_have_this_workers_own_push_unless_the_mode_postpones_it(sync: str, own: bool, least: int) -> None:
    """Each worker has ids of its own, so that no other changes them: each push moves them down. What came with the answer is
    what a pull brings then; where answers come later, it may be older, and is never newer, or rows are pulled."""

    def work(session: Session) -> int:
        embedding = ServerEmbedding(40, DIM, rule="sgd", lr=0.5, start="zeros", dtype=torch.float64)
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)
        ids, came = torch.arange(session.rank, 40, 2), 0
        for _ in range(6):
            embedding(ids).sum().backward()
            embedding.prefetch(ids)
            optimizer.step()
            optimizer.zero_grad()
            ready, pulled = embedding.table._ready, embedding.pull(ids)
            if ready is not None:
                assert torch.equal(ready[1], pulled) if own else bool((ready[1] >= pulled).all())
                came += 1
        return came

    with ThreadJob(2, 2, sync) as job:
        found = job.run(work)
    assert min(found) >= least, found

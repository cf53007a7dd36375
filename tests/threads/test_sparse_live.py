"""Sparse embeddings in live jobs: n workers on parts of a batch are one process with a dense embedding on all of it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import MakeOptimizer, assert_close, assert_equal, joined, loss_of, trained, trained_alone, weights
from tabled import USED, Lookup, dense_twin, lookup_batches, lookup_model
from torch import nn

from polytempo.reducer.servers import ServerExchange
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.both_wires,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch's own optimizers make sparse tensors
]

STEPS, SIZES = 8, (6, 6, 6)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    # A power of two: products with it are exact, so fused and separate multiplication and addition give the same bits.
    "sgd": lambda p: torch.optim.SGD(p, lr=0.25),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
}
KINDS = pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=["embedding", "bag"])


def all_equal(results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    for result in results[1:]:
        assert_equal(result, results[0])
    return results[0]


def assert_untouched(model: Lookup, got: list[torch.Tensor]) -> None:
    assert torch.equal(got[0][USED:], model.embedding.weight.detach()[USED:])
    assert not torch.equal(got[0][:USED], model.embedding.weight.detach()[:USED])


@KINDS
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (3, 1), (3, 2)])
def test_sparse_is_dense_on_the_joint_batch(kind: type[nn.Module], name: str, workers: int, servers: int) -> None:
    model, make = lookup_model(kind), OPTIMIZERS[name]
    batches = lookup_batches(STEPS, SIZES[:workers])

    def work(session: Session) -> list[torch.Tensor]:
        got, optimizer = trained(session, model, make, batches)
        assert isinstance(optimizer._reducer, ServerExchange)
        assert [table.info.name for table in optimizer._reducer.rows.tables] == ["embedding.weight"]
        return got

    with ThreadJob(workers, servers) as job:
        got = all_equal(job.run(work))
    assert_close(got, trained_alone(dense_twin(model), make, batches), rtol=1e-12)
    assert_untouched(model, got)


@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (3, 2)])
def test_sparse_adam_beside_another_optimizer(workers: int, servers: int) -> None:
    """An embedding with an optimizer of its own: two tracks, each with a clock of its own."""
    model = lookup_model()
    batches = lookup_batches(STEPS, SIZES[:workers])
    pair = lambda m: (torch.optim.SparseAdam([m.embedding.weight], lr=0.05), torch.optim.Adam(m.out.parameters(), lr=0.05))  # noqa: E731

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        both = [DistributedOptimizer(one, mine) for one in pair(mine)]
        for step in batches:
            for optimizer in both:
                optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            for optimizer in both:
                optimizer.step()
        return weights(mine)

    with ThreadJob(workers, servers) as job:
        got = all_equal(job.run(work))
    alone = copy.deepcopy(model)
    both = pair(alone)
    for step in batches:
        alone.zero_grad()
        loss_of(alone, joined(step)).backward()
        for one in both:
            one.step()
    assert_close(got, weights(alone), rtol=1e-12)
    assert_untouched(model, got)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batches_of_different_sizes_count_by_their_samples(name: str) -> None:
    model, make, sizes = lookup_model(), OPTIMIZERS[name], (2, 9, 5)
    batches = lookup_batches(STEPS, sizes)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(make(list(mine.parameters())), mine)
        for step in batches:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step(samples=sizes[session.rank])
        return weights(mine)

    with ThreadJob(3, 2) as job:
        got = all_equal(job.run(work))
    assert_close(got, trained_alone(dense_twin(model), make, batches), rtol=1e-12)


@KINDS
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2", "delay:0"])
def test_one_worker_trains_as_without_a_job_bit_for_bit(kind: type[nn.Module], name: str, sync: str) -> None:
    model, make = lookup_model(kind), OPTIMIZERS[name]
    batches = lookup_batches(STEPS, (6,))
    with ThreadJob(1, 2, sync) as job:
        got = job.run(lambda session: trained(session, model, make, batches)[0])[0]
    if name == "sgd":
        # torch's sparse SGD adds what a row has twice to the weight one by one; its dense one adds it up first as we do, but
        # the order in which it does is its own: with AVX-512 and many threads the last bit differs.
        torch.testing.assert_close(list(got), list(trained_alone(dense_twin(model), make, batches)), rtol=1e-14, atol=1e-16)
    else:
        assert_equal(got, trained_alone(model, make, batches))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_does_not_give_the_model_has_it_trained_as_a_dense_one(name: str) -> None:
    model, make = lookup_model(), OPTIMIZERS[name]
    batches = lookup_batches(STEPS, SIZES)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(make(list(mine.parameters())))
        for step in batches:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return weights(mine)

    with ThreadJob(3, 2) as job:
        got = all_equal(job.run(work))
    assert_close(got, trained_alone(dense_twin(model), make, batches), rtol=1e-12)
    assert_untouched(model, got)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sequencer", [True, False], ids=["sequencer", "alone"])
def test_workers_average_it_among_themselves(name: str, sequencer: bool) -> None:
    model, make = lookup_model(), OPTIMIZERS[name]
    batches = lookup_batches(STEPS, SIZES)
    with ThreadJob(3, via="allreduce") if sequencer else GroupJob(3) as job:
        got = all_equal(job.run(lambda session: trained(session, model, make, batches)[0]))
    assert_close(got, trained_alone(dense_twin(model), make, batches), rtol=1e-12)
    assert_untouched(model, got)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_wrapped_optimizer_may_run_on_the_worker(sync: str) -> None:
    model, make = lookup_model(), OPTIMIZERS["adagrad"]
    workers = 1 if sync == "asp" else 2
    batches = lookup_batches(STEPS, SIZES[:workers])
    with ThreadJob(workers, 2, sync) as job:
        got = all_equal(job.run(lambda session: trained(session, model, make, batches, apply="delta")[0]))
    assert_close(got, trained_alone(dense_twin(model), make, batches), rtol=1e-12)


@pytest.mark.parametrize("sync", ["asp", "ssp:1", "delay:2", "every:2", "bsp+backup:1"])
def test_in_every_mode_all_copies_are_the_servers_when_all_are_done(sync: str) -> None:
    model, make = lookup_model(), OPTIMIZERS["adagrad"]
    batches = lookup_batches(STEPS, SIZES)
    done = threading.Barrier(3)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(make(list(mine.parameters())), mine)
        while (number := optimizer.stats["step"]) < STEPS:  # who comes too late for a round is led past it
            optimizer.zero_grad()
            loss_of(mine, batches[number][session.rank]).backward()
            optimizer.step()
        optimizer.consolidate()  # the last pushes have arrived
        done.wait(30)
        optimizer.consolidate()
        done.wait(30)
        return weights(mine)

    with ThreadJob(3, 2, sync) as job:
        got = all_equal(job.run(work))
        tables = [server.executor.state.optimizer_shards["0"].rows.tables[0] for server in job.servers]
        held = torch.stack([tables[row % 2].pull(torch.tensor([row]))[0] for row in range(len(got[0]))])
    assert torch.equal(got[0], held)
    assert_untouched(model, got)


def test_a_read_in_between_does_not_hide_what_others_changed() -> None:
    """Worker 0 changes a row, worker 1 reads and then trains on another row: it must come to know of both."""
    model = lookup_model()
    turns = [threading.Barrier(2) for _ in range(2)]

    def work(session: Session) -> torch.Tensor:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](list(mine.parameters())), mine)

        def step(one: int) -> None:
            optimizer.zero_grad()
            mine(torch.tensor([[one, one, one]])).square().sum().backward()
            optimizer.step()

        if session.rank == 0:
            step(3)
        turns[0].wait(20)
        if session.rank == 1:
            optimizer.consolidate()
            step(5)
        turns[1].wait(20)
        if session.rank == 0:
            step(5)
        return mine.embedding.weight.detach().clone()

    with ThreadJob(2, 2, "asp") as job:
        got = job.run(work)
    assert torch.equal(got[0][3], got[1][3])


def test_what_changed_is_remembered_though_pushes_share_their_memory() -> None:
    """On one shard slots are ids, and ids are a push's own memory, which is used again where pushes are large."""
    turns, count = threading.Barrier(2), 20_000
    start = torch.zeros(40 * count, 1)

    def work(session: Session) -> torch.Tensor:
        embedding = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), embedding)
        for number in range(4) if session.rank == 0 else ():
            optimizer.zero_grad()
            embedding(torch.arange(number * count, (number + 1) * count)).sum().backward()
            optimizer.step()
        turns.wait(20)
        if session.rank == 1:
            embedding(torch.tensor([40 * count - 1])).sum().backward()
            optimizer.step()
        turns.wait(20)
        return embedding.weight.detach()[: 4 * count].clone()

    with ThreadJob(2, 1, "asp,scale=1") as job:
        got = job.run(work)
    assert torch.equal(got[1], torch.full((4 * count, 1), -1.0))
    assert torch.equal(got[0], got[1])


@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize("servers", [1, 3])
def test_its_state_is_torchs_and_is_gone_on_from(servers: int, wrapped_first: bool) -> None:
    """Read in the middle of one job, loaded in another: before the optimizer is wrapped, or after."""
    model, make, batches = lookup_model(), OPTIMIZERS["adagrad"], lookup_batches(STEPS, SIZES[:2])
    alone = dense_twin(model)
    plain = make(list(alone.parameters()))

    def train(optimizer: torch.optim.Optimizer, mine: nn.Module, rank: int | None, part: slice) -> None:
        for step in batches[part]:
            optimizer.zero_grad()
            loss_of(mine, joined(step) if rank is None else step[rank]).backward()
            optimizer.step()

    def first(session: Session) -> tuple[Lookup, dict[str, Any]]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(make(list(mine.parameters())), mine)
        train(optimizer, mine, session.rank, slice(0, 4))
        return mine, optimizer.state_dict()

    with ThreadJob(2, servers) as job:
        middle, state = job.run(first)[0]
    train(plain, alone, None, slice(0, 4))
    wanted = plain.state_dict()["state"]
    assert list(state["state"]) == list(wanted)
    for one, other in zip(state["state"].values(), wanted.values(), strict=True):
        assert_close([one["sum"], one["step"]], [other["sum"], other["step"]], rtol=1e-12)

    def second(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(middle)
        inner = make(list(mine.parameters()))
        if not wrapped_first:
            inner.load_state_dict(copy.deepcopy(state))
        optimizer = DistributedOptimizer(inner, mine)
        if wrapped_first:
            optimizer.load_state_dict(copy.deepcopy(state))
        train(optimizer, mine, session.rank, slice(4, None))
        return weights(mine)

    with ThreadJob(2, 2) as job:
        got = all_equal(job.run(second))
    train(plain, alone, None, slice(4, None))
    assert_close(got, weights(alone), rtol=1e-12)


def test_a_learning_rate_that_changes_is_followed() -> None:
    model, batches = lookup_model(), lookup_batches(STEPS, (6, 6))

    def train(optimizer: torch.optim.Optimizer, mine: nn.Module, rank: int | None) -> list[torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for step in batches:
            optimizer.zero_grad()
            loss_of(mine, joined(step) if rank is None else step[rank]).backward()
            optimizer.step()
            scheduler.step()
        return weights(mine)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        return train(DistributedOptimizer(OPTIMIZERS["sgd"](list(mine.parameters())), mine), mine, session.rank)

    with ThreadJob(2, 2) as job:
        got = all_equal(job.run(work))
    alone = dense_twin(model)
    assert_close(got, train(OPTIMIZERS["sgd"](list(alone.parameters())), alone, None), rtol=1e-12)


def test_an_embedding_that_is_also_the_last_layer_learns_from_both() -> None:
    """Its gradient is then dense."""
    batches = lookup_batches(4, (6, 6))

    class Tied(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 2, sparse=sparse, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).sum(1) @ self.embedding.weight[:2]

    start = torch.randn(20, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    models = [Tied(sparse) for sparse in (True, False)]
    for model in models:
        model.embedding.weight.data.copy_(start)
    with ThreadJob(2, 2) as job:
        got = all_equal(job.run(lambda s: trained(s, models[0], OPTIMIZERS["adagrad"], batches)[0]))
    assert_close(got, trained_alone(models[1], OPTIMIZERS["adagrad"], batches), rtol=1e-12)


def test_bytes_follow_the_rows_that_were_touched_and_not_the_table() -> None:
    def traffic(rows: int, touched: int) -> tuple[int, int]:
        def work(session: Session) -> tuple[int, int]:
            embedding = nn.Embedding(rows, 8, sparse=True)
            optimizer = DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding)
            before = optimizer.stats["bytes_sent"], optimizer.stats["bytes_received"]
            embedding(torch.arange(touched)).sum().backward()
            optimizer.step()
            return optimizer.stats["bytes_sent"] - before[0], optimizer.stats["bytes_received"] - before[1]

        with ThreadJob(1, 2, "asp") as job:
            return job.run(work)[0]

    small, large, more = traffic(1000, 100), traffic(100_000, 100), traffic(1000, 200)
    each = 100 * (8 + 8 * 4)
    for one, other, twice in zip(small, large, more, strict=True):
        assert abs(one - other) < 50
        assert each <= one < each + 1500
        assert abs(twice - one - each) < 50

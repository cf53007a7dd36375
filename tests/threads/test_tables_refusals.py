"""What cannot be with tables is refused at the call, in one line that says what to do, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.errors import PolytempoError, UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = pytest.mark.timeout(30)

ROWS, DIM = 20, 4


class Model(nn.Module):
    """A table on the servers, and something dense."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given = {"rule": "sgd", "lr": 1.0, "start": "zeros", "rows": ROWS, "dim": DIM, **options}
        self.table = ServerEmbedding(**given)
        self.out = nn.Linear(DIM, 1)


def wrapped(model: nn.Module, session: Session, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, **options)


def moves_a_row(model: Model, optimizer: DistributedOptimizer) -> None:
    """Training goes on: a step changes the row it is about, once, and no other."""
    before = model.table.pull(torch.arange(ROWS))
    optimizer.zero_grad()
    model.table(torch.tensor([3])).sum().backward()
    optimizer.step()
    after = model.table.pull(torch.arange(ROWS))
    before[3] -= 1.0
    assert torch.equal(after, before)


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


# Ids.

BAD_IDS: dict[str, tuple[Any, str]] = {
    "floats": (torch.tensor([1.0, 2.0]), r"expected ids from 0 to 19, got 1.0 at position 0 .*use ids.long\(\)"),
    "booleans": (torch.tensor([True]), r"expected ids from 0 to 19, got True"),
    "negative": (torch.tensor([2, -1]), r"expected ids from 0 to 19, got -1 at position 1 of 2; leave padding out"),
    "too large": (torch.tensor([[2, 20]]), r"expected ids from 0 to 19, got 20 at position 1 of 2; .*rows=None"),
    "text": (["a"], r"expected ids from 0 to 19, got 'a'"),
    "no ids": ("ids", r"expected a tensor or an array of integers, or a list of ints, got str"),
}


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("where", ["forward", "prefetch", "pull"])
def test_bad_ids_are_refused_before_anything_travels(where: str, bad: str, padding: int | None) -> None:
    ids, words = BAD_IDS[bad]
    if where != "pull" and not isinstance(ids, torch.Tensor):
        words = r"expected a tensor of ids, got (list|str); use torch.as_tensor\(ids\)"

    def work(session: Session) -> None:
        model = Model(padding_idx=padding)
        optimizer = wrapped(model, session)
        assert session.client is not None
        sent = session.client.bytes_sent
        refused(lambda: getattr(model.table, where)(ids), words)
        assert session.client.bytes_sent == sent
        moves_a_row(model, optimizer)

    with ThreadJob(1, 2) as job:
        job.run(work)


def test_a_bad_batch_in_the_middle_of_a_step_loses_no_gradient() -> None:
    def work(session: Session) -> torch.Tensor:
        model = Model()
        optimizer = wrapped(model, session)
        model.table(torch.tensor([3, 4])).sum().backward()
        refused(lambda: model.table(torch.tensor([99])), "got 99")
        refused(lambda: model.table.prefetch(torch.tensor([-5])), "got -5")
        model.table(torch.tensor([4])).sum().backward()
        optimizer.step()
        return model.table.pull(torch.arange(6))[:, 0]

    with ThreadJob(1, 2) as job:
        assert job.run(work)[0].tolist() == [0, 0, 0, -1, -2, 0]


# Tables and optimizers that cannot be.

BAD_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown rule": ({"rule": "adagrda"}, r"expected a rule of .*, got 'adagrda'.*adagrad"),
    "a rule that does not learn": ({"rule": "assign"}, r"rule 'assign' does not learn from gradients; use sgd, adagrad"),
    "unknown option": ({"momentun": 0.9}, r"rule 'sgd' has the options .*, not 'momentun'.*momentum"),
    "option of another rule": ({"beta1": 0.9}, r"rule 'sgd' has the options lr, weight_decay, momentum, not 'beta1'"),
    "bad rate": ({"lr": -1.0}, r"expected lr to be a finite number from 0 on, got -1.0"),
    "no rows": ({"rows": 0}, r"expected rows to be a number from 1 on, or None for any id, got 0"),
    "no columns": ({"dim": 0}, r"expected dim to be a number from 1 on, got 0"),
    "unknown start": (
        {"start": "uniforn"},
        r"unknown start 'uniforn'; nearest: uniform; known: zeros, uniform:0.1, normal:0.01",
    ),
    "unknown mode": ({"mode": "max"}, r"expected mode to be None, 'sum' or 'mean', got 'max'"),
    "dtype": ({"dtype": torch.int64}, r"expected dtype to be one of .*, got torch.int64"),
}


@pytest.mark.parametrize("bad", BAD_TABLES)
def test_a_table_that_cannot_be_is_refused_when_it_is_made(bad: str) -> None:
    options, words = BAD_TABLES[bad]
    refused(lambda: Model(**options), words)


class Sparse(nn.Module):
    """An embedding that workers mirror."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, sparse=True, **options)


def make(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, session: Session, **options: Any) -> object:
    return DistributedOptimizer(kind(model.parameters(), **options), model)


BAD_OPTIMIZERS: dict[str, tuple[Callable[[Session], object], str]] = {
    "clip_norm": (lambda s: wrapped(Model(), s, clip_norm=1.0), "clip_norm sees dense gradients only.*leave it out"),
    "clip_norm, mirrored": (
        lambda s: wrapped(Sparse(), s, clip_norm=1.0),
        "clip_norm sees dense gradients only.*leave it out",
    ),
    "allreduce": (lambda s: wrapped(Model(), s, via="allreduce"), "and via='allreduce' goes without them; leave via= out"),
    "Adam": (
        lambda s: make(torch.optim.Adam, Sparse(), s),
        "words has sparse gradients, which Adam does not take; use SGD, Adagrad, SparseAdam",
    ),
    "momentum": (
        lambda s: make(torch.optim.SGD, Sparse(), s, lr=0.1, momentum=0.9),
        r"SGD with momentum=0.9 cannot take the sparse gradients .* momentum=0, or use sparse=False",
    ),
    "weight decay": (
        lambda s: make(torch.optim.Adagrad, Sparse(), s, weight_decay=0.1),
        r"Adagrad with weight_decay=0.1 cannot take the sparse gradients .* weight_decay=0, or use sparse=False",
    ),
    "max_norm": (
        lambda s: wrapped(Sparse(max_norm=1.0), s),
        "words: max_norm changes rows .*leave it out",
    ),
}


@pytest.mark.parametrize("bad", BAD_OPTIMIZERS)
def test_an_optimizer_that_cannot_be_is_refused_and_another_is_made_instead(bad: str) -> None:
    """One worker is refused; the other, which was not, still finds it."""
    call, words = BAD_OPTIMIZERS[bad]

    def work(session: Session) -> None:
        if session.rank == 0:
            refused(lambda: call(session), words)
        model = Model()
        optimizer = wrapped(model, session)
        moves_a_row(model, optimizer)

    with ThreadJob(2, 2) as job:
        job.run(work)


def test_a_model_that_was_refused_can_be_used_again() -> None:
    """Its rows begin as those of the worker that was not refused."""

    def work(session: Session) -> torch.Tensor:
        model = Model(start="uniform", seed=5)
        if session.rank == 0:
            refused(lambda: wrapped(model, session, clip_norm=1.0), "clip_norm")
        optimizer = wrapped(model, session)
        start = model.table.pull(torch.arange(ROWS))
        moves_a_row(model, optimizer)
        return start

    with ThreadJob(2, 2) as job:
        got = job.run(work)
    assert torch.equal(got[0], got[1])


def test_a_table_belongs_to_one_optimizer() -> None:
    def work(session: Session) -> None:
        model = Model()
        refused(lambda: model.table(torch.tensor([1])), "belongs to no optimizer yet; give the model")
        refused(lambda: model.table.pull(torch.tensor([1])), "belongs to no optimizer yet")
        optimizer = wrapped(model, session)
        refused(lambda: wrapped(model, session), "table belongs to another DistributedOptimizer already")
        moves_a_row(model, optimizer)

    with ThreadJob(1, 2) as job:
        job.run(work)


def test_without_servers_a_table_on_servers_is_refused() -> None:
    with GroupJob(2) as job:
        job.run(lambda session: refused(lambda: wrapped(Model(), session), "polytempo run --servers 1"))


def test_after_unscaling_by_hand_a_step_is_refused() -> None:
    """A scaler does not see rows on servers: they would be pushed with its scale."""

    def work(session: Session) -> None:
        model = Model()
        optimizer = wrapped(model, session)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model.out(model.table(torch.tensor([3]))).sum()).backward()
        scaler.unscale_(optimizer)
        refused(lambda: scaler.step(optimizer), r"scaler.unscale_\(\) does not see the rows .* leave it out")
        del optimizer.grad_scale, optimizer.found_inf
        moves_a_row(model, optimizer)

    with ThreadJob(1, 2) as job:
        job.run(work)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rows": 21}, "table"),
        ({"rows": None}, "table"),
        ({"dim": 5}, "table|out"),
        ({"rule": "adagrad"}, "table.*adagrad|adagrad.*table"),
        ({"seed": 1}, "table"),
        ({"dtype": torch.float64}, "table.*float64|float64.*table"),
    ],
    ids=str,
)
def test_workers_whose_tables_differ_are_told(other: dict[str, Any], words: str) -> None:
    with pytest.raises(PolytempoError, match=words) as caught, ThreadJob(2, 2) as job:
        job.run(lambda session: wrapped(Model(**(other if session.rank else {})), session))
    assert "worker" in str(caught.value)
    assert "\n" not in str(caught.value).strip()

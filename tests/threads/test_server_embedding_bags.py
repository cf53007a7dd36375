"""A `ServerEmbedding` with a mode is an `nn.EmbeddingBag`, with padding an `nn.Embedding` whose padding is zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_close
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

ROWS, DIM, LR = 12, 3, 0.1
ALL = torch.arange(ROWS)

#: Bags as a matrix, or as a list and where each begins; with empty bags in the middle and at the ends.
BAGS: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "matrix": (torch.tensor([[1, 2, 4], [4, 4, 0]]), None),
    "list": (torch.tensor([1, 2, 4, 4, 0]), torch.tensor([0, 3])),
    "empty bags": (torch.tensor([1, 2, 4, 4, 0]), torch.tensor([0, 0, 3, 3, 5])),
    "all empty": (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
    "no bags": (torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)),
    "all padding": (torch.tensor([4, 4]), torch.tensor([0, 1])),
}


def compare(embedding: ServerEmbedding, twin: Callable[[torch.Tensor], nn.Module], *given: torch.Tensor | None) -> None:
    """Output and change of rows of a step are those of a module with the same rows."""
    wanted: list[torch.Tensor] = []

    def work(session: Session) -> list[torch.Tensor]:
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)
        here = twin(embedding.pull(ALL))
        outputs = [embedding(*given), here(*given)]
        for output in outputs:
            (output * torch.arange(output.numel(), dtype=torch.float64).view(output.shape)).sum().backward()
        optimizer.step()
        torch.optim.SGD(here.parameters(), lr=LR).step()
        wanted.extend([outputs[1].detach(), here.weight.detach()])
        return [outputs[0].detach(), embedding.pull(ALL)]

    with ThreadJob(1, 2) as job:
        got = job.run(work)[0]
    assert_close(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("bags", BAGS)
def test_bags_are_those_of_torch(bags: str, mode: str, padding: int | None) -> None:
    embedding = ServerEmbedding(ROWS, DIM, rule="sgd", lr=LR, mode=mode, padding_idx=padding, dtype=torch.float64)

    def twin(rows: torch.Tensor) -> nn.Module:
        return nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode=mode, padding_idx=padding)

    compare(embedding, twin, *BAGS[bags])


@pytest.mark.parametrize("ids", [[[1, 4, 4], [2, 4, 1]], [[4, 4], [4, 4]], [4], [[0, 1]]], ids=str)
def test_padding_is_zero_and_learns_nothing(ids: list[int]) -> None:
    embedding = ServerEmbedding(ROWS, DIM, rule="sgd", lr=LR, padding_idx=4, dtype=torch.float64)

    def twin(rows: torch.Tensor) -> nn.Module:
        rows = rows.clone()
        rows[4] = 0
        return nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=4)

    seen: list[torch.Tensor] = []
    inner = embedding.pull

    def pull(some: torch.Tensor) -> torch.Tensor:
        """The row under the padding's id keeps its first values, which are never used."""
        rows = inner(some)
        seen.append(rows[4].clone())
        rows[4] = 0
        return rows

    embedding.pull = pull  # type: ignore[method-assign]
    compare(embedding, twin, torch.tensor(ids))
    assert torch.equal(seen[0], seen[1])


def test_padding_may_be_an_id_that_is_none() -> None:
    """-1 fills batches, as many tokenizers have it."""

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = ServerEmbedding(None, DIM, rule="sgd", lr=LR, padding_idx=-1)
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)
        embedding.prefetch(torch.tensor([[7, -1], [-1, -1]]))
        optimizer.step()
        got = embedding(torch.tensor([[7, -1], [-1, -1]]))
        return got.detach(), embedding.pull(torch.tensor([7]))

    with ThreadJob(1, 2) as job:
        got, row = job.run(work)[0]
    assert torch.equal(got[0, 0], row[0])
    assert not got[0, 1].any()
    assert not got[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_fewer_bits_are_rounded_once_an_update(dtype: torch.dtype) -> None:
    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = ServerEmbedding(ROWS, DIM, rule="sgd", lr=LR, dtype=dtype)
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)
        before = embedding.pull(ALL)
        embedding(ALL).sum().backward()
        optimizer.step()
        return before, embedding.pull(ALL)

    with ThreadJob(1, 2) as job:
        before, after = job.run(work)[0]
    assert after.dtype == dtype
    assert torch.equal(after, (before.float() - LR).to(dtype))

"""Models with an embedding, and their data, for tests of tables in live jobs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from helpers import Batch, made_from_seed
from torch import nn

from polytempo.protocol.messages import AnyMessage, Pull
from polytempo.server.optimizer_state import as_tensor
from polytempo.session.session import Session
from polytempo.transport.channel import Bytes

VOCABULARY, USED, DIM = 20, 15, 4  # ids from USED on never come: their rows must keep their bits


class Lookup(nn.Module):
    """Embed three ids, add them up, and make two numbers of it."""

    def __init__(self, embedding: nn.Module, dim: int = DIM) -> None:
        super().__init__()
        self.embedding = embedding
        self.out = nn.Linear(dim, 2).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(ids)
        return self.out(torch.tanh(rows.sum(1) if rows.dim() == 3 else rows))


def lookup_model(kind: type[nn.Module] = nn.Embedding, seed: int = 0) -> Lookup:
    """A model with a sparse embedding."""
    return made_from_seed(seed, lambda: Lookup(kind(VOCABULARY, DIM, sparse=True, dtype=torch.float64)))  # type: ignore


def dense_twin(model: Lookup) -> Lookup:
    """The same model, whose gradients are dense."""
    twin = copy.deepcopy(model)
    twin.embedding.sparse = False
    return twin


def lookup_batches(steps: int, sizes: Sequence[int], seed: int = 1, used: int = USED) -> list[list[Batch]]:
    """For each step one batch for each worker, of the sizes given: three ids a sample, and two numbers."""
    generator = torch.Generator().manual_seed(seed)
    ids = lambda size: torch.randint(0, used, (size, 3), generator=generator)  # noqa: E731
    numbers = lambda size: torch.randn(size, 2, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[(ids(size), numbers(size)) for size in sizes] for _ in range(steps)]


class SentPulls(list[Pull]):
    """The pulls that a worker has sent, one for each shard that was asked, and their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[torch.Tensor | None] = []

    def ids(self) -> list[torch.Tensor]:
        """The ids of those that were sent in full."""
        return [ids for ids in self.lists if ids is not None]


def count_pulls(session: Session) -> SentPulls:
    """From now on, note the pulls that this worker sends."""
    assert session.client is not None
    requests, sent = session.client.requests, SentPulls()
    send = requests.send

    def note(shard: int, message: AnyMessage, buffers: Sequence[Bytes]) -> None:
        if isinstance(message, Pull):
            sent.append(message)
            sent.lists.append(as_tensor(buffers[0], "int64").clone() if buffers else None)
        send(shard, message, buffers)

    requests.send = note
    return sent

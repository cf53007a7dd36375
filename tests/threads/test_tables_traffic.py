"""The bytes of a step follow the unique ids of its batch, never the rows of the table; lists are sent once."""

from __future__ import annotations

import pytest
import torch
from tabled import SentPulls, count_pulls
from torch import nn

from polytempo.client.client import Client
from polytempo.compression.key_cache import KeyReceiver
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding
from polytempo.transport import shared_memory

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

DIM = 8
HEADERS = 200  # by so much the headers of a step may differ


def made(
    session: Session, rows: int | None, dim: int = DIM, **options: object
) -> tuple[ServerEmbedding, DistributedOptimizer]:
    embedding = ServerEmbedding(rows, dim, rule="sgd", lr=0.5, **options)  # type: ignore[arg-type]
    return embedding, DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), embedding)


def client_of(session: Session) -> Client:
    assert session.client is not None
    return session.client


def traffic(rows: int | None, ids: torch.Tensor, servers: int = 2, prefetch: bool = False) -> tuple[int, int]:
    """Bytes sent and received for one step, and for the pull before it or the rows that come with it."""

    def work(session: Session) -> tuple[int, int]:
        embedding, optimizer = made(session, rows)
        client = client_of(session)
        if prefetch:
            embedding.prefetch(ids)
            optimizer.step()
        sent, received = client.bytes_sent, client.bytes_received
        embedding(ids).sum().backward()
        if prefetch:
            embedding.prefetch(ids)
        optimizer.step()
        return client.bytes_sent - sent, client.bytes_received - received

    with ThreadJob(1, servers) as job:
        return job.run(work)[0]


@pytest.mark.parametrize("prefetch", [False, True])
def test_bytes_depend_on_the_ids_and_not_on_the_table(prefetch: bool) -> None:
    ids = torch.arange(0, 1000, 5)
    tables = [traffic(rows, ids, prefetch=prefetch) for rows in (1000, 10_000_000, None)]
    for sent, received in tables[1:]:
        assert abs(sent - tables[0][0]) < HEADERS
        assert abs(received - tables[0][1]) < HEADERS


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("servers", [1, 3])
def test_twice_the_ids_are_twice_the_bytes_and_repeats_are_none(servers: int, prefetch: bool) -> None:
    few, many = torch.arange(500), torch.arange(1000)
    one, two = traffic(None, few, servers, prefetch), traffic(None, many, servers, prefetch)
    again = traffic(None, few.repeat(7), servers, prefetch)
    pushed, pulled = 500 * (8 + 8 + DIM * 4), 500 * DIM * 4  # ids of the pull and of the push, and rows; rows
    assert abs(two[0] - one[0] - pushed) < HEADERS
    assert abs(two[1] - one[1] - pulled) < HEADERS
    assert pushed <= one[0] < pushed + 3000  # headers
    assert abs(again[0] - one[0]) < HEADERS
    assert abs(again[1] - one[1]) < HEADERS


# Lists that come again.


class Epochs:
    """Some batches, gone through several times; what was sent for each, and the rows in the end."""

    def __init__(self, cached: bool, prefetch: bool, forget: bool = False, ids: int = 1000, dim: int = DIM) -> None:
        batches = [torch.arange(start, 3 * ids, 3) for start in range(3)]
        self.sent: list[int] = []
        self.pulls = SentPulls()

        def work(session: Session) -> torch.Tensor:
            embedding, optimizer = made(session, None, dim, cache_keys=cached)
            client = client_of(session)
            for number in range(9):
                if forget and number == 5:
                    drop_lists(job)
                if number == 6:
                    self.pulls = count_pulls(session)
                before = client.bytes_sent
                optimizer.zero_grad()
                embedding(batches[number % 3]).sum().backward()
                if prefetch:
                    embedding.prefetch(batches[(number + 1) % 3])
                optimizer.step()
                self.sent.append(client.bytes_sent - before)
            self.full = len(self.pulls.ids())
            return embedding.pull(torch.arange(3 * ids))

        with ThreadJob(1, 2) as job:
            self.rows = job.run(work)[0]


def drop_lists(job: ThreadJob) -> None:
    """The servers forget every list of ids; their receivers stay."""
    for server in job.servers:
        for worker in server._inbox._keys._lists:
            server._inbox._keys._lists[worker] = KeyReceiver(1 << 20)


@pytest.mark.parametrize("prefetch", [False, True])
def test_lists_that_come_again_are_not_sent_again(prefetch: bool) -> None:
    plain, cached = Epochs(False, prefetch), Epochs(True, prefetch)
    assert torch.equal(plain.rows, cached.rows)
    lists = 2 * 1000 * 8  # of the push, and of the pull or the wish
    for number in range(3, 9):
        assert abs(plain.sent[number] - cached.sent[number] - lists) < 2 * HEADERS
    assert sum(cached.sent[:3]) < sum(plain.sent[:3]) + 3 * HEADERS


def test_long_lists_are_remembered_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bytes travel, the memory of long pushes is used again; that of lists as long as they must not be."""
    monkeypatch.setattr(shared_memory, "SHARE_FROM", 1 << 30)
    plain, cached = (Epochs(one, prefetch=False, ids=20_000, dim=2) for one in (False, True))
    assert torch.equal(plain.rows, cached.rows)


@pytest.mark.parametrize("prefetch", [False, True])
def test_servers_that_forget_are_sent_the_list_once_more(prefetch: bool) -> None:
    plain, cached = Epochs(False, prefetch), Epochs(True, prefetch, forget=True)
    assert torch.equal(plain.rows, cached.rows)
    assert cached.sent[5] > cached.sent[8] + 1000 * 8 - HEADERS  # it was sent
    assert cached.sent[8] < plain.sent[8] - 2 * 1000 * 8 + 2 * HEADERS  # and remember from then on
    assert prefetch or cached.sent[5] < plain.sent[5]  # once for the pull; the push finds it there
    assert cached.full == (0 if prefetch else 2 * 2)  # of the other two batches, to two servers

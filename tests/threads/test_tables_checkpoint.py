"""Tables in checkpoints: a job goes on with other numbers of servers as if nothing had happened."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Batch, assert_equal, loss_of, made_from_seed
from tabled import DIM, VOCABULARY, Lookup, lookup_batches, lookup_model
from torch import nn

from polytempo.errors import PolytempoError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.kv import KV, Array
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.both_wires,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

ALL = torch.arange(VOCABULARY)
SERVERS = pytest.mark.parametrize("servers", [(3, 2), (1, 3), (2, 2)], ids=str)


def served(rows: int | None = VOCABULARY, dim: int = DIM, rule: str = "adagrad", seed: int = 0, **options: Any) -> Lookup:
    embedding = ServerEmbedding(rows, dim, rule=rule, lr=0.1, seed=seed, dtype=torch.float64, **options)
    return made_from_seed(0, lambda: Lookup(embedding, dim))  # type: ignore[return-value]


def run_job(
    servers: int, model: Lookup, batches: Sequence[Sequence[Batch]], first: int = 0, **options: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """Train two workers from step `first` on: weights and rows of both, which are equal; and the servers' tables."""

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.Adagrad(mine.parameters(), lr=0.1), mine)
        assert optimizer.stats["step"] == first
        for step in batches[first:]:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        rows = [mine.embedding.pull(ALL)] if isinstance(mine.embedding, ServerEmbedding) else []
        return [*rows, *(p.detach().clone() for p in mine.parameters())]

    with ThreadJob(2, servers, **options) as job:
        results = job.run(work)
        tables = [server.executor.state.optimizer_shards["0"].rows.tables[0] for server in job.servers]
    assert_equal(results[1], results[0])
    return results[0], tables


def whole(tables: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The rows of all shards and what is kept beside them, by id."""
    parts = [table.saved() for table in tables]
    order = torch.cat([part["ids"] for part in parts]).argsort()
    names = [name for name in parts[0] if name not in ("steps", "versions")]
    return {name: torch.cat([part[name] for part in parts])[order] for name in names}


@SERVERS
@pytest.mark.parametrize("rule", ["adagrad", "rowwise-adagrad", "adam", "sgd"])
def test_rows_on_servers_go_on_bit_for_bit(rule: str, servers: tuple[int, int], tmp_path: Path) -> None:
    batches = lookup_batches(10, (6, 6))
    wanted, kept = run_job(servers[0], served(rule=rule), batches)
    run_job(servers[0], served(rule=rule), batches[:6], checkpoint=tmp_path)
    got, loaded = run_job(servers[1], served(rule=rule), batches, first=6, resume=tmp_path)
    assert_equal(got, wanted)
    before, after = whole(kept), whole(loaded)
    assert list(before) == list(after)
    assert_equal(list(after.values()), list(before.values()))
    assert {table.steps for table in loaded} == {10}
    assert loaded[0].clock(0, VOCABULARY) == kept[0].clock(0, VOCABULARY) == {0: 9, 1: 9}
    assert loaded[0].version_of(0, VOCABULARY) > 0


@SERVERS
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=["embedding", "bag"])
def test_mirrored_rows_go_on_bit_for_bit(kind: type[nn.Module], servers: tuple[int, int], tmp_path: Path) -> None:
    batches = lookup_batches(10, (6, 6))
    wanted, kept = run_job(servers[0], lookup_model(kind), batches)
    run_job(servers[0], lookup_model(kind), batches[:6], checkpoint=tmp_path)
    other = lookup_model(kind, seed=9)  # its values must not matter
    got, loaded = run_job(servers[1], other, batches, first=6, resume=tmp_path)
    assert_equal(got, wanted)
    before, after = whole(kept), whole(loaded)
    assert_equal(list(after.values()), list(before.values()))


@pytest.mark.parametrize("rows", [None, VOCABULARY])
def test_rows_that_nobody_pushed_to_are_not_saved_and_begin_as_they_would_have(rows: int | None, tmp_path: Path) -> None:
    batches = lookup_batches(4, (6, 6), used=5)
    run_job(2, served(rows), batches, checkpoint=tmp_path)
    manifest = json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())
    assert "0.ids" in manifest["files"][0]["tensors"]["0"]["rows"]
    got, tables = run_job(3, served(rows), batches, first=4, resume=tmp_path)
    assert sum(table.count for table in tables) == 5
    fresh, _ = run_job(1, served(rows), [])
    assert torch.equal(got[0][5:], fresh[0][5:])
    assert not torch.equal(got[0][:5], fresh[0][:5])


def test_clocks_of_arrays_go_on(tmp_path: Path) -> None:
    """The clock of a range is what its pushes have said, before the break or after it."""

    def work(session: Session, pushes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, list[dict[int, int]]]:
        kv = KV({"w": Array(40, dtype=torch.float64)})
        for start, stop in pushes:
            kv["w"].push(torch.ones(stop - start), start=start)
        kv.finish()
        return kv["w"].pull().result(), [kv["w"].clock(start, start + 10) for start in range(0, 40, 10)]

    parts = [(0, 20), (10, 30), (35, 40), (0, 10)]
    with ThreadJob(1, 3) as job:
        wanted = job.run(lambda session: work(session, parts))[0]
    with ThreadJob(1, 3, checkpoint=tmp_path) as job:
        job.run(lambda session: work(session, parts[:2]))
    with ThreadJob(1, 2, resume=tmp_path) as job:
        got = job.run(lambda session: work(session, parts[2:]))[0]
    assert torch.equal(got[0], wanted[0])
    assert got[1] == wanted[1]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rows": 21}, "20.*21|21.*20"),
        ({"rows": None}, "20"),
        ({"rule": "adam"}, "adagrad.*adam|adam.*adagrad"),
        ({"seed": 1}, "seed"),
        ({"start": "zeros"}, "uniform.*zeros|zeros.*uniform"),
    ],
    ids=str,
)
def test_other_tables_are_refused(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    run_job(2, served(), lookup_batches(2, (6, 6)), checkpoint=tmp_path)
    with pytest.raises(PolytempoError, match=words) as caught:
        run_job(2, served(**other), lookup_batches(4, (6, 6)), first=2, resume=tmp_path)
    line = str(caught.value).splitlines()[0]
    assert "step-00000002" in line
    assert "embedding" in line


def test_a_job_without_the_table_is_refused(tmp_path: Path) -> None:
    run_job(2, served(), lookup_batches(2, (6, 6)), checkpoint=tmp_path)

    def work(session: Session) -> None:
        model = served()
        DistributedOptimizer(torch.optim.Adagrad(model.out.parameters(), lr=0.1))

    with pytest.raises(PolytempoError, match="step-00000002"), ThreadJob(2, 2, resume=tmp_path) as job:
        job.run(work)

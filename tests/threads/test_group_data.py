"""Replicas of several ranks: all ranks of one draw the same samples, and a resume leaves out what replicas have done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import copied, made_params, set_gradients
from sessions import under
from torch.utils.data import DataLoader

from polytempo.checkpoints import find_checkpoint
from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.mesh import Mesh, ReplicaRanks
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.prepare import SharedLoader
from polytempo.train.sampler import DistributedSampler

pytestmark = pytest.mark.timeout(30)

START = made_params([(3,)])
LENGTH, BATCH = 36, 3


def drawn(session: Session, mesh: Mesh, steps: int | None) -> list[int]:
    """What a rank of a mesh trains on, in an epoch or its first steps; the last stage's steps are the job's."""
    place = mesh.point(session.rank)
    session.data_axis = place.data, mesh.data
    params = copied(START)
    group = ReplicaRanks(mesh.data_group(session.rank), main=place.pipe == mesh.pipe - 1 and place.tensor == 0)
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), group=group)
    indices, seen = iter(DistributedSampler(range(LENGTH))), []
    while steps is None or len(seen) < steps * BATCH:
        own = [index for _, index in zip(range(BATCH), indices, strict=False)]
        if not own:
            break
        set_gradients(params, [torch.ones(3)])
        optimizer.step(samples=len(own))
        seen += own
    return seen


def epoch(mesh: Mesh, steps: int | None = None, **options: object) -> list[list[int]]:
    with ThreadJob(mesh.size, 1, "bsp", **options) as job:  # type: ignore[arg-type]
        return job.run(lambda session: drawn(session, mesh, steps))


@pytest.mark.parametrize("via", ["ps", "allreduce"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(Mesh(2, 2), Mesh(4)), (Mesh(2, 1, 2), Mesh(1, 2)), (Mesh(4), Mesh(2, 2)), (Mesh(2, 1, 2), Mesh(3))],
    ids=str,
)
def test_a_resume_under_another_mesh_goes_on_where_the_replicas_were(
    before: Mesh, after: Mesh, via: str, tmp_path: Path
) -> None:
    """36 samples in batches of 3: 12 before, 24 after, whatever the number of replicas."""
    first = epoch(before, steps=12 // BATCH // before.data, checkpoint=tmp_path, via="ps")
    for rank, seen in enumerate(first):
        assert seen == first[before.replica_group(rank)[0]]
    done = [index for replica in range(before.data) for index in first[replica * before.pipe * before.tensor]]
    assert len(done) == 12
    positions = _positions(tmp_path)
    second = drawn_from(positions, after, via)
    rest = [index for replica in range(after.data) for index in second[replica * after.pipe * after.tensor]]
    assert sorted(done + rest) == list(range(LENGTH))


def _positions(directory: Path) -> list[dict[str, object]]:
    return list(find_checkpoint(directory)[1]["positions"])


def drawn_from(positions: list[dict[str, object]], mesh: Mesh, via: str) -> list[list[int]]:
    """Another job that goes on from these positions."""
    with ThreadJob(mesh.size, 1, "bsp", via=via) as job:
        object.__setattr__(job.job, "positions", tuple(positions))
        return job.run(lambda session: drawn(session, mesh, None))


def test_a_resume_under_the_same_mesh_goes_on_in_every_clock(tmp_path: Path) -> None:
    mesh = Mesh(2, 2)
    first = epoch(mesh, steps=2, checkpoint=tmp_path)
    with ThreadJob(mesh.size, 1, "bsp", resume=tmp_path) as job:
        second = job.run(lambda session: drawn(session, mesh, None))
        assert {name: clock.policy.progress.slowest for name, clock in job.sequencer.clocks.items()} == {"0": 6, "0@0": 6}
    assert sorted(index for replica in (0, 2) for index in first[replica] + second[replica]) == list(range(LENGTH))


def test_the_loader_of_prepare_follows_the_data_axis() -> None:
    session = Session(None, JobFacts(4, ()), 3)
    session.data_axis = 1, 2
    loader: DataLoader[int] = under(session, SharedLoader, list(range(8)), False, {"batch_size": 2})
    with_axis = [index for batch in loader for index in batch.tolist()]
    assert with_axis == [1, 3, 5, 7]


def test_a_sampler_takes_the_shard_that_it_is_given() -> None:
    session = Session(None, JobFacts(4, ()), 3)
    session.data_axis = 1, 2
    sampler = under(session, DistributedSampler, range(6), False, num_replicas=3, rank=2)
    assert list(sampler) == [2, 5]


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1), (None, 0), (2, None)])
def test_a_shard_that_there_is_not_is_refused(num_replicas: int | None, rank: int | None) -> None:
    session = Session(None, JobFacts(4, ()), 3)
    with pytest.raises(UsageError, match="expected num_replicas= and a rank= from 0 to one less"):
        under(session, DistributedSampler, range(6), num_replicas=num_replicas, rank=rank)

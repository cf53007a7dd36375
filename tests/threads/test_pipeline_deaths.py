"""A rank that dies in a mesh of pipelines is named on all others, also on those that do not wait for it themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from piped import PLAIN, batches, mse
from test_pipeline_data_axis import JOBS, lane, together
from test_pipeline_lost import trapped

from polytempo.errors import PeerError, RankLost
from polytempo.mesh import Mesh
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob

pytestmark = pytest.mark.timeout(120)


class Died(BaseException):
    """The end of a process, for its thread."""


def end(session: Session) -> None:
    """As a process that fails; the launcher would tell the servers."""
    if session.client is None:
        session.abandon()
    else:
        session.close("failed")


def outcomes(kind: str, at: int, fails: bool, sync: str | None = None) -> list[Any]:
    """What each rank of two pipelines with two stages raises when something happens on one of them."""
    mesh = Mesh(2, 2)
    models = [trapped(2) for _ in range(mesh.size)]

    def spring(session: Session) -> None:
        if fails:
            raise ValueError("the layer is broken")
        end(session)
        raise Died

    def work(session: Session) -> Any:
        model = models[session.rank]
        if session.rank == at:
            trap = model[2 * mesh.point(at).pipe + 1]
            trap.left, trap.spring = 5, lambda: spring(session)
        optimizer = together(session, mesh, PLAIN, sync=sync)
        options: dict[str, Any] = {"stages": [2, 2], "microbatches": 2, "group": lane(session, mesh)}
        try:
            with as_current(session):
                pipe = Pipeline(model, loss=mse, optimizer=optimizer, **options)
                for _ in range(20):
                    pipe.step(*batches(1, 4, seed=mesh.point(session.rank).data)[0])
        except (Exception, Died) as error:  # noqa: BLE001  it is looked at by the test
            if not isinstance(error, Died):
                end(session)
            return error
        return None

    with JOBS[kind](mesh.size) as job, ThreadPoolExecutor(mesh.size) as pool:
        sessions = job.sessions if isinstance(job, GroupJob) else [job.session(rank) for rank in range(mesh.size)]
        return list(pool.map(work, sessions))


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("kind", JOBS)
def test_a_death_is_named_on_all_ranks_of_all_replicas(kind: str, at: int) -> None:
    found = outcomes(kind, at, fails=False)
    assert isinstance(found[at], Died)
    for rank, error in enumerate(found):
        if rank != at:
            assert isinstance(error, RankLost), (rank, error)
            assert error.ranks == (at,), (rank, error)
            assert f"rank {at}" in str(error)
            assert "\n" not in str(error)


def test_a_death_is_named_where_replicas_do_not_meet_at_every_step() -> None:
    found = outcomes("servers", 1, fails=False, sync="ssp:1")
    assert [error.ranks for rank, error in enumerate(found) if rank != 1] == [(1,)] * 3


@pytest.mark.parametrize("kind", JOBS)
def test_a_failure_is_told_to_all_ranks_of_all_replicas(kind: str) -> None:
    found = outcomes(kind, 1, fails=True)
    assert isinstance(found[1], ValueError)
    for rank in (0, 2, 3):
        assert isinstance(found[rank], PeerError)
        assert "stage 1 (rank 1) failed in F0: ValueError: the layer is broken" in str(found[rank]), (rank, found[rank])

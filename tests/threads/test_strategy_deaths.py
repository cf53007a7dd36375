"""A rank that ends is named on all ranks of the job, across lanes, tensor groups and replicas; so is an error of one."""

from __future__ import annotations

from threading import Thread

import pytest
from spreading import sentences, size_of, spread, train

from polytempo.errors import PeerError, PolytempoError, RankLost
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob

pytestmark = pytest.mark.timeout(60)


def told_on_all(strategy: str, broken: int, how: str) -> dict[int, PolytempoError]:
    """Train; one rank ends in the second step, or its loss or layer raises. What the others raise."""
    told: dict[int, PolytempoError] = {}

    def work(session: Session) -> None:
        model = spread(strategy)
        train(model, sentences(1))
        session.world().all_ranks.barrier().wait()
        if session.rank == broken and how == "ends":
            session.abandon()
            return
        if session.rank == broken:
            layer = next(iter(model.pipeline.stage.part.module.children()))
            layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError if session.rank == broken else PolytempoError) as found:
            train(model, sentences(1) * 5)
        if session.rank != broken:
            told[session.rank] = found.value
        session.abandon()  # as the end of the process would

    with GroupJob(size_of(strategy)) as job:
        threads = []
        for session in job.sessions:

            def run(session: Session = session) -> None:
                with as_current(session):
                    work(session)

            threads.append(Thread(target=run))
            threads[-1].start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "every wait ends"
    return told


@pytest.mark.parametrize("strategy", ["data=2,pipe=2", "pipe=2,tensor=2", "data=2,tensor=2", "data=2,pipe=2,tensor=2"])
@pytest.mark.parametrize("last", [False, True])
def test_a_rank_that_ends_is_named_on_all(strategy: str, last: bool) -> None:
    size = size_of(strategy)
    broken = size - 1 if last else 1
    told = told_on_all(strategy, broken, "ends")
    assert sorted(told) == [rank for rank in range(size) if rank != broken]
    for error in told.values():
        assert isinstance(error, RankLost), error
        assert error.ranks == (broken,), error
        assert f"rank {broken}" in str(error)


@pytest.mark.parametrize("strategy", ["data=2,pipe=2", "data=2,tensor=2"])
def test_an_error_of_one_rank_is_told_on_all(strategy: str) -> None:
    told = told_on_all(strategy, 2, "raises")
    assert sorted(told) == [0, 1, 3]
    for error in told.values():
        assert isinstance(error, PeerError), error
        assert "rank 2" in str(error)
        assert "ZeroDivisionError: division by zero" in str(error)

"""init() after shutdown() in one process; `processes/test_joining_again_processes.py` has what needs others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import small_batches, small_model, trained, trained_alone, weights

import polytempo as pt
from polytempo.errors import UsageError
from polytempo.session import session
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and whatever happens nothing is left of it."""
    for name in ("POLYTEMPO_JOB", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    pt.shutdown()


@pytest.mark.usefixtures("alone")
def test_alone_each_life_is_a_job_of_its_own() -> None:
    data = small_batches(4, (3,))
    for life in range(3):
        pt.init()
        make = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731
        got, optimizer = trained(session.current(), small_model(life), make, data)
        assert optimizer.stats["step"] == 4
        for one, other in zip(got, trained_alone(small_model(life), make, data), strict=True):
            assert torch.equal(one, other)
        pt.log(life=life)
        assert session.current().metrics == [{"life": life}]
        pt.shutdown()


@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_with_servers_an_optimizer_of_a_second_life_is_refused_in_one_line(via: str) -> None:
    """It would get what the first has left: weights, state, and a clock that is over."""
    model = small_model()

    def work(worker: Session) -> list[str]:
        worker.life = 1
        refusals = []
        for make in (_optimizer, _arrays):
            with pytest.raises(UsageError) as refused:
                make(worker)
            refusals.append(str(refused.value))
        return refusals

    def _optimizer(worker: Session) -> None:
        pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def _arrays(worker: Session) -> None:
        pt.tables.KV({"x": pt.tables.Array(4)})

    before = weights(model)
    with ThreadJob(2, via=via) as job:
        said = job.run(work)
    for rank, refusals in enumerate(said):
        for text in refusals:
            assert text.startswith(f"rank {rank} has finished its part of this job with shutdown()")
            assert "\n" not in text
    assert all(torch.equal(one, other) for one, other in zip(weights(model), before, strict=True))

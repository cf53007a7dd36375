"""What cannot be is refused in one line that says why, on the worker that asks for it; what a job starts from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_equal, copied, made_params, set_gradients, until
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(30)


class OwnSGD(torch.optim.SGD):
    """A subclass, of which a server knows nothing."""


class SGD(torch.optim.SGD):
    """One that even has the name of a known class."""


SHAPES = [(3, 2), (4,)]
START = made_params(SHAPES)

REFUSED: dict[str, tuple[str, str, Callable[[list[nn.Parameter], Session], object]]] = {
    "LBFGS on a server": (
        "asp",
        "cannot run LBFGS: it evaluates the loss several times",
        lambda p, s: DistributedOptimizer(torch.optim.LBFGS(p)),
    ),
    "LBFGS in rounds": (
        "bsp",
        "LBFGS .* use sync='asp'",
        lambda p, s: DistributedOptimizer(torch.optim.LBFGS(p), apply="delta"),
    ),
    "a class of one's own": (
        "bsp",
        'cannot run OwnSGD: it runs classes of torch.optim by their names, and no others; use apply="delta"',
        lambda p, s: DistributedOptimizer(OwnSGD(p, lr=0.1)),
    ),
    "arguments that are swapped": (
        "bsp",
        "the optimizer comes first, then the model: .*the other way round",
        lambda p, s: DistributedOptimizer(nn.Linear(2, 1), torch.optim.SGD(p, lr=0.1)),  # type: ignore[arg-type]
    ),
    "parameters in place of an optimizer": (
        "asp",
        "with a torch.optim.Optimizer first, got a list",
        lambda p, s: DistributedOptimizer(p),  # type: ignore[arg-type]
    ),
    "an optimizer in place of a model": (
        "bsp",
        "with a torch.nn.Module second, got a SGD",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p), torch.optim.SGD(p)),  # type: ignore[arg-type]
    ),
    "a group that comes late": (
        "bsp",
        "add parameter groups before wrapping the optimizer: the job knows its parameters by now",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p)).add_param_group({"params": []}),
    ),
    "a class with a known name": (
        "bsp",
        'cannot run SGD: .*apply="delta"',
        lambda p, s: DistributedOptimizer(SGD(p, lr=0.1)),
    ),
    "Rprop under asp": (
        "asp",
        "Rprop ignores the learning rate",
        lambda p, s: DistributedOptimizer(torch.optim.Rprop(p)),
    ),
    "another apply": (
        "bsp",
        "expected apply to be server or delta, got 'sever'",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p), apply="sever"),
    ),
    "compression": (
        "bsp",
        "topk",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p), compression="topk"),
    ),
    "a clip of nothing": (
        "bsp",
        "clip_norm above 0",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p), clip_norm=0.0),
    ),
    "mean buffers without a model": (
        "bsp",
        "needs the model",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p), buffers="mean"),
    ),
    "synchronize without rounds": (
        "asp",
        r"synchronize\(\) needs a barrier mode, this is asp",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p)).synchronize(),
    ),
    "a group added later": (
        "bsp",
        "add parameter groups before",
        lambda p, s: DistributedOptimizer(torch.optim.SGD(p)).add_param_group({"params": copied(START)}),
    ),
    "a complex parameter": (
        "bsp",
        "complex64; a parameter server holds",
        lambda p, s: DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line(what: str) -> None:
    sync, words, attempt = REFUSED[what]
    with ThreadJob(1, 1, sync) as job, pytest.raises(UsageError, match=words) as refused:
        job.run(lambda session: attempt(copied(START), session))
    assert "\n" not in str(refused.value)


def test_a_step_inside_no_sync_is_refused() -> None:
    def work(session: Session) -> None:
        optimizer = DistributedOptimizer(torch.optim.SGD(copied(START)))
        with optimizer.no_sync():
            optimizer.step()

    with ThreadJob(1) as job, pytest.raises(UsageError, match=r"step\(\) inside no_sync\(\)"):
        job.run(work)


# Workers that differ. Worker 0 comes first, so that it is worker 1 that is refused.


def second_is_refused(
    first: Callable[[Session], object], second: Callable[[Session], object], words: str, sync: str = "bsp"
) -> None:
    errors: dict[int, UsageError] = {}
    with ThreadJob(2, 1, sync) as job:

        def work(session: Session) -> None:
            if session.rank == 1:
                until(lambda: "0" in job.sequencer.clocks, "worker 0 registers")
            try:
                (first, second)[session.rank](session)
            except UsageError as error:
                errors[session.rank] = error
                session.close("failed")  # so that worker 0 starts without it

        job.run(work)
    assert list(errors) == [1]
    text = str(errors[1])
    assert "\n" not in text
    assert words in text


def sgd(shapes: list[tuple[int, ...]], **settings: float | bool) -> Callable[[Session], object]:
    return lambda session: DistributedOptimizer(
        torch.optim.SGD(made_params(shapes), **{"lr": 0.1, **settings}),  # type: ignore[arg-type]
    )


def test_models_that_differ_are_refused_with_the_first_difference() -> None:
    words = "parameter 1 is parameter 1 [5] float64 in group 0 here and parameter 1 [4] float64 in group 0 there"
    second_is_refused(sgd([(3, 2), (4,), (6,)]), sgd([(3, 2), (5,), (7,)]), words)
    second_is_refused(sgd([(3, 2), (4,)]), sgd([(3, 2), (4,), (1,)]), "3 parameters here and 2 there")


def test_hyper_parameters_that_differ_are_refused_by_name() -> None:
    words = "hyper-parameters differ: momentum is 0.9 at worker 1 and 0.8 at worker 0"
    second_is_refused(sgd(SHAPES, momentum=0.8), sgd(SHAPES, momentum=0.9, weight_decay=0.1), words)


def test_modes_that_differ_are_refused() -> None:
    words = "sync is 'ssp:2' at worker 1 and 'asp' at worker 0"
    makers = [
        lambda session, mode=mode: DistributedOptimizer(torch.optim.SGD(copied(START)), sync=mode)
        for mode in ("asp", "ssp:2")
    ]
    second_is_refused(makers[0], makers[1], words)


def test_a_scheduler_that_only_worker_0_has_is_refused_by_name() -> None:
    """It adds initial_lr to the groups of worker 0, which worker 1 has not."""

    def scheduled(session: Session) -> None:
        inner = torch.optim.SGD(copied(START), lr=0.1)
        torch.optim.lr_scheduler.StepLR(inner, 1)
        DistributedOptimizer(inner)

    second_is_refused(scheduled, sgd(SHAPES), "initial_lr")


def test_a_rate_that_one_worker_changes_later_is_refused_at_that_step() -> None:
    def work(session: Session) -> str:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, [torch.ones(shape) for shape in SHAPES])
        optimizer.step()
        if session.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
            until(lambda: job.sequencer.statistics[0].state == "waiting", "worker 0 has pushed")
        try:
            optimizer.step()
        except UsageError as error:
            session.close("failed")
            return str(error)
        return ""

    with ThreadJob(2, 2) as job:
        texts = job.run(work)
    assert texts[0] == ""
    assert "lr is 0.2 at worker 1 and 0.1 at worker 0" in texts[1]


# What a job starts from.


def test_all_workers_start_from_the_values_of_worker_0() -> None:
    starts = [made_params(SHAPES, seed=seed) for seed in (20, 21, 22)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(starts[session.rank])
        DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        return [param.detach().clone() for param in params]

    with ThreadJob(3, 2, "asp") as job:
        results = job.run(work)
    for result in results:
        assert_equal(result, [param.detach() for param in starts[0]])


@pytest.mark.parametrize("registered", [False, True], ids=["before its optimizer", "before its values arrived"])
def test_when_worker_0_is_gone_before_it_gave_its_values_the_next_ones_count(registered: bool) -> None:
    starts = [made_params(SHAPES, seed=seed) for seed in (20, 21)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(starts[session.rank])
        if session.rank == 0:
            until(lambda: bool(job.sequencer.clocks) and 1 in job.sequencer.clocks["0"].slots, "worker 1 registers")
            if registered:
                client = session.client
                assert client is not None
                client.exchanges.send_seed = fail  # type: ignore[method-assign]
            else:
                fail("0")
        DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        return [param.detach().clone() for param in params]

    def fail(name: str) -> None:
        raise ConnectionResetError("worker 0 dies here")

    results: dict[int, list[torch.Tensor]] = {}

    def keep(session: Session) -> None:
        results[session.rank] = work(session)

    with ThreadJob(2, 2) as job, pytest.raises(ConnectionResetError):
        job.run(keep)
    assert_equal(results[1], [param.detach() for param in starts[1]])

"""A parameter without a gradient is left alone; one that only some workers have counts as in the joint batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from by_hand import STATEFUL, Gradients, assert_same_state, mean_of, plain
from helpers import MakeOptimizer, assert_close, assert_equal, copied, made_gradients, made_params, set_gradients
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

SHAPES = [(4, 3), (5,), (3, 3)]


def gradients_without(missing: dict[int, Sequence[int]], steps: int, seed: int = 2) -> Gradients:
    """Gradients of which some parameters have none: `missing` gives for each parameter its steps without."""
    all_there: Gradients = [list(step) for step in made_gradients(SHAPES, steps, seed)]
    for index, without in missing.items():
        for step in without:
            all_there[step][index] = None
    return all_there


def together(
    workers: Sequence[Gradients], start: Sequence[nn.Parameter], make: MakeOptimizer, servers: int = 2, **options: str
) -> list[tuple[list[torch.Tensor], dict]]:
    synchronize = options.pop("synchronize", "") == "yes"

    def work(session: Session) -> tuple[list[torch.Tensor], dict]:
        params = copied(start)
        optimizer = DistributedOptimizer(make(params), **options)  # type: ignore[arg-type]
        for step in workers[session.rank]:
            set_gradients(params, step)
            if synchronize:
                optimizer.synchronize()
            optimizer.step()
        return [param.detach().clone() for param in params], optimizer.state_dict()

    with ThreadJob(len(workers), servers) as job:
        return job.run(work)


@pytest.mark.parametrize("optimizer", STATEFUL)
def test_a_parameter_without_a_gradient_is_left_alone_state_and_all(optimizer: str) -> None:
    start, missing = made_params(SHAPES), {0: [2, 3], 1: [0, 1, 5], 2: range(8)}
    workers = [gradients_without(missing, 8, seed) for seed in (5, 6)]
    values, state = plain(start, STATEFUL[optimizer], mean_of(workers))
    assert set(state["state"]) == {0, 1}  # the last one never had a gradient
    for got, got_state in together(workers, start, STATEFUL[optimizer]):
        assert_close(got, values, rtol=1e-9)
        assert_equal(got[2:], [start[2].detach()])
        assert_same_state(got_state, state)


@pytest.mark.parametrize("way", ["server", "delta", "synchronize"])
@pytest.mark.parametrize("optimizer", STATEFUL)
def test_a_gradient_that_only_one_worker_has_counts_as_in_the_joint_batch(optimizer: str, way: str) -> None:
    start = made_params(SHAPES)
    workers = [gradients_without({0: [1, 4]}, 6, 5), gradients_without({1: [0, 3], 0: [4]}, 6, 6)]
    values, _ = plain(start, STATEFUL[optimizer], mean_of(workers))
    options = {"synchronize": "yes"} if way == "synchronize" else {"apply": way}
    for got, _ in together(workers, start, STATEFUL[optimizer], **options):
        assert_close(got, values, rtol=1e-9)

"""Live `gossip` jobs against plain loops: every model is what the mixing matrices say, and sums over all models are kept."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
import torch
from helpers import (
    Batch,
    assert_close,
    assert_equal,
    check_record,
    copied,
    loss_of,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained_alone,
    weights,
)
from torch import nn

from polytempo.errors import UsageError
from polytempo.protocol.push import Measures
from polytempo.reducer.neighbours import NeighbourExchange
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

STEPS = 20
Matrix = numpy.ndarray

MAKE: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
PLAIN: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731


# Mixing matrices, made here a second time.


def ring(n: int, step: int) -> Matrix:
    mix = numpy.zeros((n, n))
    for i in range(n):
        for j in {(i - 1) % n, (i + 1) % n} - {i}:
            mix[i, j] = 1 / 3 if n > 2 else 1 / 2
        mix[i, i] = 1 - mix[i].sum()
    return mix


def torus_2_by_2(n: int, step: int) -> Matrix:
    assert n == 4
    mix = numpy.full((4, 4), 1 / 3)
    for i, j in ((0, 3), (1, 2)):
        mix[i, j] = mix[j, i] = 0.0
    return mix


def torus_2_by_3(n: int, step: int) -> Matrix:
    assert n == 6
    mix = numpy.zeros((6, 6))
    for i in range(6):
        row, column = divmod(i, 3)
        for j in (3 * (1 - row) + column, 3 * row + (column + 1) % 3, 3 * row + (column + 2) % 3, i):
            mix[i, j] = 1 / 4
    return mix


def one_peer(n: int, step: int) -> Matrix:
    hop = 2 ** (step % max(1, (n - 1).bit_length()))
    mix = numpy.eye(n) / 2
    for i in range(n):
        mix[(i + hop) % n, i] += 1 / 2
    return mix


def static_exp(n: int, step: int) -> Matrix:
    hops = [2**k for k in range((n - 1).bit_length())]
    mix = numpy.eye(n) / (len(hops) + 1)
    for i in range(n):
        for hop in hops:
            mix[(i + hop) % n, i] += 1 / (len(hops) + 1)
    return mix


def full(n: int, step: int) -> Matrix:
    return numpy.full((n, n), 1 / n)


def mixed(models: Sequence[nn.Module], mix: Matrix, values: list[list[torch.Tensor]]) -> None:
    """Make model i the sum of P_ij values_j."""
    with torch.no_grad():
        for i, model in enumerate(models):
            for k, param in enumerate(model.parameters()):
                param.copy_(sum(mix[i, j] * values[j][k] for j in range(len(models))))


def by_hand(
    matrix: Callable[[int, int], Matrix],
    n: int,
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Sequence[Batch]],
    overlap: bool = False,
) -> list[list[torch.Tensor]]:
    """The reference: n models in one loop."""
    models = [copy.deepcopy(model) for _ in range(n)]
    optimizers = [make(list(m.parameters())) for m in models]
    for step, each in enumerate(batches):
        before = [weights(m) for m in models]
        for rank, (own, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(own, each[rank]).backward()
            optimizer.step()
        after = [weights(m) for m in models]
        mixed(models, matrix(n, step), before if overlap else after)
        if overlap:
            with torch.no_grad():
                for i, own in enumerate(models):
                    for k, param in enumerate(own.parameters()):
                        param.add_(after[i][k] - before[i][k])
    return [weights(m) for m in models]


def live(
    sync: str,
    n: int,
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Sequence[Batch]],
    record: Path | None = None,
    **options: object,
) -> list[list[torch.Tensor]]:
    def work(session: Session) -> list[torch.Tensor]:
        own = copy.deepcopy(model) if session.rank == 0 else small_model(seed=session.rank + 9)  # all start from rank 0's
        optimizer = DistributedOptimizer(make(list(own.parameters())), own, **options)  # type: ignore[arg-type]
        for each in batches:
            optimizer.zero_grad()
            loss_of(own, each[session.rank]).backward()
            optimizer.step()
        return weights(own)

    with ThreadJob(n, sync=sync, via="auto", record=record) as job:
        return job.run(work)


@pytest.mark.parametrize(
    ("sync", "n", "matrix", "overlap"),
    [
        ("gossip:ring", 2, ring, False),
        ("gossip:ring", 5, ring, False),
        ("gossip:torus", 4, torus_2_by_2, True),
        ("gossip:torus", 6, torus_2_by_3, False),
        ("gossip:exp", 4, one_peer, False),
        ("gossip:exp", 5, one_peer, True),
        ("gossip:exp,static=1", 6, static_exp, False),
        ("gossip:ring", 4, ring, True),
        ("gossip:full", 3, full, True),
    ],
)
def test_models_are_what_the_matrices_say(sync: str, n: int, matrix: Callable[..., Matrix], overlap: bool) -> None:
    model, batches = small_model(), small_batches(STEPS, [3] * n)
    got = live(sync + ",overlap=1" * overlap, n, model, MAKE, batches)
    wanted = by_hand(matrix, n, model, MAKE, batches, overlap)
    for rank in range(n):
        assert_close(got[rank], wanted[rank], rtol=1e-9)
    if n > 3:
        assert not torch.equal(got[0][0], got[1][0])  # each trains a model of its own


def test_full_gossip_is_averaging_at_each_step() -> None:
    """That is `local:1`, and with plain SGD one process with the mean gradient."""
    model, batches = small_model(), small_batches(STEPS, [4, 4, 4])
    got, averaged = live("gossip:full", 3, model, PLAIN, batches), live("local:1", 3, model, PLAIN, batches)
    joint = copy.deepcopy(model)
    optimizer = PLAIN(list(joint.parameters()))
    for each in batches:
        optimizer.zero_grad()
        (sum(loss_of(joint, batch) for batch in each) / 3).backward()
        optimizer.step()
    for own, other in zip(got, averaged, strict=True):
        assert_close(own, other, rtol=1e-9)
        assert_close(own, weights(joint), rtol=1e-9)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:torus,overlap=1"])
def test_a_job_of_one_is_plain_training(sync: str) -> None:
    model, batches = small_model(dtype=torch.float32), small_batches(STEPS, [3])
    narrow = [[(x.float(), y.float()) for x, y in each] for each in batches]
    assert_equal(live(sync, 1, model, MAKE, narrow)[0], trained_alone(model, MAKE, narrow))


# Values that are only mixed.


def settled(
    sync: str, starts: Sequence[float], steps: Sequence[int], compression: str | None = None
) -> list[tuple[float, float]]:
    """Workers with these values and the rate 0 make so many steps, each its own number; value and weight of each."""

    def work(session: Session) -> tuple[float, float]:
        params = made_params([(3, 2), (5,)])
        optimizer = DistributedOptimizer(PLAIN(params), compression=compression)
        with torch.no_grad():
            for param in params:
                param.fill_(starts[session.rank])
        for _ in range(steps[session.rank]):
            set_gradients(params, [torch.zeros_like(param) for param in params])
            optimizer.step()
        values = torch.cat([param.detach().reshape(-1) for param in params])
        assert torch.equal(values, values[:1].expand_as(values))
        return float(values[0]), optimizer._reducer.weight  # type: ignore[union-attr]

    with ThreadJob(len(starts), sync=sync, via="auto") as job:
        return job.run(work)


@pytest.mark.parametrize(
    ("sync", "n", "matrix"),
    [("gossip:ring", 4, ring), ("gossip:torus", 6, torus_2_by_3), ("gossip:exp", 8, one_peer), ("gossip:full", 3, full)],
)
def test_with_rate_0_all_reach_the_mean(sync: str, n: int, matrix: Callable[..., Matrix]) -> None:
    starts, steps = [float(rank**2) for rank in range(n)], 6
    found = settled(sync, starts, [steps] * n)
    wanted = numpy.array(starts)
    for step in range(steps):
        wanted = matrix(n, step) @ wanted
    numpy.testing.assert_allclose([value for value, _ in found], wanted, rtol=1e-12)
    assert [weight for _, weight in found] == [1.0] * n  # nothing is divided
    assert sum(value for value, _ in found) == pytest.approx(sum(starts), rel=1e-12)
    if sync in ("gossip:exp", "gossip:full"):
        numpy.testing.assert_allclose([value for value, _ in found], numpy.mean(starts), rtol=1e-12)


@pytest.mark.parametrize(
    "sync", ["gossip:torus", "gossip:full", "gossip:ring,overlap=1", "gossip:exp", "gossip:exp,static=1"]
)
def test_a_worker_that_finishes_leaves_its_mass(sync: str) -> None:
    """It gives its values and its weight to its neighbours: the others reach the mean of all, with the weight of all."""
    starts = [0.0, 1.0, 5.0, 7.0, 2.0, 3.0]
    found = settled(sync, starts, [80, 80, 3, 80, 80, 80])
    rest = [found[rank] for rank in (0, 1, 3, 4, 5)]
    assert sum(weight for _, weight in rest) == pytest.approx(6.0, rel=1e-9)
    assert sum(weight * value for value, weight in rest) == pytest.approx(sum(starts), rel=1e-9)
    numpy.testing.assert_allclose([value for value, _ in rest], numpy.mean(starts), rtol=1e-6)


def test_a_neighbour_that_dies_after_its_push_and_before_its_values_are_through_is_left_out() -> None:
    """Its neighbours keep the shares that were meant for it: the sum of those that are left stays, at weight 1."""
    starts = numpy.array([0.0, 1.0, 5.0, 7.0])
    through = threading.Barrier(3)  # its neighbours have its values of the steps before

    def work(session: Session) -> tuple[float, float]:
        params = [nn.Parameter(torch.full((4,), starts[session.rank], dtype=torch.float64))]
        optimizer = DistributedOptimizer(PLAIN(params))
        with torch.no_grad():
            params[0].fill_(starts[session.rank])
        reducer = optimizer._reducer
        assert isinstance(reducer, NeighbourExchange)
        for step in range(60):
            set_gradients(params, [torch.zeros(4)])
            if step == 2 and session.rank != 0:
                through.wait(30)
            if (session.rank, step) == (2, 2):
                reducer.begin(None, ({"lr": 0.1},), Measures())
                session.leaving.of[LeavingStep.FLUSH].clear()
                session.world().close(politely=False)
                return 0.0, 0.0
            optimizer.step()
        return float(params[0][0].detach()), reducer.weight

    with ThreadJob(4, sync="gossip:ring", via="auto") as job:
        found = job.run(work)
    before = ring(4, 0) @ ring(4, 0) @ starts
    rest = [found[rank] for rank in (0, 1, 3)]
    numpy.testing.assert_allclose([value for value, _ in rest], before[[0, 1, 3]].mean(), rtol=1e-9)
    numpy.testing.assert_allclose([weight for _, weight in rest], 1.0, rtol=1e-9)


def test_a_skipped_step_and_accumulated_gradients_are_steps_like_others() -> None:
    """A GradScaler that skips on one worker leaves the others alone; `no_sync` and `clip_norm` are local."""

    def work(session: Session) -> float:
        params = [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0), clip_norm=1.0)
        with optimizer.no_sync():
            set_gradients(params, [torch.tensor([-6.0, 0.0, 0.0])])
        optimizer.found_inf = torch.tensor(float(session.rank == 1))  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
        assert optimizer.stats["step"] == 1
        return float(params[0][0].detach())

    with ThreadJob(2, sync="gossip:ring", via="auto") as job:
        assert job.run(work) == pytest.approx([0.5, 0.5], rel=1e-5)  # worker 0 made a step of norm 1


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp"])
def test_a_cast_moves_no_mass(sync: str) -> None:
    """Two bytes a value: neighbours agree to the rounding of a cast, and the sum is that of all bits."""
    starts = [0.1234567, 1.7654321, 5.1111111, 7.7777777]
    found = settled(sync, starts, [40] * 4, "bf16")
    values = [value for value, _ in found]
    assert sum(values) == pytest.approx(sum(starts), rel=1e-12)
    assert max(values) - min(values) < 0.1


# What travels.


@pytest.mark.parametrize(
    ("sync", "n", "degree"),
    [("gossip:ring", 4, 2), ("gossip:torus", 6, 3), ("gossip:exp", 4, 1), ("gossip:full", 3, 2), ("gossip:ring", 2, 1)],
)
def test_each_worker_sends_its_model_to_each_neighbour_and_no_more(sync: str, n: int, degree: int) -> None:
    shapes, steps = [(50, 40), (40,)], 5
    model, together = sum(numpy.prod(shape) for shape in shapes) * 8, threading.Barrier(n, timeout=30)

    def work(session: Session) -> list[int]:
        params = made_params(shapes)
        optimizer = DistributedOptimizer(PLAIN(params))
        before, messages = optimizer.stats, session.world().engine.messages
        counted = {rank: link.payload_sent for rank, link in messages.links.items()}
        for _ in range(steps):
            set_gradients(params, [torch.ones_like(param) for param in params])
            optimizer.step()
        together.wait()  # all have received what was sent to them
        after, sent = optimizer.stats, [link.payload_sent - counted[rank] for rank, link in messages.links.items()]
        together.wait()  # none leaves, and hands its own over, before all have counted
        assert after["bytes_sent"] - before["bytes_sent"] < steps * (degree * model + 1000)
        assert after["bytes_received"] - before["bytes_received"] < (steps + 1) * (degree * model + 1000)
        return sent

    with ThreadJob(n, sync=sync, via="auto") as job:
        for sent in job.run(work):
            assert sum(sent) == steps * degree * (model + 16)  # 16 bytes: weight and mark


def test_a_cast_halves_what_travels() -> None:
    together = threading.Barrier(2, timeout=30)

    def work(session: Session) -> int:
        params = made_params([(50, 40)], dtype=torch.float32)
        optimizer = DistributedOptimizer(PLAIN(params), compression="bf16")
        before = sum(link.payload_sent for link in session.world().engine.messages.links.values())
        set_gradients(params, [torch.ones_like(param) for param in params])
        optimizer.step()
        together.wait()  # both have received what was sent to them
        sent = sum(link.payload_sent for link in session.world().engine.messages.links.values()) - before
        together.wait()  # neither leaves before both have counted
        return sent

    with ThreadJob(2, sync="gossip:ring", via="auto") as job:
        assert job.run(work) == [2000 * 2 + 16] * 2


# The mean of all models.


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp,overlap=1", "gossip:torus"])
def test_consolidate_is_the_mean_and_keeps_the_sum(sync: str) -> None:
    model, batches, together = small_model(), small_batches(12, [3] * 4), threading.Barrier(4, timeout=30)

    def work(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        own = copy.deepcopy(model)
        optimizer = DistributedOptimizer(MAKE(list(own.parameters())), own)
        for each in batches[:8]:
            optimizer.zero_grad()
            loss_of(own, each[session.rank]).backward()
            optimizer.step()
        before = weights(own)
        optimizer.consolidate()
        mean = weights(own)
        together.wait()  # none goes on before all have looked
        optimizer.param_groups[0]["lr"] = 0.0
        for each in batches[8:]:
            optimizer.zero_grad()
            loss_of(own, each[session.rank]).backward()
            optimizer.step()
        return before, mean, weights(own)

    with ThreadJob(4, sync=sync, via="auto") as job:
        found = job.run(work)
    wanted = [sum(parts) / 4 for parts in zip(*(before for before, _, _ in found), strict=True)]
    for before, mean, _ in found:
        assert_close(mean, wanted, rtol=1e-9)
        assert not torch.equal(before[0], mean[0])
    later = [sum(parts) / 4 for parts in zip(*(after for _, _, after in found), strict=True)]
    assert_close(later, wanted, rtol=1e-9)


def with_made_gradients(sync: str, n: int, looks: bool) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The models after some steps with given gradients; the first worker may look at the mean, alone. What it saw last."""
    gradients = [made_gradients([(3, 2)], 12, seed=rank) for rank in range(n)]

    def work(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = made_params([(3, 2)])
        optimizer = DistributedOptimizer(MAKE(params))
        for step, each in enumerate(gradients[session.rank]):
            set_gradients(params, each)
            optimizer.step()
            if looks and session.rank == 0 and step % 5 == 4:
                optimizer.consolidate()
        own = copied(params)
        if looks and session.rank == 0:
            optimizer.consolidate()  # others may have left
        return [own[0].detach()], [params[0].detach().clone()]

    with ThreadJob(n, sync=sync, via="auto") as job:
        return job.run(work)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp,overlap=1", "gossip:full"])
def test_one_worker_may_look_at_the_mean_alone_and_nothing_changes_by_it(sync: str) -> None:
    looked, plain = with_made_gradients(sync, 4, looks=True), with_made_gradients(sync, 4, looks=False)
    for (own, _), (wanted, _) in zip(looked, plain, strict=True):
        assert_close(own, wanted, rtol=1e-12)
    mean = sum(own[0] for own, _ in looked) / 4
    assert_close(looked[0][1], [mean], rtol=1e-9)  # at the end: of all, also of those that have left


# The record, and what is refused.


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp,overlap=1"])
def test_the_record_is_checked_and_replayed(tmp_path: Path, sync: str) -> None:
    live(sync, 4, small_model(), MAKE, small_batches(6, [3] * 4), record=tmp_path)
    lines = check_record(tmp_path)
    assert sum(line["kind"] == "push" for line in lines) == 24
    assert any(line.get("mixing") for line in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "polytempo-requests"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"via": "ps"}, "gossip:ring keeps each worker's model at the worker; leave via='ps' out"),
        ({"compression": "topk:0.1"}, "gossip:ring sends whole models, which it can cast; use compression='bf16' or 'fp16'"),
    ],
)
def test_what_neighbours_cannot_do_is_refused(options: dict[str, str], text: str) -> None:
    with ThreadJob(1, sync="gossip:ring", via="auto") as job, pytest.raises(UsageError, match=text):
        job.run(lambda session: DistributedOptimizer(PLAIN(made_params([(2,)])), **options))  # type: ignore[arg-type]


def test_there_is_no_agreed_gradient() -> None:
    with ThreadJob(1, sync="gossip:ring", via="auto") as job, pytest.raises(UsageError, match="needs a barrier mode"):
        job.run(lambda session: DistributedOptimizer(PLAIN(made_params([(2,)]))).synchronize())


def test_without_a_sequencer_it_is_refused() -> None:
    with GroupJob(2) as job, pytest.raises(UsageError, match="gossip:ring needs the sequencer of polytempo run"):
        job.run(lambda session: DistributedOptimizer(PLAIN(made_params([(2,)])), sync="gossip:ring"))

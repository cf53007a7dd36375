"""Replicas of a pipeline: each stage's optimizer takes its steps together with those of the same stage elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import ADAM, PLAIN, SGD, Batch, Outcome, alone, batches, layered, mse
from test_pipeline_clipping import clipping
from test_pipeline_models import Tied, seeded_model, words
from torch import nn

from polytempo.errors import PeerError, UsageError
from polytempo.mesh import Mesh, ReplicaRanks
from polytempo.pipeline.builder import StageHooks
from polytempo.pipeline.partition import ModelPart
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.stage import MakeOptimizer
from polytempo.pipeline.weight_gradients import WeightGradient
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.communication import Group
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]


def lane(session: Session, mesh: Mesh) -> Group:
    ranks = mesh.pipe_group(session.rank)
    return Group(ranks, session.world().new_group(ranks))


def together(session: Session, mesh: Mesh, make: MakeOptimizer, **options: Any) -> MakeOptimizer:
    """An optimizer of a stage whose steps are taken with the same stage of all replicas."""
    main = mesh.point(session.rank).pipe == mesh.pipe - 1
    group = ReplicaRanks(mesh.data_group(session.rank), main)
    return lambda params: DistributedOptimizer(make(params), group=group, **options)


def replicated(
    session: Session,
    mesh: Mesh,
    model: nn.Module,
    data: Sequence[Sequence[Batch]],
    make: MakeOptimizer = SGD,
    sync: str | None = None,
    **options: Any,
) -> Outcome:
    """A rank's training: each replica of the pipeline on its own batches."""
    loss = options.pop("loss", mse)
    optimizer = together(session, mesh, make, sync=sync)
    pipe = Pipeline(copy.deepcopy(model), loss=loss, optimizer=optimizer, group=lane(session, mesh), **options)
    losses = [pipe.step(x, y) for x, y in data[mesh.point(session.rank).data]]
    if sync is not None:
        assert isinstance(pipe.optimizer, DistributedOptimizer)
        pipe.optimizer.consolidate()
    return Outcome(losses, pipe.state_dict(), pipe)


def joined(data: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The batches of all replicas as those of one process."""
    return [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in zip(*data, strict=True)]


def assert_equals(outcomes: Sequence[Outcome], state: dict[str, torch.Tensor], atol: float = 1e-10) -> None:
    for outcome in outcomes:
        for name, value in state.items():
            torch.testing.assert_close(outcome.state[name], value, rtol=0, atol=atol)


JOBS: dict[str, Callable[[int], Any]] = {
    "collectives": GroupJob,
    "shared-memory": lambda ranks: ThreadJob(ranks, via="allreduce"),
    "servers": lambda ranks: ThreadJob(ranks, servers=2, via="ps"),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("spec", ["1f1b", "gpipe"])
@pytest.mark.parametrize("job", JOBS)
def test_replicas_under_bsp_are_one_process_with_the_joint_batch(job: str, spec: str, clip: float | None) -> None:
    """Of different sizes: examples weigh alike."""
    mesh, model = Mesh(2, 2), layered(5)
    data = [batches(3, 8, seed=1), batches(3, 4, seed=2)]
    make = ADAM if job == "collectives" else SGD
    wanted = alone(model, joined(data), clipping(make, clip) if clip else make)[1]
    with JOBS[job](mesh.size) as threads:
        found = threads.run(
            lambda session: replicated(session, mesh, model, data, make, schedule=spec, microbatches=4, clip_norm=clip)
        )
    assert_equals(found, wanted)
    assert found[0].losses == found[1].losses != found[2].losses


@settings(max_examples=8, deadline=None)
@given(
    mesh=st.sampled_from([Mesh(1, 3), Mesh(2, 1), Mesh(3, 1), Mesh(2, 3), Mesh(3, 2)]),
    spec=st.sampled_from(["1f1b", "gpipe", "gpipe,recompute=0", "1f1b,spare=1", "sequential"]),
    microbatches=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.sampled_from([4, 8, 12]), min_size=3, max_size=3),
    clip=st.sampled_from([None, 0.02, 10.0]),
)
def test_any_mesh_schedule_and_sizes_of_batches(
    mesh: Mesh, spec: str, microbatches: int, sizes: list[int], clip: float | None
) -> None:
    model = layered(7)
    data = [batches(2, size, seed=replica) for replica, size in enumerate(sizes[: mesh.data])]
    wanted = alone(model, joined(data), clipping(SGD, clip) if clip else SGD)[1]
    with GroupJob(mesh.size) as job:
        found = job.run(
            lambda session: replicated(session, mesh, model, data, schedule=spec, microbatches=microbatches, clip_norm=clip)
        )
    assert_equals(found, wanted)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("job", ["collectives", "shared-memory"])
def test_tied_weights_are_equal_on_all_copies(job: str, clip: float | None) -> None:
    mesh, model, loss = Mesh(2, 3), seeded_model(Tied), nn.functional.cross_entropy
    data = [words(3, 8), words(3, 8)[::-1]]
    with JOBS[job](mesh.size) as threads:
        found = threads.run(
            lambda session: replicated(session, mesh, model, data, SGD, microbatches=4, clip_norm=clip, loss=loss)
        )
    make = clipping(SGD, clip) if clip else SGD
    assert_equals(found, alone(model, joined(data), make, loss=loss)[1])
    assert all(torch.equal(outcome.state["embed.weight"], outcome.state["out.weight"]) for outcome in found)


@pytest.mark.parametrize("sync", ["local:2", "diloco:2"])
def test_tied_weights_stay_equal_in_blocks_of_local_steps(sync: str) -> None:
    mesh, model, loss = Mesh(3, 2), seeded_model(Tied), nn.functional.cross_entropy
    data = [words(5, 8), words(5, 8)[::-1], words(5, 8)[2:] + words(5, 8)[:2]]
    with ThreadJob(mesh.size, sync=sync) as job:
        found = job.run(lambda session: replicated(session, mesh, model, data, SGD, sync, microbatches=4, loss=loss))
    for outcome in found:
        assert torch.equal(outcome.state["embed.weight"], outcome.state["out.weight"])
        assert torch.equal(outcome.state["out.weight"], found[0].state["out.weight"])


@pytest.mark.parametrize("sync", ["local:2", "diloco:2"])
def test_blocks_of_local_steps_of_replicas_are_those_of_whole_models(sync: str) -> None:
    """Compared with models in one piece under the same mode, one for each replica."""
    mesh, model = Mesh(2, 2), layered(5)
    data = [batches(4, 8, seed=1), batches(4, 8, seed=2)]
    with ThreadJob(mesh.size, sync=sync) as job:
        found = job.run(lambda session: replicated(session, mesh, model, data, PLAIN, sync, microbatches=2, clip_norm=0.5))

    def whole(session: Session) -> Outcome:
        own = copy.deepcopy(model)
        optimizer = DistributedOptimizer(PLAIN(list(own.parameters())), own, clip_norm=0.5)
        for x, y in data[session.rank]:
            optimizer.zero_grad()
            mse(own(x), y).backward()
            optimizer.step()
        optimizer.consolidate()
        return Outcome([], own.state_dict(), None)  # type: ignore[arg-type]

    with ThreadJob(2, sync=sync) as job:
        wanted = job.run(whole)
    assert_equals(found, wanted[0].state)


@pytest.mark.parametrize("sync", ["ssp:1", "asp", "delay:1"])
def test_stale_replicas_have_the_gradients_of_the_weights_they_have_read(sync: str) -> None:
    """Each step's gradients are those of the whole model at the weights that the stages had when the step began."""
    mesh, model = Mesh(2, 2), layered(5)
    data = [batches(6, 8, seed=1), batches(6, 8, seed=2)]

    def train(session: Session) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        seen = []
        optimizer = together(session, mesh, PLAIN)
        pipe = Pipeline(
            copy.deepcopy(model), loss=mse, optimizer=optimizer, group=lane(session, mesh), microbatches=4, stages=[3, 2]
        )
        gradients: dict[str, torch.Tensor] = {}

        def capture(*_: object) -> None:
            gradients.update({name: param.grad.clone() for name, param in pipe.stage.part.parameters()})  # type: ignore[union-attr]

        assert pipe.optimizer is not None
        pipe.optimizer.register_step_pre_hook(capture)
        for x, y in data[mesh.point(session.rank).data]:
            weights = {name: value.clone() for name, value in pipe.stage.state().items()}
            pipe.step(x, y)
            seen.append((weights, dict(gradients)))
        return seen

    with ThreadJob(mesh.size, servers=2, sync=sync) as job:
        found = job.run(train)
    for replica in range(2):
        first, last = (found[rank] for rank in mesh.replica_group(2 * replica))
        for (x, y), one, other in zip(data[replica], first, last, strict=True):
            whole = copy.deepcopy(model)
            whole.load_state_dict(one[0] | other[0])
            mse(whole(x), y).backward()
            gradients = one[1] | other[1]
            for name, param in whole.named_parameters():
                torch.testing.assert_close(gradients[name], param.grad, rtol=0, atol=1e-10)


def test_gradients_travel_once_for_each_update_however_many_microbatches_it_has() -> None:
    mesh, model, data = Mesh(2, 2), layered(5), [batches(3, 8, seed=1), batches(3, 8, seed=2)]

    def sent(microbatches: int) -> list[int]:
        def train(session: Session) -> int:
            assert session.client is not None
            session.world()  # ranks that wait for others to come ask where they are: now, not in what is counted
            before = session.client.bytes_sent
            replicated(session, mesh, model, data, PLAIN, microbatches=microbatches)
            return session.client.bytes_sent - before

        with ThreadJob(mesh.size, servers=2, via="ps") as job:
            return job.run(train)

    few, many = sent(1), sent(8)
    assert all(abs(one - other) < 0.02 * one for one, other in zip(few, many, strict=True)), (few, many)


def test_weight_gradients_are_still_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[WeightGradient] = []
    compute = WeightGradient.compute
    monkeypatch.setattr(WeightGradient, "compute", lambda self: (computed.append(self), compute(self))[1])
    mesh, model = Mesh(2, 2), layered(5)
    data = [batches(1, 8), batches(1, 8)]
    with GroupJob(mesh.size) as job:
        job.run(lambda session: replicated(session, mesh, model, data, microbatches=4))
    assert len(computed) == 2 * 3 * 4, "replicas, linear layers, microbatches"


# What is not sound.


def refused(model: nn.Module, sync: str, **options: Any) -> str:
    mesh = Mesh(2, 2)

    def work(session: Session) -> str:
        with pytest.raises(UsageError) as caught:
            replicated(session, mesh, model, [[], []], PLAIN, sync, **options)
        return str(caught.value)

    with ThreadJob(mesh.size) as job:
        found = job.run(work)
    assert len(set(found)) == 1
    assert "\n" not in found[0]
    return found[0]


def test_schedules_without_a_flush_are_refused() -> None:
    text = refused(layered(5), "bsp", schedule="pipedream")
    assert text.startswith("pipedream has microbatches in flight at every update, and a DistributedOptimizer takes new weig")
    assert text.endswith("use a schedule that flushes (1f1b)")


def test_tied_weights_in_modes_without_a_barrier_are_refused() -> None:
    text = refused(seeded_model(Tied), "ssp:1", microbatches=2, loss=nn.functional.cross_entropy)
    assert text.startswith("stages 0, 1 hold the same parameter, and under sync=ssp:1 its copies would be updated in differ")
    assert text.endswith("use bsp, local or diloco, or stages= that keep it in one")


# The tensor axis, as far as a pipeline knows of it.


@pytest.mark.parametrize("kind", [nn.Sequential, Tied])
def test_lanes_of_a_replica_clip_by_the_norm_of_all_their_ranks(kind: type[nn.Module]) -> None:
    """Two lanes with the same replicated parameters, of which one counts them."""
    mesh, clip = Mesh(1, 2, 2), 0.05
    model, data = (layered(5), batches(3, 8)) if kind is nn.Sequential else (seeded_model(Tied), words(3, 8))
    loss = mse if kind is nn.Sequential else nn.functional.cross_entropy
    norms = list[float]()

    def train(session: Session) -> Outcome:
        ranks = session.world().new_group(mesh.replica_group(session.rank))
        shard = mesh.point(session.rank).tensor
        hooks = StageHooks(norm_group=ranks, counts=lambda name: shard == 0)
        pipe = Pipeline(
            copy.deepcopy(model),
            loss=loss,
            optimizer=SGD,
            group=lane(session, mesh),
            microbatches=4,
            clip_norm=clip,
            _hooks=hooks,
        )
        losses = [pipe.step(x, y) for x, y in data]
        return Outcome(losses, pipe.state_dict(), pipe)

    with GroupJob(mesh.size) as job:
        found = job.run(train)
    assert_equals(found, alone(model, data, clipping(SGD, clip, norms), loss=loss)[1])
    assert [outcome.pipe.gradient_norm for outcome in found] == [pytest.approx(norms[-1], abs=1e-10)] * mesh.size


def test_shards_are_not_shown_as_the_state_of_the_whole_model() -> None:
    model = layered(5)

    def train(session: Session) -> None:
        def prepare(part: ModelPart) -> None:
            for name, layer in part.members:
                if isinstance(layer, nn.Linear):
                    half = nn.Linear(6, 6).double()
                    half.bias = nn.Parameter(layer.bias.detach()[:3].clone())
                    part.replace(name, half)

        hooks = StageHooks(prepare_part=prepare)
        text = r"a shard of \(6,\): this pipeline is one lane of a strategy; use state"
        with pytest.raises((UsageError, PeerError), match=text):
            Pipeline(copy.deepcopy(model), loss=mse, optimizer=SGD, microbatches=4, _hooks=hooks).state_dict()

    with GroupJob(2) as job:
        job.run(train)


def test_a_part_is_prepared_before_its_optimizer_is_made() -> None:
    """Layers are replaced: the optimizer has their new parameters, under the names of the whole model."""
    model, data = layered(5), batches(2, 8)
    other = layered(5, 6)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)

    def train(session: Session) -> Outcome:
        def prepare(part: ModelPart) -> None:
            for name, _ in part.members:
                part.replace(name, copy.deepcopy(other[int(name)]))

        hooks = StageHooks(prepare_part=prepare)
        pipe = Pipeline(copy.deepcopy(model), loss=mse, optimizer=SGD, microbatches=4, _hooks=hooks)
        return Outcome([pipe.step(x, y) for x, y in data], pipe.state_dict(), pipe)

    with GroupJob(2) as job:
        found = job.run(train)
    losses, state = alone(other, data, SGD)
    assert_equals(found, state)
    torch.testing.assert_close(found[0].losses, losses, rtol=0, atol=1e-10)

"""Pipelines on some ranks of the job: side by side, without anything to do with each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from piped import ADAM, PLAIN, Outcome, alone, assert_same, batches, everywhere, layered, mse
from test_pipeline_clipping import clipping
from test_pipeline_lost import dies, trapped
from test_pipeline_models import Tied, seeded_model, words
from torch import nn

from polytempo.errors import RankLost, UsageError
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.runtime import RankLayout
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob
from polytempo.train.communication import all_reduce, barrier, new_group

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

LANES = [(0, 2), (1, 3)]


def lane_of(rank: int) -> int:
    return next(lane for lane, ranks in enumerate(LANES) if rank in ranks)


@pytest.mark.parametrize("spec", ["1f1b", "gpipe", "pipedream"])
def test_pipelines_side_by_side_are_trainings_of_their_own(spec: str) -> None:
    models, data = [layered(5), layered(3)], [batches(4, 8, seed=1), batches(3, 8, seed=2)]
    options: dict[str, Any] = {} if spec == "pipedream" else {"microbatches": 4, "clip_norm": 0.5}

    def work(session: Session) -> Outcome:
        groups = [new_group(ranks) for ranks in LANES]
        lane = lane_of(session.rank)
        pipe = Pipeline(copy.deepcopy(models[lane]), loss=mse, optimizer=ADAM, schedule=spec, group=groups[lane], **options)
        losses = [pipe.step(x, y) for x, y in data[lane]]
        losses += [pipe.flush()] if spec == "pipedream" else []
        assert (pipe.rank, pipe.stage.number) == (session.rank, LANES[lane].index(session.rank))
        losses.append(pipe.evaluate(*data[lane][0]))
        return Outcome(losses, pipe.state_dict(), pipe)

    with GroupJob(4) as job:
        found = job.run(work)
    for lane, ranks in enumerate(LANES):
        with GroupJob(2) as job:

            def whole(session: Session, lane: int = lane) -> Outcome:
                pipe = Pipeline(copy.deepcopy(models[lane]), loss=mse, optimizer=ADAM, schedule=spec, **options)
                losses = [pipe.step(x, y) for x, y in data[lane]]
                losses += [pipe.flush()] if spec == "pipedream" else []
                losses.append(pipe.evaluate(*data[lane][0]))
                return Outcome(losses, pipe.state_dict(), pipe)

            wanted = job.run(whole)[0]
        for rank in ranks:
            assert found[rank].losses == wanted.losses
            assert all(torch.equal(found[rank].state[name], value) for name, value in wanted.state.items())


def test_side_by_side_with_tied_weights_and_replicas_beside_collectives_of_all() -> None:
    """One lane has tied weights and the other replicas: they make different groups, and those of all ranks still work."""
    tied, plain, data = seeded_model(Tied), layered(5), batches(3, 8)
    loss = nn.functional.cross_entropy

    def work(session: Session) -> Outcome:
        first, second = new_group([0, 2, 4]), new_group([1, 3, 5])
        if session.rank % 2 == 0:
            pipe = Pipeline(copy.deepcopy(tied), loss=loss, optimizer=PLAIN, microbatches=4, group=first)
            barrier()  # ranks are threads: none computes while another traces
            losses = [pipe.step(x, y) for x, y in words(3, 8)]
        else:
            options: dict[str, Any] = {"stages": 2, "replicas": (2, 1), "microbatches": 4}
            pipe = Pipeline(copy.deepcopy(plain), loss=mse, optimizer=PLAIN, group=second, **options)
            barrier()
            losses = [pipe.step(x, y) for x, y in data]
        total = torch.ones(1)
        all_reduce(total, group=new_group())
        assert float(total) == 6
        return Outcome(losses, pipe.state_dict(), pipe)

    with GroupJob(6) as job:
        found = job.run(work)
    assert_same(found[::2], alone(tied, words(3, 8), PLAIN, loss=loss), 1e-10)
    assert_same(found[1::2], alone(plain, data, PLAIN), 1e-10)


def sent(session: Session) -> int:
    """Bytes, by this rank."""
    return sum(link.overhead_sent + link.payload_sent for link in session.world().engine.messages.links.values())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_stage_accumulates_gradients_without_a_message(microbatches: int) -> None:
    model, data = layered(3), batches(3, 8)

    def work(session: Session) -> tuple[Outcome, int]:
        group = [new_group([rank]) for rank in range(2)][session.rank]
        pipe = Pipeline(
            copy.deepcopy(model), loss=mse, optimizer=PLAIN, group=group, microbatches=microbatches, clip_norm=0.3
        )
        before = sent(session)
        losses = [pipe.step(x, y) for x, y in data[session.rank :]]
        return Outcome(losses, pipe.state_dict(), pipe), sent(session) - before

    with GroupJob(2) as job:
        found = job.run(work)
    for rank, (outcome, bytes_sent) in enumerate(found):
        assert_same([outcome], alone(model, data[rank:], clipping(PLAIN, 0.3)), 1e-10)
        assert bytes_sent == 0


def test_a_death_is_named_in_its_pipeline_and_not_noticed_in_another() -> None:
    models = [trapped(2) for _ in range(4)]  # before there are threads, which share one random generator

    def work(session: Session) -> Outcome:
        groups = [new_group(ranks) for ranks in LANES]
        lane, model = lane_of(session.rank), models[session.rank]
        if session.rank == 2:
            model[3].left, model[3].spring = 6, lambda: dies(session)
        pipe = Pipeline(model, loss=mse, optimizer=ADAM, stages=[2, 2], microbatches=4, group=groups[lane])
        return Outcome([pipe.step(x, y) for x, y in batches(6, 8)], pipe.state_dict(), pipe)

    outcomes = everywhere(4, work)
    assert isinstance(outcomes[0], RankLost)
    assert outcomes[0].ranks == (2,)
    assert "stage 1 (rank 2)" in str(outcomes[0])
    assert_same([outcomes[1], outcomes[3]], alone(trapped(2), batches(6, 8), ADAM), 1e-10)


def test_ranks_outside_and_sizes_that_do_not_fit_are_refused() -> None:
    def work(session: Session) -> None:
        pair = new_group([0, 1])
        if session.rank == 2:
            text = "rank 2 is not in the group of ranks 0, 1; make its pipeline on these ranks only"
            with pytest.raises(UsageError, match=text):
                Pipeline(layered(), loss=mse, optimizer=PLAIN, group=pair)
        else:
            text = r"needs 3 ranks, one for each replica of a stage \(1, 1, 1\); the group has 2; give a group of 3, or use"
            with pytest.raises(UsageError, match=text):
                Pipeline(layered(), loss=mse, optimizer=PLAIN, group=pair, stages=3)

    with GroupJob(3) as job:
        job.run(work)


def test_subgroups_are_of_their_groups_and_not_without_end() -> None:
    def work(session: Session) -> None:
        world = session.world()
        group = world.new_group([0, 1])
        assert group is not None
        with pytest.raises(UsageError, match=r"expected some of the ranks \[0, 1\], got \[1, 2\]"):
            world.subgroup(group, [1, 2])
        contexts = {group.context}
        for _ in range(1023):
            made = world.subgroup(group, [session.rank])
            assert made is not None
            contexts.add(made.context)
        assert len(contexts) == 1024
        with pytest.raises(UsageError, match="more than 1024 groups"):
            world.subgroup(group, [0])
        with pytest.raises(UsageError, match=r"expected a group of new_group\(\)"):
            world.subgroup(made, [session.rank])

    with GroupJob(2) as job:
        job.run(work)


def test_places_and_ranks_are_each_others_inverse() -> None:
    layout = RankLayout((2, 1, 3), (1, 3, 4, 6, 8, 9))
    places = [layout.of(rank) for rank in layout.members]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [layout.rank(*place) for place in places] == list(layout.members)
    assert [layout.ranks(stage) for stage in range(3)] == [(1, 3), (4,), (6, 8, 9)]
    assert layout.name(8) == "stage 2.1 (rank 8)"

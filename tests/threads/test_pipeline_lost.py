"""Stages that end or fail: all others name them, and what they leave behind is enough to go on."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from piped import ADAM, SGD, Batch, Outcome, alone, assert_same, batches, everywhere, layered, mse
from torch import nn

from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.state import prune, write_part
from polytempo.session.session import Session

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]


class Died(BaseException):
    """The end of a process, for its thread: nothing of ours may catch it."""


class Trap(nn.Module):
    """Does what it is told on its n-th forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.spring = -1, lambda: None  # type: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.spring()
        return x * 1


def trapped(stages: int) -> nn.Sequential:
    """A layer with parameters and a trap for each stage."""
    layers = layered(2 * stages)
    return nn.Sequential(*[layer for stage in range(stages) for layer in (layers[2 * stage], Trap())])


def train(
    stages: int,
    data: Sequence[Batch],
    spring: Callable[[Session], None] | None = None,
    at: tuple[int, int] = (0, 0),
    **options: Any,
) -> list[Any]:
    """Each rank's outcome, or its error. `at`: the stage and the forward of it at which something happens."""
    models = [trapped(stages) for _ in range(stages)]

    def work(session: Session) -> Outcome:
        trap = models[session.rank][2 * session.rank + 1]
        if spring is not None and session.rank == at[0]:
            trap.left, trap.spring = at[1], lambda: spring(session)  # type: ignore[assignment]
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=ADAM, stages=[2] * stages, **options)
        done = pipe.steps
        losses = [pipe.step(x, y) for x, y in data[done:]]
        pipe.flush()
        return Outcome(losses, pipe.state_dict(), pipe)

    return everywhere(stages, work)


def dies(session: Session) -> None:
    session.abandon()
    raise Died


def fails(session: Session) -> None:
    raise ValueError("the\nlayer is broken")


@pytest.mark.parametrize("spec", ["gpipe", "1f1b", "sequential", "pipedream"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_that_dies_is_named_by_all_others(spec: str, stage: int) -> None:
    options = {} if spec == "pipedream" else {"microbatches": 4}
    outcomes = train(4, batches(8, 8), dies, (stage, 6), schedule=spec, **options)
    assert isinstance(outcomes[stage], Died)
    for rank, error in enumerate(outcomes):
        if rank != stage:
            assert isinstance(error, RankLost), error
            assert error.ranks == (stage,)
            assert f"stage {stage} (rank {stage})" in str(error)
            assert "\n" not in str(error)


@pytest.mark.parametrize("spec", ["gpipe", "1f1b", "pipedream"])
def test_a_stage_that_fails_says_so_itself_and_to_all_others(spec: str) -> None:
    options = {} if spec == "pipedream" else {"microbatches": 4}
    outcomes = train(3, batches(8, 8), fails, (1, 6), schedule=spec, **options)
    assert isinstance(outcomes[1], ValueError)
    doing = {"pipedream": "F5", "1f1b": "F1", "gpipe": "B1"}[spec]  # gpipe makes forwards again
    for rank in (0, 2):
        assert type(outcomes[rank]) is PeerError
        assert str(outcomes[rank]) == f"stage 1 (rank 1) failed in {doing}: ValueError: the layer is broken"


def test_a_pipeline_that_has_ended_says_why() -> None:
    model = trapped(2)

    def work(session: Session) -> None:
        own = copy.deepcopy(model)
        own[3].left, own[3].spring = 1, lambda: fails(session)
        pipe = Pipeline(own, loss=mse, optimizer=ADAM, stages=[2, 2], microbatches=2)
        with pytest.raises((ValueError, PeerError), match="is broken"):
            pipe.step(*batches(1, 4)[0])
        with pytest.raises(PeerError, match=r"this pipeline has ended: stage 1 \(rank 1\) failed in F0: ValueError"):
            pipe.step(*batches(1, 4)[0])

    assert everywhere(2, work) == [None, None]


# Going on.


@pytest.mark.parametrize("spec", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 2])
def test_after_a_failure_all_parts_are_there_and_training_goes_on(spec: str, stage: int, tmp_path: Path) -> None:
    data = batches(6, 8)
    options = {"schedule": spec, "microbatches": 4}
    failed = train(3, data, fails, (stage, 22), checkpoint=tmp_path, **options)
    assert all(isinstance(error, ValueError | PeerError) for error in failed)
    assert len(list(tmp_path.glob("step-*/stage-*-of-3.safetensors"))) == 3
    resumed = train(3, data, resume=tmp_path, **options)
    losses, state = alone(trapped(3), data, ADAM)
    done = int(next(tmp_path.glob("step-*")).name.removeprefix("step-"))
    assert done > 0
    assert_same(resumed, (losses[done:], state), 1e-10)


def test_after_a_death_training_goes_on_from_the_last_step_of_all(tmp_path: Path) -> None:
    data = batches(6, 8)
    options = {"schedule": "1f1b", "microbatches": 4}
    failed = train(3, data, dies, (1, 15), checkpoint=tmp_path, checkpoint_every=1, **options)
    assert isinstance(failed[0], RankLost)
    resumed = train(3, data, resume=tmp_path, **options)
    losses, state = alone(trapped(3), data, ADAM)
    assert_same(resumed, (losses[3:], state), 1e-10)
    assert len(list(tmp_path.glob("step-*/stage-0-of-3.safetensors"))) <= 3


class Breaking(torch.optim.SGD):
    """Fails in the middle of its n-th step."""

    left = 4

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.param_groups[0]["params"][0].data.zero_()
            raise ValueError("no step")
        return super().step(closure)


@pytest.mark.parametrize("stage", [0, 2])
def test_who_is_ahead_by_an_update_writes_that_and_who_is_in_the_middle_of_one_nothing(stage: int, tmp_path: Path) -> None:
    """The stage before the last has all gradients of the step, when the last fails before it has told the loss."""
    data, model = batches(6, 8), trapped(3)

    def work(session: Session, breaks: bool, **options: Any) -> Outcome:
        kind = Breaking if breaks and session.rank == stage else torch.optim.SGD
        options |= {"stages": [2, 2, 2], "microbatches": 4}
        pipe = Pipeline(copy.deepcopy(model), loss=mse, optimizer=lambda params: kind(params, lr=0.1), **options)
        return Outcome([pipe.step(x, y) for x, y in data[pipe.steps :]], pipe.state_dict(), pipe)

    everywhere(3, lambda session: work(session, True, checkpoint=tmp_path, checkpoint_every=1))
    there = {(path.parent.name[-1], path.name[6]) for path in tmp_path.glob("step-*/stage-*.safetensors")}
    assert {("3", "0"), ("3", "1"), ("3", "2"), ("4", "1")} <= there
    assert ("4", str(stage)) not in there
    resumed = everywhere(3, lambda session: work(session, False, resume=tmp_path))
    losses, state = alone(model, data, lambda params: torch.optim.SGD(params, lr=0.1))
    assert_same(resumed, (losses[3:], state), 1e-10)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    """One stage: it has the generator to itself."""
    model, data = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double(), batches(6, 4)

    def work(session: Session, data: Sequence[Batch], resume: Path | None = None) -> list[float | None]:
        pipe = Pipeline(copy.deepcopy(model), loss=mse, optimizer=ADAM, microbatches=2, resume=resume)
        losses = [pipe.step(x, y) for x, y in data]
        pipe.save(tmp_path)
        return losses

    (whole,) = everywhere(1, lambda session: work(session, data))
    (first,) = everywhere(1, lambda session: work(session, data[:3]))
    shutil.rmtree(tmp_path / "step-00000006")
    (second,) = everywhere(1, lambda session: work(session, data[3:], tmp_path))
    assert first + second == whole


def test_running_statistics_of_a_step_that_failed_are_not_kept(tmp_path: Path) -> None:
    data = batches(5, 8)
    norms = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Trap(), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    optimizer = SGD  # a bias before BatchNorm has no gradient but rounding, which Adam would magnify

    def work(session: Session, breaks: bool, **options: Any) -> Outcome:
        model = copy.deepcopy(norms)
        if breaks and session.rank == 0:
            model[2].left, model[2].spring = 8, lambda: fails(session)
        pipe = Pipeline(model, loss=mse, optimizer=optimizer, stages=[3, 2], microbatches=2, **options)
        return Outcome([pipe.step(x, y) for x, y in data[pipe.steps :]], pipe.state_dict(), pipe)

    everywhere(2, lambda session: work(session, True, checkpoint=tmp_path))
    resumed = everywhere(2, lambda session: work(session, False, resume=tmp_path))
    losses, state = alone(norms, data, optimizer, microbatches=2)
    assert_same(resumed, (losses[3:], state), 1e-10)


def test_save_and_resume_in_normal_times(tmp_path: Path) -> None:
    data, whole = batches(6, 8), trapped(3)

    def work(session: Session, resume: Path | None) -> Outcome:
        model = copy.deepcopy(whole)
        pipe = Pipeline(model, loss=mse, optimizer=ADAM, stages=[2, 2, 2], microbatches=4, resume=resume)
        losses = [pipe.step(x, y) for x, y in (data[3:] if resume else data[:3])]
        if not resume:
            pipe.save(tmp_path)
        return Outcome(losses, pipe.state_dict(), pipe)

    everywhere(3, lambda session: work(session, None))
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert (manifest["step"], manifest["stages"], manifest["names"]) == (3, 3, list(trapped(3).state_dict()))
    resumed = everywhere(3, lambda session: work(session, tmp_path))
    losses, state = alone(trapped(3), data, ADAM)
    assert_same(resumed, (losses[3:], state), 1e-10)


def test_without_flushes_parts_are_written_at_a_flush(tmp_path: Path) -> None:
    data, model = batches(9, 4), trapped(3)

    def work(session: Session, resume: Path | None, parts: Sequence[Sequence[Batch]]) -> Outcome:
        options: dict[str, Any] = {"schedule": "pipedream", "checkpoint": tmp_path, "resume": resume}
        own = copy.deepcopy(model)
        pipe = Pipeline(own, loss=mse, optimizer=ADAM, stages=[2, 2, 2], **options)
        for part in parts:
            for x, y in part:
                pipe.step(x, y)
            pipe.flush()
        return Outcome([], pipe.state_dict(), pipe)

    whole = everywhere(3, lambda session: work(session, None, [data[:5], data[5:]]))
    for folder in tmp_path.glob("step-00000009"):
        for part in folder.iterdir():
            part.unlink()
    resumed = everywhere(3, lambda session: work(session, tmp_path, [data[5:]]))
    assert all(torch.equal(resumed[0].state[name], value) for name, value in whole[0].state.items())
    assert resumed[0].pipe.steps == 9


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    def message(**options: Any) -> list[str]:
        outcomes = everywhere(2, lambda session: Pipeline(trapped(2), loss=mse, optimizer=ADAM, **options))
        assert isinstance(outcomes[0], UsageError), outcomes[0]
        assert isinstance(outcomes[1], PeerError | UsageError)
        return [str(outcome) for outcome in outcomes]

    first, second = message(resume=tmp_path / "nothing")
    assert first == f"{tmp_path / 'nothing'} holds no checkpoint of a pipeline with 2 stages: no parts are there"
    assert second == f"stage 0 (rank 0) failed: {first}"
    train(3, batches(1, 4), checkpoint=tmp_path, checkpoint_every=1, microbatches=2)
    assert message(resume=tmp_path)[0].endswith("parts of 3 stages are there, of no step all")
    train(2, batches(1, 4), checkpoint=tmp_path / "two", checkpoint_every=1, microbatches=2)
    assert "has other stages" in message(resume=tmp_path / "two", stages=[3, 1])[0]
    part = next((tmp_path / "two").glob("step-*/stage-1-of-2.safetensors"))
    part.write_bytes(b"no such thing")
    outcomes = everywhere(
        2,
        lambda session: Pipeline(trapped(2), loss=mse, optimizer=ADAM, resume=tmp_path / "two", stages=[2, 2]),
    )
    assert str(outcomes[1]).startswith(f"cannot read the checkpoint {part}")


def test_stages_that_prune_at_the_same_time_do_not_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and removing, another stage has removed the folder."""
    for step in range(4):
        write_part(tmp_path, step, 0, 2, {"step": step})
    listing = Path.glob

    def late(self: Path, pattern: str) -> Any:
        if pattern.startswith("stage-"):
            shutil.rmtree(self)
        return listing(self, pattern)

    monkeypatch.setattr(Path, "glob", late)
    prune(tmp_path, 0, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]

"""State that a script registers rides in the job's checkpoints: schedules, generators, values of its own."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal, made_from_seed, weights
from safetensors.torch import load_file
from sessions import under
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.prepare import prepare
from polytempo.train.sampler import DistributedSampler
from polytempo.train.script_state import LARGE, RngState, register_for_checkpointing

pytestmark = pytest.mark.timeout(30)

EPOCHS, BATCH, SAMPLES = 4, 4, 48
SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.03, steps),
    "milestones": lambda optimizer, steps: lr_scheduler.MultiStepLR(optimizer, [3, 9, 17], 0.5),
    "in turn": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 3, 0.7)], [6]
    ),
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.randn(5, 3, generator=generator, dtype=torch.float64))


DATA = data()
MODEL = made_from_seed(0, lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3))).double()


class Notes:
    """What a script may keep: all kinds of plain data."""

    def __init__(self, rank: int) -> None:
        self.seen: dict[str, Any] = {"rank": rank, "steps": 0, "best": None, "history": [], "mean": torch.zeros(3, 1)}
        self.seen |= {"nothing": torch.empty(0), "odd": {(1, "a"): {2, 3}}, "wide": 1 << 80, "name": "a\nb"}

    def add(self, loss: float) -> None:
        self.seen["steps"] += 1
        self.seen["history"].append((self.seen["steps"], loss))
        self.seen["mean"] = self.seen["mean"] + loss

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


Trained = tuple[list[torch.Tensor], list[float], Notes]


def train(session: Session, schedule: str = "cosine", loader_of: str = "prepare", per_epoch: bool = False) -> Trained:
    """A training of all epochs, or what is left of it: the weights, the learning rate of each step, the script's notes."""
    model, dataset = copy.deepcopy(MODEL), DATA
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if loader_of == "prepare":
        model, optimizer, loader = prepare(model, inner, DataLoader(dataset, batch_size=BATCH, shuffle=True))
        epochs = loader.epochs(EPOCHS)
    else:
        optimizer = DistributedOptimizer(inner, model)
        sampler = DistributedSampler(dataset)
        loader, epochs = DataLoader(dataset, batch_size=BATCH, sampler=sampler), sampler.epochs(EPOCHS)
    scheduler = SCHEDULES[schedule](optimizer, EPOCHS * len(loader))
    notes, rates = Notes(session.rank), []
    if session.size == 1:
        torch.manual_seed(5)  # generators are the process's, and workers are its threads
        register_for_checkpointing(RngState())
    else:
        model.eval()
    register_for_checkpointing(scheduler)
    register_for_checkpointing(notes, per_rank=True)
    for _ in epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step(samples=len(x))
            notes.add(loss.item())
            if not per_epoch:
                scheduler.step()
            if loader_of == "sampler" and session.should_stop():
                break
        if per_epoch:
            scheduler.step()
    return weights(model), rates, notes


def check_resumed(tmp_path: Path, workers: int, stop_at: int, **how: Any) -> None:
    """A training that is stopped and goes on equals one that is not: weights, rates, notes."""
    with ThreadJob(workers) as job:
        whole = job.run(lambda session: train(session, **how))
    with ThreadJob(workers, limits=Limits(steps=stop_at * workers), checkpoint=tmp_path) as job:
        first = job.run(lambda session: train(session, **how))
    with ThreadJob(workers, 2, resume=tmp_path) as job:
        second = job.run(lambda session: train(session, **how))
    for (wanted, rates, notes), (_, before, _), (got, after, kept) in zip(whole, first, second, strict=True):
        assert before + after == rates
        assert len(before) == stop_at
        assert_equal(got, wanted)
        assert kept.seen["history"] == notes.seen["history"]
        assert kept.seen["rank"] == notes.seen["rank"], "each rank has its own back"
        assert torch.equal(kept.seen["mean"], notes.seen["mean"])
        assert (kept.seen["odd"], kept.seen["wide"]) == (notes.seen["odd"], notes.seen["wide"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(schedule: str, tmp_path: Path) -> None:
    check_resumed(tmp_path, 2, 9, schedule=schedule)


@pytest.mark.parametrize("loader_of", ["prepare", "sampler"])
@pytest.mark.parametrize("stop_at", [5, 12, 30])
def test_dropout_goes_on_as_if_nothing_had_happened(loader_of: str, stop_at: int, tmp_path: Path) -> None:
    check_resumed(tmp_path, 1, stop_at, loader_of=loader_of)


@pytest.mark.parametrize("stop_at", [6, 9, 11, 12])
def test_a_schedule_by_epochs_is_as_far_as_the_epochs_are(stop_at: int, tmp_path: Path) -> None:
    check_resumed(tmp_path, 2, stop_at, schedule="milestones", per_epoch=True)


def test_a_checkpoint_in_the_middle_has_the_state_of_its_step(tmp_path: Path) -> None:
    with ThreadJob(2, checkpoint=tmp_path, checkpoint_every=5) as job:
        whole = job.run(train)
    for step in (15, 20):
        with ThreadJob(2, resume=tmp_path / f"step-{step:08d}") as job:
            second = job.run(train)
        for (wanted, rates, notes), (got, after, kept) in zip(whole, second, strict=True):
            assert after == rates[step:]
            assert_equal(got, wanted)
            assert kept.seen["history"] == notes.seen["history"]


def test_with_other_numbers_of_workers_all_have_the_schedule_and_only_known_ranks_their_own_state(tmp_path: Path) -> None:
    with ThreadJob(2, limits=Limits(steps=10), checkpoint=tmp_path) as job:
        first = job.run(train)
    with ThreadJob(3, resume=tmp_path) as job:
        second = job.run(train)
    assert [after[0] for _, after, _ in second] == [rate_at(5)] * 3
    assert [notes.seen["rank"] for _, _, notes in second] == [0, 1, 2]
    begun = [notes.seen["history"][0] for _, _, notes in second]
    assert begun[:2] == [notes.seen["history"][0] for _, _, notes in first]
    assert begun[2] not in begun[:2], "a new rank has no state of its own to go on from"


def rate_at(step: int) -> float:
    """The rate of this step in a cosine schedule that nothing has interrupted, of the job of two workers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = SCHEDULES["cosine"](optimizer, EPOCHS * SAMPLES // BATCH // 2)
    for _ in range(step):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_an_interrupted_job_has_the_state_of_the_last_step_of_each_worker(sync: str, tmp_path: Path) -> None:
    """The launcher stops all workers at once, wherever they are, and the servers save what they have."""
    together, rates = threading.Barrier(2), {}

    def until_stopped(session: Session, steps: int) -> None:
        model = copy.deepcopy(MODEL).eval()
        loader = DataLoader(DATA, batch_size=BATCH)
        model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        schedule, notes = lr_scheduler.ExponentialLR(optimizer, 0.5), Notes(session.rank)
        register_for_checkpointing(schedule, notes)
        rates[session.rank] = [optimizer.param_groups[0]["lr"], notes.seen["rank"]]
        for number, (x, _) in enumerate(loader):
            if number == (
                steps + session.rank if sync == "asp" else steps
            ):  # the next batch was drawn, no step is made of it
                together.wait(20)
                return
            optimizer.zero_grad()
            (model(x).sum() * 0).backward()
            optimizer.step()
            schedule.step()

    job = ThreadJob(2, sync=sync, checkpoint=tmp_path)
    sessions = [job.session(rank) for rank in range(2)]
    threads = [threading.Thread(target=as_worker, args=(session, until_stopped, 3)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    job.close(exit_status=130, save=True)
    for session in sessions:
        session.abandon()
    with ThreadJob(2, sync=sync, resume=tmp_path) as job:
        job.run(lambda session: until_stopped(session, 0))
    assert rates == {0: [0.5**3, 0], 1: [0.5 ** (4 if sync == "asp" else 3), 0 if sync == "bsp" else 1]}


def test_a_state_that_is_older_than_the_parameters_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The only worker is killed after a step, before it draws again; what has not changed for long is not old."""

    def killed(session: Session, steps: int) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
        register_for_checkpointing(schedule, lr_scheduler.MultiStepLR(optimizer, [100]))
        for _ in range(steps):
            model(DATA.tensors[0][:2]).sum().backward()
            optimizer.step()
            schedule.step()

    for steps, words in ((3, ["ExponentialLR 0", "MultiStepLR 0"]), (None, [])):
        saved = tmp_path / f"killed-{steps}"
        job = ThreadJob(1, checkpoint=saved)
        session = job.session(0)
        as_worker(session, killed, steps or 3)
        if steps is None:
            session.close()
        job.close(exit_status=130, save=True)
        session.abandon()
        with ThreadJob(1, resume=saved) as job:
            job.run(lambda session: killed(session, 0))
        said = [line for line in capfd.readouterr().err.splitlines() if "is of step 2, and the parameters of step 3" in line]
        assert [name for line, name in zip(said, words, strict=True) if f"rank 0: the state of {name} in" in line] == words


def as_worker(session: Session, work: Callable[..., None], *arguments: Any) -> None:
    with as_current(session):
        work(session, *arguments)


def test_state_that_is_large_is_in_checkpoints_and_does_not_travel_with_each_step(tmp_path: Path) -> None:
    class Large(Notes):
        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.seen["steps"], "values": torch.full((LARGE // 4 + 1,), float(self.seen["steps"]))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen |= state

    def work(session: Session, steps: int) -> tuple[dict[str, Any], int]:
        model = copy.deepcopy(MODEL)
        optimizer, notes = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model), Large(session.rank)
        register_for_checkpointing(notes)
        begun = dict(notes.seen)
        for _ in range(steps):
            model(DATA.tensors[0][:2]).sum().backward()
            optimizer.step()
            notes.add(1.0)
        return begun, optimizer.stats["bytes_sent"]

    with ThreadJob(2, checkpoint=tmp_path, checkpoint_every=4) as job:
        sent = job.run(lambda session: work(session, 9))
    assert all(LARGE * 2 < amount < LARGE * 3 for _, amount in sent), "at steps 4 and 8; and when it leaves"
    for step in (4, 8, 9):
        with ThreadJob(2, resume=tmp_path / f"step-{step:08d}") as job:
            for begun, _ in job.run(lambda session: work(session, 0)):
                assert begun["steps"] == step
                assert torch.equal(begun["values"], torch.full((LARGE // 4 + 1,), float(step)))


class Closed:
    def load_state_dict(self, state: Any) -> None: ...

    def state_dict(self) -> Any:
        return {"epoch": 1, "parts": [{"rule": max}]}


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (
            lambda: Closed(),
            r"the state of Closed 0 cannot be stored in a checkpoint: state_dict\(\)\['parts'\]\[0\]\['rule'\]: ",
        ),
        (lambda: [1], r"expected objects with state_dict\(\) and load_state_dict\(\), got a list"),
        (lambda: torch.optim.SGD(MODEL.parameters(), lr=1.0), "got a SGD, which is in the job's checkpoint by itself"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_when_it_is_registered(thing: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        under(Session(None, JobFacts(1, ()), 0), register_for_checkpointing, thing())
    assert "\n" not in str(refused.value)


def test_an_object_is_registered_once() -> None:
    notes = Notes(0)
    with pytest.raises(UsageError, match="got the same Notes twice"):
        under(Session(None, JobFacts(1, ()), 0), register_for_checkpointing, notes, notes)


def test_generators_go_on_where_they_were() -> None:
    state = RngState().state_dict()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    RngState().load_state_dict(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_a_checkpoint_holds_tensors_as_such_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with ThreadJob(1, limits=Limits(steps=3), checkpoint=tmp_path) as job:
        job.run(train)
    saved = tmp_path / "step-00000003" / "state-worker-0.safetensors"
    assert any(tensor.shape == (3,) and tensor.dtype == torch.float32 for tensor in load_file(saved).values())
    saved.write_bytes(saved.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match="is damaged"):
        ThreadJob(1, resume=tmp_path)

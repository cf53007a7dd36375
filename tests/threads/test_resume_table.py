"""Every helper x every mode x a resume: a table, and a test that walks it.

A training of three epochs is stopped in the middle of the second, by the job's budget, and goes on from the checkpoint. In
modes that are deterministic the weights are those of a training that was not stopped; in the others each sample is trained
on once in an epoch. A combination that cannot be is refused with its reason. Modes come from the table of modes: a new one
is in here, and must hold one of the three.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, made_from_seed, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset

import polytempo as pt
from polytempo.checkpoints import find_checkpoint
from polytempo.errors import PolytempoError, UsageError
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.sync.spec import MODES, parse_spec
from polytempo.testing.threads import ThreadJob

pytestmark = pytest.mark.timeout(60)

WORKERS, EPOCHS, BATCH, SAMPLES = 2, 3, 4, 48
STOP = 9  # steps of a worker, of 6 in an epoch
JOINT = WORKERS * BATCH

#: Of modes whose example is too long for a small training, what is run in its place; variants that have code of their own.
SHORT = {"anytime": "anytime:0.02", "local": "local:3", "adacomm": "adacomm:3", "diloco": "diloco:3"}
SHORT |= {"downpour": "downpour:push=3,fetch=3", "every": "every:3", "delay": "delay:2"}
VARIANTS = ("bsp+balance,micro=2", "local:3,state=mean", "diloco:3,fragments=3", "diloco:3,quorum=1,grace=0", "asup,bound=1")
SPECS = (*(SHORT.get(name, mode.example) for name, mode in MODES.items()), *VARIANTS)

#: Modes in which the same steps are made of the same samples each time.
DETERMINISTIC = ("bsp", "bsp+balance", "local", "adacomm", "diloco")
#: What `polytempo run` refuses to save, and why.
UNSAVED = {"gossip": "keeps each worker's model at the worker", "adpsgd": "keeps each worker's model at the worker"}
#: What `fit` refuses, and why.
UNFIT = {
    "bsp+balance": r"fit\(\) takes batches of one size, and bsp\+balance.* shares them by speed; use sync=bsp, or prepare"
}


def mode_of(sync: str) -> str:
    return parse_spec(sync).mode.name


def is_deterministic(sync: str) -> bool:
    """Fragments are averaged at different steps: a job that stops ends their blocks early."""
    return mode_of(sync) in DETERMINISTIC and "quorum" not in sync and "fragments" not in sync


class Noted(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):  # type: ignore[misc]
    """Samples that say which they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.y = self.x @ torch.randn(5, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


DATA = Noted()
MODEL = made_from_seed(2, lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))).double()
#: What a helper gives: the model, its optimizer, a loader, and the epochs that are left.
Made = tuple[nn.Module, torch.optim.Optimizer, Any, Iterator[int]]


def by_prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
    model, wrapped, loader = pt.prepare(model, optimizer, DataLoader(DATA, batch_size=BATCH, shuffle=True))
    micro = wrapped.spec.capabilities.micro or 1
    assert len(loader) == SAMPLES // max(BATCH // micro, 1) // WORKERS, "of a whole epoch, resumed or not"
    return model, wrapped, loader, loader.epochs(EPOCHS)


def by_sampler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
    wrapped = pt.DistributedOptimizer(optimizer, model)
    batch = BATCH // (wrapped.spec.capabilities.micro or 1) or 1
    sampler = pt.DistributedSampler(DATA, batch_size=batch)
    return model, wrapped, DataLoader(DATA, batch_size=batch, sampler=sampler), sampler.epochs(EPOCHS)


def by_batch_sampler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
    wrapped = pt.DistributedOptimizer(optimizer, model)
    sampler = pt.DistributedBatchSampler(DATA, BATCH)
    return model, wrapped, DataLoader(DATA, batch_sampler=sampler), sampler.epochs(EPOCHS)


LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Made]] = {
    "prepare": by_prepare,
    "DistributedSampler": by_sampler,
    "DistributedBatchSampler": by_batch_sampler,
}

#: By epoch, the samples of the steps that were made.
Seen = dict[int, list[int]]


def train(session: Session, helper: str) -> tuple[list[torch.Tensor], Seen]:
    """The plain loop, with momentum and a schedule by epochs; it stops where the budget says so."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader, epochs = LOOPS[helper](model, optimizer)
    schedule, seen = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), Seen()
    pt.register_for_checkpointing(schedule)
    for epoch in epochs:
        for index, x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            seen.setdefault(epoch, []).extend(index.tolist())
            if pt.should_stop() and helper != "prepare":
                optimizer.consolidate()
                return weights(model), seen
        schedule.step()
    optimizer.consolidate()
    return weights(model), seen


def run(sync: str, helper: str, **options: Any) -> tuple[list[torch.Tensor], Seen, float]:
    """The weights of rank 0, what all workers have seen, and how many samples counted."""
    with ThreadJob(WORKERS, 1, sync, **options) as job:
        results = job.run(lambda session: train(session, helper))
    seen: Seen = {}
    for _, own in results:
        for epoch, indices in own.items():
            seen.setdefault(epoch, []).extend(indices)
    assert [notice for notice in job.notices if "--samples" in notice] == []
    return results[0][0], seen, job.summary["samples"]


@pytest.mark.parametrize("helper", LOOPS)
@pytest.mark.parametrize("sync", SPECS)
def test_a_loop_goes_on_after_a_resume(sync: str, helper: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    request = RunRequest(ScriptProgram(str(script)), workers=WORKERS, sync=sync, checkpoint=tmp_path / "saved")
    if mode_of(sync) in UNSAVED:
        with pytest.raises(UsageError, match=UNSAVED[mode_of(sync)]):
            request.checked()
        return
    request.checked()
    if mode_of(sync) == "bsp+balance" and not parse_spec(sync).capabilities.micro and helper == "DistributedSampler":
        with pytest.raises(PolytempoError, match="found no batch that was dealt by speed"):
            run(sync, helper)
        return
    limits = Limits(samples=STOP * JOINT)
    _, first, counted = run(sync, helper, limits=limits, checkpoint=tmp_path / "saved")
    step = int(find_checkpoint(tmp_path / "saved")[1]["step"])
    if is_deterministic(sync) and not parse_spec(sync).capabilities.micro:  # else shares are by speed
        assert STOP <= step < STOP + 3, "steps, and not blocks of them"
    got, second, rest = run(sync, helper, resume=tmp_path / "saved")
    if mode_of(sync) != "bsp+backup":  # there what comes late is discarded
        assert counted + rest == EPOCHS * SAMPLES, "what was trained on, in both jobs"
    for epoch in range(EPOCHS):
        used = Counter([*first.get(epoch, []), *second.get(epoch, [])])
        assert set(used) == set(range(SAMPLES)) or mode_of(sync) == "anytime", "places that return come in a later epoch"
        if mode_of(sync) != "anytime":  # there a micro-batch that is late is abandoned, and drawn again
            assert set(used.values()) == {1}
    if is_deterministic(sync):
        wanted, _, _ = run(sync, helper)
        assert_close(got, wanted, rtol=1e-9)


@pytest.mark.parametrize("sync", SPECS)
def test_fit_goes_on_after_a_resume(sync: str, tmp_path: Path) -> None:
    def fitted(**options: Any) -> tuple[list[torch.Tensor], list[Any]]:
        models = [copy.deepcopy(MODEL) for _ in range(WORKERS)]
        about = {"optimizer": partial(torch.optim.SGD, lr=0.02, momentum=0.9), "strategy": f"data={WORKERS}"}
        about |= {"batch_size": JOINT, "progress": False, "epochs": EPOCHS}
        about |= {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)}

        def work(session: Session) -> pt.History:
            return pt.fit(models[session.rank], (DATA.x, DATA.y), nn.functional.mse_loss, **{**about, **options})

        with ThreadJob(WORKERS, 1, sync) as job:
            histories = job.run(work)
        return weights(models[0]), histories[0].rows

    if mode_of(sync) in UNFIT:
        with pytest.raises(UsageError, match=UNFIT[mode_of(sync)]):
            fitted()
        return
    saving = {"checkpoint": tmp_path, "checkpoint_every": 3}
    fitted(**saving, max_steps=STOP)
    got, rows = fitted(**saving, resume=True)
    assert rows[-1]["step"] == EPOCHS * SAMPLES // JOINT
    if is_deterministic(sync):
        wanted, _ = fitted()
        assert_close(got, wanted, rtol=1e-9)

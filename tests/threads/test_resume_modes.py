"""Every mode x every mode: a checkpoint that was saved under one goes on under the other, from its weights and with the
state of its optimizer, or is refused in one line before anything is trained. Modes come from the table of modes.
"""

from __future__ import annotations

import copy
import re
import threading
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_equal, weights
from safetensors.torch import load_file
from test_resume_table import JOINT, MODEL, SPECS, STOP, UNSAVED, WORKERS, by_prepare, mode_of
from torch import nn

import polytempo as pt
from polytempo.checkpoints import find_checkpoint
from polytempo.errors import PolytempoError, UsageError
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.sync.spec import Spec, parse_spec
from polytempo.testing.threads import ThreadJob

pytestmark = pytest.mark.timeout(60)

#: Variants that hold what others do.
ALIKE = ("bsp+balance,micro=2", "asup,bound=1")
SAVED = [sync for sync in SPECS if sync not in ALIKE and mode_of(sync) not in UNSAVED]
SAVED.append("local:3,momentum=0.3,state=keep")
#: Per worker and parameter.
Momenta = list[list[torch.Tensor]]


class Trained(NamedTuple):
    """Of a job: what it began with, by worker where that differs, and the momenta of its workers at its end."""

    start: list[torch.Tensor]
    before: Momenta
    outer: list[torch.Tensor]
    after: Momenta


def momenta(optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [own["momentum_buffer"].clone() for own in state.values() if own.get("momentum_buffer") is not None]


def train(sync: str, **options: Any) -> tuple[Trained, list[str]]:
    """Plain SGD with momentum until the budget is used up; what it began with, and what was said."""

    def work(session: Session) -> tuple[list[torch.Tensor], ...]:
        model = copy.deepcopy(MODEL)
        if "resume" in options:  # its own values must not matter
            for param in model.parameters():
                nn.init.constant_(param, 7.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        model, optimizer, loader, epochs = by_prepare(model, inner)
        start, before = weights(model), momenta(optimizer)
        outer = [one for part in optimizer.state_dict().get("outer", []) for one in part if one is not None]
        all_there.wait(30)  # where no worker waits for another, they would train before this one has looked
        for _ in epochs:
            for _, x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        optimizer.consolidate()
        return start, before, outer, momenta(optimizer)

    all_there = threading.Barrier(WORKERS)
    with ThreadJob(WORKERS, 1, sync, **options) as job:
        found = job.run(work)
    start, outer = found[0][0], found[0][2]
    return Trained(start, [one[1] for one in found], outer, [one[3] for one in found]), job.notices


def held(directory: Path, what: str = "value.0") -> list[torch.Tensor]:
    """The parameters in a checkpoint of one server, or their momentum, read without this library."""
    path, manifest = find_checkpoint(directory)
    file = load_file(path / "shard-0.safetensors")
    found = []
    for name, track in sorted(manifest["tracks"].items()):
        flat, place = file[f"{name}.{what}"].view(-1), 0
        for tensor, shape, *_ in track["proposal"]["tensors"]:
            size = torch.Size(shape).numel()
            found += [] if "of parameter" in tensor else [flat[place : place + size].view(shape)]
            place += size
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def under(sync: str) -> tuple[Path, Trained]:
        directory = tmp_path_factory.mktemp("saved")
        return directory, train(sync, checkpoint=directory, limits=Limits(samples=STOP * JOINT))[0]

    return under


def settled(sync: str) -> Spec:
    """With what is chosen for the script's optimizer."""
    return parse_spec(sync).settled("SGD", [{"momentum": 0.9}], workers=WORKERS)


def holds(sync: str) -> tuple[str, str, int]:
    """Where a mode has the momentum of the script's optimizer, the kind of its outer one, and the parts of the model."""
    spec = settled(sync)
    averaging = spec.averaging
    if averaging is None:
        return "rule" if mode_of(sync) == "asup" else "workers" if spec.worker_momentum else "servers", "", 1
    kind = "" if not averaging.outer_momentum else "block momentum" if averaging.in_lr else "outer momentum"
    return "workers", kind, averaging.fragments


@pytest.mark.parametrize("then", SAVED)
@pytest.mark.parametrize("first", SAVED)
def test_a_checkpoint_goes_on_under_another_mode(first: str, then: str, saved: Any) -> None:
    directory, before = saved(first)
    (had, outer, parts), (has, wants, takes) = holds(first), holds(then)
    options = {"resume": directory, "limits": Limits(samples=(STOP + 1) * JOINT)}
    if parts != takes:
        sync = re.escape(settled(first).text)
        words = rf"the checkpoint step-0+\d+ is of {sync}, which holds the model in .*; resume with --sync {sync}$"
        with pytest.raises(PolytempoError, match=words):
            train(then, **options)
        return
    found, notices = train(then, **options)
    assert_equal(found.start, held(directory))
    lost = [notice for notice in notices if "cannot go on under" in notice]
    assert len(lost) == ((had != has and "rule" in (had, has)) or bool(outer and outer != wants)), notices
    if outer and outer == wants and "quorum" not in then:  # there, reading it would be to wait
        assert_equal(found.outer, held(directory, "state.0.momentum_buffer"))
    if "rule" in (had, has):
        return
    there = [held(directory, "state.0.momentum_buffer")] if had == "servers" else before.after
    for rank, own in enumerate(found.before):
        assert len(own) == len(found.start), "the optimizer's state is carried"
        if had == has == "workers":
            assert_equal(own, there[rank])
        else:
            assert_close(own, [sum(parts) / len(there) for parts in zip(*there, strict=True)], rtol=1e-14)  # type: ignore[misc]


@pytest.mark.parametrize("first", [*SAVED, *(name for name in SPECS if mode_of(name) in UNSAVED)])
def test_what_a_manifest_says_enough_of_is_refused_before_anything_starts(first: str, tmp_path: Path) -> None:
    """With exit status 2: `UsageError` of the command."""
    (tmp_path / "train.py").touch()
    saved = tmp_path / "step-00000004"
    saved.mkdir()
    (saved / "manifest.json").write_text(f'{{"step": 4, "sync": "{first}", "files": []}}')
    for then in SAVED:
        request = RunRequest(ScriptProgram(str(tmp_path / "train.py")), workers=WORKERS, sync=then, resume=saved)
        if mode_of(first) in UNSAVED:
            words = f"{first} keeps each worker's model at the worker, and no checkpoint holds it"
        else:
            words = "" if holds(first)[2] == holds(then)[2] else "which holds the model in .* resume with --sync"
        with pytest.raises(UsageError, match=words) if words else nullcontext():
            request.checked()


@pytest.mark.parametrize("then", ["local:2", "diloco:2", "diloco:2,quorum=1,grace=0"])
@pytest.mark.parametrize("buffers", ["mean", "local"])
def test_averaged_buffers_go_on_where_the_checkpoint_has_them(buffers: str, then: str, tmp_path: Path) -> None:
    def work(start: float, steps: int, averaged: str) -> Any:
        def train(session: Session) -> float:
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            nn.init.constant_(model[1].running_mean, start + session.rank)
            optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, buffers=averaged)
            for _ in range(steps):
                model[1].running_mean += 1 + session.rank
                optimizer.zero_grad()
                model(torch.ones(4, 2)).sum().backward(inputs=list(model.parameters()))
                optimizer.step()
            return float(model[1].running_mean[0])

        return train

    with ThreadJob(1, 1, "local:2", checkpoint=tmp_path) as job:
        (ended,) = job.run(work(5.0, 2, buffers))
    with ThreadJob(2, 1, then, resume=tmp_path) as job:
        found = job.run(work(50.0, 0, "mean"))
    assert found == ([ended, ended] if buffers == "mean" else [50.0, 51.0])

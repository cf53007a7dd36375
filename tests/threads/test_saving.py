"""Checkpoints when things go wrong: full disks, crashes at any moment, interrupted jobs, copied folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import until
from torch import nn

from polytempo.checkpoints import digest_of_file, find_checkpoint, newest_since, publish, whole_checkpoints
from polytempo.errors import JobEnded, PeerError
from polytempo.launcher.local_job import CheckpointWatch
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.server import checkpoint as checkpoints
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedSampler

pytestmark = pytest.mark.timeout(30)


def made(directory: Path, step: int, name: str = "", at: int = 0, text: bytes = b"values") -> Path:
    """A checkpoint as a job leaves it; `at`: when it was written, in nanoseconds."""
    path = directory / (name or f"step-{step:08d}")
    path.mkdir(parents=True)
    (path / "shard-0.safetensors").write_bytes(text)
    digest = digest_of_file(path / "shard-0.safetensors")
    manifest = {"step": step, "files": [{"file": "shard-0.safetensors", "digest": digest, "tensors": {}}]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    if at:
        os.utime(path / "manifest.json", ns=(at, at))
    return path


# Which one is the newest.


def test_the_latest_step_is_taken_whenever_it_was_written(tmp_path: Path) -> None:
    for step, at in ((100, 1000), (20, 3000), (90, 2000)):
        made(tmp_path, step, at=at)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-00000020", "step-00000090", "step-00000100"]
    assert find_checkpoint(tmp_path)[0].name == "step-00000100"


def test_steps_are_numbers_also_where_names_are_longer(tmp_path: Path) -> None:
    made(tmp_path, 99_999_999)
    made(tmp_path, 100_000_000)
    assert find_checkpoint(tmp_path)[1]["step"] == 100_000_000


@pytest.mark.parametrize("copied_at", [1000, 3000])
def test_of_a_checkpoint_and_its_copy_the_one_with_the_jobs_name_is_taken(tmp_path: Path, copied_at: int) -> None:
    made(tmp_path, 50, at=2000)
    made(tmp_path, 50, "step-00000050-copy", at=copied_at)
    made(tmp_path, 40, "step-00000060", at=9000)  # renamed by hand: what counts is in the manifest
    assert find_checkpoint(tmp_path)[0].name == "step-00000050"


def test_of_two_copies_the_later_is_taken(tmp_path: Path) -> None:
    made(tmp_path, 50, "step-50-a", at=2000)
    made(tmp_path, 50, "step-50-b", at=1000)
    assert find_checkpoint(tmp_path)[0].name == "step-50-a"


def test_a_job_that_went_back_removes_what_is_behind_it_and_nothing_of_the_other_branch(tmp_path: Path) -> None:
    for step in (10, 100, 110, 120):
        made(tmp_path, step)
    for step in (20, 30, 40):
        made(tmp_path, step, f"step-{step:08d}.partial")
        publish(tmp_path, f"step-{step:08d}", {"step": step}, [], 3)
    left = [path.name for path in whole_checkpoints(tmp_path)]
    assert left == [f"step-{step:08d}" for step in (20, 30, 40, 100, 110, 120)]


def test_a_resumed_job_says_where_it_goes_on_and_names_one_that_was_written_later(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    made(tmp_path / "saved", 100, at=1000)
    request = RunRequest(ScriptProgram(str(script)), resume=tmp_path / "saved")
    first = f"resumed at step 100, from {tmp_path / 'saved' / 'step-00000100'}"
    assert request.checked().note() == first
    later = made(tmp_path / "saved", 20, at=2000)
    (later / "manifest.json").write_text(json.dumps({"step": 20, "files": [], "positions": [{"epoch": 2}, {"epoch": 1}]}))
    os.utime(later / "manifest.json", (2000, 2000))
    assert request.checked().note().startswith(f"{first}; {later} was written later")
    assert (
        RunRequest(ScriptProgram(str(script)), resume=later).checked().note() == f"resumed at step 20, epoch 2, from {later}"
    )
    assert RunRequest(ScriptProgram(str(script))).checked().note() == ""


# What the disk says.


def test_the_newest_is_what_the_job_itself_has_written(tmp_path: Path) -> None:
    old = made(tmp_path, 100)
    went_on_from = made(tmp_path, 10)
    saves = CheckpointWatch(tmp_path, went_on_from)
    assert saves.newest() == went_on_from, "nothing was saved yet"
    made(tmp_path, 20, "step-00000020.partial")
    assert saves.newest() == went_on_from, "it is not whole"
    new = made(tmp_path, 20)
    assert saves.newest() == new, "not the one of an earlier job, though of a later step"
    shutil.rmtree(new)
    shutil.rmtree(went_on_from)
    assert saves.newest() is None, "what is not there any more is not named"
    shutil.rmtree(old)
    again = made(tmp_path, 100, at=5)
    assert saves.newest() == again, "written anew under an old name"
    (again / "shard-0.safetensors").unlink()
    assert saves.newest() is None


def test_what_a_killed_server_has_begun_is_removed_and_nothing_else(tmp_path: Path) -> None:
    made(tmp_path, 5, "step-00000005.partial")
    saves = CheckpointWatch(tmp_path, None)
    made(tmp_path, 10)
    made(tmp_path, 20, "step-00000020.partial")
    saves.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005.partial", "step-00000010"]


class Crash(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step once more"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call that changes the disk the process dies once: what is found then is whole, and never an older one
    than the last that was whole before."""
    names = ("fsync", "rename", "unlink", "rmdir")
    calls = {name: getattr(os, name) for name in names}
    moments = 0
    while True:
        directory = tmp_path / str(moments)
        for step in (10, 20, 30, 40):
            made(directory, step)
        step = 40 if again else 50
        partial = made(directory, step, f"step-{step:08d}.partial", text=b"new")
        files = json.loads((partial / "manifest.json").read_text())["files"]
        (partial / "manifest.json").unlink()
        left = [moments]

        def dies(name: str, left: list[int] = left) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if left[0] == 0:
                    raise Crash
                left[0] -= 1
                return calls[name](*arguments, **options)

            return call

        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(os, name, dies(name))
            try:
                publish(directory, f"step-{step:08d}", {"step": step}, files, 3)
                over = True
            except Crash:
                over = False
        found = find_checkpoint(directory)[0]
        assert int(found.name.removeprefix("step-")) >= (30 if again else 40)
        for path in whole_checkpoints(directory):
            find_checkpoint(path)
        if over:
            assert (found / "shard-0.safetensors").read_bytes() == b"new"
            break
        moments += 1
    assert moments > 4, "the moments were not tried"


# A disk that is full.


def train(session: Session, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No file can be written whose path holds one of these words."""
    words: list[str] = []
    write = checkpoints.save_file

    def save(tensors: Any, path: Path) -> None:
        if any(word in str(path) for word in words):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save)
    return words


def test_a_checkpoint_that_cannot_be_written_is_left_out_if_that_was_asked_for(full: list[str], tmp_path: Path) -> None:
    full += ["step-00000002.partial/shard-1", "step-00000006.partial/shard-0"]
    with ThreadJob(2, 2, checkpoint=tmp_path, checkpoint_every=2, go_on_unsaved=True) as job:
        job.run(lambda session: train(session, 7))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000007"]
    notices = [notice for notice in job.notices if "checkpoint" in notice]  # these workers read the same data, which is said
    assert len(notices) == 2
    words = f"warning: the checkpoint step-00000002 could not be written to {tmp_path}: No space left on device"
    assert notices[0].startswith(words)
    assert notices[0].endswith("; going on without it")
    assert "\n" not in notices[0]


def test_else_it_ends_the_job_in_one_line_and_nothing_of_it_is_left(full: list[str], tmp_path: Path) -> None:
    full += ["step-00000004.partial/shard-1"]
    job = ThreadJob(2, 2, checkpoint=tmp_path, checkpoint_every=2)
    with pytest.raises((JobEnded, PeerError)) as ended:
        job.run(lambda session: train(session, 1000))
    job.close(1)
    assert isinstance(ended.value, JobEnded), ended.value
    said = f"the checkpoint step-00000004 could not be written to {tmp_path}: No space left on device"
    assert str(ended.value).startswith(said)
    assert "--checkpoint-errors continue" in str(ended.value)
    assert "\n" not in str(ended.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


@pytest.mark.parametrize("go_on", [False, True])
def test_one_at_the_end_is_the_jobs_failure_unless_it_may_go_on(full: list[str], go_on: bool, tmp_path: Path) -> None:
    full += ["step-00000003"]
    record = tmp_path / "record"
    with ThreadJob(1, 1, checkpoint=tmp_path / "saved", record=record, go_on_unsaved=go_on) as job:
        job.run(lambda session: train(session, 3))
    meta = json.loads((record / "meta.json").read_text())
    assert meta["exit_status"] == (0 if go_on else 1)
    assert ("could not be written" in meta["cause"]) is not go_on
    assert list((tmp_path / "saved").iterdir()) == []


def test_a_manifest_that_cannot_be_written_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Path:
        raise OSError(errno.EIO, "Input/output error", "manifest.json")

    monkeypatch.setattr(checkpoints, "publish", fails)
    with ThreadJob(1, 1, checkpoint=tmp_path, go_on_unsaved=True) as job:
        job.run(lambda session: train(session, 3))
    assert "Input/output error: manifest.json; going on" in job.notices[0]
    assert list(tmp_path.iterdir()) == []


# An interrupted job.


def test_an_interrupted_round_is_in_the_checkpoint_neither_as_values_nor_as_samples(tmp_path: Path) -> None:
    """Worker 0 has pushed its part of step 3, worker 1 has not: a job that goes on sees all samples of that step again."""
    data = list(range(24))
    seen: dict[int, list[list[int]]] = {0: [], 1: []}
    job = ThreadJob(2, 2, checkpoint=tmp_path)

    def work(session: Session) -> None:
        model = nn.Linear(1, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        sampler = DistributedSampler(data, shuffle=False)
        batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
        for step, batch in enumerate(batches):
            if step == 3 and session.rank == 1:
                until(lambda: bool(job.sequencer.clocks["0"].pending()), "worker 0 has pushed")
                job.close(130, save=True)
                raise JobEnded("interrupted")
            seen[session.rank].append(batch)
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step(samples=2)
            optimizer.zero_grad()

    with pytest.raises((JobEnded, PeerError)):
        job.run(work)
    found, manifest = find_checkpoint(tmp_path)
    assert found.name == "step-00000003"
    assert (manifest["steps"], manifest["samples"]) == (6, 12)
    assert newest_since(tmp_path, {}) == found
    rest: list[int] = []

    def go_on(session: Session) -> None:
        sampler = DistributedSampler(data, shuffle=False)
        rest.extend(sampler)

    with ThreadJob(1, 1, resume=tmp_path) as resumed:
        resumed.run(go_on)
    trained = [sample for batches in seen.values() for batch in batches[:3] for sample in batch]
    assert sorted(trained + rest) == data


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_before_the_first_push_there_is_nothing_to_save(sync: str, tmp_path: Path) -> None:
    job = ThreadJob(2, 1, sync, checkpoint=tmp_path)
    job.run(lambda session: train(session, 0))
    job.close(130, save=True)
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_job_saves_what_has_come_since_its_last_checkpoint(tmp_path: Path) -> None:
    """The slowest has not moved, so the name is that of the last one; the values are not."""
    job = ThreadJob(2, 1, "asp", checkpoint=tmp_path, checkpoint_every=2)
    closed = threading.Event()

    def work(session: Session) -> None:
        train(session, 5 if session.rank == 0 else 2)
        if session.rank == 0:
            closed.wait(20)
        else:
            until(lambda: job.sequencer.statistics[0].pushes == 5, "worker 0 is done")
            until(lambda: (tmp_path / "step-00000002").exists(), "the checkpoint is whole")
            job.close(130, save=True)
            closed.set()
        raise JobEnded("interrupted")

    with pytest.raises(JobEnded):
        job.run(work)
    found, manifest = find_checkpoint(tmp_path)
    assert (found.name, manifest["steps"]) == ("step-00000002", 7)

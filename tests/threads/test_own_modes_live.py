"""Modes that users bring, in jobs in threads: as objects and as files; digests that differ; and what they do wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.door import bring_file
from polytempo.errors import JobEnded, ModeError, UsageError
from polytempo.records.check import check_lines
from polytempo.records.files import read_events
from polytempo.session.session import Session
from polytempo.sync.mode import Mode, Origin
from polytempo.sync.spec import Spec, parse_spec
from polytempo.testing.threads import ThreadJob

OWN = Path(__file__).parents[1] / "modes" / "own_mode.py"


pytestmark = pytest.mark.usefixtures("nothing_brought")


def training(sync: str | Mode | Spec | None = None, steps: int = 6) -> Callable[[Session], str]:
    def work(session: Session) -> str:
        model = nn.Linear(4, 2)
        optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync=sync)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4) * (1 + session.rank)).square().mean().backward()
            optimizer.step(samples=2)
        return optimizer._part.plan.spec.text

    return work


@pytest.mark.parametrize("name", ["LEAD", "K_BATCH"])
def test_a_brought_mode_trains_and_its_record_keeps_its_promises(name: str, tmp_path: Path) -> None:
    modes = bring_file(OWN)
    with ThreadJob(workers=3, sync=modes[name](2), record=tmp_path) as job:
        texts = job.run(training())
    assert texts == [f"own_mode.py:{name}:2"] * 3
    assert check_lines(read_events(tmp_path), parse_spec(texts[0]), 3) > 50
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["modes"] == {"own_mode.py": parse_spec(texts[0]).digest}


def test_an_object_is_enough_where_servers_are_threads(tmp_path: Path) -> None:
    mode = replace(bring_file(OWN)["K_BATCH"], origin=None, name="anew", example="anew:2")
    with ThreadJob(workers=2, record=tmp_path) as job:
        assert job.run(training(mode(2))) == ["anew:2"] * 2
    assert json.loads((tmp_path / "meta.json").read_text())["job"]["optimizers"] == {"0": "anew:2"}


def test_another_file_is_refused_at_joining() -> None:
    bring_file(OWN)
    spec = parse_spec("own_mode.py:LEAD:2")
    assert isinstance(spec.mode.origin, Origin)
    other = replace(spec, mode=replace(spec.mode, origin=replace(spec.mode.origin, digest="another")))
    with (
        ThreadJob(workers=1, sync="own_mode.py:LEAD:2") as job,
        pytest.raises(UsageError, match="is not that of the servers"),
    ):
        job.run(training(other))


def test_a_policy_that_does_what_none_may_ends_the_job_in_a_line() -> None:
    source = OWN.read_text().replace("        made, self.there = self.there, []\n", "        made = self.there\n")
    (line,) = [number for number, text in enumerate(source.splitlines(), 1) if "def on_push" in text]
    broken = f"own_mode.py:{line}: applies a push of step "
    with ThreadJob(workers=2, sync=bring_file(written(source))["K_BATCH"](2)) as job, pytest.raises(JobEnded) as ended:
        job.run(training())
    assert str(ended.value).startswith(broken)
    assert "\n" not in str(ended.value)


def test_a_machine_that_fails_is_named_with_its_line() -> None:
    machine = "machine=lambda worker, last, k: 1 / 0,\n    "
    source = OWN.read_text().replace('tells={"size": int},', f'{machine}tells={{"size": int}},')
    sync = bring_file(written(source))["K_BATCH"](2)
    with (
        ThreadJob(workers=2, sync=sync) as job,
        pytest.raises(ModeError, match=r"^own_mode\.py:\d+: ZeroDivisionError: div"),
    ):
        job.run(training())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(source: str) -> Path:
    """A file of this content, in the test's folder."""
    Path("own_mode.py").write_text(source)
    return Path("own_mode.py")

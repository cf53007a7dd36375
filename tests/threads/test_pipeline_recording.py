"""What the ranks of a pipeline write down, and what is read back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from piped import Outcome, batches, layered, piped

from polytempo.errors import UsageError
from polytempo.report.pipeline_picture import bars_of
from polytempo.stages.recording import FIELDS, read_logs, write_log

pytestmark = pytest.mark.timeout(120)


def written(folder: Path, spec: str = "1f1b", ranks: int = 3) -> list[Outcome]:
    outcomes = piped(layered(5), batches(2, 8), ranks, schedule=spec, microbatches=None if spec == "pipedream" else 4)
    for outcome in outcomes:
        assert write_log(outcome.pipe, folder) == folder / f"pipeline-{outcome.pipe.rank}.jsonl"
    return outcomes


@pytest.mark.parametrize("spec", ["1f1b", "gpipe", "pipedream"])
def test_every_action_is_read_back_with_its_place_and_version(tmp_path: Path, spec: str) -> None:
    outcomes = written(tmp_path / "new", spec)
    lines = read_logs(tmp_path / "new")
    assert all(line.keys() == FIELDS for line in lines)
    assert [line["start"] for line in lines] == sorted(line["start"] for line in lines)
    for rank, outcome in enumerate(outcomes):
        mine = [line for line in lines if line["rank"] == rank]
        assert {(line["stage"], line["replica"], line["ranks"]) for line in mine} == {(rank, 0, 3)}
        found = [(line["kind"], line["microbatch"], line["version"]) for line in mine]
        assert found == [(done.action.kind, done.action.microbatch, done.version) for done in outcome.pipe.log]
    assert len(bars_of(lines)) == len(lines), "and can be drawn"


def test_replicas_are_told_apart(tmp_path: Path) -> None:
    outcomes = piped(layered(5), batches(1, 8), 3, stages=2, replicas=(2, 1), microbatches=4)
    for outcome in outcomes:
        write_log(outcome.pipe, tmp_path)
    assert {(line["rank"], line["stage"], line["replica"]) for line in read_logs(tmp_path)} == {
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    }


def test_the_clock_is_the_hosts_steady_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = written(tmp_path / "a")
    last = outcomes[0].pipe.log[-1].end
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    path = write_log(outcomes[0].pipe, tmp_path / "b")
    monkeypatch.undo()
    assert json.loads(path.read_text().splitlines()[-1])["end"] == pytest.approx(last + 4000)


def test_writing_twice_leaves_each_action_once(tmp_path: Path) -> None:
    outcomes = written(tmp_path)
    before = read_logs(tmp_path)
    for outcome in outcomes:
        write_log(outcome.pipe, tmp_path)
    assert len(read_logs(tmp_path)) == len(before) == sum(len(outcome.pipe.log) for outcome in outcomes)


def test_what_is_left_of_a_run_with_a_lost_rank_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "pipeline-1.jsonl").unlink()
    assert {line["rank"] for line in read_logs(tmp_path)} == {0, 2}


def test_folders_that_are_no_record_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got none that has a line; call write_log"):
        read_logs(tmp_path)
    written(tmp_path, ranks=3)
    written(tmp_path, ranks=2)
    with pytest.raises(UsageError, match=r"got runs of \[2, 3\] ranks; give each its own folder"):
        read_logs(tmp_path)


@pytest.mark.parametrize("text", ["{", "3", '{"stage": 0}'])
def test_a_line_that_is_no_action_is_named(tmp_path: Path, text: str) -> None:
    lines = len(written(tmp_path)[2].pipe.log)
    with (tmp_path / "pipeline-2.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(UsageError, match=rf"pipeline-2\.jsonl, line {lines + 1}: expected an action, got ") as caught:
        read_logs(tmp_path)
    assert "\n" not in str(caught.value)

"""What the ranks of a pipeline write down, and what is read back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from piped import Outcome, batches, layered, piped

from polytempo.cli.main import run
from polytempo.errors import UsageError
from polytempo.pipeline.trace_files import FIELDS, read_traces
from polytempo.report.picture import bars_of, last_updates

pytestmark = pytest.mark.timeout(120)


def written(folder: Path, spec: str = "1f1b", ranks: int = 3) -> list[Outcome]:
    outcomes = piped(layered(5), batches(2, 8), ranks, schedule=spec, microbatches=None if spec == "pipedream" else 4)
    for outcome in outcomes:
        assert outcome.pipe.record(folder) == folder / f"pipeline-{outcome.pipe.rank}.jsonl"
    return outcomes


@pytest.mark.parametrize("spec", ["1f1b", "gpipe", "pipedream"])
def test_every_action_is_read_back_with_its_place_and_version(tmp_path: Path, spec: str) -> None:
    outcomes = written(tmp_path / "new", spec)
    lines = read_traces(tmp_path / "new")
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
        outcome.pipe.record(tmp_path)
    assert {(line["rank"], line["stage"], line["replica"]) for line in read_traces(tmp_path)} == {
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    }


def test_the_clock_is_the_hosts_steady_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = written(tmp_path / "a")
    last = outcomes[0].pipe.log[-1].end
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    path = outcomes[0].pipe.record(tmp_path / "b")
    monkeypatch.undo()
    assert json.loads(path.read_text().splitlines()[-1])["end"] == pytest.approx(last + 4000)


def test_writing_twice_leaves_each_action_once(tmp_path: Path) -> None:
    outcomes = written(tmp_path)
    before = read_traces(tmp_path)
    for outcome in outcomes:
        outcome.pipe.record(tmp_path)
    assert len(read_traces(tmp_path)) == len(before) == sum(len(outcome.pipe.log) for outcome in outcomes)


def test_what_is_left_of_a_run_with_a_lost_rank_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "pipeline-1.jsonl").unlink()
    assert {line["rank"] for line in read_traces(tmp_path)} == {0, 2}


def test_folders_that_are_no_record_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"got none that has a line; let every rank of the script call pipeline\.record\("):
        read_traces(tmp_path)
    written(tmp_path, ranks=3)
    written(tmp_path, ranks=2)
    with pytest.raises(UsageError, match=r"got runs of \[2, 3\] ranks; give each its own folder"):
        read_traces(tmp_path)


@pytest.mark.parametrize("text", ["{", "3", '{"stage": 0}'])
def test_a_line_that_is_no_action_is_named(tmp_path: Path, text: str) -> None:
    lines = len(written(tmp_path)[2].pipe.log)
    with (tmp_path / "pipeline-2.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(UsageError, match=rf"pipeline-2\.jsonl, line {lines + 1}: expected an action, got ") as caught:
        read_traces(tmp_path)
    assert "\n" not in str(caught.value)


# The command.


@pytest.mark.long
def test_a_run_is_drawn_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path)
    assert run(["picture", str(tmp_path)]) == 0
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000
    assert f"written: {tmp_path}/pipeline.png, bubble " in capsys.readouterr().out
    assert run(["picture", str(tmp_path), "--last", "1", "--out", str(tmp_path / "last.svg"), "--title", "one step"]) == 0
    assert "one step" in (tmp_path / "last.svg").read_text()


def test_the_last_updates_of_each_stage_are_what_belongs_to_them(tmp_path: Path) -> None:
    written(tmp_path)
    lines = read_traces(tmp_path)
    last = last_updates(lines, 1)
    for stage in range(3):
        mine = [line for line in last if line["stage"] == stage]
        assert [line["version"] for line in mine if line["kind"] in "FB"] == [1] * 8
        assert [line["kind"] for line in mine].count("U") == 1
    assert len(last_updates(lines, 2)) == len(last_updates(lines, 3)) == len(lines)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--last", "0"], "expected --last of at least 1, got 0"),
        (["--between", "1"], "expected --between FROM,TO in seconds, such as 0.5,1.5; got '1'"),
        (["--between", "50,60"], "expected two moments with actions between them, from 0 to"),
        (["--out", "here.txt"], "here.txt"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path)
    assert run(["picture", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["picture", str(tmp_path)]) == 2
    assert "expected files pipeline-RANK.jsonl" in capsys.readouterr().err
    assert run(["picture", str(tmp_path / "none")]) == 2
    assert f"there is no directory {tmp_path / 'none'}; expected one that" in capsys.readouterr().err

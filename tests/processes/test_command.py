"""The command as a user types it: output, files, one-line refusals, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

PNG = b"\x89PNG"


def polytempo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polytempo", *arguments]
    return fork_server.run(command, cwd=cwd)


def test_timing_table_picture_json_and_record(tmp_path: Path) -> None:
    flags = ["--workers", "4", "--slow", "3:3", "--picture", "out/p.png", "--json", "out/r.json", "--record", "out/rec"]
    done = polytempo("simulate", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    modes = ["bsp", "bsp+balance", "anytime:auto", "ssp:3", "dssp:3..15", "asp"]
    for mode in modes:
        assert mode in done.stdout
    assert done.stdout.splitlines()[-1].startswith("use bsp+balance, because")
    assert (tmp_path / "out/p.png").read_bytes()[:4] == PNG
    results = json.loads((tmp_path / "out/r.json").read_text())
    assert [result["sync"] for result in results] == modes
    for name in ("bsp-ps", "ssp-3-ps", "dssp-3..15-ps", "asp-ps"):
        checked = polytempo("check", f"out/rec/{name}", cwd=tmp_path)
        assert checked.returncode == 0, checked.stderr
        assert "keep every promise; replay gives the same" in checked.stdout


def test_training_is_the_same_twice(tmp_path: Path) -> None:
    flags = ["--slow", "3:3", "--train", "digits", "--steps", "200", "--sync", "bsp", "--sync", "asp", "--target", "0.8"]
    outputs = []
    for turn in ("a", "b"):
        done = polytempo("simulate", *flags, "--json", f"{turn}.json", "--picture", f"{turn}.png", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "reaches 80 % first" in done.stdout
        outputs.append(done.stdout.replace(f"{turn}.png", ""))
    assert outputs[0] == outputs[1]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_experiment_from_a_file_and_flags_that_win(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "cluster: {workers: 3, slow: {2: 4}, link: {bandwidth: 1Gb/s}, model: 10MB}\n"
        "sync: [bsp, ssp:2]\nvia: [ps, ring]\nbudget: {steps_each: 20}\nseed: 3\n"
    )
    refused = polytempo("simulate", "job.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "ssp:2 needs a parameter server, got 'ring'" in refused.stderr
    done = polytempo("simulate", "job.yaml", "--sync", "bsp", "--steps-each", "5", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "r.json").read_text())
    assert [(r["sync"], r["via"], r["steps"]) for r in results] == [("bsp", "ps", 15), ("bsp", "ring", 15)]


def test_scaling(tmp_path: Path) -> None:
    done = polytempo("simulate", "--scaling", "--bandwidth", "1Gb/s", "--model", "100MB", "--picture", "s.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 shards" in done.stdout
    assert "ring" in done.stdout
    assert (tmp_path / "s.png").read_bytes()[:4] == PNG


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "--sync", "spp:3"], "nearest: ssp:3"),
        (["simulate", "--sync", "dssp:5..3"], "write 3..5"),
        (["simulate", "--sync", "bsp+backup:4"], "use at most bsp+backup:3"),
        (["simulate", "--sync", "anytime:0"], "write for example anytime:auto"),
        (["simulate", "--workers", "0"], "at least 1 worker"),
        (["simulate", "--slow", "9:2"], "the ranks are 0 to 3"),
        (["simulate", "--bandwidth", "fast"], "such as 1Gb/s"),
        (["simulate", "--hiccup", "5"], "--hiccup"),
        (["simulate", "--train", "digit", "--steps", "5"], "nearest: digits"),
        (["simulate", "--train", "digits", "--batch", "500"], "smaller batch or fewer workers"),
        (["simulate", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["simulate", "--wrokers", "3"], "--workers"),
        (["simulate", "--steps", "0"], "above 0"),
        (["simulate", "--picture", "x.docx"], "x.docx"),
    ],
)
def test_mistakes_are_refused_in_one_line_with_status_2(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = polytempo(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert done.stderr.startswith("polytempo: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    for text, expected in (
        ("cluster: {wokers: 3}", "nearest: workers"),
        ("cluster: [", "is not YAML"),
        ("- 1", "expected keys and values"),
        ("sync: spp:3", "nearest: ssp:3"),
    ):
        (tmp_path / "job.yaml").write_text(text)
        done = polytempo("simulate", "job.yaml", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert expected in done.stderr


def test_a_simulation_that_cannot_go_on_says_who_waits_for_whom(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("cluster: {crashes: [{worker: 3, at: 5, noticed_after: null}]}\nsync: ssp:1\n")
    done = polytempo("simulate", "job.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "worker 0 waits for 3 (2 ahead of worker 3, bound 1)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    polytempo("simulate", "--sync", "ssp:3", "--slow", "3:3", "--record", "rec", cwd=tmp_path)
    events = tmp_path / "rec/events.jsonl"
    events.write_text(events.read_text().replace('"slowest":2', '"slowest":3', 1))
    done = polytempo("check", "rec", cwd=tmp_path)
    assert done.returncode == 1
    assert "slowest is 2" in done.stderr
    missing = polytempo("check", "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_help_and_version(tmp_path: Path) -> None:
    assert "simulate" in polytempo("--help", cwd=tmp_path).stdout
    assert "Usage" in polytempo(cwd=tmp_path).stdout
    assert polytempo("--version", cwd=tmp_path).stdout.startswith("polytempo 0.")

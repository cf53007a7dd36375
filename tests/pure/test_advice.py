"""Which mode for a cluster: the modes that are compared, the choice among them, and a command that `run` accepts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from straggling import draw_job
from test_step_cost import bsp_record

from polytempo.cli.main import app, run
from polytempo.cli.run import _check_command
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.records.files import RecordWriter
from polytempo.records.step_figures import figures_of
from polytempo.report import straggler_costs
from polytempo.report.straggler_report import closing_line, full_report, straggler_report
from polytempo.simulate.advice import Caution, advise, caution_of, default_modes, situation_of
from polytempo.simulate.cluster import Cluster, Hiccup, Link
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.strategy.job_options import JobOptions
from polytempo.sync.spec import COMPARED, MODES, parse_spec, refused_of

RUN = typer.main.get_command(app).commands["run"]
GIGABIT = Link(bandwidth=1.25e8)


def accepted(command: str, folder: Path) -> RunRequest:
    """What `polytempo run` makes of a command before it starts a process; it raises what `run` refuses."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("polytempo", "run")
    given = RUN.make_context(verb, words).params
    (folder / given["script"]).touch()
    options: dict[str, Any] = JobOptions(given["strategy"], given["workers"], 0, given["sync"], given["via"]).settled()
    request = RunRequest(ScriptProgram(str(folder / given["script"])), servers=given["servers"], **options)
    return request.checked().request


def outcomes_of(*rates: tuple[str, float]) -> list[Outcome]:
    """Made-up outcomes of modes with these samples a second."""
    some = simulate_job(Cluster(workers=2), "bsp", steps=10)
    return [replace(some, sync=sync, samples_per_second=rate) for sync, rate in rates]


@pytest.mark.parametrize(
    ("flags", "use"),
    [
        ("-n 8", "bsp"),
        ("-n 1", "bsp"),
        ("-n 8 --slow 7:1.04", "bsp"),
        ("-n 8 --slow 7:2", "bsp+balance"),
        ("-n 8 --slow 7:2 --step-time 100ms --fixed-time 95ms", "bsp"),
        ("-n 8 --hiccup 0.05:10", "anytime:auto"),
        ("-n 8 --slow 7:2 --bandwidth 1Gb/s --model 100MB", "bsp+balance"),
        ("-n 8 --bandwidth 1Gb/s --model 100MB --step-time 500ms", "local:8"),
        ("-n 8 --bandwidth 10Mb/s --model 100MB --step-time 500ms", "diloco:100"),
        ("-n 4 --slow 3:3 --bandwidth 1Gb/s --model 1MB --servers 3", "bsp+balance"),
    ],
)
def test_a_cluster_in_one_command_out_that_run_accepts(
    flags: str, use: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", *flags.split(), "--json", str(tmp_path / "told.json")]) == 0
    *words, command = capsys.readouterr().out.splitlines()
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["use"], told["command"]) == (use, command)
    assert any(line.startswith(f"use {use}") and "because" in line for line in words)
    request = accepted(command, tmp_path)
    assert (request.sync, request.size) == (use, int(flags.split()[1]))
    for name, option in (("step time", "--step-time"), ("batch", "--batch"), ("model", "--model"), ("links", "--bandwidth")):
        line = next(line for line in words if line.strip().startswith(f"{name} "))
        assert ("given" in line) == (option in flags)
        assert ("assumed" in line) != (option in flags)


def test_simulate_compares_what_may_win_and_ends_with_the_same_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "-n", "4", "--slow", "3:3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("use bsp+balance, because it takes 41 % of the time of bsp")
    assert any(line.split()[:4] == ["step", "time", "1", "s"] and "assumed" in line for line in out)
    assert [
        line.split()[0] for line in out if line.split()[0:1] and line.split()[0] in default_modes(Cluster(slow={3: 3.0}))
    ]
    assert run(["simulate", "-n", "4", "--sync", "ssp:3", "--sync", "asp"]) == 0  # those that were asked for, and no others
    assert "bsp" not in capsys.readouterr().out.splitlines()[-1].split(",")[0]


def test_the_modes_that_are_compared_follow_the_situation() -> None:
    even = Cluster(workers=4)
    assert default_modes(even) == ("bsp", "ssp:3", "asp")
    assert default_modes(Cluster(workers=1)) == ("bsp",)
    unequal = default_modes(replace(even, slow={3: 2.0}))
    assert {"bsp+balance", "anytime:auto"} <= set(unequal)
    assert "anytime:auto" in default_modes(replace(even, hiccup=Hiccup(0.1, 10.0)))
    slow = replace(even, link=GIGABIT, model_bytes=1e8)
    assert {"local:8", "diloco:100"} <= set(default_modes(slow))
    assert situation_of(slow).in_words() == "equal workers, slow links"
    assert {"local:8", "diloco:100"} <= set(default_modes(replace(even, links={rank: Link(1.0) for rank in range(4)})))


def test_every_mode_has_its_place_in_the_order_of_caution() -> None:
    found = {name: caution_of(parse_spec(mode.example)) for name, mode in MODES.items()}
    assert {name for name, caution in found.items() if caution is Caution.EXACT} == {"bsp", "bsp+balance"}
    assert {name for name, caution in found.items() if caution is Caution.FRESH} == {"bsp+backup", "anytime"}
    assert {name for name, caution in found.items() if caution is Caution.LOCAL} == {"local", "adacomm", "diloco"}
    assert caution_of(parse_spec("diloco:100,quorum=2")) is Caution.STALE
    cautions = [caution_of(parse_spec(mode)) for mode in COMPARED]
    assert cautions == sorted(cautions)


@pytest.mark.parametrize(
    ("rates", "use"),
    [
        ([("bsp", 100), ("bsp+balance", 104.9)], "bsp"),
        ([("bsp", 100), ("bsp+balance", 105.1)], "bsp+balance"),
        ([("bsp", 100), ("bsp+balance", 150), ("anytime:auto", 160)], "bsp+balance"),
        ([("bsp", 100), ("bsp+balance", 150), ("anytime:auto", 170)], "anytime:auto"),
        ([("bsp", 100), ("asp", 1000)], "bsp"),  # how many more samples it needs, times do not say
        ([("ssp:3", 100), ("asp", 200)], "asp"),  # nothing else was asked for
        ([("asp", 200), ("local:8", 124), ("bsp", 100)], "bsp"),
        ([("asp", 200), ("local:8", 126), ("bsp", 100)], "local:8"),
    ],
)
def test_small_gains_and_what_may_cost_accuracy_are_not_worth_it(rates: list[tuple[str, float]], use: str) -> None:
    for order in (rates, rates[::-1]):  # the same in any order
        assert advise(outcomes_of(*order)).best.sync == use


def test_advice_from_a_record_says_what_it_cannot_tell_and_leaves_out_what_the_job_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sizes, refused in (
        ("one", [32], []),
        ("two", [32, 8], []),
        ("refused", [32], ["bsp+balance", "anytime:auto"]),
        ("arrays", [32], list(COMPARED)),
    ):
        with RecordWriter(tmp_path / name) as writer:
            for line in bsp_record(sizes, stalls=0.0):
                writer.write(line)
            facts = {"size": 4, "spec": "bsp", "job": {"refused": refused}, "options": {"script": "mine.py"}}
            writer.close(facts)
    told = {}
    for name in ("one", "two", "refused"):
        assert run(["advise", str(tmp_path / name)]) == 0
        told[name] = capsys.readouterr().out
    assert "cannot tell the fixed time" in told["one"]
    assert "--fixed-time" in told["one"]
    assert "cannot tell" not in told["two"]
    assert "fixed time  7" in told["two"]  # of 77 ms and more, from the record
    assert told["one"].splitlines()[-1] == "polytempo run -n 4 --sync bsp+balance mine.py"
    assert not any(line.startswith(("bsp+balance", "anytime")) for line in told["refused"].splitlines())
    assert accepted(told["refused"].splitlines()[-1], tmp_path).sync == "bsp"
    assert run(["advise", str(tmp_path / "arrays")]) == 2
    assert "would take none of the modes" in capsys.readouterr().err


def test_the_advice_on_40_straggling_jobs_is_accepted_and_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that refuse some modes: what is named, in one line, passes the checks that `run` makes."""
    monkeypatch.setattr(straggler_costs, "STEPS", 60)  # cheaper, and as good for this
    named = set()
    for seed in range(40):
        job = draw_job(seed)
        figures, unfit = figures_of(job.lines), Random(seed).sample(COMPARED, seed % 5)
        report = straggler_report(figures, job.sync, unfit)
        line = closing_line(report)
        assert "\n" not in line
        for mode in re.findall(r"--sync (\S+)", line + full_report(report, {})):
            assert mode not in unfit
            accepted(f"polytempo run -n {job.size} --sync {mode} train.py", tmp_path)
        if line:
            share, seconds = re.search(r"costs about (\d+) % of the time \(([0-9.]+) s\)", line).groups()
            assert int(share) >= 5
            assert float(seconds) >= 1.0
        if gain := re.search(r"--sync (\S+).* would bring \+(\d+) %", line):
            assert int(gain[2]) >= 5
            named.add(gain[1])
        if not seed % 10:
            assert line == closing_line(straggler_report(figures, job.sync, unfit))  # the same record, the same advice
            assert "--sync" not in closing_line(straggler_report(figures, job.sync, COMPARED))
    assert {"bsp+balance", "anytime:auto"} <= named


def test_the_end_of_a_run_asks_the_command_itself() -> None:
    """What `--strategy` or `--via` of the running command would refuse with another `--sync` is not advised."""
    split, plain = JobOptions("data=2,pipe=2"), JobOptions(workers=4)
    request = RunRequest(ScriptProgram("train.py"), workers=4)
    assert set(refused_of(COMPARED, partial(_check_command, split, request))) == {
        "bsp+balance",
        "anytime:auto",
        "bsp+backup:1",
    }
    assert refused_of(COMPARED, partial(_check_command, plain, request)) == ()
    by_all_reduce = partial(_check_command, plain, replace(request, via="allreduce"))
    assert refused_of(COMPARED, by_all_reduce) == ("bsp+backup:1", "ssp:3", "dssp:3..15", "asp")

"""Which mode for a cluster: the modes that are compared, the choice among them, and a command that `run` accepts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from commands import Typed
from straggling import Drawn, draw_job
from test_step_cost import bsp_record

from polytempo.cli.main import run
from polytempo.errors import UsageError
from polytempo.launcher.function_program import FunctionProgram
from polytempo.launcher.request import CheckedRequest
from polytempo.records.files import RecordWriter
from polytempo.records.step_figures import figures_of
from polytempo.report import straggler_report as report_of_stragglers
from polytempo.report.advice import advise, default_modes, situation_of
from polytempo.report.straggler_report import closing_line, straggler_report
from polytempo.simulate.cluster import Cluster, Hiccup, Link
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.sync.capabilities import Caution
from polytempo.sync.spec import MODES, compared, parse_spec

GIGABIT = Link(bandwidth=1.25e8)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    return Typed(tmp_path, monkeypatch)


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
    flags: str, use: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: Typed
) -> None:
    assert run(["advise", *flags.split(), "--json", str(tmp_path / "told.json")]) == 0
    *words, command = capsys.readouterr().out.splitlines()
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["use"], told["command"]) == (use, command)
    assert any(line.startswith(f"use {use}") and "because" in line for line in words)
    request = typed.start(command).request
    assert (request.sync, request.size) == (use, int(flags.split()[1]))
    if "Between hosts: add --listen HOST:PORT --expect N." in words:
        typed.start(command.replace("train.py", "--listen 127.0.0.1:0 --expect 1 train.py"))
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
    found = {name: parse_spec(mode.example).capabilities.caution for name, mode in MODES.items()}
    assert {name for name, caution in found.items() if caution is Caution.EXACT} == {"bsp", "bsp+balance"}
    assert {name for name, caution in found.items() if caution is Caution.FRESH} == {"bsp+backup", "anytime"}
    assert {name for name, caution in found.items() if caution is Caution.LOCAL} == {"local", "adacomm", "diloco", "easgd"}
    assert parse_spec("diloco:100,quorum=2").capabilities.caution is Caution.STALE
    cautions = [parse_spec(mode).capabilities.caution for mode in compared()]
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: Typed
) -> None:
    (tmp_path / "mine.py").touch()
    for name, sizes, refused in (
        ("one", [32], []),
        ("two", [32, 8], []),
        ("refused", [32], ["bsp+balance", "anytime:auto"]),
        ("arrays", [32], list(compared())),
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
    assert typed.start(told["refused"].splitlines()[-1]).request.sync == "bsp"
    assert run(["advise", str(tmp_path / "arrays")]) == 2
    assert "would take none of the modes" in capsys.readouterr().err


def train() -> None:
    """What a notebook may launch."""


def test_advice_from_a_record_of_launch_is_a_call_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: Typed
) -> None:
    """No script has the function: `polytempo run` would find none."""
    with RecordWriter(tmp_path / "record") as writer:
        for line in bsp_record([32], stalls=0.0):
            writer.write(line)
        writer.close({"size": 4, "spec": "bsp", "options": FunctionProgram(train).facts()})
    assert run(["advise", str(tmp_path / "record"), "--model", "1MB", "--bandwidth", "1Gb/s"]) == 0
    *words, call = capsys.readouterr().out.splitlines()
    request = typed.launch(call, train).request
    assert (request.program.name, request.size, request.sync) == ("train()", 4, "bsp+balance")
    assert not any("--listen" in line for line in words), "launch has none"


#: What a command may have beside its mode; N is the number of workers.
OPTIONS = (
    "-n N",
    "-n N --via ps",
    "-n N --via allreduce",
    "-n N --servers 2",
    "-n N --checkpoint saved --checkpoint-every 50",
    "-n N --min-workers 1 --slow 0:2",
    "-n 1 --listen 127.0.0.1:0 --expect M",
    "--strategy data=N",
    "--strategy pipe=N,microbatches=N",
    "--strategy tensor=N",
    "--strategy data=N,sync=OWN",
)


def in_mode(options: str, sync: str) -> str:
    return f"polytempo run {options} --sync {sync} train.py"


def options_of_job(job: Drawn, seed: int, typed: Typed) -> tuple[str, CheckedRequest]:
    """Options with which such a job may be started, and what is started then."""
    for options in [*OPTIONS[seed % len(OPTIONS) :], *OPTIONS]:
        filled = options.replace("OWN", job.sync).replace("N", str(job.size)).replace("M", str(job.size - 1))
        try:
            return filled, typed.start(in_mode(filled, job.sync))
        except UsageError:
            continue  # this mode does not go with these options
    raise AssertionError(f"no command starts {job.sync}")


def test_the_advice_on_40_straggling_jobs_is_accepted_and_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: Typed
) -> None:
    """Jobs whose scripts refuse some modes, and whose commands refuse others: what is named, at the end of the run and from
    its record, is started by the same command with that mode."""
    monkeypatch.setattr(report_of_stragglers, "STEPS", 60)  # cheaper, and as good for this
    named: set[str] = set()
    by_options: dict[str, set[str]] = {}
    for seed in range(40):
        job = draw_job(seed)
        options, checked = options_of_job(job, seed, typed)
        figures, unfit = figures_of(job.lines), Random(seed).sample(compared(), seed % 5)
        report = straggler_report(figures, parse_spec(job.sync), {*unfit, *checked.request.refused_modes()})
        line = closing_line(report, str(tmp_path / "my record"))
        assert "\n" not in line
        with RecordWriter(tmp_path / "my record") as writer:
            for row in job.lines:
                writer.write(row)
            facts = {"size": job.size, "spec": job.sync, "job": {"refused": unfit}, "options": checked.options()}
            writer.close(json.loads(json.dumps(facts)))
        explain = re.search(r"polytempo explain .*(?=\)$)", line)
        assert run(shlex.split(explain[0])[1:] if explain else ["explain", str(tmp_path / "my record")]) == 0
        for mode in set(re.findall(r"--sync (\S+)", line + capsys.readouterr().out)):
            assert mode not in unfit
            assert typed.start(in_mode(options, mode)).request.sync == mode
            by_options.setdefault(re.sub(r"[\d ]+", "", options), set()).add(mode)
        if line:
            share, seconds = re.search(r"costs about (\d+) % of the time \(([0-9.]+) s\)", line).groups()
            assert int(share) >= 5
            assert float(seconds) >= 1.0
        if gain := re.search(r"--sync (\S+).* would bring \+(\d+) %", line):
            assert int(gain[2]) >= 5
            named.add(gain[1])
        if not seed % 10:
            assert line == closing_line(report, str(tmp_path / "my record"))  # the same record, the same advice
            assert "--sync" not in closing_line(straggler_report(figures, parse_spec(job.sync), compared()))
    assert {"bsp+balance", "anytime:auto"} <= named
    assert len(by_options) >= 6
    assert set.union(*by_options.values()) >= {"bsp+balance", "anytime:auto", "local:8", "ssp:3", "asp"}


def test_a_command_knows_what_it_would_refuse(typed: Typed) -> None:
    """What `--strategy`, `--via`, `--servers` or `--checkpoint` of the same command would refuse with another `--sync`."""

    def refused(options: str) -> tuple[str, ...]:
        checked = typed.start(f"polytempo run {options} train.py")
        assert checked.options()["refused"] == list(checked.request.refused_modes())
        for mode in compared():
            if mode in checked.request.refused_modes():
                with pytest.raises(UsageError):
                    typed.start(in_mode(options, mode))
            else:
                typed.start(in_mode(options, mode))
        return checked.request.refused_modes()

    assert refused("--strategy data=2,pipe=2") == ("bsp+balance", "anytime:auto", "bsp+backup:1")
    assert set(refused("--strategy tensor=2")) == set(compared()) - {"bsp", "local:8", "diloco:100"}
    assert refused("-n 4") == refused("-n 4 --checkpoint saved") == refused("-n 4 --servers 2") == ()
    assert refused("-n 4 --via allreduce") == ("bsp+backup:1", "ssp:3", "dssp:3..15", "asp")
    assert refused("-n 1") == ("bsp+backup:1",)
    declared = typed.start("polytempo run --strategy data=2,sync=ssp:3 train.py").request
    assert set(declared.refused_modes()) == set(compared()) - {"ssp:3"}  # a --sync beside it would be refused

"""Mistakes are refused in one line, with status 2, before any process starts; workers that do not fit, by name."""

from __future__ import annotations

import re
import socket

import pytest
from live import PACED, Bench


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sync", "sps:3", PACED], "nearest: ssp"),
        (["--sync", "dssp:5..3", PACED], "write 3..5"),
        (["--sync", "bsp+backup:2", PACED], "needs more than 2 workers, got 2"),
        (["--sync", "anytime:soon", PACED], "expected auto or a number of seconds above 0"),
        (["-n", "0", PACED], "at least 1 worker, got 0"),
        (["--servers", "0", PACED], "at least 1 server, got 0"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["-m", "no.such.module"], "there is no module no.such.module below"),
        (["-m", "xml"], "xml is a package without a __main__"),
        (["--debug", "2", PACED], "--debug names worker 2; expected one of this host, 0 to 1"),
        ([], "SCRIPT"),
        (["--slow", "2:3", PACED], "--slow names worker 2, but there are workers 0 to 1"),
        (["--slow", "1:0.5", PACED], "expected 1 or more"),
        (["--hiccup", "often", PACED], "expected PROBABILITY:SECONDS"),
        (["--hiccup", "2:300ms", PACED], "expected PROBABILITY:SECONDS"),
        (["--hiccup", "0.1:soon", PACED], "expected PROBABILITY:SECONDS"),
        (["--link", "100", PACED], "expected BANDWIDTH[,LATENCY] such as 100Mb/s"),
        (["--link", "100Mb/s,soon", PACED], "expected BANDWIDTH[,LATENCY] such as 100Mb/s"),
        (["--link", "100Mb/s", "--listen", "127.0.0.1:0", "--expect", "1", PACED], "leave out --link or --listen"),
        (["--steps", "0", PACED], "above 0"),
        (["--via", "allreduce", "--sync", "asp", PACED], "--via allreduce cannot do --sync asp"),
        (["--via", "allreduce", "--servers", "2", PACED], "--via allreduce cannot do --servers"),
        (["--via", "allreduce", "--checkpoint", "here", PACED], "--via allreduce cannot do --checkpoint"),
        (["--sync", "gossip:ring", "--via", "ps", PACED], "servers hold none; leave --via ps out"),
        (["--sync", "adpsgd:ring", "--servers", "2", PACED], "servers hold none; leave --servers out"),
        (["--sync", "gossip:exp", "--checkpoint", "here", PACED], "servers hold none; leave --checkpoint out"),
        (["--sync", "gossip:torus", "-n", "5", PACED], "gossip:torus needs rows x columns of workers"),
        (["--via", "pigeon", PACED], "expected --via auto, ps, allreduce"),
        (["--max-restarts", "1", PACED], "--max-restarts is planned"),
        (["--strategy", "data=2,pipe=3", "-n", "4", PACED], "nearest: data=2,pipe=2 or data=4"),
        (["--strategy", "tensor=2", "--sync", "ssp:1", PACED], "sync=ssp:1 does not go with tensor=2"),
        (["--strategy", "pipe=2", "--checkpoint", "here", PACED], "use fit(checkpoint=...)"),
        (["--min-workers", "3", PACED], "between 1 and 2"),
        (["--listen", "127.0.0.1:0", PACED], "--expect"),
        (["--insecure", PACED], "--listen"),
        (["--checkpoint-every", "5", PACED], "needs --checkpoint DIR"),
        (["--checkpoint", "sav\udce9", PACED], "the name of --checkpoint sav\\udce9 is not UTF-8"),
        (["--resume", "sav\udce9", PACED], "the name of --resume sav\\udce9 is not UTF-8"),
        (["--checkpoint", "/dev/null/saved", PACED], "cannot write to --checkpoint /dev/null/saved: Not a directory"),
        (["--checkpoint-errors", "contine", PACED], "expected --checkpoint-errors stop or continue, got 'contine'"),
        (["--on-divergence", "stopp", PACED], "expected --on-divergence warn or stop, got 'stopp'"),
        (["--grace", "0", PACED], "expected --grace above 0 seconds, got 0"),
        (["--host-timeout", "0.5", PACED], "expected --host-timeout of at least 1 second, got 0.5"),
        (["--resume", "nowhere", PACED], "there is no checkpoint in nowhere"),
        (["--timeout", "-1", PACED], "above 0 seconds"),
    ],
)
def test_mistakes_in_run(arguments: list[str], expected: str, bench: Bench) -> None:
    done = bench.run("run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert expected in done.stderr


@pytest.mark.parametrize(("quiet", "lines"), [((), 2), (("-q",), 1)])
def test_options_behind_the_script_are_pointed_out(quiet: tuple[str, ...], lines: int, bench: Bench) -> None:
    script = bench.folder / "plain.py"
    script.write_text("import polytempo\n")
    done = bench.run("run", *quiet, "--min-workers", "9", str(script), "-n", "9", "--lr", "0.1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, lines)
    hint = (
        f"polytempo: -n stands behind {script} and is passed on to it; put it before {script} where polytempo run is meant\n"
    )
    assert done.stderr.startswith(hint) == (not quiet)


def test_a_record_is_overwritten_only_when_told_to(bench: Bench) -> None:
    logs = bench.folder / "record" / "logs"
    logs.mkdir(parents=True)
    for old in (logs.parent / "events.jsonl", logs / "worker-9.log", logs / "mine.log"):
        old.write_text("old")
    command = ["run", "-n", "1", "--record", "record"]
    done = bench.run(*command, PACED, ".", "steps=2")
    refused = "polytempo: record holds the record of an earlier job; choose another directory, or add --overwrite\n"
    assert (done.returncode, done.stderr) == (2, refused)
    assert (logs.parent / "events.jsonl").read_text() == "old"
    done = bench.run(*command, "--overwrite", PACED, ".", "steps=2")
    assert done.returncode == 0, done.stderr
    assert bench.meta()["job"]["steps"] == 2
    assert sorted(log.name for log in logs.iterdir()) == ["mine.log", "server-0.log", "worker-0.log"]


def test_a_port_in_use_is_refused(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = bench.run("run", "--listen", address, "--expect", "1", PACED)
    assert done.returncode == 2
    assert f"cannot listen on {address}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--key-file", "k", PACED], "--join HOST:PORT is missing"),
        (["--join", "localhost:1", PACED], "give either --key-file FILE"),
        (["--join", "localhost", "--insecure", PACED], "expected HOST:PORT"),
        (["--join", "localhost:1", "--key-file", "nowhere", PACED], "cannot read the key file nowhere"),
        (["--join", "localhost:1", "--insecure", "nowhere.py"], "there is no script nowhere.py"),
    ],
)
def test_mistakes_in_worker(arguments: list[str], expected: str, bench: Bench) -> None:
    done = bench.run("worker", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert expected in done.stderr


def test_workers_with_another_model_are_refused_with_the_first_difference_in_every_mode(bench: Bench) -> None:
    """Under asp one worker would be enough to go on; a mistake is none the less one."""
    done = bench.run("run", "-n", "2", "--sync", "asp", "--min-workers", "1", PACED, ".", "model=1:5", "steps=100000")
    assert done.returncode == 1
    assert "differ: parameter 0 is weight [" in done.stderr
    assert "float32 in group 0" in done.stderr
    assert re.search(r"polytempo: worker [01] failed with exit status 1 before its first push$", done.stderr)


def test_a_script_that_fails_at_its_first_line_ends_the_job_in_every_mode(bench: Bench) -> None:
    script = bench.folder / "wrong.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    nothing\ntime.sleep(3600)\n")
    done = bench.run("run", "-n", "2", "--sync", "asp", str(script))
    assert done.returncode == 1
    assert "NameError: name 'nothing' is not defined" in done.stderr
    assert done.stderr.splitlines()[-1] == "polytempo: worker 1 failed with exit status 1 before its first push"


def test_workers_with_other_hyper_parameters_are_refused_by_name_in_barrier_modes(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", PACED, ".", "lr=1:0.5")
    assert done.returncode == 1
    assert "hyper-parameters differ: lr is" in done.stderr
    assert bench.run("run", "-n", "2", "--sync", "asp", PACED, ".", "lr=1:0.5", "steps=3").returncode == 0

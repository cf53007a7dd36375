"""Modes that users bring, in jobs of processes: servers and workers load the same file; another host names its own."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from live import PACED, Bench, said

from polytempo.protocol.messages import Assigned, Hello, decode, encode
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.zeromq import ZmqChannel

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
OWN = Path(__file__).parents[1] / "modes" / "own_mode.py"
EVIL = "from pathlib import Path\n\nPath('it was run').touch()\n"


def test_a_file_is_brought_by_all_processes_and_its_record_needs_it(bench: Bench) -> None:
    bench.forks = False  # what a process has loaded already it need not be told of
    done = bench.run("run", "-n", "1", "--sync", f"{OWN}:K_BATCH:2", "--record", "record", PACED, ".", "steps=4")
    assert done.returncode == 0, done.stderr
    assert bench.meta()["spec"] == "own_mode.py:K_BATCH:2"
    assert list(bench.meta()["modes"]) == ["own_mode.py"]
    assert any("told" in line for line in bench.events()), "fields of its own come with releases"
    checked = bench.run("check", "record", "--mode", str(OWN))
    assert "own_mode.py:K_BATCH:2: " in checked.stdout, checked.stderr


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_mode.py"


@pytest.mark.parametrize(("sync", "workers"), [("easgd:4", 2), ("easgd:4", 4), ("K_BATCH:3", 2), ("K_BATCH:3", 4)])
def test_elastic_averaging_and_the_example_learn_with_a_slow_worker(sync: str, workers: int, bench: Bench) -> None:
    """Live over servers, recorded, checked and replayed; no worker waits for the slow one."""
    if sync.startswith("K_BATCH"):
        sync, own = f"{EXAMPLE}:{sync}", ["--mode", str(EXAMPLE)]
    else:
        own = []
    slow = ["--slow", f"{workers - 1}:3", "--samples", "6000", "--servers", "2", "--record", "record"]
    done = bench.run("run", "-n", str(workers), "--sync", sync, *slow, DIGITS)
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy (\d+\.\d) %", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 80
    checked = bench.run("check", "record", *own)
    assert "keep every promise; replay gives the same" in checked.stdout, checked.stderr
    assert not [line for line in bench.events() if line["kind"] == "hold" and line["step"]]


def test_another_host_names_its_own_file(bench: Bench) -> None:
    here, there = bench.folder / "own_mode.py", bench.folder / "there"
    there.mkdir()
    shutil.copy(OWN, here)
    shutil.copy(OWN, there)
    options = ["--listen", "127.0.0.1:0", "--expect", "1", "--insecure", "--sync", "own_mode.py:LEAD:2"]
    job = bench.start("run", "-n", "1", *options, PACED, ".", "steps=3")
    join = found_in(said(job, "waiting for 1 worker"))
    joined = bench.run("worker", "--join", join, "--insecure", "--mode", "there/own_mode.py", PACED, ".", "steps=3")
    assert joined.returncode == 0, joined.stderr
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err


def test_another_host_is_told_no_path(bench: Bench) -> None:
    options = ["--listen", "127.0.0.1:0", "--expect", "1", "--insecure", "--sync", f"{OWN}:LEAD:2"]
    job = bench.start("run", "-n", "1", *options, PACED, ".", "steps=300")
    join = found_in(said(job, "waiting for 1 worker"))
    channel = ZmqChannel(f"tcp://{join}", b"agent-of-this-test", None, Pool(), 1 << 20)
    channel.send(encode(Hello(role="agent", count=1)))
    assert channel.pollable().poll(20_000)
    received = channel.receive()
    assigned = decode(received[0]) if received else None
    channel.close()
    job.send_signal(signal.SIGQUIT)
    job.communicate(timeout=60)
    assert isinstance(assigned, Assigned)
    assert [(one["name"], one["path"]) for one in assigned.job["modes"]] == [("own_mode.py", "")]
    assert str(OWN.parent) not in str(assigned.job)


@pytest.mark.parametrize("named", [(), ("--mode", "there/own_mode.py")])
def test_a_host_without_the_file_or_with_another_loads_none_and_both_hosts_say_why(
    named: tuple[str, ...], bench: Bench
) -> None:
    here, there = bench.folder / "here", bench.folder / "there"
    here.mkdir()
    there.mkdir()
    shutil.copy(OWN, here)
    (there / "own_mode.py").write_text(OWN.read_text() + "\n# edited\n")
    (bench.folder / "own_mode.py").write_text(EVIL + code_of(OWN))  # in the agent's own folder: a name alone loads nothing
    options = ["--listen", "127.0.0.1:0", "--expect", "1", "--insecure", "--sync", "here/own_mode.py:LEAD:2"]
    job = bench.start("run", "-n", "1", *options, PACED, ".", "steps=300")
    join = found_in(said(job, "waiting for 1 worker"))
    joined = bench.run("worker", "--join", join, "--insecure", *named, PACED, ".", "steps=3")
    why = "is not the file that the job was started with" if named else "which this host's command line does not name"
    assert joined.returncode == 2
    assert why in joined.stderr
    assert joined.stderr.count("\n") == 1, joined.stderr
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"worker 1 could not be started ({'the job uses' if not named else ''}" in err
    assert not (bench.folder / "it was run").exists()


def test_a_worker_in_whose_process_the_file_fails_ends_the_job_in_a_line(bench: Bench) -> None:
    fails = "import sys\n\nif sys.argv[0].endswith('paced.py'):\n    raise OSError('not here')\n"
    (bench.folder / "lab.py").write_text(fails + code_of(OWN))
    bench.forks = False
    done = bench.run("run", "-n", "1", "--sync", "lab.py:LEAD:2", PACED, ".", "steps=3")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "polytempo: lab.py:4: OSError: not here"
    assert "Traceback" not in done.stderr


def code_of(file: Path) -> str:
    """What stands behind its imports from the future, which must come first."""
    return file.read_text().partition("import annotations\n")[2]


def found_in(text: str) -> str:
    """The address by which a job says it can be joined."""
    found = re.search(r"worker --join (\S+) --insecure", text)
    assert found is not None, text
    return found[1]

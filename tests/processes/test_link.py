"""`polytempo run --link`: the network of the job is emulated, and nothing else changes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from live import PACED, SCRIPTS, Bench, finished, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_link.py"
LINKED = str(SCRIPTS / "linked.py")


@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_a_job_trains_to_the_same_numbers_as_without(via: str, bench: Bench) -> None:
    plain = bench.run("run", "-n", "2", "--via", via, LINKED)
    linked = bench.run("run", "-n", "2", "--via", via, "--link", "100Mb/s,1ms", "--record", "record", LINKED)
    assert (plain.returncode, linked.returncode) == (0, 0), plain.stderr + linked.stderr
    (model, sharing), (same, without) = (sorted({line[4:] for line in done.stdout.splitlines()}) for done in (plain, linked))
    assert (model, sharing, without) == (same, "shares memory", "shares no memory")
    assert "the network is emulated" in linked.stderr
    assert "100 Mb/s each way, 1 ms one way" in linked.stderr
    assert "emulated" not in plain.stderr
    assert bench.meta()["options"]["link"] == [12.5e6, 0.001]
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr


def test_the_end_of_the_emulated_network_ends_the_job(bench: Bench) -> None:
    job = bench.start("run", "-n", "2", "--link", "1Gb/s", "--quiet", PACED, ".", "until=never")
    wait_until(lambda: all((bench.folder / f"clock-{rank}").exists() for rank in range(2)))
    bench.child(job.pid, "polytempo.launcher.link_process").send_signal(signal.SIGKILL)
    done = finished(job)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "polytempo: the emulated network (--link) was killed by SIGKILL"


def test_what_a_worker_says_last_arrives(bench: Bench) -> None:
    """It leaves while its last message is under way, for longer than servers take to finish."""
    script = bench.folder / "last.py"
    script.write_text("import polytempo as pt; pt.init(); pt.log(rank=pt.rank())")
    done = bench.run("run", "-n", "2", "--link", "1Mb/s,400ms", "--record", "record", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(event["rank"] for event in bench.events() if event["kind"] == "metric") == [0, 1]


def test_the_example_runs_itself_and_prints_a_table(bench: Bench) -> None:
    small = ["--sync", "local:4", "--steps", "8", "--width", "16", "--link", "1Gb/s", "--target", "0"]
    done = bench.python(str(EXAMPLE), *small)
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()[2:]
    assert head.split() == ["mode", "0", "%", "at", "sooner", "all", "steps", "sent", "accuracy"]
    assert (row.split()[0], row.split()[3:5], row.split()[-1]) == ("local:4", ["1.0", "x"], "%")

"""A job on two hosts: `run --listen` on one, `worker --join` on the other; who has no key gets nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from hosts import Hosts, two_hosts, why_not
from live import PACED, Bench, wait_until

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "allowed")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def start(bench: Bench, prefix: list[str], *arguments: str) -> subprocess.Popen[str]:
    return bench.start(*arguments, prefix=prefix)


def key_file(bench: Bench) -> Path:
    wait_until(lambda: bool(list(bench.temporary.glob("polytempo-*/workers.key"))))
    return next(bench.temporary.glob("polytempo-*/workers.key"))


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_a_job_on_two_hosts(sync: str, hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--sync", sync, "--servers", "2", "--listen", listen, "--expect", "2", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=10")
    key = key_file(bench)
    secrets = json.loads(key.read_text())
    joined = start(
        bench, hosts.inside(hosts.b), "worker", "--join", listen, "--key-file", str(key), "-n", "2", PACED, ".", "steps=10"
    )
    wait_until(lambda: (bench.folder / "clock-2").exists())
    for process in bench.processes():
        try:
            shown = " ".join(process.cmdline()) + " ".join(process.environ().values())
        except psutil.NoSuchProcess:
            continue
        assert secrets["worker_secret"] not in shown
    out, err = joined.communicate(timeout=60)
    assert joined.returncode == 0, err
    assert f"joined {listen} as workers 1, 2 of 3" in err
    assert "[1] worker 1 took 10 steps" in out
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert [worker["steps"] for worker in bench.meta()["workers"]] == [10, 10, 10]
    assert bench.run("check", "record").returncode == 0


def test_a_worker_killed_on_the_other_host_is_noticed(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--sync", "asp", "--listen", listen, "--expect", "1", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=20")
    join = ["worker", "--join", listen, "--key-file", str(key_file(bench))]
    joined = start(bench, hosts.inside(hosts.b), *join, PACED, ".", "steps=20", "die=1:5:kill")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "warning: worker 1 was killed by SIGKILL; going on with 1 of 2" in err
    assert joined.wait(timeout=20) == 1
    joined.communicate()


def test_a_host_that_vanishes_is_given_up_and_ends_its_own_part(hosts: Hosts, bench: Bench) -> None:
    """Each side sees the other fall silent, and neither stays."""
    listen = f"{hosts.address}:7077"
    flags = ["--sync", "ssp:1", "--listen", listen, "--expect", "1", "--host-timeout", "3", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=12")
    join = ["worker", "--join", listen, "--key-file", str(key_file(bench)), "--host-timeout", "4"]
    joined = start(bench, hosts.inside(hosts.b), *join, PACED, ".", "steps=100000")
    wait_until(lambda: (bench.folder / "clock-1").exists() and len(bench.clock(1)) > 6)
    subprocess.run(["ip", "-n", hosts.b, "link", "set", "lo", "down"], check=True)
    links = subprocess.run(["ip", "-n", hosts.b, "link"], capture_output=True, text=True, check=True).stdout
    name = re.findall(r"(ptr\d+)", links)[0]
    subprocess.run(["ip", "-n", hosts.b, "link", "set", name, "down"], check=True)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "worker 1 its host was not heard of for 3 s; going on with 1 of 2" in err
    _, err = joined.communicate(timeout=60)
    assert joined.returncode == 1
    assert f"polytempo: nothing was heard of the job at {listen} for 4 s: its host is gone" in err.splitlines()[-1]


@pytest.mark.new_interpreters
def test_a_killed_launcher_ends_the_job_on_every_host(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--sync", "asp", "--servers", "2", "--listen", listen, "--expect", "2"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=100000")
    join = ["worker", "--join", listen, "--key-file", str(key_file(bench)), "-n", "2", "--host-timeout", "3600"]
    joined = start(bench, hosts.inside(hosts.b), *join, PACED, ".", "steps=100000")
    wait_until(lambda: (bench.folder / "clock-2").exists() and len(bench.clock(2)) > 6)
    job.kill()
    _, err = joined.communicate(timeout=20)  # it is told: its own patience would last for an hour
    assert joined.returncode == 1
    assert err.splitlines()[-1] == "polytempo: the launcher is gone"
    job.communicate(timeout=20)
    wait_until(lambda: not bench.processes(), 10)


def test_a_killed_agent_leaves_no_worker_and_no_key(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--sync", "asp", "--listen", listen, "--expect", "1", "--host-timeout", "2"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=100", "pace=0.05")
    joined = start(
        bench,
        hosts.inside(hosts.b),
        "worker",
        "--join",
        listen,
        "--key-file",
        str(key_file(bench)),
        PACED,
        ".",
        "steps=100000",
    )
    wait_until(lambda: (bench.folder / "clock-1").exists() and len(bench.clock(1)) > 6)
    joined.kill()
    _, err = joined.communicate(timeout=20)
    assert err.splitlines()[-1] == f"polytempo: the agent (process {joined.pid}) was killed; its processes have ended too"
    assert len(list(bench.temporary.glob("polytempo-*"))) == 1, "only the folder of the job that goes on"
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "worker 1 its host was not heard of for 2 s; going on with 1 of 2" in err


def test_a_host_that_pauses_and_comes_back_is_told_that_it_was_given_up(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--sync", "asp", "--listen", listen, "--expect", "1", "--host-timeout", "1.5", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "until=enough")
    join = ["worker", "--join", listen, "--key-file", str(key_file(bench))]
    joined = start(bench, hosts.inside(hosts.b), *join, PACED, ".", "until=enough")
    wait_until(lambda: (bench.folder / "clock-1").exists() and len(bench.clock(1)) > 6)
    paused = [psutil.Process(joined.pid), *psutil.Process(joined.pid).children(recursive=True)]
    for process in paused:
        process.suspend()
    given_up = lambda: any(e["kind"] == "leave" and e["worker"] == 1 for e in bench.events())  # noqa: E731
    wait_until(given_up)
    for process in paused:
        process.resume()
    out, err = joined.communicate(timeout=60)
    cause = "the job goes on without it: its host was not heard of for 1.5 s"
    assert joined.returncode == 1, err
    assert err.count(f"\npolytempo: {cause}\n") == 1, err
    assert (out + err).count(f"[1] polytempo: this worker ends: {cause}\n") == 1, out + err
    steps = len(bench.clock(0))
    wait_until(lambda: len(bench.clock(0)) > steps)
    (bench.folder / "enough").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "worker 1 its host was not heard of for 1.5 s; going on with 1 of 2" in err
    assert "Traceback" not in err
    assert bench.run("check", "record").returncode == 0


def test_who_has_no_key_gets_nothing(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", "--listen", listen, "--expect", "1", PACED, ".", "steps=5")
    key = key_file(bench)
    stranger = (
        "import sys, zmq; s = zmq.Context().socket(zmq.DEALER); s.linger = 0; s.connect(sys.argv[1]);"
        "s.send_multipart([b'\\x81\\xa4type\\xa5Hello', b'']); print(s.poll(3000), flush=True);"
        "import os; os._exit(0)"  # the end of its context has been seen to hang
    )
    command = [*hosts.inside(hosts.b), sys.executable, "-c", stranger, f"tcp://{listen}"]
    heard = subprocess.run(command, capture_output=True, text=True, check=True)
    assert heard.stdout.strip() == "0"
    other = bench.folder / "other.key"
    public, secret = (part.decode() for part in zmq.curve_keypair())
    facts = json.loads(key.read_text()) | {"worker_public": public, "worker_secret": secret}
    other.write_text(json.dumps(facts))
    other.chmod(0o600)
    refused = start(bench, hosts.inside(hosts.b), "worker", "--join", listen, "--key-file", str(other), PACED, ".")
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert re.search("did not answer within 15 s|has refused this connection", err), "which, depends on who is faster"
    assert job.poll() is None
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 130

"""Ranks on two hosts that no server joins: torchrun and mpirun with an address and a key file, and `run --via allreduce`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from live import PACED, Bench, wait_until
from test_two_hosts import key_file, start

REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "allowed"), pytest.mark.timeout(120)]
SCRIPT = str(Path(__file__).parent / "between_hosts.py")
PORT = 7311


def new_key(bench: Bench) -> str:
    assert bench.run("key", "ranks.key").returncode == 0
    path = bench.folder / "ranks.key"
    assert path.stat().st_mode & 0o077 == 0
    return str(path)


def ranks(bench: Bench, hosts: Hosts, per_host: int, *keys: str, script: str = SCRIPT) -> list[subprocess.Popen[str]]:
    """As a launcher with agents on both hosts starts them; with one key file for all, or one for each."""
    started = []
    for rank in range(2 * per_host):
        own: dict[str, int | str] = {
            "RANK": rank,
            "WORLD_SIZE": 2 * per_host,
            "LOCAL_RANK": rank % per_host,
            "LOCAL_WORLD_SIZE": per_host,
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": PORT,
        }
        if keys:
            own["POLYTEMPO_KEY_FILE"] = keys[rank % len(keys)]
        prefix = hosts.inside(hosts.a if rank < per_host else hosts.b)
        variables = {name: str(value) for name, value in own.items()}
        started.append(bench.popen([*prefix, sys.executable, script], PATIENCE="20", **variables))
    return started


def results(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    ended = [process.communicate(timeout=90) for process in started]
    return [(process.returncode, out, err) for process, (out, err) in zip(started, ended, strict=True)]


@pytest.mark.parametrize("per_host", [1, 2])
def test_bytes_over_the_cable_are_as_few_as_can_be(hosts: Hosts, bench: Bench, per_host: int) -> None:
    """Every collective is right; a flat ring sends 2n(p-1)/p, and one stream a host n each way. Counted in the links."""
    ended = results(ranks(bench, hosts, per_host, new_key(bench)))
    assert [status for status, _, _ in ended] == [0] * 2 * per_host, ended
    said = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    size = 2 * per_host
    for rank, counted in enumerate(said):
        assert counted["ring"] == 2 * counted["n"] * (size - 1) // size
        assert counted["hierarchical away"] == (counted["n"] if rank % per_host == 0 else 0)
        assert counted["choice"] == ("hierarchical" if per_host > 1 else "ring")
    assert len({counted["bits"] for counted in said}) == 1


def test_without_a_key_they_refuse_to_talk(hosts: Hosts, bench: Bench) -> None:
    ended = results(ranks(bench, hosts, 1))
    for rank, (status, _, err) in enumerate(ended):
        assert status == 1
        last = err.splitlines()[-1]
        assert f"ranks {1 - rank} are on other hosts: give all ranks the same key file" in last
        assert "polytempo key FILE" in last


def test_unlike_keys_are_named(hosts: Hosts, bench: Bench) -> None:
    first = shutil.copy(new_key(bench), bench.folder / "first.key")
    os.unlink(bench.folder / "ranks.key")
    ended = results(ranks(bench, hosts, 1, str(first), new_key(bench)))
    assert [status for status, _, _ in ended] == [1, 1]
    for rank, (_, _, err) in enumerate(ended):
        assert f"rank {rank} cannot talk to rank {1 - rank}" in err.splitlines()[-1]
        assert "same key file" in err.splitlines()[-1]


def test_run_by_all_reduce_on_two_hosts(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--via", "allreduce", "--listen", listen, "--expect", "2", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, PACED, ".", "steps=10")
    joining = ["worker", "--join", listen, "--key-file", str(key_file(bench)), "-n", "2", PACED, ".", "steps=10"]
    joined = start(bench, hosts.inside(hosts.b), *joining)
    _, err = joined.communicate(timeout=60)
    assert joined.returncode == 0, err
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert [worker["steps"] for worker in bench.meta()["workers"]] == [10, 10, 10]
    assert bench.meta()["options"]["via"] == "allreduce"
    assert bench.run("check", "record").returncode == 0


def test_a_rank_killed_on_the_other_host_is_left_out(hosts: Hosts, bench: Bench) -> None:
    listen = f"{hosts.address}:7077"
    flags = ["--via", "allreduce", "--listen", listen, "--expect", "1", "--min-workers", "2", "--record", "record"]
    job = start(bench, hosts.inside(hosts.a), "run", "-n", "2", *flags, PACED, ".", "steps=12", "die=2:5:kill")
    joining = ["worker", "--join", listen, "--key-file", str(key_file(bench)), PACED, ".", "steps=12", "die=2:5:kill"]
    joined = start(bench, hosts.inside(hosts.b), *joining)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    joined.communicate(timeout=60)
    steps = [worker["steps"] for worker in bench.meta()["workers"]]
    assert steps[:2] == [12, 12]
    assert steps[2] < 12
    wait_until(lambda: not bench.processes())

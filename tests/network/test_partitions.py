"""A network that breaks between hosts: what is back in time has lost nothing, and never do two sides train apart.

Each rank's gradient is 1 for a parameter of its own (`replicas.py`), so the values say which ranks made them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hosts import SwitchedHosts, switched_hosts, why_not
from live import Bench, wait_until
from test_collectives_between_hosts import new_key
from test_two_hosts import key_file, start

REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "allowed"), pytest.mark.timeout(150)]
SCRIPT = str(Path(__file__).parent / "replicas.py")
STEPS, PACE = 40, 0.05
PORT = 7312
#: Seconds that a link is down. Before it was given up after 5 s without an acknowledgement, and after 3 s its kernels try
#: again after 6 s only.
DOWN = 4.2
SIDES = {"both": (True, True), "sends": (True, False), "hears": (False, True)}


@pytest.fixture
def hosts() -> Iterator[SwitchedHosts]:
    with switched_hosts(3) as made:
        yield made


def taken(bench: Bench, rank: int) -> int:
    path = bench.folder / f"taken-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def train(bench: Bench, hosts: SwitchedHosts, *flags: str, pace: float = PACE) -> list[subprocess.Popen[str]]:
    """A job with a worker on each of three hosts, of which each has taken some steps: launcher and agents."""
    listen, script = f"{hosts.addresses[0]}:7077", (SCRIPT, ".", str(STEPS), str(pace))
    flags = ("--listen", listen, "--expect", "2", "--record", "record", *flags)
    started = [start(bench, hosts.inside(0), "run", "-n", "1", *flags, *script)]
    for host in (1, 2):
        join = ["worker", "--join", listen, "--key-file", str(key_file(bench))]
        started.append(start(bench, hosts.inside(host), *join, *script))
        wait_until(lambda host=host: (bench.folder / f"taken-{host}").exists())  # ranks are given to agents as they come
    wait_until(lambda: all(taken(bench, rank) > 2 for rank in range(3)))
    return started


def ballots(bench: Bench, hosts: SwitchedHosts, per_host: int, sync: str, least: int) -> list[subprocess.Popen[str]]:
    """Ranks that no coordinator joins, as another launcher starts them; each has taken some steps."""
    key, size, started = new_key(bench), per_host * len(hosts.names), []
    for rank in range(size):
        own = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank % per_host,
            "LOCAL_WORLD_SIZE": per_host,
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": PORT,
            "POLYTEMPO_KEY_FILE": key,
            "SYNC": sync,
            "MIN_WORKERS": least,
            "HOST_TIMEOUT": 1,
        }
        command = [*hosts.inside(rank // per_host), sys.executable, SCRIPT, ".", str(STEPS), str(PACE)]
        started.append(bench.popen(command, **{name: str(value) for name, value in own.items()}))
    wait_until(lambda: all(taken(bench, rank) > 2 for rank in range(size)))
    return started


def ends(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and last words of each."""
    said = [process.communicate(timeout=90)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def values(bench: Bench, rank: int) -> list[float] | None:
    path = bench.folder / f"values-{rank}"
    return [round(value, 6) for value in json.loads(path.read_text())] if path.exists() else None


def one_history(bench: Bench) -> None:
    """All values that any rank has held lie on one line: ranks may differ in how far they are, not in where they go."""
    lines = [line for rank in range(3) for line in (bench.folder / f"taken-{rank}").read_text().splitlines()]
    held = sorted((json.loads(line) for line in lines), key=sum, reverse=True)
    for before, after in pairwise(held):
        assert all(late <= early + 1e-9 for early, late in zip(before, after, strict=True)), (before, after)


def down(hosts: SwitchedHosts, host: int, seconds: float, side: str = "both") -> None:
    hosts.cut(host, *SIDES[side])
    threading.Event().wait(seconds)
    hosts.heal(host)


def whole(bench: Bench) -> None:
    """All ranks hold what a run without a cut ends with."""
    assert [values(bench, rank) for rank in range(3)] == [[round(-STEPS / 3, 6)] * 3] * 3


def test_a_link_that_is_back_in_time_loses_nothing(hosts: SwitchedHosts, bench: Bench) -> None:
    """Cut off, deaf or unheard in turn, and flapping: the values are those of a run without."""
    started = train(bench, hosts, "--via", "allreduce", "--host-timeout", "8")
    down(hosts, 1, DOWN)
    before = taken(bench, 1)
    wait_until(lambda: taken(bench, 1) > before)
    down(hosts, 0, 0.6, "sends")
    for _ in range(3):
        down(hosts, 2, 0.4, "hears")
        threading.Event().wait(0.1)
    for status, said in ends(started):
        assert status == 0, said
    whole(bench)
    assert bench.run("check", "record").returncode == 0


def test_a_host_that_stays_away_is_given_up_and_ends(hosts: SwitchedHosts, bench: Bench) -> None:
    """By the coordinator's word; it learns so when its link is back, and has not gone on meanwhile."""
    flags = ("--via", "allreduce", "--host-timeout", "2", "--min-workers", "2")
    started = train(bench, hosts, *flags)
    hosts.cut(2)
    wait_until(lambda: values(bench, 0) is not None and values(bench, 1) is not None)
    hosts.heal(2)
    (status, said), first, second = ends(started)
    assert status == first[0] == 0, said
    assert "worker 2 its host was not heard of for 2 s; going on with 2 of 3" in said
    assert second[0] == 1
    assert values(bench, 0) == values(bench, 1)
    assert values(bench, 2) is None
    assert taken(bench, 2) < STEPS
    assert "its host" in second[1].splitlines()[-1]


def test_two_against_two_without_a_coordinator_end_with_the_reason(bench: Bench) -> None:
    """`--min-workers 1` or not: neither side knows that the other has ended, and neither is more than half."""
    with switched_hosts(2) as hosts:
        started = ballots(bench, hosts, 2, "local:4", 1)
        hosts.cut(1)
        for rank, (status, said) in enumerate(ends(started)):
            assert status == 1
            assert f"rank {rank} ends: nothing is heard of rank" in said, said
            assert "which may be alive behind a broken link" in said
            assert values(bench, rank) is None


@pytest.mark.proof
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("host", range(3))
@pytest.mark.parametrize("sync", ["bsp", "local:4", "anytime:auto", "bsp via ps", "ssp:2 via ps"])
def test_four_seconds_are_nothing_by_default(hosts: SwitchedHosts, bench: Bench, sync: str, host: int, side: str) -> None:
    mode, _, way = sync.partition(" via ")
    started = train(bench, hosts, "--sync", mode, "--via", way or "allreduce", "--min-workers", "1")
    down(hosts, host, 3.8, side)
    for status, said in ends(started):
        assert status == 0, said
    if mode in ("bsp", "local:4"):
        whole(bench)
    elif mode == "anytime:auto":
        one_history(bench)
    assert [worker["steps"] for worker in bench.meta()["workers"]] == [STEPS] * 3 or mode == "anytime:auto"
    assert bench.run("check", "record").returncode == 0


@pytest.mark.proof
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("host", range(3))
@pytest.mark.parametrize("sync", ["bsp", "local:4", "anytime:auto", "gossip:ring"])
def test_those_cut_off_for_long_never_finish(hosts: SwitchedHosts, bench: Bench, sync: str, host: int, side: str) -> None:
    """Whoever finishes holds the same; host 0 has the coordinator, and goes on alone where that is allowed."""
    via = () if sync.startswith("gossip") else ("--via", "allreduce")
    started = train(bench, hosts, "--sync", sync, *via, "--host-timeout", "2", "--min-workers", "1")
    hosts.cut(host, *SIDES[side])
    found = ends(started)
    finished = [rank for rank in range(3) if values(bench, rank) is not None]
    assert finished == [rank for rank in range(3) if rank != host] if host else [0], found
    if sync == "anytime:auto":
        one_history(bench)
    elif not sync.startswith("gossip"):
        assert len({tuple(values(bench, rank) or ()) for rank in finished}) == 1, found


@pytest.mark.proof
@pytest.mark.parametrize("how", ["both", "sends", "hears", "apart"])
@pytest.mark.parametrize("host", range(3))
@pytest.mark.parametrize("sync", ["bsp", "local:4"])
def test_a_majority_goes_on_without_a_coordinator(
    hosts: SwitchedHosts, bench: Bench, sync: str, host: int, how: str
) -> None:
    started = ballots(bench, hosts, 1, sync, 1)
    if how == "apart":
        hosts.part(host, (host + 1) % 3)
    else:
        hosts.cut(host, *SIDES[how])
    found = ends(started)
    finished = [rank for rank in range(3) if values(bench, rank) is not None]
    assert len(finished) == 2, found
    assert host not in finished or how == "apart"
    assert values(bench, finished[0]) == values(bench, finished[1])
    for rank, (status, said) in enumerate(found):
        assert status == (0 if rank in finished else 1)
        assert rank in finished or "go on without rank" in said or "nothing is heard of rank" in said

"""Processes killed in the middle of an all-reduce: the others name them within two seconds, and go on without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Bench, wait_until

SIZE = 4
#: What the library promises.
LIMIT = 2.0

#: One process that loads torch, and its forked children, which are the ranks. Arguments: a name to meet by, a folder,
#: the algorithm, who dies, after how many sends of its own (-1: when told), how many numbers; what else (background, child).
SCRIPT = """
import json, os, signal, sys, time, traceback
from pathlib import Path
import torch
from polytempo.collectives.world import open_by_name
from polytempo.errors import PeerError, RankLost

name, folder, how, extras = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
who, sends, length, size = map(int, sys.argv[5:])
torch.set_num_threads(1)
alive, end = os.pipe()


def write(name, value):
    (folder / f"{name}.part").write_text(json.dumps(value))
    (folder / f"{name}.part").rename(folder / name)


def have_a_child():
    if os.fork() == 0:
        write("child", os.getpid())
        os.read(alive, 1)  # until the first process ends
        os._exit(0)


def die():
    write("death", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def arm(engine):
    original, left = engine.messages.send, [sends]

    def send(*about):
        if not left[0]:
            die()
        left[0] -= 1
        original(*about)

    engine.messages.send = send


def total(group):
    mine = torch.full((length,), float(1 << group.engine.rank))
    group.all_reduce([mine], algorithm=how, background="background" in extras).wait()
    assert (mine == mine[0]).all()
    return mine[0].item()


def take_part(rank):
    world = open_by_name(name, rank, size)
    group = world.all_ranks
    assert total(group) == (1 << size) - 1
    if rank == who:
        if "child" in extras:
            have_a_child()
            while not (folder / "child").exists():
                time.sleep(0.001)
        if sends >= 0:
            arm(world.engine)
    write(f"going-{rank}", os.getpid())
    if rank == who:  # a loss ends whatever call a rank is in: it is to be the second on all
        while not all((folder / f"going-{other}").exists() for other in range(size)):
            time.sleep(0.001)
    try:
        while True:
            assert total(group) == (1 << size) - 1
    except RankLost as error:
        named = time.monotonic()
        text, lost = str(error), list(error.ranks)
    child = (folder / "child").exists() and Path(f"/proc/{json.loads((folder / 'child').read_text())}").exists()
    while True:
        try:
            again = world.reform()
            seen = [total(again) for _ in range(3)]
            break
        except PeerError:
            continue
    write(f"survivor-{rank}", dict(named=named, text=text, lost=lost, ranks=again.ranks, seen=seen, child=child))
    world.close()


ranks = []
for rank in range(size):
    pid = os.fork()
    if not pid:
        os.close(end)
        status = 1
        try:
            take_part(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    ranks.append(pid)
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
write("statuses", statuses)
"""

pytestmark = pytest.mark.long


@pytest.fixture
def job(bench: Bench) -> Iterator[Job]:
    made = Job(bench)
    yield made
    made.end()


class Job:
    """Ranks that add up until one of them is gone."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.size = SIZE
        self._process: subprocess.Popen[str] | None = None

    def start(self, how: str, who: int, sends: int, length: int = 1000, extras: str = "", size: int = SIZE) -> None:
        script, self.size = self._bench.folder / "ranks.py", size
        script.write_text(SCRIPT)
        name = f"{os.getpid()}-{self._bench.folder.name}"
        about = [name, self._bench.folder, how, extras, who, sends, length, size]
        self._process = self._bench.popen([sys.executable, str(script), *map(str, about)])

    def said(self, name: str) -> Any:
        """What a rank has written down."""
        return json.loads((self._bench.folder / name).read_text())

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: self.over() or all((self._bench.folder / name).exists() for name in names), 60)

    def over(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def finish(self, who: list[int]) -> list[dict[str, Any]]:
        """Wait for the end; what the survivors say."""
        assert self._process is not None
        _, err = self._process.communicate(timeout=60)
        statuses = self.said("statuses")
        assert [statuses[rank] for rank in who] == [-signal.SIGKILL] * len(who), err
        assert [status for rank, status in enumerate(statuses) if rank not in who] == [0] * (self.size - len(who)), err
        return [self.said(f"survivor-{rank}") for rank in range(self.size) if rank not in who]

    def end(self) -> None:
        """Whatever is left of it, should a test have failed."""
        if self._process is not None:
            for process in self._bench.processes():
                if process.pid != os.getpid():
                    process.kill()
            self._process.communicate(timeout=20)


def check(job: Job, who: int, death: float) -> list[dict[str, Any]]:
    """Everybody has named it in time, and gone on with all others."""
    survivors = job.finish([who])
    others = [rank for rank in range(job.size) if rank != who]
    for found in survivors:
        assert f"rank {who} is gone" in found["text"], found
        assert found["lost"] == [who]
        assert found["named"] - death < LIMIT, f"it took {found['named'] - death:.1f} s"
        assert found["ranks"] == others
        assert found["seen"] == [float(sum(1 << rank for rank in others))] * 3
    return survivors


@pytest.mark.parametrize(
    ("how", "who", "sends", "extras"),
    [
        ("ring", 0, 0, ""),
        ("ring", 2, 3, ""),
        ("ring", 2, 3, "background"),
        ("tree", 0, 1, ""),
        ("tree", 3, 0, "background"),
        ("halving-doubling", 1, 2, ""),
        ("double-tree", 2, 1, ""),
        ("double-tree", 2, 1, "background"),
        ("shared-memory", 0, 2, ""),
        ("shared-memory", 3, 4, ""),
        ("shared-memory", 3, 4, "background"),
    ],
)
def test_a_killed_process_is_named_by_all_in_time(job: Job, how: str, who: int, sends: int, extras: str) -> None:
    job.start(how, who, sends, extras=extras)
    job.wait_for("death")
    check(job, who, job.said("death"))


@pytest.mark.parametrize("how", ["ring", "tree", "halving-doubling", "double-tree", "shared-memory"])
def test_a_process_killed_while_much_is_under_way_is_named_by_all_in_time(job: Job, how: str) -> None:
    job.start(how, 1, 2, length=3_000_000)
    job.wait_for("death")
    check(job, 1, job.said("death"))


@pytest.mark.parametrize("how", ["ring", "shared-memory"])
@pytest.mark.parametrize("length", [10, 1_000_000])
def test_a_process_killed_from_outside_at_any_moment_is_named_by_all_in_time(job: Job, how: str, length: int) -> None:
    job.start(how, 2, -1, length)
    job.wait_for(*(f"going-{rank}" for rank in range(SIZE)))
    death = time.monotonic()
    os.kill(job.said("going-2"), signal.SIGKILL)
    check(job, 2, death)


def test_a_process_killed_while_it_is_stopped_is_named_by_all_in_time(job: Job) -> None:
    """All others are waiting for it by then, or soon."""
    job.start("ring", 1, -1)
    job.wait_for(*(f"going-{rank}" for rank in range(SIZE)))
    os.kill(job.said("going-1"), signal.SIGSTOP)
    death = time.monotonic()
    os.kill(job.said("going-1"), signal.SIGKILL)
    check(job, 1, death)


@pytest.mark.parametrize(
    ("how", "extras"),
    [("ring", "child"), ("ring", "child and background"), ("tree", "child"), ("shared-memory", "child and background")],
)
def test_a_forked_child_that_lives_on_hides_nothing(job: Job, how: str, extras: str) -> None:
    """Such as the workers of a data loader: they have all descriptors of the dead."""
    job.start(how, 1, 2, extras=extras)
    job.wait_for("death")
    survivors = check(job, 1, job.said("death"))
    assert all(found["child"] for found in survivors), "the child was gone before anybody looked"


def test_two_processes_killed_at_once_are_named_by_all_in_time(job: Job) -> None:
    job.start("ring", 9, -1, size=5)
    job.wait_for(*(f"going-{rank}" for rank in range(5)))
    death = time.monotonic()
    for rank in (1, 3):
        os.kill(job.said(f"going-{rank}"), signal.SIGKILL)
    for found in job.finish([1, 3]):
        assert set(found["lost"]) <= {1, 3}
        assert "is gone" in found["text"]
        assert found["named"] - death < LIMIT
        assert found["ranks"] == [0, 2, 4]
        assert found["seen"] == [float(0b10101)] * 3


def leftover_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_nothing_has_a_name_that_outlives_it(job: Job) -> None:
    before = leftover_segments()
    job.start("shared-memory", 0, 3, length=100_000)
    job.wait_for("death")
    check(job, 0, job.said("death"))
    assert leftover_segments() <= before

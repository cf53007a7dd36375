"""Workers and servers of one host share memory, and nothing of it outlives them, however they end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Bench, wait_until

ELEMENTS = 1 << 20
MODEL = 4 * ELEMENTS  # bytes

#: Arguments: what rank 1 does while it takes the values of its fourth answer, and how many steps each takes.
SCRIPT = """
import json, os, re, signal, sys, threading
from pathlib import Path
import psutil
import torch
import polytempo as pt
from polytempo.reducer.copier import Copier
from polytempo.transport.shared_memory import Borrowed

how, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
pt.init()
rank = pt.rank()
taken = 0
original = Copier.scatter


def scatter(copier, parts, *rest):
    if rank == 1 and taken == 3:
        views = [buffer for buffers in parts.values() for buffer in buffers]
        assert views and all(isinstance(view, Borrowed) for view in views)
        seen = [bytes(view) for view in views]
        Path("holding.part").write_text(str(os.getpid()))
        Path("holding.part").rename("holding")  # it is there with its text, or not at all
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        Path("same").write_text(str(seen == [bytes(view) for view in views]))
    return original(copier, parts, *rest)


Copier.scatter = scatter


def segments(pid):
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:polytempo" in line:
            start, stop, inode = re.match(r"(\\w+)-(\\w+) \\S+ \\w+ \\S+ (\\d+)", line).groups()
            found[inode] = found.get(inode, 0) + int(stop, 16) - int(start, 16)
    return found


def command_of(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # the other worker, which may end at any moment
        return []


def await_holder():
    while not Path("holding").exists():
        threading.Event().wait(0.01)
    holder = psutil.Process(int(Path("holding").read_text()))
    while how == "stop" and holder.status() != psutil.STATUS_STOPPED:
        threading.Event().wait(0.01)
    return holder


parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
optimizer = pt.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
holder = await_holder() if how in ("kill", "stop") and rank == 0 else None
for taken in range(steps):
    optimizer.zero_grad()
    (parameter.sum() * -1).backward()
    optimizer.step()
    assert bool((parameter == parameter[0]).all()), "values of two updates were mixed"
if how == "stop" and rank == 0:
    holder.send_signal(signal.SIGCONT)
servers = [p.pid for p in psutil.Process().parent().children() if "polytempo.launcher.server_process" in command_of(p)]
maps = {"own": segments("self"), "servers": [segments(pid) for pid in servers]}
Path(f"maps-{rank}").write_text(json.dumps(maps))
print(f"worker {rank} took {taken + 1} steps")
""".replace("ELEMENTS", str(ELEMENTS))

FLAGS = ["--servers", "2", "--sync", "asp"]


def command(bench: Bench, how: str, steps: int, *flags: str) -> list[str]:
    script = bench.folder / "script.py"
    script.write_text(SCRIPT)
    return ["run", "-n", "2", *FLAGS, *flags, str(script), how, str(steps)]


def maps_of(bench: Bench, rank: int) -> dict[str, Any]:
    return dict(json.loads((bench.folder / f"maps-{rank}").read_text()))


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_workers_and_servers_map_the_same_memory(bench: Bench) -> None:
    done = bench.run(*command(bench, "", 5))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        maps = maps_of(bench, rank)
        assert len(maps["servers"]) == 2
        common = [maps["own"].keys() & server.keys() for server in maps["servers"]]
        assert len(common[0] & common[1]) == 1, "the bucket, of which each server reads its part, and nothing else"
        for shared in common:
            sizes = sorted(maps["own"][inode] for inode in shared)
            assert sizes[-1] >= MODEL, "the worker's bucket"
            assert sizes[-2] >= MODEL // 2, "the server's values"


@pytest.mark.new_interpreters
def test_nothing_is_left_when_everybody_is_killed_at_once(bench: Bench) -> None:
    named = in_shared_memory()
    process = bench.start(*command(bench, "", 1_000_000, "--record", "record"))
    wait_until(lambda: (bench.folder / "record" / "events.jsonl").exists() and len(bench.events()) > 50)
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(everybody) == 6  # the launcher, its janitor, two servers and two workers
    for one in everybody:
        one.send_signal(signal.SIGSTOP)  # so that nobody tidies up
    for one in everybody:
        one.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not bench.processes(), 10)
    assert in_shared_memory() <= named
    (leftover,) = bench.temporary.glob("polytempo-*")
    assert all(file.is_socket() or file.name == "job.json" for file in leftover.iterdir()), "sockets, and no memory"
    for file in leftover.iterdir():
        file.unlink()
    leftover.rmdir()


def test_a_worker_that_is_killed_while_it_holds_values_stops_nobody(bench: Bench) -> None:
    done = bench.run(*command(bench, "kill", 20), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warning: worker 1 was killed by SIGKILL; going on with 1 of 2" in done.stderr
    assert "worker 0 took 20 steps" in done.stdout


def test_values_do_not_change_while_somebody_holds_them_and_nobody_waits_for_it(bench: Bench) -> None:
    """Updates that come meanwhile go to another memory."""
    done = bench.run(*command(bench, "stop", 20), timeout=60)
    assert done.returncode == 0, done.stderr
    assert (bench.folder / "same").read_text() == "True"
    assert "worker 0 took 20 steps" in done.stdout
    assert "worker 1 took 20 steps" in done.stdout
    assert "asp: 40 steps" in done.stderr, "every push of both has counted"

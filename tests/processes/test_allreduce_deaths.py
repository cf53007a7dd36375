"""Without servers that hold values, too: who dies is named, and the others go on, or end with the cause."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from live import Bench, wait_until

MEMBERS = 3
STEPS = 6

#: Arguments: who dies, at which step, where. Everybody who lives writes down its weights and its processes' memory.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import polytempo as pt
from polytempo.collectives.shared_buffer import SharedMeanBuffer
from polytempo.collectives.shared_buffer import mean_in_place
from polytempo.transport.local_peers import LocalPeers

who, when, where, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
pt.init()
taken = -1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def doomed():
    return pt.rank() == who and taken == when


def before(original):
    return lambda *arguments: die() if doomed() else original(*arguments)


def after(original):
    return lambda *arguments: (original(*arguments), die() if doomed() else None)[0]


def after_one(original):
    def tell(peers, ranks, *note):
        ranks = list(ranks)
        original(peers, ranks[:1] if doomed() else ranks, *note)
        if doomed():
            die()
    return tell


if where == "before it finished":
    SharedMeanBuffer.finish = before(SharedMeanBuffer.finish)
elif where == "before it told":
    SharedMeanBuffer.finish = after(SharedMeanBuffer.finish)
elif where == "after it told one":
    LocalPeers.tell = after_one(LocalPeers.tell)
elif where == "before it was met":
    LocalPeers.meet = before(LocalPeers.meet)
elif where == "before the memory":
    LocalPeers.hand_over = before(LocalPeers.hand_over)
elif where == "while all begin":
    SharedMeanBuffer.meet = before(SharedMeanBuffer.meet)

if where == "before it registered" and doomed():
    die()
torch.manual_seed(0)
model = torch.nn.Linear(40, 30)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for taken in range(steps):
    generator = torch.Generator().manual_seed(100 * taken + pt.rank())
    if doomed() and where == "before a step":
        die()
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    optimizer.step(samples=1 + pt.rank())
weights = [p.detach().flatten().tolist() for p in model.parameters()]
Path(f"weights-{pt.rank()}").write_text(json.dumps(weights))
print(f"worker {pt.rank()} took {taken + 1} steps")
"""

IN_A_ROUND = ["before it finished", "before it told", "after it told one"]


def command(bench: Bench, who: int, when: int, where: str, *flags: str, steps: int = STEPS) -> list[str]:
    script = bench.folder / "script.py"
    script.write_text(SCRIPT)
    line = ["run", "-n", str(MEMBERS), "--via", "allreduce", *flags]
    return [*line, str(script), str(who), str(when), where, str(steps)]


def weights_of(bench: Bench, rank: int) -> list[list[float]]:
    found: list[list[float]] = json.loads((bench.folder / f"weights-{rank}").read_text())
    return found


def trained_alone(who: int, last_round: int) -> list[torch.Tensor]:
    """What plain PyTorch makes of the same batches, where one takes part only up to some round."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        members = [rank for rank in range(MEMBERS) if rank != who or step <= last_round]
        optimizer.zero_grad()
        for rank in members:
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
            share = (1 + rank) / sum(1 + member for member in members)
            (model(batch).square().mean() * share).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(
    ("who", "when", "where"),
    [
        (1, 0, "before a step"),
        (0, 3, "before a step"),
        *((1, 2, where) for where in IN_A_ROUND),
        (0, STEPS - 1, "before it told"),
    ],
    ids=str,
)
def test_the_others_go_on_and_stay_the_same(bench: Bench, who: int, when: int, where: str) -> None:
    named = in_shared_memory()
    done = bench.run(*command(bench, who, when, where, "--min-workers", "2", "--record", "record"), timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"warning: worker {who} was killed by SIGKILL; going on with 2 of 3" in done.stderr
    others = [rank for rank in range(MEMBERS) if rank != who]
    for rank in others:
        assert f"worker {rank} took {STEPS} steps" in done.stdout
    assert weights_of(bench, others[0]) == weights_of(bench, others[1])
    last_round = when if where in IN_A_ROUND else when - 1  # in which its gradient, which was there, counts
    for got, wanted in zip(weights_of(bench, others[0]), trained_alone(who, last_round), strict=True):
        torch.testing.assert_close(torch.tensor(got), wanted.flatten(), rtol=1e-4, atol=1e-6)
    states = [worker["state"] for worker in bench.meta()["workers"]]
    assert states == ["lost" if rank == who else "finished" for rank in range(MEMBERS)]
    assert bench.run("check", "record").returncode == 0
    assert in_shared_memory() <= named


@pytest.mark.parametrize(("who", "where"), [(0, "before a step"), (1, "before it finished")])
def test_without_leave_to_go_on_the_job_ends_with_the_cause(bench: Bench, who: int, where: str) -> None:
    done = bench.run(*command(bench, who, 2, where, steps=100_000), timeout=60)
    assert done.returncode == 1, done.stdout
    last = done.stderr.splitlines()[-1]
    assert last == f"polytempo: worker {who} was killed by SIGKILL; 2 of 3 workers are left, at least 3 are needed"


@pytest.mark.parametrize(
    ("who", "where", "status"),
    [
        (1, "before it registered", 0),
        (2, "before it was met", 0),
        (0, "before the memory", 1),  # with it all that was to be shared is lost
        (0, "while all begin", 1),  # and so are the values from which all start
    ],
)
def test_a_death_while_the_job_begins_keeps_nobody_waiting(bench: Bench, who: int, where: str, status: int) -> None:
    done = bench.run(*command(bench, who, -1, where, "--min-workers", "2"), timeout=60)
    assert done.returncode == status, done.stderr
    assert f"worker {who} was killed by SIGKILL" in done.stderr
    if status == 0:
        others = [rank for rank in range(MEMBERS) if rank != who]
        assert weights_of(bench, others[0]) == weights_of(bench, others[1])
    else:
        assert "rank 0 is gone" in done.stderr or "worker 0 ended before the other workers" in done.stderr


def test_two_deaths_at_once_leave_one_who_goes_on(bench: Bench) -> None:
    process = bench.start(*command(bench, 9, 0, "", "--min-workers", "1", "--record", "record", steps=3000))
    wait_until(lambda: (bench.folder / "record" / "events.jsonl").exists() and len(bench.events()) > 100)
    for child in workers_of(process.pid)[:2]:
        child.kill()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "worker 2 took 3000 steps" in out
    assert "worker 0 was killed by SIGKILL" in err
    assert "worker 1 was killed by SIGKILL" in err


def workers_of(launcher: int) -> list[psutil.Process]:
    """In the order of their ranks."""
    return [p for p in psutil.Process(launcher).children() if any("script.py" in part for part in p.cmdline())]


def test_a_killed_launcher_takes_everybody_with_it(bench: Bench) -> None:
    named = in_shared_memory()
    process = bench.start(*command(bench, 9, 0, "", "--record", "record", steps=1_000_000))
    wait_until(lambda: (bench.folder / "record" / "events.jsonl").exists() and len(bench.events()) > 100)
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not bench.processes(), 10)
    assert in_shared_memory() <= named

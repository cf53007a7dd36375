"""A worker of `anytime` whose process is stopped: the others go on without it, and it catches up before it counts again."""

from __future__ import annotations

from pathlib import Path

import psutil
from live import Bench, finished, wait_until

#: Samples are few until the test says that the budget shall be used up: then all workers leave after the same round.
SCRIPT = """
import hashlib, os, time
from pathlib import Path
import torch
import polytempo as pt

torch.set_num_threads(1)
pt.init()
torch.manual_seed(pt.rank())
model = torch.nn.Linear(40, 30)
optimizer = pt.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
Path(f"pid-{pt.rank()}").write_text(str(os.getpid()))
rounds = Path(f"rounds-{pt.rank()}").open("a")
install = optimizer._update._rounds.install


def installed():  # all replicas must be the same now: parameters, and the optimizer's state
    install()
    state = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    bits = b"".join(value.detach().numpy().tobytes() for value in [*model.parameters(), *state])
    print(optimizer._reducer.step, hashlib.sha256(bits).hexdigest(), file=rounds, flush=True)


optimizer._update._rounds.install = installed
while not pt.should_stop():
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    time.sleep(0.005)
    optimizer.step(samples=1_000_000 if Path("finish").exists() else 8)
"""


def values_of(folder: Path, rank: int) -> dict[int, str]:
    """A digest of a worker's values and state at the start of each round, as its script saw them."""
    written = folder / f"rounds-{rank}"
    lines = written.read_text().splitlines() if written.exists() else []
    return {int(number): digest for number, digest in (line.split() for line in lines if line.count(" ") == 1)}


def test_a_stopped_worker_delays_no_other_and_catches_up(bench: Bench) -> None:
    script, folder, stopped = bench.folder / "script.py", bench.folder, 1
    script.write_text(SCRIPT)

    def rounds(rank: int) -> int:
        return len(values_of(folder, rank))

    options = ["--via", "allreduce", "--sync", "anytime:0.1", "--samples", "1000000", "--record", "record"]
    job = bench.start("run", "-n", "3", *options, str(script))
    wait_until(lambda: all(rounds(rank) >= 2 for rank in range(3)))
    process = psutil.Process(int((folder / f"pid-{stopped}").read_text()))
    process.suspend()
    before = [rounds(rank) for rank in range(3)]
    wait_until(lambda: all(rounds(rank) >= before[rank] + 4 for rank in (0, 2)))
    assert rounds(stopped) == before[stopped]
    process.resume()
    wait_until(lambda: rounds(stopped) >= before[stopped] + 4)
    (folder / "finish").touch()
    done = finished(job)
    assert done.returncode == 0, done.stderr
    one, two, three = (values_of(folder, rank) for rank in range(3))
    missed = {number for number in one if number not in two}
    assert len(missed) >= 2
    both = sorted(number for number in one if number in two)
    assert [one[number] for number in both] == [two[number] for number in both]
    assert both[0] < min(missed)
    assert both[-1] > min(missed)
    assert all(one[number] == digest for number, digest in three.items() if number in one)
    assert stopped in {line["worker"] for line in bench.events() if line["kind"] == "discard"}
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr

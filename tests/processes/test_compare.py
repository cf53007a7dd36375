"""`polytempo compare`, live: each mode as `polytempo run` would run it, with a metric or without; records are kept."""

from __future__ import annotations

from live import Bench

SCRIPT = """
import sys, torch
import polytempo as pt

pt.init()
torch.manual_seed(pt.rank())
model = torch.nn.Linear(2, 1)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 2)).square().mean()
    loss.backward()
    optimizer.step(samples=4)
    if pt.rank() == 0:
        pt.log(**{sys.argv[1]: step / 5})
"""


def test_modes_are_compared_as_run_would_run_them_and_without_a_metric_by_speed(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(SCRIPT)
    modes = ("bsp", "local:2", "ssp:1", "gossip:ring")
    command = ["compare", "-n", "2", *(part for mode in modes for part in ("--sync", mode)), "train.py", "loss"]
    done = bench.run(*command)
    assert done.returncode == 0, done.stderr
    folders = [bench.folder / "out" / "compare" / mode.replace(":", "-") for mode in modes]
    ways = [bench.meta(str(folder.relative_to(bench.folder)))["options"]["via"] for folder in folders]
    assert ways == ["allreduce", "allreduce", "ps", "peers"]
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith(modes)][:4]
    assert rows == ["bsp (allreduce)", "local:2 (allreduce)", "ssp:1,momentum=lookahead,spike=1.5", "gossip:ring (peers)"]
    assert "last" in done.stdout
    told = "train.py logged no accuracy, so modes are compared by their speed alone"
    early = done.stderr.index(told)
    assert early < done.stderr.index("mode 2 of 4"), "as soon as it is known"
    assert told in done.stdout
    assert "(it logs loss)" in done.stdout


def test_records_of_a_comparison_are_kept(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(SCRIPT)
    compare = ("compare", "-n", "1", "--sync", "asp")
    done = bench.run(*compare, "train.py", "accuracy")
    assert done.returncode == 0, done.stderr
    assert "asp reaches 95 % first" in done.stdout
    before = (bench.folder / "out/compare/asp/events.jsonl").read_bytes()
    done = bench.run(*compare, "train.py", "accuracy")
    assert done.stderr.endswith("records: out/compare-2\n")
    done = bench.run(*compare, "--out", "out/compare", "train.py", "accuracy")
    refused = "out/compare/asp holds the record of an earlier job; choose another directory, or add --overwrite"
    assert (done.returncode, done.stderr) == (2, f"polytempo: {refused}\n")
    assert (bench.folder / "out/compare/asp/events.jsonl").read_bytes() == before
    done = bench.run(*compare, "--out", "out/compare", "--overwrite", "train.py", "accuracy")
    assert done.returncode == 0, done.stderr
    assert (bench.folder / "out/compare/asp/events.jsonl").read_bytes() != before

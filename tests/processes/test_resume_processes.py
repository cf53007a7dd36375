"""A job of processes that is interrupted and goes on ends where one does that is not: dropout, momentum, schedule."""

from __future__ import annotations

import signal

import pytest
from live import PACED, Bench, wait_until

SCRIPT = """
import sys, time, torch
import polytempo as pt
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 4))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, loader = pt.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
torch.manual_seed(1 + pt.rank())
pt.register_for_checkpointing(scheduler, pt.RngState())
for epoch in loader.epochs(3):
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        (model(x.double()).square().mean() - model[0].bias.sum()).backward()
        optimizer.step()
        scheduler.step()
        if sys.argv[1:] and (epoch, step) >= (1, 5):
            open(f"there-{pt.rank()}", "w").close()
            time.sleep(0.05)
if pt.rank() == 0:
    optimizer.consolidate()
    print("ends at", sum(parameter.detach().sum() for parameter in model.parameters()).item(), len(loader))
"""


@pytest.mark.long
def test_an_interrupted_job_goes_on_as_if_nothing_had_happened(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(SCRIPT)
    whole = bench.start("run", "-n", "2", "--servers", "1", "train.py")
    process = bench.start("run", "-n", "2", "--checkpoint", "saved", "train.py", "slowly")
    wait_until(lambda: all((bench.folder / f"there-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    resumed = bench.run("run", "-n", "2", "--resume", "saved", "train.py")
    saved = said.rpartition("--resume ")[2].strip()
    step = int(saved.rpartition("step-")[2])
    assert f"polytempo: resumed at step {step}, epoch 1, from {saved}" in resumed.stderr.splitlines()
    uninterrupted, trouble = whole.communicate(timeout=30)
    ends = [line for text in (uninterrupted, resumed.stdout) for line in text.splitlines() if "ends at" in line]
    assert len(ends) == 2, (trouble, said, resumed.stderr)
    assert ends[0] == ends[1]


def test_under_another_mode_a_job_goes_on_or_ends_in_one_line(bench: Bench) -> None:
    """Where the manifest says enough, before any process is started."""
    bench.run("run", "-n", "1", "--checkpoint", "saved", PACED, ".", "steps=3", "pace=0")
    on = bench.run("run", "-n", "1", "--resume", "saved", "--sync", "local:8", PACED, ".", "steps=3", "pace=0")
    assert (on.returncode, on.stdout.strip()) == (0, "[0] worker 0 took 3 steps"), on.stderr
    assert "polytempo: resumed at step 3, from saved/step-00000003" in on.stderr.splitlines()
    for arguments, status, words in [
        (
            ["--sync", "diloco:8,fragments=2", PACED, "."],
            2,
            "holds the model in one part, and diloco:8,fragments=2",
        ),
        (
            ["--sync", "local:8", PACED, ".", "model=0:5"],
            1,
            "step-00000003 is of another model: parameter 0 is",
        ),
    ]:
        done = bench.run("run", "-n", "1", "--resume", "saved", *arguments)
        assert done.returncode == status, done.stderr
        assert words in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert ("starting" in done.stderr) == (status == 1)

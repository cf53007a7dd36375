"""A job of processes that is interrupted and goes on ends where one does that is not: dropout, momentum, schedule."""

from __future__ import annotations

import signal

import pytest
from live import Bench, wait_until

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

"""The script in the README runs as it stands, heeds its budget, and gives no cause for a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import Bench

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.long
def test_the_script_in_the_readme_is_whole(bench: Bench) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (bench.folder / "train.py").write_text(script)
    done = bench.run("run", "-n", "2", "--steps", "30", "--record", "record", "train.py")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert 30 <= bench.meta()["job"]["steps"] <= 32
    assert bench.meta()["job"]["samples"] == 32 * bench.meta()["job"]["steps"]
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "finished"]


@pytest.mark.long
def test_what_that_script_would_do_without_its_lines_is_said(bench: Bench) -> None:
    """The first two lines alone, as many scripts have them: seeded alike, shuffled alike, and deaf to the budget."""
    (bench.folder / "train.py").write_text(
        "import torch\nimport polytempo as pt\npt.init()\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\ndata = torch.randn(64, 4)\n"
        "optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "for x in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):\n"
        "    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()\n"
    )
    done = bench.run("run", "-n", "2", "--steps", "8", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("workers 0 and 1 pushed the same gradient in step 0: do they read the same batches?") == 1
    assert done.stderr.count("the script never asks pt.should_stop()") == 1

"""What a worker loads before it trains: not torch's compiler, unless somebody compiles; and one that loads nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from live import Bench

TRAIN = """
import sys, torch, polytempo as pt
pt.init()
model = torch.nn.Linear(3, 3)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
assert "torch._dynamo" not in sys.modules
pt.shutdown()
"""

COMPILE = """
import torch, polytempo as pt
{before}
pt.init()
optimizer = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1)
optimizer.zero_grad()

import torch._dynamo
@torch.compile(backend=lambda graph, inputs: graph.forward)
def step(x):
    optimizer.zero_grad()
    return x + 1
assert step(torch.ones(2)).tolist() == [2.0, 2.0]
optimizer.zero_grad()
plain = torch.optim.Optimizer.zero_grad.__wrapped__
assert getattr(plain, "__dynamo_disable") is not plain  # torch's own mark, not ours
"""


@pytest.mark.long
@pytest.mark.new_interpreters
def test_workers_of_servers_do_not_load_the_compiler(bench: Bench) -> None:
    script = bench.folder / "train.py"
    script.write_text(TRAIN)
    done = bench.run("run", "-n", "1", "--sync", "asp", str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("before", ["", "import torch._dynamo"])
def test_who_compiles_finds_torch_as_it_was(before: str) -> None:
    code = COMPILE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.new_interpreters
def test_a_script_that_ends_before_the_servers_listen_has_succeeded(bench: Bench) -> None:
    (bench.folder / "short.py").write_text("print('hello')")
    done = bench.run("run", "-n", "2", "--record", "record", "short.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"]
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "finished"]

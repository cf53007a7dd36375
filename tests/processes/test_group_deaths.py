"""Groups of ranks side by side: a rank that is killed ends its own group, by name, and another group does not notice."""

from __future__ import annotations

import json

from live import Bench

#: Ranks 0 and 2 train together, and 1 and 3, of which 3 is killed in its fourth step.
SCRIPT = """
import json, os, signal
from pathlib import Path
import torch
import polytempo as pt

torch.set_num_threads(1)
pt.init()
groups = [pt.new_group([0, 2]), pt.new_group([1, 3])]
weight = torch.nn.Parameter(torch.zeros(4 + pt.rank() % 2))
optimizer = pt.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), group=groups[pt.rank() % 2])
told = {"lost": [], "steps": 0}
for step in range(8):
    if pt.rank() == 3 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    weight.grad = torch.full_like(weight, float(pt.rank()))
    try:
        optimizer.step()
    except pt.RankLost as lost:
        told["lost"] = list(lost.ranks)
        break
    told["steps"] += 1
told["weight"] = weight[0].item()
Path(f"told-{pt.rank()}").write_text(json.dumps(told))
"""


def test_a_rank_that_is_killed_ends_its_own_group_by_name(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(SCRIPT)
    run = bench.run("run", "-n", "4", "--via", "allreduce", "--min-workers", "3", "--record", "record", "train.py")
    assert run.returncode == 0, run.stderr
    told = {rank: json.loads((bench.folder / f"told-{rank}").read_text()) for rank in (0, 1, 2)}
    assert told[0] == told[2] == {"lost": [], "steps": 8, "weight": -0.5 * 8 * 1.0}
    steps = told[1]["steps"]
    assert steps in (2, 3)  # it may be told before the answer to its last step
    assert told[1] == {"lost": [3], "steps": steps, "weight": -0.5 * steps * 2.0}
    assert bench.meta()["job"]["members"] == {"0": [0, 2], "0@1": [1, 3]}
    assert bench.meta()["job"]["steps"] == 16
    check = bench.run("check", "record")
    assert check.returncode == 0, check.stderr

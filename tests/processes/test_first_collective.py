"""The first collective of a job after a worker was killed, or has finished: those who need it are told so at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live import Bench

#: Rank 0 is killed after a step, rank 3 finishes; neither has made a call in which ranks meet. Ranks 1 and 2 make theirs.
SURVIVORS = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import polytempo as pt
import polytempo.horovod as hvd

torch.set_num_threads(1)
pt.init()
me, one = pt.rank(), torch.ones(1)
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = pt.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
for step in range(2):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if me == 3:
    sys.exit(0)
told = {}


def lost(name, call):
    began = time.monotonic()
    try:
        call()
        told[name] = None
    except pt.RankLost as error:
        told[name] = [str(error), list(error.ranks), time.monotonic() - began]


lost("first", lambda: pt.all_reduce(one))
lost("barrier", pt.barrier)
everyone, with_killed, with_done = pt.new_group(), pt.new_group([0, 1, 2]), pt.new_group([1, 2, 3])
lost("new_group", lambda: pt.all_reduce(one, group=with_killed))
lost("finished", lambda: pt.broadcast(one, 1, group=with_done))
lost("recv", lambda: pt.recv(one, src=0))
lost("send", lambda: pt.send(one, 3))
lost("horovod", lambda: hvd.allreduce(one))
pair = pt.new_group([1, 2])
pt.all_reduce(one, group=pair)
left = pt.reform()
pt.all_reduce(one, group=left)
kv = pt.tables.KV({"counts": pt.tables.Array(2)})
kv["counts"].push(torch.ones(2)).result()
told |= {"value": one.item(), "left": list(left.ranks)}
Path(f"told-{me}").write_text(json.dumps(told))
"""


def told_by(bench: Bench, rank: int) -> dict[str, Any]:
    return dict(json.loads((bench.folder / f"told-{rank}").read_text()))


@pytest.mark.parametrize("flags", [("--sync", "asp"), ("--sync", "asp", "--link", "1Gb/s")], ids=["by name", "by store"])
def test_ranks_that_ended_before_they_met_the_others_are_named_at_once(flags: tuple[str, ...], bench: Bench) -> None:
    (bench.folder / "train.py").write_text(SURVIVORS)
    run = bench.run("run", "-n", "4", *flags, "--min-workers", "1", "train.py")
    assert run.returncode == 0, run.stderr
    killed, finished = "was killed by SIGKILL before its first collective", "has finished before its first collective"
    for rank in (1, 2):
        told = told_by(bench, rank)
        for call in ("first", "barrier", "new_group", "finished", "recv", "send", "horovod"):
            text, ranks, seconds = told[call]
            assert seconds < 5.0, told
            assert ranks, told
            assert set(ranks) <= {0, 3}, told
            assert all(f"rank {who} {killed if who == 0 else finished}" in text for who in ranks), told
            assert f"rank {rank} needs it" in text, told
        assert told["new_group"][1] == told["recv"][1] == [0]
        assert told["finished"][1] == told["send"][1] == [3]
        assert told["left"] == [1, 2]
        assert told["value"] == 4.0


#: Rank 1 is killed before it has called anything.
TORCH = """
import os, signal
from pathlib import Path
import torch.distributed as dist
import polytempo

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    store = dist.FileStore(os.path.abspath("store"), 3)  # torch's own store of env:// waits for all ranks
    dist.init_process_group("polytempo", store=store, rank=int(os.environ["RANK"]), world_size=3)
except polytempo.PeerError as error:
    Path("told-" + os.environ["RANK"]).write_text(str(error))
"""


def test_torchs_default_group_is_not_waited_for_when_a_rank_was_killed_before_it(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(TORCH)
    run = bench.run("run", "-n", "3", "--min-workers", "1", "train.py")
    assert run.returncode == 0, run.stderr
    for rank in (0, 2):
        told = (bench.folder / f"told-{rank}").read_text()
        assert told == f"rank 1 was killed by SIGKILL before its first collective: rank {rank} needs it in a new group"

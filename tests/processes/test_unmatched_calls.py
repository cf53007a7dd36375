"""A call that not all ranks make: who waits says in which, and where the others are; then it fails, and the job with it."""

from __future__ import annotations

import re

import pytest
from live import Bench

#: Each rank makes the calls of its own; its errors are its last words.
SCRIPT = """
import sys, threading
import torch
import polytempo as pt

torch.set_num_threads(1)
pt.init(timeout=2.0)
one, weight = torch.ones(1), torch.nn.Parameter(torch.zeros(2))
optimizer = pt.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5)) if "train" in sys.argv else None


def step():
    weight.grad = torch.full_like(weight, 1.0 + pt.rank())
    optimizer.step()


def hang():
    threading.Event().wait(60)


{}
"""

STEPS = ("--sync", "bsp", "--via", "ps")
REDUCES = r"all_reduce\(sum, float32\[1\]\)"
#: What all ranks do, what rank 0 does and rank 1 does; arguments; who fails first, and how.
MIXED = {
    "first collective, and step()": (
        ("step()", "pt.all_reduce(one)", "step(); step()"),
        STEPS,
        (0,),
        r"rank 0 has waited 2 s in all_reduce\(\) #1 in group world, for rank 1 to join: "
        r"rank 1 is in optimizer.step\(\), step 1; it may take longer with pt.init\(timeout=SECONDS\)",
    ),
    "a collective, and step()": (
        ("step(); pt.barrier()", "pt.all_reduce(one)", "step(); step()"),
        STEPS,
        (0,),
        rf"rank 0 has waited 2 s in {REDUCES} #2 in group world, for rank 1: rank 1 is in optimizer.step\(\), step 1",
    ),
    "step() alone": (
        ("step()", "hang()", "step(); step()"),
        STEPS,
        (1,),
        r"rank 1 has waited 3 s for workers 0: 1 ahead of worker 0, bound 0; rank 0 computes step 1; it may take longer",
    ),
    "collectives of two groups": (
        ("pair = pt.new_group([0, 1])", "pt.all_reduce(one)", "pt.barrier(group=pair)"),
        (),
        (0, 1),
        rf"rank 0 has waited 2 s in {REDUCES} #1 in group world, for rank 1: "
        rf"rank 1 is in barrier\(\) #1 in group of ranks 0, 1|"
        rf"rank 1 has waited 2 s in barrier\(\) #1 in group of ranks 0, 1, for rank 0: "
        rf"rank 0 is in {REDUCES} #1 in group world",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_who_waits_names_its_call_and_those_of_the_others_and_fails_in_time(case: str, bench: Bench) -> None:
    (before, first, second), flags, failing, words = MIXED[case]
    body = f"{before}\nif pt.rank() == 0:\n    {first}\nelse:\n    {second}\n"
    (bench.folder / "train.py").write_text(SCRIPT.format(body))
    run = bench.run("run", "-n", "2", *flags, "train.py", *(["train"] if flags else []), timeout=60)
    assert run.returncode == 1, run.stderr
    assert re.search(rf"\[[01]\] polytempo.errors.PeerError: (?:{words})", run.stderr), run.stderr
    cause = run.stderr.splitlines()[-1]
    assert any(cause.startswith(f"polytempo: worker {rank} failed with exit status 1") for rank in failing), run.stderr

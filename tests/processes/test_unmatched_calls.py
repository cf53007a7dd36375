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

#: What all ranks do, what rank 0 does and rank 1 does; arguments; words that the error of each rank has, if it raises one.
MIXED = {
    "first collective, and step()": (
        "step()",
        ("pt.all_reduce(one)", "step(); step()"),
        ("--sync", "bsp", "--via", "ps"),
        (
            r"rank 0 has waited 2 s in all_reduce\(\) #1 in group world, for rank 1 to join: "
            r"rank 1 is in optimizer.step\(\), step 1; it may take longer with",
            r"rank 1 has waited 2 s for workers 0: 1 ahead of worker 0, bound 0; "
            r"rank 0 is in all_reduce\(\) #1 in group world",
        ),
    ),
    "a collective, and step()": (
        "step(); pt.barrier()",
        ("pt.all_reduce(one)", "step(); step()"),
        ("--sync", "bsp", "--via", "ps"),
        (
            r"rank 0 has waited 2 s in all_reduce\(sum, float32\[1\]\) #2 in group world, for rank 1: "
            r"rank 1 is in optimizer.step\(\), step 1",
            r"rank 1 has waited 2 s for workers 0: 1 ahead of worker 0, bound 0; "
            r"rank 0 is in all_reduce\(sum, float32\[1\]\) #2 in group world",
        ),
    ),
    "collectives of two groups": (
        "pair = pt.new_group([0, 1])",
        ("pt.all_reduce(one)", "pt.barrier(group=pair)"),
        (),
        (
            r"rank 0 has waited 2 s in all_reduce\(sum, float32\[1\]\) #1 in group world, for rank 1: "
            r"rank 1 is in barrier\(\) #1 in group of ranks 0, 1",
            r"rank 1 has waited 2 s in barrier\(\) #1 in group of ranks 0, 1, for rank 0: "
            r"rank 0 is in all_reduce\(sum, float32\[1\]\) #1 in group world",
        ),
    ),
    "a message that is not sent": (
        "pt.barrier()",
        ("pt.recv(one, src=1)", "hang()"),
        (),
        (
            r"rank 0 has waited 2 s in recv\(float32\[1\], from 1, tag 0\), for rank 1: "
            r"rank 1 has made no optimizer and waits in no call",
            "-",
        ),
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_who_waits_names_its_call_and_those_of_the_others_and_fails_in_time(case: str, bench: Bench) -> None:
    before, (first, second), flags, words = MIXED[case]
    body = f"{before}\nif pt.rank() == 0:\n    {first}\nelse:\n    {second}\n"
    (bench.folder / "train.py").write_text(SCRIPT.format(body))
    arguments = ["train"] if "step" in before else []
    run = bench.run("run", "-n", "2", *flags, "train.py", *arguments, timeout=60)
    assert run.returncode == 1, run.stderr
    assert re.fullmatch(r"polytempo: worker [01] failed with exit status 1.*", run.stderr.splitlines()[-1]), run.stderr
    found = [
        bool(re.search(rf"\[{rank}\] polytempo.errors.PeerError: {text}", run.stderr)) for rank, text in enumerate(words)
    ]
    assert any(found), run.stderr  # the first to fail may take the other with it

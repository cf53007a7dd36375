"""Run by `test_equal_to_cpu.py` as a job: trains with each optimizer that is named, and leaves the values in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_training import OPTIMIZERS, exact, trained

import polytempo as pt

device, where, *cases = sys.argv[1:]
exact()
pt.init()
results = {}
for case in cases:
    name, apply, layout = [*case.split("/"), "", ""][:3]
    options = {"apply": apply} if apply else {}
    results[case] = trained(pt.rank(), pt.size(), device, OPTIMIZERS[name], layout, **options)
torch.save(results, Path(where) / f"rank-{pt.rank()}.pt")
pt.shutdown()

"""A worker that talks: lines to standard output until it is told to go on, then progress bars to standard error.

Usage: talking.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import polytempo as pt

pt.init()
number = 0
while number == 0 or not (Path(sys.argv[1]) / "go-on").exists():
    print(f"line {number} " + "." * 2000)
    number += 1
for done in range(2001):
    sys.stderr.write(f"\r{done / 20:6.2f} % of worker {pt.rank()}")
sys.stderr.write("\n" + "x" * 200_000)
pt.log(lines=number)

"""`make test-gpu`: the tests of this folder, with the interpreter that runs this file. Downloads nothing.

    make test-gpu                        all, in some minutes
    make test-gpu ARGS="-k deaths"       some; arguments are pytest's
    make test-gpu ARGS="--proof"         also what takes minutes by itself: 50 jobs in a row

Where there is no GPU it says so and ends with status 0. Where a module is missing that the tests need, it names it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NEEDED = (
    "pytest",
    "xdist",
    "pytest_timeout",
    "hypothesis",
    "psutil",
    "msgspec",
    "zmq",
    "safetensors",
    "typer",
    "rich",
    "yaml",
)


def main(arguments: list[str]) -> int:
    if importlib.util.find_spec("torch") is None:
        print("test-gpu: skipped: torch is not installed here")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("test-gpu: skipped: there is no CUDA device here (torch.cuda.is_available() is False)")
        return 0
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"test-gpu: these modules are missing: {', '.join(missing)}; install polytempo[dev], or put them on PYTHONPATH"
        )
        return 2
    import pytest

    name = torch.cuda.get_device_name(0)
    print(f"test-gpu: {name}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    # pytest-benchmark, where it is installed, warns about `-n`, and warnings are errors here
    side_by_side = ["-q", "-p", "no:benchmark", "-n", "4", "--dist", "worksteal"]
    return int(pytest.main([*side_by_side, str(Path(__file__).parent), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

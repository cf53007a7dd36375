"""A worker of `pt.launch` in a new interpreter: `python -m polytempo.launcher.function_process FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from polytempo.launcher.forked_process import exit_status
from polytempo.launcher.function_program import load_call, run_function
from polytempo.launcher.job_facts import job_of_environment


def main(file: Path) -> None:
    """Make the call, in the place that the environment says."""
    found = job_of_environment()
    assert found is not None, "pt.launch starts it"
    run_function(lambda: load_call(file)(), file.parent, found[1])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.exit(exit_status(lambda: main(path)))

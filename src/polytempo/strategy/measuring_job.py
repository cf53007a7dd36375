"""A short job that measures the links of a number of processes on this host, for plans that are made outside of a job.

`measured_machine` starts `polytempo run` with this file as its script: the ranks measure what lies between them
(`links.py`), and rank 0 writes it to a file. The environment of the user counts: threads, affinity, cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from polytempo.errors import PolytempoError
from polytempo.strategy.costs import Machine, as_data, from_data

#: Seconds that the job may take.
PATIENCE = 300.0


def measured_machine(workers: int, link: str | None = None) -> Machine:
    """Measure a machine by a job of its own.

    Args:
        workers: The number of processes, all on this host.
        link: A network between them to emulate, as `polytempo run --link` takes it.

    Returns:
        What lies between the ranks.

    Raises:
        PolytempoError: The job has failed; the text is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        options = ["-n", str(workers), "-q", *(["--link", link] if link else [])]
        command = [sys.executable, "-m", "polytempo", "run", *options, __file__, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise PolytempoError(f"measuring the links of {workers} processes took more than {PATIENCE:g} s") from None
        if done.returncode or not file.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise PolytempoError(f"measuring the links of {workers} processes failed: {said[-1] if said else 'no output'}")
        return from_data(json.loads(file.read_text(encoding="utf-8")))[1]


def _main(file: str) -> None:
    """What each rank runs."""
    from polytempo.session.session import current, init, rank, shutdown
    from polytempo.strategy.links import measure_machine

    init()
    machine = measure_machine(current().world(), session=current())
    if rank() == 0:
        Path(file).write_text(json.dumps(as_data([], machine)), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    _main(sys.argv[1])

"""Whatever happens to those who read and to the disk, a job goes on, and says so once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from live import PACED, SCRIPTS, Bench

TALKING = str(SCRIPTS / "talking.py")


def test_a_reader_that_leaves_a_full_disk_and_progress_bars(bench: Bench) -> None:
    logs = bench.folder / "record" / "logs"
    logs.mkdir(parents=True)
    for full in (bench.folder / "record" / "events.jsonl", logs / "worker-0.log"):
        full.symlink_to("/dev/full")
    process = bench.start("run", "-n", "2", "--record", "record", "--overwrite", TALKING, ".")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "line 0 ..." in process.stdout.readline()
    process.stdout.close()
    lines = []
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if "standard output is gone" in line:
            (bench.folder / "go-on").touch()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, lines
    assert sum("standard output is gone (Broken pipe); the job goes on" in line for line in lines) == 1
    assert lines.count("[0] 100.00 % of worker 0") == lines.count("[1] 100.00 % of worker 1") == 1
    assert sum("% of worker" in line for line in lines) < 20, "a bar is a line now and then"
    assert sum(len(line) for line in lines if "xxx" in line) > 400_000
    lost = [line for line in lines if "No space left on device" in line]
    assert len(set(lost)) == 1, "said when it happens, and again at the end"
    assert lost[0].startswith("polytempo: warning: cannot write record/")
    assert lines[-1] == lost[0]
    assert lines[-2].startswith("polytempo: 2 workers finished after ")
    assert not (bench.folder / "record" / "meta.json").exists(), "cut short"
    assert "line 0" in (logs / "worker-1.log").read_text()


def test_a_script_whose_name_is_no_text_is_recorded(bench: Bench) -> None:
    name = os.fsdecode(b"tr\xe4in.py")
    shutil.copy(PACED, bench.folder / name)
    done = bench.run("run", "-n", "1", "--record", "record", name, ".", "steps=3")
    assert done.returncode == 0, done.stderr
    assert bench.meta()["options"]["script"] == name
    assert sorted(path.name for path in (bench.folder / "record").iterdir()) == ["events.jsonl", "logs", "meta.json"]


@pytest.mark.parametrize(
    ("where", "status", "says"),
    [(">&-", 0, ""), ("| true", 1, "polytempo: standard output was closed before all was written to it\n")],
)
def test_standard_output_that_is_closed_is_no_traceback(where: str, status: int, says: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m polytempo simulate --steps 5 --sync bsp {where}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, says)

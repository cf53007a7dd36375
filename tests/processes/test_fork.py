"""A process forked from one that has torch loaded is what a new interpreter would be: `polytempo run --fork`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from live import Bench, finished, wait_until

FACTS = """
import atexit, json, os, signal, sys
import beside
atexit.register(print, "at the end")
def shown(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return [part.decode() for part in file.read().split(b"\\0") if part]
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "original": sys.orig_argv[1:], "path": sys.path[0], "file": __file__, "name": __name__,
    "main": main.__dict__ is globals(), "loader": type(__loader__).__name__, "spec": __spec__,
    "directory": os.getcwd(), "group": os.getpgrp() == os.getpid(), "command": shown("cmdline")[1:],
    "environment": dict(os.environ), "shown": [one for one in shown("environ") if one.startswith("POLYTEMPO_TEST")],
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3], "files": len(os.listdir("/proc/self/fd")),
    "signals": {str(int(n)): str(signal.getsignal(n)) for n in signal.valid_signals() if n != signal.SIGINT},
    "interrupt": getattr(signal.getsignal(signal.SIGINT), "__name__", ""),
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "input": sys.stdin.read(),
    "encoding": [s.encoding for s in (sys.stdin, sys.stdout, sys.stderr)], "errors": [sys.stdout.errors, sys.stderr.errors],
}))
"""
ENDINGS = (
    "pass",
    "1 / 0",
    "def f(): raise ValueError('no')\nf()",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('in words')",
    "raise KeyboardInterrupt",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "import atexit, sys; atexit.register(lambda: print(sys.last_value)); sys.excepthook = lambda *_: None; 1 / 0",
    "import os; os.write(1, b'raw'); os._exit(4)",
    "this is no Python",
    "import ctypes; ctypes.CDLL(None).printf(b'of C')",
)


def both_ways(command: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    environment = {**os.environ, "POLYTEMPO_TEST": "set", "PYTHONPATH": ""}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ways = (subprocess.Popen, fork_server.popen)
    return [finished(way(command, text=True, cwd=folder, env=environment, **pipes)) for way in ways]  # type: ignore[operator]


def test_a_script_finds_what_a_new_interpreter_would_give_it(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/facts.py").write_text(FACTS)
    (tmp_path / "scripts/beside.py").touch()
    anew, forked = both_ways([sys.executable, "scripts/facts.py", "--of", "its own"], tmp_path)
    assert anew.returncode == forked.returncode == 0, forked.stderr
    assert forked.stderr == anew.stderr == ""
    (one, one_end), (other, other_end) = (done.stdout.splitlines() for done in (anew, forked))
    assert one_end == other_end == "at the end"
    assert json.loads(other) == json.loads(one)


@pytest.mark.parametrize("code", ENDINGS)
def test_it_ends_as_a_new_interpreter_would(code: str, tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(code)
    anew, forked = both_ways([sys.executable, "it.py"], tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (anew.returncode, anew.stdout, anew.stderr)


JOB = """
import os, sys, numpy, torch, polytempo as pt
pt.init()
drawn = [torch.rand(1).item(), int(numpy.random.randint(1 << 60)), os.urandom(8).hex()]
print("drawn", *drawn, torch.get_num_threads(), "torch" in sys.modules, os.getpgrp() == os.getpid(), flush=True)
pt.shutdown()
"""


def test_workers_of_a_forked_job_have_seeds_threads_and_groups_of_their_own(bench: Bench) -> None:
    (bench.folder / "job.py").write_text(JOB)
    done = bench.run("run", "-n", "2", "job.py")
    assert done.returncode == 0, done.stderr
    (first, *one), (second, *other) = (line.split()[2:] for line in sorted(done.stdout.splitlines()))
    assert first == second, "torch starts with one seed in every process"
    assert one[:2] != other[:2]
    assert not set(one[:2]) & set(other[:2])
    assert one[2:] == other[2:] == ["1", "True", "True"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_forked_job_ends_with_its_launcher(number: signal.Signals, bench: Bench) -> None:
    (bench.folder / "job.py").write_text(
        "import time, polytempo as pt\npt.init()\nprint('there', flush=True)\ntime.sleep(1000)"
    )
    process = bench.start("run", "-n", "2", "job.py")
    assert process.stdout is not None
    assert "there" in process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    wait_until(lambda: not bench.processes())

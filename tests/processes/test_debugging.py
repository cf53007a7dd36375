"""`breakpoint()` in a worker: the only one, or that of `--debug RANK`, has the terminal; Ctrl-C; without a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import fork_server
import pytest
from live import Bench, finished

STOPS = """
import time
import torch
import polytempo as pt
pt.init(timeout=0.3)
x = 41 + pt.rank()
breakpoint()
ones = torch.ones(1)
pt.all_reduce(ones)
print(f"reduced to {int(ones)}", flush=True)
"""
LOOPS = """
import subprocess, time
import polytempo as pt
pt.init()
sleeper = subprocess.Popen(["sleep", "1000"])
print("it runs", flush=True)
while True:
    time.sleep(0.01)
"""
#: As a shell starts a command: it leads the foreground of a terminal of its own.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from polytempo.cli.main import main
main(sys.argv[1:])
"""
PROMPT = "(Pdb) "


class Terminal:
    """`polytempo run` on a terminal, and the fingers of its user."""

    def __init__(self, bench: Bench, script: str, *options: str) -> None:
        (bench.folder / "script.py").write_text(script)
        self._keys, screen = pty.openpty()
        command = [sys.executable, "-c", ON_A_TERMINAL, "run", "--fork", *options, "script.py"]
        environment = {**bench.environment, "TERM": "dumb"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), screen)
        self.process = fork_server.popen(command, cwd=bench.folder, env=environment, **streams)
        os.close(screen)
        self.text = ""

    def until(self, words: str) -> str:
        """Read until this is shown; what was shown since the last call."""
        deadline = time.monotonic() + 60
        while words not in self.text:
            ready = select.select([self._keys], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"it never showed {words!r}: {self.text}"
            self.text += self._read()
        shown, _, self.text = self.text.partition(words)
        return shown

    def type(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def end(self) -> tuple[int, str]:
        """The exit status, and the rest of what was shown."""
        while data := self._read():
            self.text += data
        os.close(self._keys)
        return self.process.wait(60), self.text

    def _read(self) -> str:
        try:
            return os.read(self._keys, 1 << 16).decode()
        except OSError:  # all that held the terminal have ended
            return ""


def test_the_only_worker_has_the_terminal(bench: Bench) -> None:
    terminal = Terminal(bench, STOPS, "-n", "1")
    assert "worker 0 is in its debugger" in terminal.until(PROMPT)
    terminal.type("p x\n")
    assert "41" in terminal.until(PROMPT)
    terminal.type("c\n")
    status, rest = terminal.end()
    assert status == 0, rest
    assert "\nreduced to 1\r\n" in rest, "without a rank before it: the worker writes to the terminal"


def test_one_of_several_is_debugged_and_the_others_wait(bench: Bench) -> None:
    """Its user takes longer than every time-out: those of the ranks, and `--timeout`. Ctrl-C at the prompt is pdb's."""
    terminal = Terminal(bench, STOPS, "-n", "2", "--debug", "1", "--timeout", "0.3")
    begun = terminal.until(PROMPT)
    assert "worker 1 has the terminal; no time-out gives up a worker (--debug)" in begun
    terminal.type("p x\n")
    assert "42" in terminal.until(PROMPT)
    terminal.type("\x03")
    terminal.type("\n")  # Python may print the prompt, and block on the next key after it has seen the signal
    assert "KeyboardInterrupt" in terminal.until(PROMPT)
    terminal.type("time.sleep(2)\n")
    begun += terminal.until(PROMPT)
    terminal.type("c\n")
    status, rest = terminal.end()
    assert status == 0, rest
    assert rest.count("reduced to 2") == 2, "of worker 0 through the launcher, of worker 1 directly"
    assert "[0] reduced to 2" in rest
    assert "[1]" not in rest
    passed = "[0] polytempo: breakpoint() at {}:7 is passed over: worker 0 has no terminal; to stop there: --debug 0"
    assert passed.format(bench.folder / "script.py") in begun + rest


def test_ctrl_c_is_the_debuggers_from_the_first_breakpoint_on(bench: Bench) -> None:
    """It stops a script that runs, as pdb does; `q` ends the worker, and with it what the worker has started."""
    terminal = Terminal(bench, LOOPS.replace("print", "breakpoint()\nprint"), "-n", "1")
    terminal.until(PROMPT)
    terminal.type("c\n")
    terminal.until("it runs")
    terminal.type("\x03")
    assert "Program interrupted" in terminal.until(PROMPT)
    terminal.type("q\n")
    status, rest = terminal.end()
    assert status == 1
    assert "worker 0 failed with exit status 1" in rest


def test_a_debugged_worker_that_dies_of_ctrl_c_has_interrupted_the_job(bench: Bench) -> None:
    loops = LOOPS.replace("print", "breakpoint()\nimport signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint")
    terminal = Terminal(bench, loops, "-n", "1")
    terminal.until(PROMPT)
    terminal.type("import sys; sys.settrace(None)\n")
    terminal.until(PROMPT)
    terminal.type("c\n")
    terminal.until("it runs")
    terminal.type("\x03")
    status, rest = terminal.end()
    assert status == 130, rest
    assert "interrupted; all processes have ended" in rest


def test_without_a_breakpoint_ctrl_c_is_the_launchers(bench: Bench) -> None:
    terminal = Terminal(bench, LOOPS, "-n", "1")
    terminal.until("it runs")
    terminal.type("\x03")
    status, rest = terminal.end()
    assert status == 130, rest
    assert "interrupted; all processes have ended" in rest
    assert "KeyboardInterrupt" not in rest


@pytest.mark.parametrize("given", ["a pipe", "nothing"])
def test_without_a_terminal(given: str, bench: Bench) -> None:
    """From a pipe the debugger reads what comes; where nothing can come, the breakpoint is passed over."""
    (bench.folder / "script.py").write_text(STOPS)
    command = [sys.executable, "-m", "polytempo", "run", "--fork", "-n", "1", "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    source = subprocess.PIPE if given == "a pipe" else subprocess.DEVNULL
    process = fork_server.popen(command, stdin=source, cwd=bench.folder, env=bench.environment, **pipes)
    if process.stdin is not None:
        process.stdin.write("p 'x is', x\nc\n")
    done = finished(process)
    assert done.returncode == 0, done.stderr
    assert "reduced to 1" in done.stdout
    assert ("('x is', 41)" in done.stdout) == (given == "a pipe")
    assert ("is passed over: standard input is /dev/null" in done.stderr) == (given == "nothing")


def test_a_debugger_of_ones_own_and_none_at_all(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text(
        "import sys\nstop = lambda: print('mine, called at line', sys._getframe(1).f_lineno)"
    )
    (bench.folder / "script.py").write_text(STOPS)
    shown = {}
    for choice in ("mine.stop", "0"):
        command = [sys.executable, "-m", "polytempo", "run", "--fork", "-n", "1", "script.py"]
        environment = {**bench.environment, "PYTHONBREAKPOINT": choice}
        process = fork_server.popen(
            command, stdin=subprocess.PIPE, cwd=bench.folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        shown[choice] = process.communicate(timeout=60)[0]
    assert shown == {"mine.stop": "[0] mine, called at line 7\n[0] reduced to 1\n", "0": "[0] reduced to 1\n"}

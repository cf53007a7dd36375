"""`pt.launch` in a script: its value, output, errors, Ctrl-C; and in a notebook, whose cells are run again."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from live import Bench, finished, said

TRAINS = """
import atexit, os, signal, sys, threading, time
import torch
import polytempo as pt

class Result:
    def __init__(self, weight, path):
        self.weight, self.path = weight, path

def train(steps, rate):
    pt.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4096, 64)).pow(2).mean().backward()  # in several threads
        optimizer.step()
    print("rank", pt.rank(), "of", pt.size(), sys.argv[1], flush=True)
    return Result(model.weight.sum().item(), os.pread(handle, 4, 0) if handle else b"")

handle = 0
os.environ["OMP_NUM_THREADS"] = "2"  # of workers; a forked one would wait for this process's threads for ever
torch.set_num_threads(2)
(torch.ones(1 << 22) * 2).sum()  # OpenMP has threads from now on
before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
atexit.register(print, "the end of the script")
if sys.argv[1] == "fork":
    handle = os.open(__file__, os.O_RDONLY)  # a forked worker has it, too
else:
    idle = threading.Event()
    threading.Thread(target=idle.wait, daemon=True).start()
found = pt.launch(train, (3,), {"rate": 0.1}, n=2, sync="bsp", record="record")
again = pt.launch(train, (3, 0.1), n=1, quiet=True)
assert type(found) is type(again) is Result
assert abs(found.weight - again.weight) < 1e-3 * abs(again.weight), (found.weight, again.weight)
assert found.path == (b"\\nimp" if handle else b""), found.path
assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
print("done")
"""
FAILS = """
import os, signal
import polytempo as pt

class Mine(ValueError):
    pass

def fails():
    pt.init()
    if pt.rank() == 1:
        raise Mine("of worker 1")
    pt.barrier()  # which fails because worker 1 has

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def nested():
    pt.launch(dies)

for function in (fails, dies, nested):
    try:
        pt.launch(function, n=2)
    except Exception as error:
        print(type(error).__name__, error, "|", "in fails" in str(error.__cause__))
"""
LOOPS = """
import signal, sys, time
import polytempo as pt

def loops():
    pt.init()
    sys.stderr.write(f"rank {pt.rank()} runs\\n")
    while True:
        time.sleep(0.01)

try:
    pt.launch(loops, n=2)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize("way", ["fork", "value"])
def test_a_function_is_run_by_workers_and_its_value_comes_back(way: str, bench: Bench) -> None:
    (bench.folder / "script.py").write_text(TRAINS)
    done = bench.python("script.py", way)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == [f"[{rank}] rank {rank} of 2 {way}" for rank in (0, 1)]
    assert lines[2:] == [f"[0] rank 0 of 1 {way}", "done", "the end of the script"]
    assert "polytempo: bsp: starting 2 workers: train()" in done.stderr
    assert "polytempo: bsp: 6 steps of 2 workers in" in done.stderr
    assert {**bench.meta()["options"], "script": "train()", "runs": "function"} == bench.meta()["options"]


def test_the_first_cause_is_raised(bench: Bench) -> None:
    (bench.folder / "script.py").write_text(FAILS)
    done = bench.python("script.py")
    assert done.returncode == 0, done.stderr
    own, killed, nested = done.stdout.splitlines()
    first = re.fullmatch(
        r"JobEnded worker [01] was killed by SIGKILL; 1 of 2 workers are left, at least 2 are needed \| False", killed
    )
    assert first, "both kill themselves: either may be first"
    assert [own, nested] == [
        "Mine of worker 1 | True",
        "UsageError launch() starts a job, and this process is a worker of one; call it outside of the job | False",
    ]


def test_ctrl_c_ends_the_job_and_is_the_callers_then(bench: Bench) -> None:
    (bench.folder / "script.py").write_text(LOOPS)
    script = bench.popen([sys.executable, "script.py"])
    text = said(script, "rank 0 runs")
    while "rank 1 runs" not in text:
        text += said(script, "runs")
    script.send_signal(signal.SIGINT)
    done = finished(script)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr
    assert "interrupted; all processes have ended" in done.stderr


# In a notebook.

JUPYTER = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None,
    reason="nbclient and ipykernel are not installed; pip install -e '.[dev]' brings them",
)
ALONE = """
pt.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).pow(2).mean().backward()
    optimizer.step()
print("alone", pt.size(), round(model.weight.sum().item(), 4))
"""
TOGETHER = """
def train(steps):
    pt.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
    print("rank", pt.rank(), "of", pt.size())
    return Figures(pt.size(), round(model.weight.sum().item(), 4))

found = pt.launch(train, (3,), n=2, sync="bsp")
print(type(found) is Figures, found.size, found.weight)
"""
FIRST = """
import os, signal, threading
import torch
import polytempo as pt
rate, lock = 0.1, threading.Lock()

class Figures:
    def __init__(self, size, weight):
        self.size, self.weight = size, weight
"""
REFUSED = """
try:
    pt.launch(lambda: lock, n=2)
except pt.UsageError as error:
    print(error)
"""
INTERRUPTED = """
def interrupts():
    pt.init()
    if pt.rank() == 0:
        os.kill(KERNEL, signal.SIGINT)
    pt.barrier()
    signal.pause()

KERNEL = os.getpid()
try:
    pt.launch(interrupts, n=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def outputs(cell: Any) -> dict[str, list[str]]:
    """The lines of a cell, by stream; workers' in order of their ranks."""
    found: dict[str, list[str]] = {"stdout": [], "stderr": []}
    for output in cell.outputs:
        assert output.output_type == "stream", output
        found[output.name] += output.text.splitlines()
    return {name: sorted(lines, key=lambda line: not line.startswith("[")) for name, lines in found.items()}


@JUPYTER
@pytest.mark.long
def test_cells_of_a_notebook_are_run_again(bench: Bench) -> None:
    """A job of one in one cell, a job of two workers in the next; both again; then what cannot be shipped, and Ctrl-C."""
    import nbclient
    import nbformat

    cells = [FIRST, ALONE, TOGETHER, ALONE, TOGETHER, REFUSED, INTERRUPTED]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    environment = {**os.environ, **bench.environment, "JUPYTER_RUNTIME_DIR": str(bench.folder / "runtime")}
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(bench.folder)}})
    client.execute(env=environment)
    alone, together = outputs(notebook.cells[1]), outputs(notebook.cells[2])
    weight = alone["stdout"][0].removeprefix("alone 1 ")
    assert re.fullmatch(r"-?\d\.\d+", weight)
    assert sorted(together["stdout"][:2]) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert together["stdout"][2:] == [f"True 2 {weight}"]
    assert "polytempo: bsp: starting 2 workers: train()" in together["stderr"]
    assert any(line.startswith("polytempo: bsp: 6 steps of 2 workers in") for line in together["stderr"])
    assert outputs(notebook.cells[3]) == alone
    assert sorted(outputs(notebook.cells[4])["stdout"]) == sorted(together["stdout"])
    (refused,) = outputs(notebook.cells[5])["stdout"]
    assert refused.startswith("launch() cannot ship lock, which <lambda>() uses (lock): cannot pickle")
    assert outputs(notebook.cells[6])["stdout"] == ["interrupted"]


def test_the_notebook_is_needed_where_the_suite_is_whole() -> None:
    """`make test` installs what the test above needs: it is skipped nowhere but in environments of one's own."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"nbclient' in text
    assert '"ipykernel' in text

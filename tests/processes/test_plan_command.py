"""`polytempo plan` as a user types it: scripts, profiles, one-line refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

from polytempo.cli.main import run
from polytempo.pipeline.layer_profile import Layer, Profile, save_profile
from polytempo.strategy import planning
from polytempo.strategy.costs import Machine, MeasuredLink

SCRIPT = """
import torch
from torch import nn
from beside import WIDTH
def make_model(): return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))
example = torch.ones(5, WIDTH)
"""
NODE = {"forward_ms": 1.0, "backward_ms": 2.0, "activation_bytes": 10.0, "weight_bytes": 4e6}


def plan(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polytempo", "plan", *arguments]
    return fork_server.run(command, cwd=cwd)


def test_a_script_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / "net.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("WIDTH = 6\n")
    done = plan("nets/net.py", "--devices", "2:1Gb/s", "--memory", "1GB", "--json", "out/p.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    again = plan("--profile", "out/p.json", "--devices", "2:1Gb/s", "--memory", "1GB", cwd=tmp_path)
    assert again.stdout == done.stdout
    assert "measured: medians; ± is half of the interquartile range" in done.stdout
    for text in ("on 2 devices", "a minibatch of 5 samples", "data parallelism", "after 8 microbatches", "memory"):
        assert text in done.stdout
    found = json.loads((tmp_path / "out/p.json").read_text())
    assert [layer["name"] for layer in found["profile"]["layers"]] == ["0", "1", "2"]
    assert sum(stage["replicas"] for stage in found["plan"]["stages"]) == 2
    assert found["plan"]["limit"] == 1e9


EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
GUARDED = """
import sys, torch
import polytempo as pt
from torch import nn
def main():
    pt.init()
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = pt.Pipeline(net, loss=nn.functional.mse_loss, optimizer=None, microbatches=3)
    try:
        pipe.step(torch.ones(int(sys.argv[1]), 4), None)
    except Exception:
        raise SystemExit("trained")
if __name__ == "__main__":
    main()
"""


def test_a_script_that_trains_a_pipeline_is_planned_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run up to its first batch, with its own arguments and none of ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guarded.py").write_text(GUARDED)
    before = list(sys.argv), list(sys.path)
    assert run(["plan", str(EXAMPLE), "--devices", "2:1GB/s"]) == 0
    shown = capfd.readouterr().out
    assert "a minibatch of 16 samples" in shown
    assert "after 4 microbatches" in shown
    assert run(["plan", str(EXAMPLE), "--repeats", "1", "--", "--microbatches", "2"]) == 0
    assert "a minibatch of 32 samples" in capfd.readouterr().out
    assert run(["plan", "guarded.py", "--", "12"]) == 0
    assert "a minibatch of 4 samples" in capfd.readouterr().out
    assert (sys.argv, sys.path) == before


def test_saved_profiles_and_graphs(tmp_path: Path) -> None:
    save_profile(Profile("net", (Layer("a", 1.0, 2.0, 10.0, 4e9), Layer("b", 1.0, 2.0, 10.0, 4e9)), 32), tmp_path / "p.json")
    nodes = [NODE | {"id": name, "name": name} for name in ("x", "y")]
    (tmp_path / "g.json").write_text(json.dumps({"model": "graph", "nodes": nodes, "edges": [["x", "y"]]}))
    done = plan("--profile", "p.json", "--devices", "2:1Gb/s", "--microbatches", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("net: 2 stages (1-1) on 2 devices\n")
    assert "a minibatch of 32 samples every 3000 ms" in done.stdout
    assert "after 3 microbatches: 25.0 %" in done.stdout
    done = plan("--profile", "g.json", "--devices", "2:1Gb/s", cwd=tmp_path)
    assert done.stdout.startswith("graph: 2 stages (1-1) on 2 devices\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected a script to measure or --profile FILE, got neither"),
        (["broken.py"], "broken.py, line 2: ZeroDivisionError: division by zero"),
        (
            ["empty.py"],
            "expected empty.py to define model or make_model(), or to train a pt.Pipeline, a strategy or pt.fit, got "
            "neither; nearest: modle",
        ),
        (["nowhere.py"], "cannot read nowhere.py: No such file"),
        (["--profile", "nowhere.json"], "cannot read the profile nowhere.json"),
        (["empty.py", "--devices", "4"], "expected a topology"),
        (["empty.py", "--memory", "much"], "expected --memory such as 100MB"),
        (["empty.py", "--microbatches", "0"], "expected --microbatches of at least 1, got 0"),
    ],
)
def test_mistakes_are_refused_in_one_line_with_status_2(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has torch already."""
    (tmp_path / "broken.py").write_text("model = None\nexample = 1 / 0\n")
    (tmp_path / "empty.py").write_text("modle = 1\n")
    monkeypatch.chdir(tmp_path)
    status = run(["plan", *arguments])
    out, err = capfd.readouterr()
    assert status == 2, err
    assert expected in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_mistake_is_the_exit_status(tmp_path: Path) -> None:
    done = plan("nowhere.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "cannot read nowhere.py: No such file" in done.stderr


STRATEGY_SCRIPT = """
import torch
import polytempo as pt
from torch import nn
pt.init()
model_of_mine = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
strategy = pt.Strategy(data=3, pipe=2, microbatches=2)
with strategy.scope():
    spread = strategy.distribute(model_of_mine, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam)
spread.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
raise SystemExit("trained")
"""


def test_a_strategy_is_explained_from_a_short_job(tmp_path: Path) -> None:
    """With processes: the links of two are measured."""
    (tmp_path / "net.py").write_text(STRATEGY_SCRIPT)
    done = plan("--strategy", "pipe=2", "-n", "2", "net.py", "--batch", "8", "--json", "out/s.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("Sequential: 3 layers; 2 workers on 1 host with ")
    assert first.endswith("8 samples a step")
    assert [line.split()[0] for line in lines[4:7]] == ["data=2", "tensor=2", ">"]
    found = json.loads((tmp_path / "out/s.json").read_text())
    chosen = found["strategies"][-1]
    assert (chosen["pipe"], chosen["stages"], chosen["microbatches"]) == (2, [1, 2], 2)
    weights = [4 * (8 * 16 + 16), 4 * (16 * 4 + 4)]
    assert [row["parameters"] for row in chosen["memory"]] == weights
    assert [row["state"] for row in chosen["memory"]] == [2 * size + 2 * 4 for size in weights]  # Adam counts its steps
    assert chosen["seconds"] > 0


def test_scripts_that_train_by_a_strategy_are_found_and_refusals_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    link = MeasuredLink(1e-4, 1e-9)
    monkeypatch.setattr(planning, "measured_machine", lambda count: Machine((tuple(range(count)),), (count,), link))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(STRATEGY_SCRIPT)
    assert run(["plan", "--strategy", "data=3,pipe=2", "net.py"]) == 0
    shown = capfd.readouterr().out
    assert "12 samples a step" in shown  # three replicas of 4
    assert "> data=3,pipe=2        1f1b x 2" in shown
    for arguments, text in {
        ("--strategy", "auto", "net.py"): "goes with any number of workers; give -n",
        ("-n", "2", "net.py"): "expected --strategy",
        ("--strategy", "auto", "-n", "2", "--profile", "p.json"): "give a SCRIPT",
        ("--strategy", "auto", "-n", "0", "net.py"): "expected --workers of at least 1",
        ("--strategy", "dota=2", "net.py"): "dota",
        ("--strategy", "auto", "-n", "2", "--memory", "1B", "net.py"): "the least that any needs is",
    }.items():
        assert run(["plan", *arguments]) == 2
        said = capfd.readouterr().err
        assert text in said
        assert len(said.strip().splitlines()) == 1

"""What a user reads of something that trains without pushes, such as a pipeline."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from polytempo.launcher.display import Display, progress_line, state, status_line
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.protocol.messages import Status, WorkerStatus
from polytempo.protocol.values import TrainingProgress
from polytempo.server.job_plan import Limits

FOUR = "pipeline of 4 stages, 1f1b"


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (TrainingProgress(FOUR, 0, 0.0), f"{FOUR}: 0 steps"),
        (TrainingProgress(FOUR, 1, 2.0, 0.5), f"{FOUR}: 1 step in 2.0 s, 2 s a step, last loss 0.5"),
        (TrainingProgress(FOUR, 40, 3.21, 0.123456), f"{FOUR}: 40 steps in 3.2 s, 0.0803 s a step, last loss 0.1235"),
        (TrainingProgress("pipedream", 2, 3.0), "pipedream: 2 steps in 3.0 s, 1.5 s a step"),
        (TrainingProgress(FOUR, 1, 1.0, float("nan")), f"{FOUR}: 1 step in 1.0 s, 1 s a step, last loss nan"),
    ],
)
def test_progress_in_words(progress: TrainingProgress, text: str) -> None:
    assert progress_line(progress) == text


def worker(step: int, present: float) -> WorkerStatus:
    return WorkerStatus(0, step, 0.0, "computing" if present else "absent", 0.0, 0.0, present, ())


def test_the_plain_line_is_about_what_trains() -> None:
    told = TrainingProgress(FOUR, 3, 6.0, 0.5)
    alone = Status(seconds=7.0, used=0.0, workers=(worker(0, 0.0),), progress=told)
    assert status_line("bsp", alone) == progress_line(told)
    pushing = Status(seconds=7.0, used=0.0, workers=(worker(5, 7.0),))
    assert status_line("bsp", pushing) == "bsp: 7 s, step 5, waiting 0 %"
    pushing.progress = told
    assert status_line("bsp", pushing).startswith("bsp: 7 s"), "both: the budget is about pushes"
    pushing.progress, pushing.used = TrainingProgress(FOUR, 3, 6.0, 0.5, counted=True), 0.25
    assert status_line("bsp", pushing) == f"{progress_line(told)}, 25 % of the budget", "its steps are the pushes"


def test_a_line_about_several_workers_says_whose_step_it_is() -> None:
    """The last line says how many steps all of them made together."""
    for steps, text in (((5,), "step 5"), ((5, 5), "each worker at step 5"), ((7, 5, 6), "workers at steps 5 to 7")):
        status = Status(seconds=7.0, used=0.0, workers=tuple(worker(step, 7.0) for step in steps))
        assert status_line("bsp", status) == f"bsp: 7 s, {text}, waiting 0 %"


def test_of_replicas_of_a_pipeline_one_stage_is_shown() -> None:
    told = TrainingProgress(FOUR, 3, 6.0, 0.5, distributed=True)
    others = WorkerStatus(1, 0, 0.0, "absent", 0.0, 0.0, 0.0, ())
    status = Status(seconds=7.0, used=0.0, workers=(worker(5, 7.0), others), progress=told)
    assert status_line("bsp", status) == "bsp: 7 s, step 5, waiting 0 %"
    console = Console(width=100, record=True, file=StringIO())
    console.print(Display("bsp", quiet=True)._picture(status))
    assert "starting" not in (shown := console.export_text())
    assert progress_line(told) in shown


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({}, []),
        ({"workers": 4, "record": Path("here"), "seed": 3, "min_workers": 1}, []),
        ({"sync": "ssp:3", "servers": 2}, ["--sync ssp:3", "--servers 2"]),
        ({"via": "allreduce", "limits": Limits(steps=5, seconds=1.5)}, ["--via allreduce"]),
        ({"slow": {1: 2.0}, "hiccup": (0.1, 0.2)}, ["--slow", "--hiccup"]),
        ({"checkpoint": Path("a"), "resume": Path("b"), "timeout": 3.0}, ["--checkpoint a", "--resume b", "--timeout 3.0"]),
    ],
)
def test_what_a_request_says_about_pushes(options: dict[str, Any], ignored: list[str]) -> None:
    assert RunRequest(ScriptProgram("script.py"), **options).push_options() == ignored


@pytest.mark.parametrize("pushing", [False, True])
def test_a_terminal_shows_a_line_instead_of_a_table_of_workers_who_push_nothing(pushing: bool) -> None:
    told = TrainingProgress(FOUR, 3, 6.0, 0.5)
    status = Status(seconds=7.0, used=0.0, workers=(worker(5, 7.0 if pushing else 0.0),), progress=told)
    console = Console(width=100, record=True, file=StringIO())
    console.print(Display("bsp", quiet=True)._picture(status))
    shown = console.export_text()
    assert progress_line(told) in shown
    assert ("waiting" in shown) is pushing


def test_what_is_started_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    for options, text in (
        ({}, "starting 2 workers: train.py"),
        ({"workers": 1, "sync": "asp"}, "starting 1 worker and 1 server: train.py"),
        ({"servers": 2}, "starting 2 workers and 2 servers: train.py"),
        ({"via": "allreduce"}, "starting 2 workers: train.py, gradients by all-reduce"),
    ):
        assert RunRequest(ScriptProgram("train.py"), **options).in_words() == text
    Display("bsp", quiet=False).begin("starting 2 workers: train.py")
    Display("bsp", quiet=True).begin("nothing")
    assert capfd.readouterr().err == "polytempo: bsp: starting 2 workers: train.py\n"


def test_a_terminal_names_those_that_are_late_not_those_that_wait() -> None:
    held = WorkerStatus(0, 5, 0.0, "waiting", 1.0, 1.0, 9.0, (2, 1))
    assert state(held, {0, 2}) == "waits for 1"
    assert state(held) == "waits for 2, 1"
    assert state(worker(0, 0.0)) == "starting"


def test_bars_stand_above_the_table_and_are_drawn_ten_times_a_second_at_most() -> None:
    now = [0.0]
    display = Display("bsp", quiet=False, clock=lambda: now[0])
    console = Console(width=60, height=20, file=StringIO(), force_terminal=True)
    display._console, display._live = console, Live(console=console, auto_refresh=False)
    drawn = []
    display._guarded = lambda draw: drawn.append(display._bars.rows(9))  # type: ignore[method-assign]
    for turn in range(33):
        now[0] = turn / 32
        display.draw("0", (f"{turn} of 32",), True, True)
    assert drawn == [[f"[0] {turn} of 32"] for turn in range(4, 33, 4)]


def test_a_line_about_the_whole_job_does_not_hide_whose_line_was_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    display = Display("bsp", quiet=False)
    display.line("1", "ZeroDivisionError", True)
    display.show(Status(seconds=7.0, used=0.0, workers=(worker(5, 7.0),)))
    assert display.latest == ("1", True)
    display.line("0", "still here", False)
    assert display.latest == ("0", False)
    assert capfd.readouterr().err == "[1] ZeroDivisionError\npolytempo: bsp: 7 s, step 5, waiting 0 %\n"

"""The first server is told how a pipeline gets on: seldom, by one rank, and at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from piped import PLAIN, batches, layered, mse

from polytempo.errors import PeerError
from polytempo.launcher.job_facts import JobFacts
from polytempo.pipeline.pipeline import Pipeline, pipeline_title
from polytempo.pipeline.schedules import make
from polytempo.protocol.messages import MetricReport
from polytempo.protocol.values import TrainingProgress
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.step_reports import EVERY, ProgressReporter


class Server:
    """In place of a client: what the first server hears."""

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[TrainingProgress] = []
        self.fails = fails

    def send(self, shard: int, message: MetricReport) -> None:
        if self.fails:
            raise PeerError("server 0 is gone")
        progress, values = message.progress, message.values
        assert shard == 0
        assert progress is not None
        assert values == {"steps": progress.steps} | ({} if progress.loss is None else {"loss": progress.loss})
        self.heard.append(progress)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def telling(server: Server | None, clock: Clock, rank: int = 0) -> tuple[ProgressReporter, Session]:
    session = Session(None, JobFacts(2, ()), rank)
    session.client = cast("Any", server)
    return ProgressReporter(session, "it", clock), session


def test_it_is_told_at_once_then_at_most_once_a_second_and_at_the_end() -> None:
    server, clock = Server(), Clock()
    told, session = telling(server, clock)
    clock.now = 110.0  # data is loaded meanwhile: no step's time
    for step in range(10):
        told.begins()
        clock.now += 0.3
        told.made(1, step / 10 if step else None)
    heard = [(p.steps, round(p.seconds, 3), p.loss) for p in server.heard]
    assert heard == [(0, 0.0, None), (1, 0.3, None), (5, 1.5, 0.4), (9, 2.7, 0.8)]
    assert EVERY == 1.0
    told.made(0, 7.0)
    session.leaving.of[LeavingStep.FLUSH][0]()
    assert (server.heard[-1].steps, server.heard[-1].loss) == (10, 7.0)
    assert server.heard[-1].seconds == pytest.approx(3.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_others_and_those_without_a_server_tell_nothing(rank: int) -> None:
    server, clock = Server() if rank else None, Clock()
    told, session = telling(server, clock, rank)
    told.begins()
    clock.now += 5
    told.made(1, 0.5)
    assert session.leaving.of[LeavingStep.FLUSH] == []
    assert server is None or server.heard == []


def test_training_goes_on_when_the_server_is_gone() -> None:
    server, clock = Server(fails=True), Clock()
    told, _ = telling(server, clock)
    told.begins()
    clock.now += 5
    told.made(1, 0.5)
    server.fails = False
    clock.now += 5
    told.made(1, 0.25)
    assert [p.steps for p in server.heard] == [2]


@pytest.mark.parametrize(
    ("spec", "replicas", "text"),
    [
        ("1f1b", None, "pipeline of 2 stages, 1f1b, 6 microbatches"),
        ("gpipe", (2, 1), "pipeline of 2 stages (replicas 2-1), gpipe, 6 microbatches"),
        ("pipedream", None, "pipeline of 2 stages, pipedream"),
    ],
)
def test_a_pipeline_in_words(spec: str, replicas: tuple[int, ...] | None, text: str) -> None:
    assert pipeline_title(make(spec, 2, 6, replicas)) == text


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_job_knows_how_its_pipeline_went(schedule: str, tmp_path: Path) -> None:
    data = batches(5, 4)

    def train(session: Session) -> list[float | None]:
        microbatches = 2 if schedule == "1f1b" else None
        options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
        pipe = Pipeline(layered(), loss=mse, optimizer=PLAIN, **options)
        return [*(pipe.step(x, y) for x, y in data), pipe.flush()]

    with ThreadJob(2, record=tmp_path) as job:
        losses = [loss for loss in job.run(train)[0] if loss is not None]
    progress = job.summary["progress"]
    assert progress["what"].startswith(f"pipeline of 2 stages, {schedule}")
    assert (progress["steps"], progress["loss"]) == (len(data), losses[-1])
    assert progress["seconds"] > 0
    assert job.summary["steps"] == 0, "nothing was pushed"
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    metrics = [line for line in lines if line["kind"] == "metric"]
    assert {line["worker"] for line in metrics} == {0}
    assert (metrics[0]["steps"], metrics[-1]["steps"], metrics[-1]["loss"]) == (0, len(data), losses[-1])
    assert json.loads((tmp_path / "meta.json").read_text())["job"]["progress"] == progress


def test_a_job_without_one_has_no_such_figures() -> None:
    with ThreadJob(1) as job:
        job.run(lambda session: None)
    assert job.summary["progress"] is None

"""Modes of a file in live jobs: k-batch-sync, whose pushes are answered before they are applied; own fields; mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import assert_close, check_record, copied, made_gradients, made_params, set_gradients, weights
from torch import nn

from polytempo.door import bring_file
from polytempo.errors import PolytempoError
from polytempo.records.files import read_events
from polytempo.records.lines import RecordLine
from polytempo.session.session import Session
from polytempo.sync.spec import parse_spec
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_mode.py"
SHAPES = [(30, 20), (5,)]
START = made_params(SHAPES)
STEPS, RATE = 40, 0.5
#: They do not depend on the values: of what a push was made shows in what became of it.
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=70 + worker) for worker in range(4)]


def run(
    workers: int, sync: str, record: Path, servers: int = 1, samples: Sequence[int] = (1, 2, 3, 4)
) -> list[torch.Tensor]:
    """A job in which workers compute what is known before; the values at its end."""

    def work(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=RATE))
        for step in range(STEPS):
            set_gradients(params, GRADIENTS[session.rank][step])
            optimizer.step(samples=samples[session.rank])

    with ThreadJob(workers, servers, sync, record=record) as job:
        job.run(work)
    # The last update is made when all have left.
    shards = [server.executor.state.optimizer_shards["0"] for server in job.servers]
    flat = torch.cat([shard.values["float64"].clone() for shard in shards])
    check_record(record)
    return [part.view(shape) for part, shape in zip(flat.split([30 * 20, 5]), SHAPES, strict=True)]


def made_again(lines: Sequence[RecordLine], samples: Sequence[int] = (1, 2, 3, 4)) -> list[torch.Tensor]:
    """The values, from the record alone."""
    values = weights(nn.ParameterList(START))
    pushed: dict[int, list[int]] = {}
    for line in lines:
        if line["kind"] == "push":
            pushed.setdefault(line["worker"], []).append(line["step"])
        elif line["kind"] == "discard":
            pushed[line["worker"]].remove(line["step"])
        elif line["kind"] == "apply" and line["server"] == 0:
            parts = [(worker, pushed[worker].pop(0)) for worker in line["workers"]]
            total = sum(samples[worker] for worker, _ in parts)
            for index in range(len(SHAPES)):
                mean = sum(samples[worker] / total * GRADIENTS[worker][step][index] for worker, step in parts)
                values[index] = values[index] - RATE * mean
    return values


@pytest.mark.parametrize(("workers", "k", "servers"), [(2, 2, 1), (4, 3, 2), (2, 5, 1), (4, 7, 1)])
def test_k_batch_sync_applies_the_first_k_of_any_workers(workers: int, k: int, servers: int, tmp_path: Path) -> None:
    """A worker's push may wait for others while it computes the next: what waits is not what it writes then."""
    bring_file(EXAMPLE)
    values = run(workers, f"own_mode.py:K_BATCH:{k}", tmp_path, servers)
    lines = list(read_events(tmp_path))
    updates = [line for line in lines if line["kind"] == "apply" and line["server"] == 0]
    assert all(len(line["workers"]) == k for line in updates[:-1])
    assert not any(stale for line in updates for stale in line["staleness"])
    discarded = sum(line["kind"] == "discard" for line in lines)
    assert workers * STEPS - discarded == sum(len(line["workers"]) for line in updates)
    assert_close(values, made_again(lines), rtol=1e-12)


OWN_FIELDS = '''
"""A worker says how many steps it has made; the policy tells it how many others have made."""

from polytempo.modes import *


class Telling(Policy):
    def on_push(self, push, now):
        self.progress.move(push.worker, push.step + 1)
        told = fields(count=push.measured.fields["made"] * 2, text="x" * push.step, exact=True, share=0.5)
        return [Apply((push,), 1 / len(self.members)), Release(push.worker, push.step + 1, self.progress.slowest, told)]


class Counting(StepMachine):
    def handle(self, event, now, part=0):
        if isinstance(event, Release) and event.directive is not None:
            assert event.directive["count"] == 2 * self.step, event
            assert event.directive["text"] == "x" * (self.step - 1)
            assert (event.directive["exact"], event.directive.number("share")) == (True, 0.5)
        orders = super().handle(event, now, part)
        return [PushStep(fields(made=self.step)) if isinstance(order, PushStep) else order for order in orders]


TELLS = Mode(
    "tells", "tells", "asp, and words", lambda workers: Telling(workers), machine=lambda worker, last, **_: Counting(last),
    tells={"count": int, "text": str, "exact": bool, "share": float}, measures={"made": int},
)
'''


def brought(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    bring_file(file)


def test_fields_go_both_ways_and_are_recorded(tmp_path: Path) -> None:
    brought(tmp_path, "telling_mode.py", OWN_FIELDS)
    run(2, "telling_mode.py:TELLS", tmp_path / "record")
    lines = list(read_events(tmp_path / "record"))
    assert {line["fields"]["made"] for line in lines if line["kind"] == "push"} == set(range(1, STEPS + 1))
    told = [line["told"] for line in lines if line["kind"] == "release" and line["step"]]
    assert {told["count"] for told in told} == {2 * made for made in range(1, STEPS + 1)}


def mistaken(tmp_path: Path, name: str, old: str, new: str) -> str:
    """What a job says of a mode with a mistake, in one line."""
    assert OWN_FIELDS.count(old) == 1
    brought(tmp_path, name, OWN_FIELDS.replace(old, new))
    with pytest.raises(PolytempoError) as told:
        run(2, f"{name}:TELLS", tmp_path / "record")
    assert "\n" not in str(told.value)
    return str(told.value)


def line_of(text: str) -> int:
    return OWN_FIELDS[: OWN_FIELDS.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('"x" * push.step', '"x" * 2000', "def on_push", "tells worker . a text of 2000 characters in text, at most 1024"),
        ("share=0.5)\n", "share=0.5, more=1)\n", "def on_push", "tells worker . a field 'more' that it does not declare"),
        ("share=0.5)\n", 'share="half")\n', "def on_push", "share='half', and declares share as a number"),
        ("1 / len(self.members)", "1 / (push.step - 3)", "told = fields", "ZeroDivisionError|makes an update with rate -"),
        (
            "[Apply((push,)",
            "[Apply((push, push)",
            "def on_push",
            "applies a push of step 0 of worker . that it was not given",
        ),
        ("push.worker, push.step + 1, self", "push.worker, push.step + 2, self", "def on_push", "for step 2; its next is 1"),
        ("fields(made=self.step)", "fields(made=0.5)", "def handle", "on Computed the machine measures made='0.5'"),
    ],
)
def test_a_mistake_is_a_line_with_file_and_line(old: str, new: str, line: str, said: str, tmp_path: Path) -> None:
    name = f"mistaken_{abs(hash((old, new)))}.py"
    told = mistaken(tmp_path, name, old, new)
    assert re.search(rf"{name}:\d+: .*({said})", told), told


def test_a_mode_that_was_not_brought_is_refused_by_the_servers(tmp_path: Path) -> None:
    with pytest.raises(PolytempoError, match=r"add --mode nowhere\.py"):
        parse_spec("nowhere.py:X:2")

"""What a worker tells of its own time with each push: computing, input, the exchange, and the work."""

from __future__ import annotations

import copy
import io
import time

import pytest
import torch

import polytempo as pt
from polytempo.protocol.push import MOST_SIGNS, Measures, no_steps
from polytempo.protocol.values import Position, VitalSigns
from polytempo.records.files import read_events
from polytempo.testing.threads import ThreadJob
from polytempo.train.observers import InputWatch

INPUT, COMPUTE, STEPS = 0.02, 0.01, 4


def train(worker: int, given: bool) -> None:
    """Steps of which INPUT seconds are waiting for data, and longer sequences with each step."""
    model = torch.nn.Linear(4, 1)
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model if given else None)
    for step in range(STEPS):
        time.sleep(INPUT)
        loss = model(torch.ones(2 + step, 4)).mean()
        time.sleep(COMPUTE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("sync", ["bsp", "asp", "local:2", "downpour:push=2,fetch=2"])
def test_a_push_says_what_it_took(tmp_path, sync):
    with ThreadJob(workers=2, sync=sync, record=tmp_path / "job") as job:
        job.run(lambda worker: train(worker, given=True))
    pushes = [line for line in read_events(tmp_path / "job") if line["kind"] == "push"]
    block = 2 if sync.startswith(("local", "downpour")) else 1
    assert len(pushes) == 2 * STEPS // block
    for line in pushes:
        assert line["input"] >= block * INPUT
        assert line["computed"] >= line["input"] + block * COMPUTE
        first = line["step"] * block
        assert line["work"] == sum(4 * (2 + step) for step in range(first, first + block))
    assert all("exchanged" in line for line in pushes if line["step"] > 0)


def test_without_the_model_input_counts_as_computing(tmp_path):
    with ThreadJob(workers=1, sync="asp", record=tmp_path / "job") as job:
        job.run(lambda worker: train(worker, given=False))
    pushes = [line for line in read_events(tmp_path / "job") if line["kind"] == "push"]
    assert all("input" not in line and line["computed"] >= INPUT + COMPUTE for line in pushes)


def test_a_copy_or_a_saved_model_does_not_measure():
    model = torch.nn.Linear(4, 1)
    watch = InputWatch(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"polytempo" not in file.getvalue()
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(torch.ones(2, 4)), model.forward(torch.ones(2, 4)))
    assert watch.take(lambda now: 1.0, 2.0) == (0.0, None)
    model(torch.ones(2, 4))
    model(torch.ones(3, 4))
    assert watch.take(lambda now: 1.0, 2.0) == (1.0, 8.0)  # of the first forward pass
    watch.watch()
    with torch.no_grad():
        model(torch.ones(50, 4))
    model(torch.ones(2, 4))
    assert watch.take(lambda now: 1.0, 2.0) == (1.0, 8.0)  # of the first that is trained on


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # a FutureWarning since torch 2.15
def test_a_model_is_as_it_was_after_its_first_forward_pass_and_at_the_end():
    model = torch.nn.Linear(4, 1)
    watch = InputWatch(model)
    assert len(model._forward_pre_hooks) == 1
    watch.watch()
    assert len(model._forward_pre_hooks) == 1
    model(torch.ones(2, 4))
    assert not model._forward_pre_hooks
    torch.jit.script(model)
    watch.watch()
    watch.stop()
    assert not model._forward_pre_hooks
    scripted = torch.jit.script(model)
    assert InputWatch(scripted).take(lambda now: 1.0, 2.0) == (0.0, None)


@pytest.mark.proof  # torch.compile takes seconds to import
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # of torch.compile, on that one version
def test_a_compiled_model_is_one_graph():
    graphs = []
    model = torch.nn.Linear(4, 1)
    InputWatch(model)
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(2, 4))
    assert len(graphs) == 1


def test_figures_of_several_steps_are_added_up():
    sums = no_steps()
    for step in (Measures(input=1.0, computed=2.0, gradient_digest=7), Measures(input=2.0, work=3.0, size=4.0), Measures()):
        sums.add(step)
    assert sums == Measures(samples=3.0, count=3, computed=2.0, input=3.0, work=3.0, size=4.0, gradient_digest=7), (
        "what is not known of a step is left out of a sum"
    )


def test_places_of_several_steps_are_all_those_dealt_out_or_else_the_last() -> None:
    def places(*each: Position) -> tuple[Position, ...]:
        sums = no_steps()
        for one in each:
            sums.add(Measures(positions=(one,)))
        return sums.positions

    even = [Position(0, 16), Position(0, 32)]
    dealt = [Position(0, 4, done=((start, start + 4),), length=20) for start in (0, 8)]
    assert places(*even) == (even[1],)
    assert places(*dealt) == (*dealt,)


def test_vital_signs_of_several_steps_are_told_of_as_many_as_there_is_room_for():
    sums = no_steps()
    seen = [VitalSigns(float(step), 1.0, 0.1, 1.0) for step in range(100)]
    for count, signs in enumerate(seen, 1):
        sums.add(Measures(vital_signs=(signs,)))
        told = list(sums.vital_signs)
        assert told == seen[:count] if count <= MOST_SIGNS else MOST_SIGNS // 2 < len(told) <= MOST_SIGNS
        assert told[-1] is signs
        assert told == sorted(told, key=seen.index)

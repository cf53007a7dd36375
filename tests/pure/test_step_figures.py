"""The figures of a worker's own time: on push lines, read back, and kept while a job runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polytempo.protocol.push import Measures
from polytempo.records.lines import event_line, event_of
from polytempo.records.step_figures import MIN_KEPT, FigureLog, StepFigures, figures_from, figures_of
from polytempo.server.sequencer import push_figures
from polytempo.sync.events import Measured, Pushed


def test_time_waited_for_others_is_no_part_of_an_exchange():
    measures = Measures(computed=0.3, input=0.1, exchanged=0.5, work=64.0)
    assert push_figures(measures, waited=0.45) == {"work": 64.0, "computed": 0.3, "input": 0.1, "exchanged": 0.05}
    assert "exchanged" not in push_figures(measures, waited=0.6)  # two clocks: it is never below 0
    assert push_figures(Measures(), waited=0.0) == {}


def test_figures_stand_on_the_line_and_change_no_event():
    event = Pushed(1, 5, 32)
    line = event_line(event, 2.0, {"input": 0.1, "exchanged": 0.05})
    assert line == {**event_line(event, 2.0), "input": 0.1, "exchanged": 0.05}
    assert event_of(line) == event
    measured = Pushed(1, 5, 32, measured=Measured(work=32.0, computed=0.123456789))
    assert event_of(event_line(measured, 2.0, {"computed": 0.123457})) == measured  # what the policy was given


def test_figures_are_read_from_lines():
    lines = [
        {"t": 0.0, "kind": "release", "worker": 0, "step": 0, "slowest": 0},
        {"t": 1.0, "kind": "push", "worker": 0, "step": 0, "samples": 8, "computed": 0.7, "input": 0.2},
        {"t": 1.0, "kind": "push", "worker": 0, "step": 0, "samples": 8, "optimizer": "1", "computed": 9.0},
    ]
    assert figures_of(lines) == [StepFigures(0, 0, 1.0, 8, computed=0.7, input=0.2, elapsed=1.0)]
    plain = [{key: value for key, value in line.items() if key not in ("computed", "input")} for line in lines]
    assert figures_of(plain) == [StepFigures(0, 0, 1.0, 8, computed=1.0, elapsed=1.0)]


@given(st.integers(1, 400), st.integers(1, 3))
def test_a_log_is_bounded_and_keeps_the_same_steps_of_all_workers(steps, workers):
    log = FigureLog(workers)
    log._most = MIN_KEPT
    for step in range(steps):
        for worker in range(workers):
            log.released(worker, step - 0.5)
            log.add(worker, step, float(step), 1.0, 1, 0.0, 0.25, 0.0, 0.0)
    kept = {worker: [one.step for one in figures_from(log.as_rows()) if one.worker == worker] for worker in range(workers)}
    assert all(rows == kept[0] and len(rows) <= MIN_KEPT for rows in kept.values())
    assert len(kept[0]) >= min(steps, MIN_KEPT // 2)
    assert kept[0][0] == 0
    assert figures_from(log.as_rows())[0] == StepFigures(0, 0, 0.0, computed=0.25, elapsed=0.5)

"""Records with drops and warm starts: the checker and the replay must be able to say no to them, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from clusters import EVENTFUL, STRAGGLER

from polytempo.errors import BrokenInvariant
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

DROPS, WARM = "asp,drop=2", "downpour:push=2,warm=9"


def record(sync: str) -> list[RecordLine]:
    lines: list[RecordLine] = []
    simulate_job(STRAGGLER, sync, steps_each=30, record=lines.append)
    return lines


def nth(lines: list[RecordLine], kind: str, number: int) -> int:
    return [index for index, line in enumerate(lines) if line["kind"] == kind][number]


def refused(lines: list[RecordLine], sync: str) -> str:
    with pytest.raises(BrokenInvariant) as caught:
        check_lines(lines, parse_spec(sync), STRAGGLER.workers)
    return str(caught.value)


def _other_reason(lines: list[RecordLine]) -> None:
    lines[nth(lines, "discard", 3)]["reason"] = "it was late"


def _not_stale_enough(lines: list[RecordLine]) -> None:
    lines[nth(lines, "discard", 3)]["reason"] = "staleness 2 is above 2"


def _another_bound(lines: list[RecordLine]) -> None:
    lines[nth(lines, "discard", 3)]["reason"] = "staleness 9 is above 8"


def _too_stale(lines: list[RecordLine]) -> None:
    lines[nth(lines, "apply", 9)]["staleness"] = [3]


def _applied_as_well(lines: list[RecordLine]) -> None:
    at = nth(lines, "discard", -1)
    last = copy.deepcopy(lines[nth(lines, "apply", -1)])
    last["version"] += 1
    lines.insert(len(lines), {**last, "t": lines[-1]["t"], "workers": [lines[at]["worker"]]})


def _neither(lines: list[RecordLine]) -> None:
    del lines[nth(lines, "discard", -1)]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_other_reason, "discarded, although the mode applies every push"),
        (_not_stale_enough, "discarded, although the mode applies every push"),
        (_another_bound, "discarded, although the mode applies every push"),
        (_too_stale, "applied, although staleness 3 is above 2"),
        (_applied_as_well, "has no push left to apply"),
        (_neither, "has not applied these accepted pushes"),
    ],
)
def test_the_checker_sees_a_wrong_drop(damage: Callable[[list[RecordLine]], None], says: str) -> None:
    lines = record(DROPS)
    check_lines(lines, parse_spec(DROPS), STRAGGLER.workers)
    damage(lines)
    assert says in refused(lines, DROPS)


def test_the_checker_knows_specs_with_drops_apart() -> None:
    lines = record(DROPS)
    assert "applies every push" in refused(lines, "asp")
    assert "applies every push" in refused(lines, "asp,drop=3")
    assert "applied, although" in refused(record("asp"), DROPS)


def test_replay_takes_a_drop_for_the_update_that_the_policy_made_and_for_nothing_else() -> None:
    lines = record(DROPS)
    policy = parse_spec(DROPS).policy
    replay(lines, policy(4))
    at = nth(lines, "discard", 3)
    for change in ({"worker": (lines[at]["worker"] + 1) % 4}, {"step": 99}, {"reason": "it was late"}):
        changed = [{**line, **change} if index == at else line for index, line in enumerate(lines)]
        with pytest.raises(BrokenInvariant, match=f"line {at + 1}: replay expected"):
            replay(changed, policy(4))
    with pytest.raises(BrokenInvariant, match=r"replay (updates from|makes)|replay expected"):
        replay([*lines[: at + 1], *lines[at:]], policy(4))  # twice
    without = [line for index, line in enumerate(lines) if index != at]
    with pytest.raises(BrokenInvariant, match="replay updates from"):
        replay(without, policy(4))


def test_a_warm_start_is_one_worker_s_alone() -> None:
    lines = record(WARM)
    check_lines(lines, parse_spec(WARM), 4)
    released = {"t": 0.0, "kind": "release", "worker": 2, "step": 0, "slowest": 0}
    early = [*lines[: nth(lines, "push", 0)], released, *lines[nth(lines, "push", 0) :]]
    assert "a release while worker 0 trains alone" in refused(early, WARM)
    other = copy.deepcopy(lines)
    other[nth(other, "hold", 4)]["waiting_for"] = [3]
    assert "waits for a worker that does not train alone" in refused(other, WARM)
    assert "held without need" in refused(lines, "downpour:push=2")
    assert "still held for step 0 without need" in refused(lines, "downpour:push=2,warm=7")
    assert "a release while worker 0 trains alone" in refused(lines, "downpour:push=2,warm=11")


def test_drops_are_in_the_records_of_an_eventful_cluster() -> None:
    for sync in ("asp,drop=3,lr=staleness", "asup,bound=1,drop=2"):
        lines: list[RecordLine] = []
        outcome = simulate_job(EVENTFUL, sync, seed=7, steps_each=15, record=lines.append)
        assert sum(line["kind"] == "discard" for line in lines) == outcome.discarded > 3

"""Which modes and schedules go with a model that is split: every pair, against the rules of design note 0012."""

from __future__ import annotations

import pytest
from clusters import MODES

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import SCHEDULES, make
from polytempo.strategy.soundness import check_pair, check_tied, refusal
from polytempo.strategy.strategy import Strategy
from polytempo.sync.spec import MODES as KNOWN
from polytempo.sync.spec import parse_spec

SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
#: What the design note allows, written down a second time.
ALONE = {"asp", "ssp:0", "ssp:3", "dssp:1..6", "dssp-paper:1..6", "every:4", "delay:0", "delay:3"}
AVERAGED = {"bsp", "local:3", "local:4,after=4", "diloco:3"}


def allowed(mode: str, pipe: int, tensor: int, schedule: str) -> bool:
    if schedule == "pipedream":
        return False
    if tensor > 1:
        return mode in AVERAGED
    return pipe == 1 or mode in ALONE | AVERAGED


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipe", "tensor"), SPLITS)
@pytest.mark.parametrize("mode", MODES)
def test_every_pair(mode: str, pipe: int, tensor: int, schedule: str) -> None:
    if allowed(mode, pipe, tensor, schedule):
        check_pair(parse_spec(mode), pipe, tensor, schedule)
        assert Strategy(2, pipe, tensor, mode, schedule).sync == mode
        return
    with pytest.raises(UsageError) as refused:
        Strategy(2, pipe, tensor, mode, schedule)
    text = str(refused.value)
    assert "\n" not in text
    assert "; use " in text, "and what to use in its place"
    assert ("no flush" in text) == (not make(schedule, 1, 1).flushes)


def test_all_modes_are_in_these_tests() -> None:
    assert {parse_spec(mode).mode.name for mode in MODES} >= set(KNOWN)


def test_all_that_is_named_in_the_place_of_a_refused_mode_is_accepted() -> None:
    corrected = ["ssp:3,lr=staleness", "asp,drop=3", "dssp:1..6,drop=2", "every:4,wait=1,drop=9", "diloco:100,quorum=2"]
    for mode in [*MODES, *corrected]:
        for pipe, tensor in SPLITS:
            found = refusal(parse_spec(mode), pipe, tensor)
            if found is None:
                continue
            named, _, other = found.instead.partition(", or pipe=")
            for instead in named.replace(" or ", ", ").split(", "):
                check_pair(parse_spec(instead), pipe, tensor, "1f1b")
            if other:
                check_pair(parse_spec(mode), tensor, 1, "1f1b")


@pytest.mark.parametrize(
    ("sync", "pipe", "tensor", "reason"),
    [
        ("bsp+backup:1", 2, 1, "stages could leave out different replicas from a round"),
        ("diloco:3,quorum=2", 2, 1, "stages could leave out different replicas from a merge"),
        ("every:4,wait=1", 2, 1, "stages could leave out different replicas from a barrier"),
        ("adacomm:2", 2, 1, "a period of its own"),
        ("asp,drop=3", 2, 1, "by the staleness that it sees itself"),
        ("gossip:ring", 2, 2, "sync=gossip:ring does not go with pipe=2 and tensor=2"),
        ("ssp:1", 1, 2, "different versions of a weight that both hold"),
    ],
)
def test_reasons(sync: str, pipe: int, tensor: int, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_pair(parse_spec(sync), pipe, tensor, "1f1b")
    assert reason in str(refused.value)


def test_tied_parameters_need_a_barrier() -> None:
    check_tied(parse_spec("bsp"), (0, 1), "head.weight")
    with pytest.raises(UsageError, match=r"stages 0, 1 hold the same parameter head\.weight, and under sync=ssp:1"):
        check_tied(parse_spec("ssp:1"), (0, 1), "head.weight")

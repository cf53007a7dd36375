"""`Strategy`: its text both ways, its mesh and the nearest choice, presets, and what `--strategy` makes of a command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.strategy.job_options import JobOptions
from polytempo.strategy.strategy import PRESETS, Strategy

COUNTS = st.integers(1, 8)
SYNCS = st.sampled_from([None, "bsp", "local:4,after=4", "diloco:3"])
SCHEDULES = st.sampled_from(["1f1b", "gpipe", "gpipe,recompute=0", "sequential", "1f1b,spare=2"])
STRATEGIES = st.builds(
    Strategy,
    data=st.none() | COUNTS,
    pipe=COUNTS,
    tensor=COUNTS,
    sync=SYNCS,
    schedule=SCHEDULES,
    microbatches=st.none() | COUNTS,
    via=st.sampled_from([None, "ps", "allreduce", "auto"]),
)


@given(STRATEGIES | st.builds(Strategy.auto, st.none() | st.floats(1, 1e12), SYNCS))
def test_a_strategy_is_its_text(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert "\n" not in strategy.describe()


def test_options_of_modes_and_schedules_follow_them() -> None:
    found = Strategy.parse("data=2, sync=every:8,wait=2, schedule=gpipe,recompute=0 ,microbatches=8")
    assert found == Strategy(2, sync="every:8,wait=2", schedule="gpipe,recompute=0", microbatches=8)
    assert str(Strategy()) == "data=all"
    assert Strategy.parse("auto,memory=16GB") == Strategy.auto("16GB") == Strategy(automatic=True, memory=16e9)
    assert {name: str(make()) for name, make in PRESETS.items()} == {
        "auto": "auto",
        "mirrored": "sync=bsp,via=allreduce",
        "multi_worker": "sync=bsp,via=allreduce",
        "parameter_server": "sync=asp,via=ps",
        "central_storage": "sync=bsp,via=ps",
    }
    assert Strategy.parse("parameter_server,sync=ssp:3,data=2") == Strategy(2, sync="ssp:3", via="ps")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data=2,pipes=2", "nearest: pipe"),
        ("data=two", "expected a whole number data of at least 1, got data=two"),
        ("pipe=0", "expected a whole number pipe of at least 1, got pipe=0"),
        ("data=2,data=4", "data stands twice"),
        ("mirored", "nearest: mirrored"),
        ("", "expected items NAME=VALUE"),
        ("pipe=2,schedule=gpip", "nearest: gpipe"),
        ("pipe=2,sync=sps:3", "nearest: ssp:3"),
        ("via=carrier", "expected via to be auto, ps, allreduce"),
        ("memory=16GB", "memory= is the limit under which strategy='auto' chooses"),
        ("auto,pipe=2", "auto chooses data, pipe and tensor by itself"),
        ("schedule=gpipe,vertical_sync=1", "gpipe has no option 'vertical_sync'"),
    ],
)
def test_texts_that_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        Strategy.parse(text)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"pipe": 0}, {"tensor": 1.5}, {"data": "2"}, {"microbatches": -1}, {"pipe": True}])
def test_counts_that_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"expected {next(iter(wrong))} to be a whole number of at least 1, got"):
        Strategy(**wrong)  # type: ignore[arg-type]


# The number of workers.


@given(STRATEGIES, st.integers(1, 24))
def test_a_mesh_has_the_workers_or_the_nearest_choice_has(strategy: Strategy, size: int) -> None:
    fits = size % strategy.each == 0 if strategy.data is None else strategy.data * strategy.each == size
    if not fits:
        near = strategy.nearest(size)
        with pytest.raises(UsageError) as refused:
            strategy.mesh(size)
        assert str(refused.value).endswith(f"the job has {size}; nearest: {' or '.join(near)}")
        assert all(Strategy.parse(text).mesh(size).size == size for text in near)
        return
    mesh = strategy.mesh(size)
    assert mesh.size == size
    assert (mesh.pipe, mesh.tensor) == (strategy.pipe, strategy.tensor)
    assert strategy.data in (None, mesh.data)
    assert strategy.resolved(size).mesh(size) == mesh


def test_the_words_of_a_count_that_does_not_fit() -> None:
    def said(text: str, size: int) -> str:
        with pytest.raises(UsageError) as refused:
            Strategy.parse(text).mesh(size)
        return str(refused.value)

    assert said("data=2,pipe=3", 4) == "data=2,pipe=3 needs 6 workers, the job has 4; nearest: data=2,pipe=2 or data=4"
    assert said("pipe=3", 4) == "pipe=3 needs a multiple of 3 workers, the job has 4; nearest: pipe=4 or data=4"
    assert said("tensor=4", 6) == "tensor=4 needs a multiple of 4 workers, the job has 6; nearest: data=2,tensor=3 or data=6"
    assert said("data=3", 1) == "data=3 needs 3 workers, the job has 1; nearest: data=1"
    assert said("pipe=2,sync=asp", 3) == "pipe=2 needs a multiple of 2 workers, the job has 3; nearest: pipe=3 or data=3"


def test_the_nearest_choice_is_sound_too() -> None:
    assert Strategy(pipe=2, sync="ssp:1").nearest(4) == ["data=2,pipe=2", "data=4"]
    assert all("tensor" not in text for size in range(1, 25) for text in Strategy(pipe=5, sync="ssp:1").nearest(size))


def test_an_open_strategy_is_filled_by_the_job() -> None:
    assert Strategy(pipe=2).resolved(6, "ssp:1") == Strategy(3, 2, sync="ssp:1", microbatches=2)
    assert Strategy(pipe=2, sync="asp", microbatches=4).resolved(2, "bsp", "ps") == Strategy(1, 2, 1, "asp", "1f1b", 4, "ps")
    assert Strategy(data=2, tensor=2).mesh(4) == Mesh(2, 1, 2)
    with pytest.raises(UsageError, match="sync=ssp:1 does not go with tensor=2"):
        Strategy(tensor=2).resolved(4, "ssp:1")
    with pytest.raises(UsageError, match="chosen for a model"):
        Strategy.auto().mesh(4)


def test_in_words() -> None:
    said = Strategy(2, 2, sync="bsp", microbatches=4).describe()
    assert said == "2 replicas x 2 stages = 4 workers: bsp between replicas, 1f1b with 4 microbatches"
    assert Strategy.parameter_server().describe() == "replicas: asp between replicas over parameter servers"
    said = Strategy(1, 1, 4, microbatches=2).describe()
    assert said == "1 replica x 4 shards = 4 workers: the mode of the job between replicas, 2 microbatches"
    assert Strategy.auto(16e9).describe() == "chosen for the model by predicted step time within 16 GB a worker"


# The command.


def settled(**given: object) -> dict[str, object]:
    return JobOptions(**given).settled()  # type: ignore[arg-type]


def test_without_a_strategy_a_command_is_as_before() -> None:
    plain = {"workers": 2, "sync": "bsp", "via": "auto", "min_workers": None, "strategy": "", "replica": 1, "refused": ()}
    assert settled() == plain
    given = {"workers": 4, "sync": "ssp:3", "via": "ps", "min_workers": 2}
    assert settled(**given) == plain | given


def test_the_product_is_the_number_of_workers() -> None:
    assert settled(strategy="data=2,pipe=3")["workers"] == 6
    assert settled(strategy="pipe=2,tensor=2")["workers"] == 4
    assert settled(strategy="sync=asp")["workers"] == 2
    assert settled(strategy="data=2,pipe=3", expect=4)["workers"] == 2
    filled = settled(strategy="pipe=2", workers=2, expect=4, sync="ssp:1")
    assert (filled["strategy"], filled["sync"]) == ("data=3,pipe=2,sync=ssp:1,microbatches=2", "ssp:1")
    assert filled["replica"] == 2
    assert filled["min_workers"] == 6, "a worker of each replica is a part of the model"
    assert settled(strategy="data=4,sync=asp", min_workers=2)["min_workers"] == 2
    served = settled(strategy="parameter_server", workers=3)
    assert (served["sync"], served["via"], served["min_workers"]) == ("asp", "ps", None)
    assert served["strategy"] == "data=3,sync=asp,microbatches=1,via=ps"
    assert settled(strategy="auto", workers=4)["strategy"] == "auto"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"strategy": "data=2,pipe=3", "workers": 4}, "nearest: data=2,pipe=2 or data=4"),
        ({"strategy": "data=2,pipe=2", "expect": 6}, "nearest: --expect 4"),
        ({"strategy": "pipe=2", "sync": "gossip:ring"}, "sync=gossip:ring does not go with pipe=2"),
        ({"strategy": "data=2,sync=asp", "sync": "bsp"}, "--strategy has sync=asp and --sync is bsp; give one of them"),
        ({"strategy": "mirrored", "via": "ps"}, "--strategy has via=allreduce and --via is ps; give one of them"),
        ({"strategy": "pipe=2", "saves": "--checkpoint"}, "use fit(checkpoint=...)"),
        ({"strategy": "tensor=2", "saves": "--resume"}, "use fit(checkpoint=...)"),
        ({"strategy": "data=2,pipe=2", "min_workers": 3}, "use --min-workers 4, or leave it out"),
        ({"strategy": "auto"}, "give -n"),
    ],
)
def test_commands_that_are_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        settled(**given)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)

"""The schedules with a name: what their papers say of them, and what the checker says, for all small sizes."""

from __future__ import annotations

import re
from itertools import product

import pytest

from polytempo.errors import UsageError
from polytempo.pipeline.actions import Schedule, to_text
from polytempo.pipeline.check import check
from polytempo.pipeline.schedules import SCHEDULES, gpipe, in_flight, make, one_f_one_b, pipedream, sequential

SPECS = ("sequential", "gpipe", "gpipe,recompute=0", "1f1b", "1f1b,recompute=1", "pipedream", "pipedream,vertical_sync=1")


def bodies(schedule: Schedule) -> list[str]:
    return [line.partition(": ")[2] for line in to_text(schedule).splitlines() if line.startswith("stage")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("stages", range(1, 7))
def test_every_size_passes_the_checker(spec: str, stages: int) -> None:
    for microbatches in range(1, 13):
        facts = check(make(spec, stages, microbatches))
        assert max(facts.versions_kept) <= stages
        if spec.startswith("pipedream"):
            assert facts.updates == (tuple((number,) for number in range(microbatches)),) * stages
        else:
            assert facts.updates == ((tuple(range(microbatches)),),) * stages
            assert facts.versions_kept == (1,) * stages
            assert facts.used == ((0,) * microbatches,) * stages


@pytest.mark.parametrize("spec", ["sequential", "gpipe", "1f1b", "pipedream"])
def test_every_number_of_replicas_passes_the_checker(spec: str) -> None:
    for replicas in (*product((1, 2, 3, 4), repeat=2), *product((1, 2, 5), repeat=3), (4, 2, 1, 1), (1, 3, 2, 5)):
        for microbatches in (5, 6, 7, 12):
            schedule = make(spec, len(replicas), microbatches, replicas)
            facts = check(schedule)
            assert schedule.replicas == replicas
            counts = [in_flight(replicas, stage) for stage in range(len(replicas))]
            if spec == "pipedream":
                assert all(kept <= most for kept, most in zip(facts.versions_kept, counts, strict=True))
                assert [len(made) for made in facts.updates] == [-(-microbatches // count) for count in replicas]
            if spec in ("pipedream", "1f1b"):
                rounds = [-(-microbatches // count) for count in replicas]
                assert list(facts.in_flight) == [min(pair) for pair in zip(counts, rounds, strict=True)]


@pytest.mark.parametrize("replicas", [(2, 2), (3, 3, 3), (2, 2, 2, 2)])
def test_vertical_sync_with_replicas(replicas: tuple[int, ...]) -> None:
    for microbatches in (3, 6, 7, 13):
        facts = check(pipedream(len(replicas), microbatches, replicas, vertical_sync=True))
        assert len(set(facts.used)) == len(set(facts.updates)) == 1
        assert facts.updates[0][0] == tuple(range(replicas[0]))


def test_how_they_look() -> None:
    assert bodies(sequential(2, 2)) == ["F0 B0 F1 B1 U"] * 2
    assert bodies(gpipe(2, 3)) == ["F0 F1 F2 B2 B1 B0 U"] * 2
    assert bodies(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 U",
        "F0 F1 B0 F2 B1 F3 B2 B3 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 U",
    ]
    assert bodies(pipedream(2, 5, (2, 1))) == [
        "F0 F2 B0 U F4 B2 U B4 U",
        "F1 F3 B1 U B3 U U",
        "F0 B0 U F1 B1 U F2 B2 U F3 B3 U F4 B4 U",
    ]
    assert bodies(one_f_one_b(2, 5, replicas=(2, 1))) == [
        "F0 F2 B0 F4 B2 B4 U",
        "F1 F3 B1 B3 U",
        bodies(sequential(1, 5))[0],
    ]


def test_what_is_kept() -> None:
    assert check(one_f_one_b(4, 9)).in_flight == check(one_f_one_b(4, 9)).activations == (4, 3, 2, 1)
    assert check(gpipe(4, 9, recompute=False)).activations == (9, 9, 9, 9)
    assert check(gpipe(4, 9)).in_flight == (9, 9, 9, 9)
    assert check(gpipe(4, 9)).activations == (1, 1, 1, 1)
    assert check(sequential(4, 9)).activations == (1, 1, 1, 1)
    for stages in range(1, 7):
        for microbatches in range(1, 13):
            wanted = tuple(min(stages - stage, microbatches) for stage in range(stages))
            assert check(one_f_one_b(stages, microbatches)).in_flight == wanted


@pytest.mark.parametrize("stages", range(1, 8))
def test_versions_of_the_published_recurrence(stages: int) -> None:
    """Weights w_1^(t-n+1), ..., w_n^(t) for minibatch t of n stages; with vertical sync w^(t-n+1) everywhere."""
    minibatches = range(3 * stages + 2)
    facts = check(pipedream(stages, len(minibatches)))
    assert facts.used == tuple(tuple(max(0, t - (stages - 1) + s) for t in minibatches) for s in range(stages))
    assert facts.in_flight == facts.versions_kept == tuple(range(stages, 0, -1))
    facts = check(pipedream(stages, len(minibatches), vertical_sync=True))
    assert facts.used == (tuple(max(0, t - stages + 1) for t in minibatches),) * stages
    assert facts.versions_kept == (stages,) * stages


def test_in_flight_of_replicated_stages() -> None:
    assert [in_flight((2, 1), stage) for stage in range(2)] == [2, 1]
    assert [in_flight((3, 1, 4), stage) for stage in range(3)] == [3, 5, 1]
    assert [in_flight((15, 1), stage) for stage in range(2)] == [2, 1]


def test_specs() -> None:
    assert make("gpipe", 3, 5) == gpipe(3, 5, recompute=True)
    assert make("gpipe,recompute=0", 3, 5) == gpipe(3, 5, recompute=False)
    assert make(" 1f1b , recompute=1", 2, 3) == one_f_one_b(2, 3, recompute=True)
    assert make("pipedream,vertical_sync=1", 2, 3) == pipedream(2, 3, vertical_sync=True)
    assert make("pipedream,recompute=1,vertical_sync=0", 2, 3) == pipedream(2, 3, recompute=True)
    assert make("sequential", 2, 3, [1, 2]) == sequential(2, 3, (1, 2))
    assert all(make(name, 2, 2).name == name for name in SCHEDULES)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("gpip", "unknown pipeline schedule 'gpip'; nearest: gpipe; known: sequential, gpipe, 1f1b, pipedream"),
        ("PipeDream", "unknown pipeline schedule 'PipeDream'; nearest: pipedream"),
        ("", "unknown pipeline schedule ''; known"),
        ("gpipe,recompte=1", "gpipe has no option 'recompte'; known: recompute, spare; nearest: recompute"),
        ("sequential,recompute=1", "sequential has no option 'recompute'; known: none"),
        ("gpipe,", "gpipe has no option ''; known: recompute"),
        (
            "gpipe,recompute",
            "option 'recompute' of gpipe must be given once, as recompute=VALUE; got 'recompute'",
        ),
        ("gpipe,recompute=yes", "expected 0 or 1 for option 'recompute' of gpipe, got 'yes'; write for example recompute=0"),
        ("gpipe,recompute=1,recompute=0", "must be given once"),
        ("gpipe,vertical_sync=1", "gpipe has no option 'vertical_sync'"),
    ],
)
def test_specs_that_are_refused(spec: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)) as caught:
        make(spec, 2, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(
    ("stages", "microbatches", "replicas", "complaint"),
    [
        (0, 4, None, "expected 1 stage or more, got 0; nearest: 1"),
        (2, 0, None, "or more, got 0; nearest: 1"),
        (2, 4, (1,), "replicas for each of 2 stages, got (1,); nearest: (1, 1)"),
        (2, 4, (1, 2, 3), "replicas for each of 2 stages, got (1, 2, 3); nearest: (1, 2)"),
        (2, 4, (0, 1), "every stage has 1 to 4 replicas, or some have nothing to do; got (0, 1); nearest: (1, 1)"),
        (2, 4, (5, 1), "got (5, 1); nearest: (4, 1)"),
    ],
)
def test_impossible_sizes(
    name: str, stages: int, microbatches: int, replicas: tuple[int, ...] | None, complaint: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        make(name, stages, microbatches, replicas)


def test_vertical_sync_needs_equal_replicas() -> None:
    with pytest.raises(UsageError, match=re.escape("got (2, 1); nearest: (2, 2), or leave vertical sync out")):
        pipedream(2, 8, (2, 1), vertical_sync=True)

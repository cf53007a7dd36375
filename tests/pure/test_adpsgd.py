"""AD-PSGD's policy: who asks whom, that no worker is ever held, and that pairs keep the mass and reach the mean.

Here a pair is averaged at the moment of the release that names it; all other orders are in `test_adpsgd_model.py`.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from driving import Job
from test_properties import Game, only, play, under_each

from polytempo.errors import OrderError
from polytempo.sync.actions import Admit, Release
from polytempo.sync.adpsgd import BIPARTITE, PairAveraging, PairMachine, draw, passive_neighbours
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Left, Pushed
from polytempo.sync.machine import AskPartner, Leaving, Replied

SYNCS = tuple(f"adpsgd:{topology}" for topology in BIPARTITE)


# Who asks whom.


@pytest.mark.parametrize("topology", BIPARTITE)
@pytest.mark.parametrize("count", range(1, 18))
def test_every_edge_joins_an_active_and_a_passive_place_and_all_are_connected(topology: str, count: int) -> None:
    edges = [(place, other) for place in range(count) for other in passive_neighbours(topology, place, count)]
    assert all((place % 2, other % 2) == (0, 1) for place, other in edges)
    reached, before = {0}, set[int]()
    while reached != before:
        before = reached
        reached = before | {end for edge in edges if before & set(edge) for end in edge}
    assert reached == set(range(count))


def test_the_neighbours_of_each_graph() -> None:
    assert [passive_neighbours("ring", place, 4) for place in range(4)] == [[1, 3], [], [1, 3], []]
    assert [passive_neighbours("ring", place, 5) for place in range(5)] == [[1], [], [1, 3], [], [3]]
    assert passive_neighbours("ring", 0, 2) == [1]
    assert passive_neighbours("ring", 0, 1) == []
    assert passive_neighbours("exp", 0, 16) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert passive_neighbours("exp", 0, 32) == [1, 3, 5, 9, 15, 17, 23, 27, 29, 31]
    assert passive_neighbours("full", 2, 7) == [1, 3, 5]


def test_partners_are_drawn_evenly_and_the_same_each_time() -> None:
    counts = Counter(draw(0, worker, step, 3) for worker in range(30) for step in range(100))
    assert all(900 < count < 1100 for count in counts.values())
    assert [draw(7, 2, step, 5) for step in range(50)] == [draw(7, 2, step, 5) for step in range(50)]
    assert [draw(7, 2, step, 5) for step in range(50)] != [draw(8, 2, step, 5) for step in range(50)]


def test_active_workers_are_told_a_partner_and_passive_ones_are_not() -> None:
    job = Job("adpsgd:ring", 4).start()
    asked = set()
    for _ in range(20):
        for worker in range(4):
            (release,) = only(Release, job.push(worker))
            assert (release.directive.mixing is not None) == (worker % 2 == 0)
            if release.directive.mixing is not None:
                ((partner, _),) = release.directive.mixing.send
                assert release.directive.mixing == Mixing(0.5, ((partner, 0.5),), ((partner, 0.5),))
                asked.add((worker, partner))
    assert asked == {(0, 1), (0, 3), (2, 1), (2, 3)}


def test_a_worker_alone_has_no_partner() -> None:
    job = Job("adpsgd:ring", 1).start()
    assert only(Release, job.push(0)) == [Release(0, 1, 1, NextMixing())]


def test_a_hanging_worker_holds_no_other_back() -> None:
    job = Job("adpsgd:ring", 5).start()
    for _ in range(30):
        for worker in (0, 1, 2, 4):
            job.push(worker)
    assert not job.held
    assert job.steps == {0: 30, 1: 30, 2: 30, 3: 0, 4: 30}


def test_another_seed_draws_other_partners() -> None:
    def partners(sync: str) -> list[object]:
        job = Job(sync, 4).start()
        return [only(Release, job.push(0))[0].directive.mixing for _ in range(20)]

    assert partners("adpsgd:ring") == partners("adpsgd:ring,seed=0")
    assert partners("adpsgd:ring") != partners("adpsgd:ring,seed=1")


# Mass.


class Pairs:
    """The values (x, w) of all members, averaged when a release names a pair."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Fraction, Fraction]] = {}
        self.begun = self.gone = (Fraction(0), Fraction(0))

    def follow(self, job: Job) -> None:
        event, _, actions = job.history[-1]
        if isinstance(event, Left) and event.worker in self.values:
            self.gone = plus(self.gone, self.values.pop(event.worker))
        for release in only(Release, actions):
            self.release(release)

    def release(self, release: Release) -> None:
        worker = release.worker
        first = worker not in self.values
        value = self.values.setdefault(worker, (Fraction(0), Fraction(0)))
        if first and not release.directive.enters:
            self.values[worker] = value = Fraction(3**worker), Fraction(1)
            self.begun = plus(self.begun, value)
        assert release.directive.enters == (value[1] == 0)
        if release.directive.mixing is not None:
            ((partner, _),) = release.directive.mixing.send
            if partner in self.values:  # at the start it may be released a moment later
                other = self.values[partner]
                assert other[1] > 0, "a partner has a model"
                self.values[worker] = self.values[partner] = (value[0] + other[0]) / 2, (value[1] + other[1]) / 2


def plus(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> tuple[Fraction, Fraction]:
    return one[0] + other[0], one[1] + other[1]


@under_each(SYNCS)
def test_pairs_keep_the_mass_and_meet_at_the_mean(sync: str, game: Game) -> None:
    """What members have, and what those that left took along, is what they began with; without gradients all models meet."""
    pairs = Pairs()
    for job in play(sync, game):
        pairs.follow(job)
        kept = pairs.gone
        for value in pairs.values.values():
            kept = plus(kept, value)
        assert kept == pairs.begun
    if not job.steps:
        return
    pairs.values = {worker: (float(x), float(w)) for worker, (x, w) in pairs.values.items()}  # type: ignore[misc]
    mean = sum(x for x, _ in pairs.values.values()) / sum(w for _, w in pairs.values.values())
    for _ in range(60 * len(job.steps)):
        for worker in sorted(job.steps):
            job.push(worker)
            pairs.follow(job)
        if all(abs(x / w - mean) <= 1e-6 * max(1, abs(mean)) for x, w in pairs.values.values()):
            return
    raise AssertionError(f"{pairs.values} do not meet at {mean}")


def test_a_joiner_asks_until_it_has_a_model() -> None:
    job = Job("adpsgd:ring", 3).start()
    (release,) = only(Release, job.join(0 + 5))
    assert release.directive.enters
    assert release.directive.mixing is not None
    assert release.directive.mixing.send[0][0] == 1, "the passive one"
    declined = only(Release, job.feed(Pushed(5, release.step, samples=0)))[0]
    assert declined.directive.enters, "a push without samples: it has no model yet"
    assert declined.directive.mixing is not None
    after = only(Release, job.push(5))[0]
    assert not after.directive.enters
    assert after.directive.mixing is None, "its place is odd now: it is passive"


def test_a_joiner_is_asked_by_none_before_it_has_a_model() -> None:
    job = Job("adpsgd:ring", 1).start()
    job.join(3)
    assert [only(Release, job.push(0))[0].directive.mixing for _ in range(5)] == [None] * 5
    job.push(3)
    assert only(Release, job.push(0))[0].directive.mixing == Mixing(0.5, ((3, 0.5),), ((3, 0.5),))


# The state machine of a pair.


def test_a_joiner_that_leaves_while_it_waits_for_a_model_computes_nothing() -> None:
    machine = PairMachine(2)
    machine.handle(Admit(2, 0), 0.0)
    half = ((1, 0.5),)
    asked = machine.handle(Release(2, 0, 0, NextMixing(Mixing(0.5, half, half), (), True)), 0.0)
    assert any(isinstance(order, AskPartner) for order in asked)
    machine.handle(Leaving(), 0.0)
    assert not machine.handle(Replied(1, 0, True), 0.0)
    assert machine.is_free


def test_a_pair_is_averaged() -> None:
    active, passive = PairAveraging(0), PairAveraging(1)
    active.begin(4, 1)
    assert active.waiting_for == 1
    assert passive.grants()
    assert active.replied(1, 4)
    assert active.waiting_for is None
    assert not active.replied(1, 4), "once"


def test_one_that_waits_declines_and_goes_on() -> None:
    one, other = PairAveraging(0), PairAveraging(1)
    one.begin(0, 1)
    other.begin(0, 0)
    assert not one.grants()
    assert other.replied(0, 0)
    assert other.grants()


def test_a_lost_partner_ends_the_wait_and_its_late_reply_is_ignored() -> None:
    active = PairAveraging(2)
    active.begin(7, 3)
    assert not active.lost(1)
    assert active.lost(3)
    assert not active.replied(3, 7)
    active.begin(8, 3)
    assert not active.replied(3, 7), "of another step"


def test_what_a_driver_may_not_do() -> None:
    active = PairAveraging(2)
    with pytest.raises(OrderError, match="worker 2 cannot average with itself"):
        active.begin(0, 2)
    active.begin(0, 1)
    with pytest.raises(OrderError, match="began to average with worker 3 while it waits for worker 1"):
        active.begin(1, 3)

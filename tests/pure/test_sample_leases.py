"""Leases of samples at the sequencer: every place is done once, whatever returns and whatever is asked twice."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from polytempo.server.sample_leases import SampleLeases

from polytempo.protocol.messages import LeaseSamples, Push
from polytempo.protocol.values import Position, PushId

WORKERS = 3


def ask(request: int, count: int = 4, epoch: int = 0, turn: int = 0, length: int = 20, **more: object) -> LeaseSamples:
    return LeaseSamples(request=request, sampler="a", epoch=epoch, length=length, turn=turn, count=count, **more)  # type: ignore[arg-type]


def push_of(worker: int, ranges: object, epoch: int = 0) -> Push:
    return Push(id=PushId("0", worker, 0, 0), positions=(Position(epoch, 0, "a", done=tuple(ranges)),))  # type: ignore[arg-type]


def test_an_answer_that_was_lost_is_given_again() -> None:
    leases = SampleLeases(WORKERS)
    first = leases.lease(0, ask(1))
    assert leases.lease(0, ask(1)) == first
    assert first.ranges == ((0, 4),)
    assert leases.lease(0, ask(2)).ranges == ((4, 8),)


def test_less_is_given_ahead_near_the_end() -> None:
    leases = SampleLeases(WORKERS)
    sizes = []
    for request in range(100):
        got = leases.lease(request % WORKERS, ask(request, length=240, ahead=12)).ranges
        sizes.append(sum(stop - start for start, stop in got))
    given_out = [size for size in sizes if size]
    assert sum(given_out) == 240
    assert given_out[0] == 16
    assert max(given_out[-4:]) == 4


def test_what_a_worker_held_returns_but_not_what_is_still_to_be_applied() -> None:
    leases = SampleLeases(WORKERS)
    leases.lease(0, ask(1, 6))
    pending = push_of(0, [(0, 2)])
    leases.left(0, [pending])
    assert leases.lease(1, ask(1, 20)).ranges == ((2, 20),)
    leases.applied(pending)
    leases.discarded(push_of(1, [(4, 6)]))
    assert leases.lease(2, ask(1, 20)).ranges == ((4, 6),)


def test_a_place_that_returns_late_is_named_in_the_next_epoch() -> None:
    leases = SampleLeases(WORKERS)
    leases.lease(0, ask(1, 20))
    leases.applied(push_of(0, [(0, 18)]))
    assert leases.lease(1, ask(1, 4, epoch=1)).earlier == ()
    leases.lease(0, ask(2, 0, back=((18, 20),)))
    assert leases.lease(1, ask(2, 4, epoch=1)).earlier == (0,)
    assert leases.lease(1, ask(3, 4, epoch=0)).ranges == ((18, 20),)
    assert leases.lease(1, ask(4, 4, epoch=0, turn=1)).ranges == ((0, 4),)


@given(st.integers(0, 2**32 - 1))
def test_every_place_is_done_once(seed: int) -> None:
    """Workers lease, push, abandon, have pushes discarded, leave and come back, in any order."""
    dice, leases, length = random.Random(seed), SampleLeases(WORKERS), 40
    held: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(WORKERS)}
    done: list[int] = []
    request, steps = 0, 0
    while len(done) < length:
        steps += 1
        worker, what = dice.randrange(WORKERS), dice.choice(["take", "push", "push", "discard", "back", "leave"])
        what = "push" if steps > 200 and held[worker] else "take" if steps > 200 else what
        request += 1
        if what == "take":
            held[worker] += leases.lease(worker, ask(request, dice.randint(1, 6), length=length, ahead=8)).ranges
        elif what == "leave":
            leases.left(worker, [])
            held[worker] = []
        elif held[worker]:
            chosen = held[worker].pop(dice.randrange(len(held[worker])))
            if what == "push":
                leases.applied(push_of(worker, [chosen]))
                done += range(*chosen)
            elif what == "discard":
                leases.discarded(push_of(worker, [chosen]))
            else:
                leases.lease(worker, ask(request, 0, length=length, back=(chosen,)))
    assert sorted(done) == list(range(length))

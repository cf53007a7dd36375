"""`plan_checker.py` on plans with a mistake in them."""

from __future__ import annotations

import pytest
from plan_checker import PlanError, SymbolicRun, check
from planning import ROOTED, Plans, apart, complaint, one_host, plans_of

from polytempo.collectives.plans import PLANS
from polytempo.collectives.steps import Combine, Copy, Fetch, HostRanks, Meet, Put, Receive, Send, Step


@pytest.mark.parametrize(("collective", "algorithm"), list(PLANS))
@pytest.mark.parametrize("pieces", [1, 2])
def test_no_step_can_be_left_out(collective: str, algorithm: str, pieces: int) -> None:
    hosts = ((0, 1), (2,), (3, 4)) if algorithm == "hierarchical" else one_host(5)
    chunks, plans = plans_of(collective, algorithm, hosts, pieces, root=1 if collective in ROOTED else 0)
    for rank, plan in enumerate(plans):
        for index in range(len(plan)):
            shorter = [*plans[:rank], plan[:index] + plan[index + 1 :], *plans[rank + 1 :]]
            complaint(shorter, collective, hosts, chunks, root=1 if collective in ROOTED else 0)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [key for key in PLANS if key[1] in ("shared-memory", "hierarchical") and key[0] != "barrier"],
)
def test_no_meeting_can_be_left_out_by_everybody(collective: str, algorithm: str) -> None:
    hosts = ((0, 1), (2, 3, 4)) if algorithm == "hierarchical" else one_host(3)
    chunks, plans = plans_of(collective, algorithm, hosts)
    meetings = max(sum(isinstance(step, Meet) for step in plan) for plan in plans)
    for number in range(meetings):
        assert complaint([without(plan, number) for plan in plans], collective, hosts, chunks).startswith("race")


def without(plan: list[Step], meeting: int) -> list[Step]:
    index = [index for index, step in enumerate(plan) if isinstance(step, Meet)][meeting]
    return plan[:index] + plan[index + 1 :]


@pytest.mark.parametrize("algorithm", ["ring", "tree", "double-tree", "halving-doubling"])
def test_a_missing_send_is_a_deadlock(algorithm: str) -> None:
    chunks, plans = plans_of("all_reduce", algorithm, apart(4))
    last = max(index for index, step in enumerate(plans[0]) if isinstance(step, Send))
    del plans[0][last]
    text = complaint(plans, "all_reduce", apart(4), chunks)
    assert text.startswith("deadlock: rank ")
    assert "waits for rank 0" in text


@pytest.mark.parametrize("algorithm", ["ring", "tree", "double-tree", "halving-doubling"])
def test_a_message_that_nobody_wants_is_left_over(algorithm: str) -> None:
    chunks, plans = plans_of("all_reduce", algorithm, apart(4))
    plans[1].append(Send(2, 0))
    text = complaint(plans, "all_reduce", apart(4), chunks)
    assert text == "left over: rank 1 sends 1 messages to rank 2 that are never received, the first with chunk 0"


def test_sent_before_it_is_added_up() -> None:
    chunks, plans = plans_of("reduce", "tree", apart(4))
    assert plans[2] == [Combine(3, 0), Send(0, 0)]
    plans[2].reverse()
    assert complaint(plans, "reduce", apart(4), chunks).startswith("race: rank 2 at step 1 (combine 0 from 3)")


def test_a_part_that_is_missing_and_one_that_is_there_twice() -> None:
    chunks, plans = plans_of("reduce", "tree", apart(2))
    twice = [[*plans[0], *plans[0]], [*plans[1], *plans[1]]]
    assert complaint(twice, "reduce", apart(2), chunks) == (
        "wrong result: chunk 0 of rank 0 has more than once chunk 0 of rank 1"
    )
    text = complaint([[], []], "reduce", apart(2), chunks)
    assert text == "wrong result: chunk 0 of rank 0 misses chunk 0 of rank 1"


def test_a_part_of_somebody_else() -> None:
    text = complaint([[Receive(1, 0)], [Send(0, 1)]], "all_gather", apart(2), 2)
    assert text.startswith(
        "wrong result: chunk 0 of rank 0 misses chunk 0 of rank 0; has what it should not: chunk 1 of rank 1"
    )


@pytest.mark.parametrize("algorithm", ["ring", "tree", "double-tree", "halving-doubling", "hierarchical"])
def test_a_combine_done_twice_waits_for_ever_or_takes_the_wrong_message(algorithm: str) -> None:
    hosts: HostRanks = ((0, 1), (2, 3)) if algorithm == "hierarchical" else apart(4)
    chunks, plans = plans_of("all_reduce", algorithm, hosts)
    index = next(index for index, step in enumerate(plans[0]) if isinstance(step, Combine))
    plans[0].insert(index, plans[0][index])
    assert complaint(plans, "all_reduce", hosts, chunks).startswith(("deadlock", "wrong result", "race"))


def test_adding_up_in_two_places_is_refused() -> None:
    """Recursive doubling: right but for rounding, which may differ between the two."""
    both: Plans = [[Copy(0, 1), Send(1 - rank, 1), Combine(1 - rank, 0)] for rank in range(2)]
    assert "chunk 0 is added up in several places" in complaint(both, "all_reduce", apart(2), chunks=2)


def test_put_after_the_meeting_is_a_race() -> None:
    chunks, plans = plans_of("broadcast", "shared-memory", one_host(3), root=1)
    plans[1].reverse()
    text = complaint(plans, "broadcast", one_host(3), chunks, root=1)
    assert text.startswith("race: ")
    assert "chunk 0 of rank 1's slot, maybe while it is put" in text


def test_what_is_never_put_cannot_be_read() -> None:
    plans: Plans = [[Meet((0, 1)), Fetch(1, 0, 0)], [Meet((0, 1))]]
    assert complaint(plans, "broadcast", one_host(2), 1, root=1).endswith("rank 1's slot, which is never put")


def test_a_slot_written_while_it_is_read_is_a_race() -> None:
    """Found in whichever order the two happen to be run."""
    plans: Plans = [[Put(0), Meet((0, 1)), Put(0)], [Put(0), Meet((0, 1)), Fetch(0, 0, 0)]]
    text = complaint(plans, "broadcast", one_host(2), 1)
    assert text == "race: rank 0 at step 2 (put 0) writes to its slot what rank 1 may still be reading"
    plans = [[Meet((0, 1)), Fetch(1, 0, 0)], [Put(0), Meet((0, 1)), Put(0)]]
    text = complaint(plans, "broadcast", one_host(2), 1, root=1)
    assert text == "race: rank 0 at step 1 (fetch 0 of 1 as 0) reads chunk 0 of rank 1's slot, maybe while it is put"


def test_a_message_orders_what_is_in_shared_memory() -> None:
    check([[Put(0), Send(1, 1)], [Receive(0, 1), Fetch(0, 0, 0)]], "broadcast", one_host(2), 2)


def test_a_message_stored_early_must_not_hit_a_chunk_in_use() -> None:
    """Rank 0 sends its chunk to 2, but what it then stores from 1 may arrive before."""
    plans: Plans = [[Send(2, 0), Receive(1, 0)], [Send(0, 0)], [Receive(0, 0)]]
    with pytest.raises(
        PlanError, match=r"race: rank 0 at step 1 .receive 0 from 1. writes chunk 0, which may still be on its way"
    ):
        SymbolicRun(plans, apart(3), 1).to_the_end()
    plans = [[Put(0), Receive(1, 0)], [Send(0, 0)]]
    with pytest.raises(PlanError, match=r"race: .* may store chunk 0 while an earlier step still uses it"):
        SymbolicRun(plans, one_host(2), 1).to_the_end()


def test_meetings_of_different_members_wait_for_ever() -> None:
    plans: Plans = [[Meet((0, 1))], [Meet((0, 1, 2))], []]
    text = complaint(plans, "barrier", one_host(3), 1)
    assert text == (
        "deadlock: rank 0 at step 0 (meet 0,1) waits for rank 1; "
        "rank 1 at step 0 (meet 0,1,2) waits for rank 0 and rank 2, which has ended"
    )


def test_a_barrier_must_have_heard_from_everybody() -> None:
    text = complaint([[Send(1, 0)], [Receive(0, 0)]], "barrier", apart(2), 1)
    assert text == "wrong result: rank 0 leaves the barrier without a word from rank 1"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Send(1, 5), "it has no chunk 5"),
        (Send(0, 0), "there is no peer 0"),
        (Send(7, 0), "there is no peer 7"),
        (Fetch(2, 0, 0), "rank 2 is on another host"),
        (Meet((0, 2)), "rank 2 is on another host"),
        (Meet((1,)), "it is not a member itself"),
    ],
)
def test_steps_that_cannot_be(step: Step, text: str) -> None:
    assert complaint([[step], [], []], "all_reduce", ((0, 1), (2,)), 2).endswith(f"): {text}")


def test_in_a_gather_the_others_have_only_their_own() -> None:
    assert complaint([[], [Send(0, 0)]], "gather", apart(2), 2).endswith("it has no chunk 0")

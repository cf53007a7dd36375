"""What the formulas say, and what is chosen by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.collectives.cost import PREFERENCE, Speeds, applies, choose, predict
from polytempo.collectives.plans import COLLECTIVES, PLANS
from polytempo.collectives.steps import HostRanks
from polytempo.errors import UsageError

settled = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SPEEDS = Speeds(alpha=50e-6, beta=1e-9, gamma=0.1e-9, alpha_inside=10e-6, beta_inside=0.2e-9)


def apart(size: int) -> HostRanks:
    return tuple((rank,) for rank in range(size))


def even(hosts: int, ranks: int) -> HostRanks:
    return tuple(tuple(range(host * ranks, (host + 1) * ranks)) for host in range(hosts))


HOSTS = st.builds(even, st.integers(1, 9), st.integers(1, 5))
SECONDS = st.floats(1e-12, 1e-2)


def test_every_plan_has_a_formula_and_every_algorithm_a_rank() -> None:
    for collective, algorithm in PLANS:
        assert predict(collective, algorithm, 1000, even(2, 2), SPEEDS) > 0
    assert {algorithm for _, algorithm in PLANS} == set(PREFERENCE)


@settled
@given(
    key=st.sampled_from(list(PLANS)),
    hosts=HOSTS,
    sizes=st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)),
    speeds=st.builds(Speeds, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
)
def test_more_bytes_never_take_less_time(
    key: tuple[str, str], hosts: HostRanks, sizes: tuple[int, int], speeds: Speeds
) -> None:
    fewer, more = (predict(*key, size, hosts, speeds) for size in sorted(sizes))
    assert 0 <= fewer <= more


@settled
@given(collective=st.sampled_from(COLLECTIVES), hosts=HOSTS, nbytes=st.integers(0, 10**10))
def test_the_smallest_prediction_is_chosen(collective: str, hosts: HostRanks, nbytes: int) -> None:
    choice = choose(collective, nbytes, hosts, SPEEDS)
    known = {algorithm for name, algorithm in PLANS if name == collective}
    assert set(choice.predicted) == {algorithm for algorithm in known if applies(algorithm, hosts)}
    assert choice.predicted[choice.algorithm] == pytest.approx(min(choice.predicted.values()), rel=1e-5)
    assert choice.reason.startswith(f"{choice.algorithm}: ")


def test_the_textbook_formulas_for_ranks_of_one_host_each() -> None:
    p, n, s = 8, 10**6, SPEEDS
    part = (p - 1) / p * n
    ring = 2 * (p - 1) * s.alpha + part * (2 * s.beta + s.gamma)
    assert predict("all_reduce", "ring", n, apart(p), s) == pytest.approx(ring)
    assert predict("all_reduce", "halving-doubling", n, apart(p), s) == pytest.approx(ring)
    tree = 2 * 3 * (s.alpha + n * s.beta) + 3 * n * s.gamma
    assert predict("all_reduce", "tree", n, apart(p), s) == pytest.approx(tree)
    assert predict("broadcast", "tree", n, apart(p), s) == pytest.approx(3 * (s.alpha + n * s.beta))
    assert predict("broadcast", "ring", n, apart(2), s) == pytest.approx(s.alpha + n * s.beta)
    assert predict("barrier", "tree", n, apart(p), s) == pytest.approx(3 * s.alpha)


def test_ranks_that_share_a_link_share_its_bandwidth() -> None:
    """The same hosts with four ranks each: halving and all-to-all send four times as much over a link."""
    free = replace(SPEEDS, alpha=0, alpha_inside=0, beta_inside=0, gamma=0)
    one = predict("all_reduce", "halving-doubling", 10**6, apart(2), free)
    four = predict("all_reduce", "halving-doubling", 10**6, even(2, 4), free)
    assert four == pytest.approx(4 * one)
    assert predict("all_to_all", "linear", 10**6, even(2, 4), free) == pytest.approx(10**6 * free.beta * 4 * 4 / 8)


@pytest.mark.parametrize("hosts", [8, 12, 16, 32])
def test_many_hosts_take_a_tree_for_little_and_a_ring_for_much(hosts: int) -> None:
    assert choose("all_reduce", 1000, apart(hosts), SPEEDS).algorithm == "tree"
    assert choose("all_reduce", 200_000, apart(hosts), SPEEDS).algorithm == "double-tree"
    assert choose("all_reduce", 10**9, apart(hosts), SPEEDS).algorithm == "ring"


@pytest.mark.parametrize("nbytes", [0, 1000, 10**6, 10**9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_one_host_shares_memory(nbytes: int, ranks: int) -> None:
    for collective in COLLECTIVES:
        if collective != "reduce":
            assert choose(collective, nbytes, even(1, ranks), SPEEDS).algorithm == "shared-memory"


def test_a_root_that_adds_up_alone_is_slower_than_a_tree() -> None:
    slow_adding = replace(SPEEDS, gamma=1e-9)
    assert choose("reduce", 10**8, even(1, 8), slow_adding).algorithm == "tree"
    assert choose("reduce", 1000, even(1, 8), slow_adding).algorithm == "shared-memory"


@pytest.mark.parametrize("nbytes", [1000, 10**6, 10**9])
def test_several_hosts_of_several_ranks_go_in_two_levels(nbytes: int) -> None:
    choice = choose("all_reduce", nbytes, even(2, 4), SPEEDS)
    assert choice.algorithm == "hierarchical"
    assert "hierarchical" not in choose("all_reduce", nbytes, apart(4), SPEEDS).predicted
    assert "shared-memory" not in choice.predicted


def test_the_reason_is_a_sentence() -> None:
    slow = replace(SPEEDS, beta=1e-7)
    assert choose("all_reduce", 10**7, even(2, 2), slow).reason == (
        "hierarchical: 1.01 s expected over 2 hosts, ring 1.5 s, double-tree 2 s, halving-doubling 2 s, tree 2.01 s"
    )
    assert choose("gather", 0, apart(2), SPEEDS).reason == "linear: 50 µs expected over 2 hosts, nothing else applies"


def test_a_single_rank_takes_no_time() -> None:
    assert all(predict(*key, 10**6, apart(1), SPEEDS) == 0 for key in PLANS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="there are: linear, shared-memory"):
        predict("gather", "ring", 1, apart(2), SPEEDS)
    with pytest.raises(UsageError, match="there is no collective"):
        choose("sum", 1, apart(2), SPEEDS)

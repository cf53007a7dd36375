"""Mixing matrices: stochastic for any number of members, and as fast as the theory says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polytempo.errors import SpecError
from polytempo.sync.directives import Mixing
from polytempo.sync.spec import parse_spec
from polytempo.sync.topology import TOPOLOGIES, check_size, mixing_rows, phases

SIZES = range(1, 18)
KINDS = (*((name, False) for name in TOPOLOGIES), ("exp", True))
every_kind = pytest.mark.parametrize(("topology", "static"), KINDS)


def matrix(rows: dict[int, Mixing]) -> np.ndarray:
    """P as what is received; `sent` must be the same."""
    ranks = sorted(rows)
    place = {rank: index for index, rank in enumerate(ranks)}
    received, sent = np.zeros((2, len(ranks), len(ranks)))
    for rank, row in rows.items():
        received[place[rank], place[rank]] = sent[place[rank], place[rank]] = row.keep
        for other, share in row.receive:
            received[place[rank], place[other]] += share
        for other, share in row.send:
            sent[place[other], place[rank]] += share
    assert (received == sent).all(), "what one sends is what the other receives"
    return received


def gap(topology: str, count: int, static: bool = False) -> float:
    sizes = sorted(abs(np.linalg.eigvals(matrix(mixing_rows(topology, tuple(range(count)), 0, static)))))
    return 1 - float(sizes[-2])


@every_kind
@pytest.mark.parametrize("count", SIZES)
def test_rows_and_columns_sum_to_one(topology: str, static: bool, count: int) -> None:
    members = tuple(3 * position + 1 for position in range(count))
    for step in range(phases(topology, count, static) + 1):
        mixing = matrix(mixing_rows(topology, members, step, static))
        assert abs(mixing.sum(axis=0) - 1).max() <= 1e-12
        assert abs(mixing.sum(axis=1) - 1).max() <= 1e-12
        assert mixing.min() >= 0
        assert (mixing.diagonal() > 0).all()
        if topology != "exp":
            assert (mixing == mixing.T).all()


@every_kind
@pytest.mark.parametrize("count", SIZES)
def test_all_members_are_connected(topology: str, static: bool, count: int) -> None:
    product = np.eye(count)
    for step in range(2 * count):
        product = matrix(mixing_rows(topology, tuple(range(count)), step, static)) @ product
    assert product.min() > 0


def test_the_weights_that_are_published() -> None:
    ring = mixing_rows("ring", (0, 1, 2, 3))
    assert ring[0] == Mixing(pytest.approx(1 / 3), ((1, 1 / 3), (3, 1 / 3)), ((1, 1 / 3), (3, 1 / 3)))
    assert mixing_rows("ring", (4, 7))[4] == Mixing(0.5, ((7, 0.5),), ((7, 0.5),))
    assert mixing_rows("ring", (4,))[4] == Mixing(1.0, (), ())
    torus = mixing_rows("torus", tuple(range(9)))
    assert torus[4] == Mixing(pytest.approx(0.2), *[tuple((other, 0.2) for other in (1, 3, 5, 7))] * 2)
    assert {share for _, share in mixing_rows("torus", tuple(range(6)))[0].send} == {0.25}  # two rows: one edge between
    assert mixing_rows("exp", (2, 5, 6, 8), 1)[5] == Mixing(0.5, ((8, 0.5),), ((8, 0.5),))
    assert mixing_rows("exp", (2, 5, 6, 8, 9), 2)[2] == Mixing(0.5, ((9, 0.5),), ((5, 0.5),))
    full = matrix(mixing_rows("full", tuple(range(5))))
    assert abs(full - 1 / 5).max() < 1e-15


@pytest.mark.parametrize(
    ("topology", "static", "count", "expected"),
    [
        ("ring", False, 4, 0.667),
        ("ring", False, 8, 0.195),
        ("ring", False, 16, 0.051),
        ("exp", True, 4, 0.667),
        ("exp", True, 8, 0.5),
        ("exp", True, 16, 0.4),
        ("full", False, 7, 1.0),
    ],
)
def test_spectral_gaps(topology: str, static: bool, count: int, expected: float) -> None:
    assert gap(topology, count, static) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("topology", ["ring", "torus", "full"])
@pytest.mark.parametrize("count", [2, 3, 4, 6, 9, 16])
def test_the_distance_to_the_mean_shrinks_by_the_second_eigenvalue(topology: str, count: int) -> None:
    """At most by it in every step for any start, and by exactly it for the slowest one."""
    mixing = matrix(mixing_rows(topology, tuple(range(count))))
    second = 1 - gap(topology, count)
    values = np.random.default_rng(count).normal(size=(count, 3))
    mean = values.mean(axis=0)
    for _ in range(30):
        before = np.linalg.norm(values - mean)
        values = mixing @ values
        assert np.linalg.norm(values - mean) <= second * before + 1e-12
    sizes, vectors = np.linalg.eigh(mixing)
    slowest = vectors[:, np.argsort(abs(sizes))[-2]]
    assert np.linalg.norm(mixing @ slowest) == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_one_peer_exponential_is_exact_after_log2_n_steps(count: int, first: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    mean, rounds = values.mean(), int(math.log2(count))
    for step in range(first, first + rounds):
        assert step == first or count == 1 or abs(values - mean).max() > 1e-9, "not earlier"
        values = matrix(mixing_rows("exp", tuple(range(count)), step)) @ values
    assert abs(values - mean).max() < 1e-14


# Sizes.


@pytest.mark.parametrize(("workers", "instead"), [(2, "4"), (3, "4"), (5, "4 or 6"), (7, "6 or 8"), (13, "12 or 14")])
def test_a_torus_that_does_not_factor_is_refused(workers: int, instead: str) -> None:
    with pytest.raises(
        SpecError, match=f"rows x columns of workers, both at least 2, got {workers}; start {instead} of them"
    ):
        parse_spec("gossip:torus").policy(workers)


@pytest.mark.parametrize("workers", [1, 4, 6, 8, 9, 10, 12, 15, 16])
def test_a_torus_that_factors_is_not(workers: int) -> None:
    check_size("torus", workers)


def test_static_is_for_exp_alone() -> None:
    with pytest.raises(SpecError, match="static=1 is an option of gossip:exp, got gossip:ring"):
        parse_spec("gossip:ring,static=1")

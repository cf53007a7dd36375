"""Momentum at each worker that looks ahead is stable at rates at which that of servers is not, on a quadratic.

Workers push in turn, one push of each in flight, made by `optim/worker_momentum.py` and torch's SGD: what one round makes of
the values, of what workers have read and of the velocities is a matrix, whose column is what it makes of one of them alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.optim.worker_momentum import GradientMomentum

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "stable_rates.py"


def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stable_rates", FIGURES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RATES = figures()
momenta = st.just(0.0) | st.floats(0.001, 0.95)  # matrices with 1e-200 in them have no eigenvalues that LAPACK finds
numbers_of_workers = st.integers(2, 16)


def sgd(values: torch.Tensor, rate: float, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD([values], lr=rate, momentum=momentum)


class Turns:
    """Workers in turn, and servers; each element of their tensors is a job of its own."""

    def __init__(self, way: str, momentum: float, workers: int, rate: float) -> None:
        count = 1 if way == "server" else workers
        velocities = count if momentum else 0
        ones = torch.eye(1 + workers + velocities, dtype=torch.float64)
        self.values, self.way = ones[0].clone(), way
        self.read = [torch.nn.Parameter(ones[1 + worker].clone()) for worker in range(workers)]
        self.at_workers = [sgd(read, rate, momentum) for read in self.read]
        self.on_servers = sgd(self.values, rate / workers, momentum if way == "server" else 0.0)
        self.optimizers = [self.on_servers] if way == "server" else self.at_workers
        for number in range(velocities):
            (param,) = self.optimizers[number].param_groups[0]["params"]
            self.optimizers[number].state[param]["momentum_buffer"] = ones[1 + workers + number].clone()
        self.momenta = [GradientMomentum(one, way == "lookahead") for one in self.at_workers]

    def push(self, worker: int) -> None:
        read = self.read[worker]
        read.grad = read.detach().clone()  # of x^2 / 2
        self.values.grad = read.grad.clone()
        if self.way != "server":
            self.momenta[worker].push(read, read.grad, self.values.grad)
        self.on_servers.step()
        read.data.copy_(self.values)

    def round(self) -> torch.Tensor:
        """The matrix."""
        for worker in range(len(self.read)):
            self.push(worker)
        velocities = [one.state[param].get("momentum_buffer") for one in self.optimizers for param in one.state]
        return torch.stack([self.values, *(read.detach() for read in self.read), *filter(torch.is_tensor, velocities)])


def growth(way: str, momentum: float, workers: int, rate: float) -> float:
    """By what the error is multiplied in a round, in the long run."""
    return float(torch.linalg.eigvals(Turns(way, momentum, workers, rate).round()).abs().max())


def check_edge(way: str, momentum: float, workers: int) -> None:
    edge = RATES.largest_stable_rate(way, momentum, workers)
    assert growth(way, momentum, workers, 0.99 * edge) < 1
    assert growth(way, momentum, workers, 1.01 * edge) > 1


def check_order(momentum: float, workers: int) -> None:
    ahead, server = (RATES.largest_stable_rate(way, momentum, workers) for way in ("lookahead", "server"))
    assert ahead >= server * (1 - 1e-9)


same = settings(max_examples=40)
more = settings(max_examples=2000)


@same
@given(st.sampled_from(("server", "worker", "lookahead")), momenta, st.integers(1, 16))
def test_real_workers_diverge_where_the_formula_says(way: str, momentum: float, workers: int) -> None:
    check_edge(way, momentum, workers)


@pytest.mark.proof
@more
@given(st.sampled_from(("server", "worker", "lookahead")), momenta, st.integers(1, 16))
def test_real_workers_diverge_where_the_formula_says_many(way: str, momentum: float, workers: int) -> None:
    check_edge(way, momentum, workers)


@same
@given(momenta, numbers_of_workers)
def test_looking_ahead_is_never_below_the_servers_momentum(momentum: float, workers: int) -> None:
    check_order(momentum, workers)


@pytest.mark.proof
@more
@given(momenta, numbers_of_workers)
def test_looking_ahead_is_never_below_the_servers_momentum_many(momentum: float, workers: int) -> None:
    check_order(momentum, workers)


@pytest.mark.parametrize(
    ("momentum", "least", "most"),
    [(0.0, 1.0, 1.0), (0.3, 1.1, 1.15), (0.5, 1.3, 1.5), (0.8, 2.8, 3.3), (0.9, 5.6, 6.4), (0.95, 10.9, 12.6)],
)
def test_how_much_further_looking_ahead_goes(momentum: float, least: float, most: float) -> None:
    for workers in range(2, 17):
        ahead, server = (RATES.largest_stable_rate(way, momentum, workers) for way in ("lookahead", "server"))
        assert least - 0.01 <= ahead / server <= most + 0.01
        assert momentum != 0.9 or ahead >= 4 * server


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9, 0.99])
def test_alone_each_way_is_that_of_one_process(momentum: float) -> None:
    """Nesterov's own limit, and that of Polyak's momentum."""
    nesterov, polyak = 2 * (1 + momentum) / (1 + 2 * momentum), 2 * (1 + momentum)
    assert RATES.largest_stable_rate("lookahead", momentum, 1) == pytest.approx(nesterov, rel=1e-9)
    for way in ("server", "worker"):
        assert RATES.largest_stable_rate(way, momentum, 1) == pytest.approx(polyak, rel=1e-9)
    assert growth("lookahead", momentum, 1, nesterov * 0.999) < 1 < growth("lookahead", momentum, 1, nesterov * 1.001)


@pytest.mark.parametrize(("momentum", "workers"), [(0.9, 4), (0.5, 2), (0.8, 7)])
def test_below_the_edge_all_rates_are_stable(momentum: float, workers: int) -> None:
    """So that the smallest crossing is the edge, and no island lies below it."""
    for way in ("server", "worker", "lookahead"):
        edge = RATES.largest_stable_rate(way, momentum, workers)
        for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
            assert growth(way, momentum, workers, share * edge) < 1

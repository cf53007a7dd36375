"""What a script does with its model and optimizer works as in one process: models, dtypes, several optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from by_hand import STATEFUL, Gradients, mean_of, plain
from helpers import (
    MakeOptimizer,
    assert_close,
    assert_equal,
    begun,
    copied,
    joined,
    loss_of,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    weights,
)
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedSampler

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]


def test_frozen_parameters_stay_as_they_are() -> None:
    model, data = small_model(), small_batches(5, (4, 4))
    model[0].weight.requires_grad_(False)

    def train(model: nn.Module, wrapped: DistributedOptimizer | torch.optim.Optimizer, rank: int | None) -> None:
        for step in data:
            wrapped.zero_grad()
            loss_of(model, joined(step) if rank is None else step[rank]).backward()
            wrapped.step()

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        train(mine, DistributedOptimizer(STATEFUL["adam"](list(mine.parameters()))), session.rank)
        return weights(mine)

    alone = copy.deepcopy(model)
    train(alone, STATEFUL["adam"](list(alone.parameters())), None)
    with ThreadJob(2, 2) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, weights(alone), rtol=1e-9)
        assert_equal(result[:1], [model[0].weight.detach()])


class Tied(nn.Module):
    """An autoencoder whose two layers share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(torch.tanh(self.encode(x))))  # type: ignore[no-any-return]


def train_both(model: nn.Module, make: MakeOptimizer, steps: int = 10, workers: int = 2) -> tuple[list, list]:
    """The weights of one process, and those of each worker."""
    data = small_batches(steps, (4,) * workers)

    def run(mine: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None) -> list[torch.Tensor]:
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, joined(step) if rank is None else step[rank]).backward()
            optimizer.step()
        return weights(mine)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        return run(mine, DistributedOptimizer(make(list(mine.parameters())), mine), session.rank)

    alone = copy.deepcopy(model)
    wanted = run(alone, make(list(alone.parameters())), None)
    with ThreadJob(workers, 2) as job:
        return wanted, job.run(work)


def test_tied_parameters_are_one_parameter() -> None:
    model = made_from_seed(4, Tied).double()
    wanted, results = train_both(model, STATEFUL["momentum"])
    assert len(wanted) == 4
    for result in results:
        assert_close(result, wanted, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # of torch.compile, on that one version
def test_a_compiled_model_trains_as_it_is() -> None:
    model, data = small_model(), small_batches(6, (4,))

    def run(called: nn.Module, mine: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for (batch,) in data:
            optimizer.zero_grad()
            loss_of(called, batch).backward()
            optimizer.step()
        return weights(mine)

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        compiled = torch.compile(mine, backend="eager")
        return run(compiled, mine, DistributedOptimizer(STATEFUL["adam"](list(compiled.parameters()))))

    alone = copy.deepcopy(model)
    wanted = run(alone, alone, STATEFUL["adam"](list(alone.parameters())))
    with ThreadJob(1, 2) as job:
        (got,) = job.run(work)
    assert_close(got, wanted, rtol=1e-9)


def test_parameters_that_are_not_contiguous_train_as_in_one_process() -> None:
    start = [nn.Parameter(p.detach().to(memory_format=torch.channels_last)) for p in made_params([(4, 3, 2, 2)])]
    start += [nn.Parameter(made_params([(6, 5)])[0].detach().t()), *made_params([(3,)])]
    assert [p.is_contiguous() for p in start] == [False, False, True]
    shapes = [tuple(p.shape) for p in start]
    workers = [made_gradients(shapes, 5, seed) for seed in (5, 6)]

    def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: Gradients) -> list[torch.Tensor]:
        for step in gradients:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    def fresh() -> list[nn.Parameter]:
        return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in start]

    def work(session: Session) -> list[torch.Tensor]:
        params = fresh()
        got = steps(params, DistributedOptimizer(STATEFUL["adam"](params)), workers[session.rank])
        assert [p.is_contiguous() for p in params] == [False, False, True]
        return got

    params = fresh()
    wanted = steps(params, STATEFUL["adam"](params), mean_of(workers))
    with ThreadJob(2, 3) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, wanted, rtol=1e-9)


@pytest.mark.parametrize("servers", [1, 3])
def test_bfloat16_beside_float32_is_plain_training_bit_for_bit(servers: int) -> None:
    shapes = [(3, 5), (7,), (4, 4), (9,)]
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    start = [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(made_params(shapes), dtypes, strict=True)]
    gradients: Gradients = [list(step) for step in made_gradients(shapes, 10)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9))
        for step in gradients:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    wanted, _ = plain(start, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), gradients)
    with ThreadJob(1, servers) as job:
        (got,) = job.run(work)
    assert_equal(got, wanted)


def test_two_optimizers_in_a_script_have_a_clock_each() -> None:
    """The second one steps every other time only, with another class."""
    model, data = small_model(), small_batches(6, (4, 4))

    def run(mine: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, rank: int | None) -> list:
        for number, step in enumerate(data):
            mine.zero_grad()
            loss_of(mine, joined(step) if rank is None else step[rank]).backward()
            first.step()
            if number % 2:
                second.step()
        return weights(mine)

    def make(mine: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return STATEFUL["adam"](list(mine[0].parameters())), STATEFUL["momentum"](list(mine[2].parameters()))

    def work(session: Session) -> tuple[list, int, int]:
        mine = copy.deepcopy(model)
        first, second = (DistributedOptimizer(optimizer, mine) for optimizer in make(mine))
        return run(mine, first, second, session.rank), first.stats["step"], second.stats["step"]

    alone = copy.deepcopy(model)
    wanted = run(alone, *make(alone), None)
    with ThreadJob(2, 2) as job:
        results = job.run(work)
    for got, first_step, second_step in results:
        assert_close(got, wanted, rtol=1e-9)
        assert (first_step, second_step) == (6, 3)


class Numbers(torch.utils.data.Dataset[int]):
    """Its samples are their own numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12: a job in threads has threads
def test_forked_loaders_share_the_data_set_among_workers() -> None:
    start = made_params([(3,)])

    def work(session: Session) -> list[int]:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        sampler = DistributedSampler(Numbers())
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, sampler=sampler, timeout=60)
        seen: list[int] = []
        for batch in begun(loader):
            set_gradients(params, [batch.double().mean() * torch.ones(3, dtype=torch.float64)])
            optimizer.step(samples=len(batch))
            seen += batch.tolist()
        return seen

    with ThreadJob(2) as job:
        seen = job.run(work)
    assert sorted(seen[0] + seen[1]) == list(range(20))
    assert [len(own) for own in seen] == [10, 10]


ODD: dict[str, tuple[list[tuple[int, ...]], MakeOptimizer]] = {
    "fewer elements than servers": ([(1,)], STATEFUL["adam"]),
    "fewer tensors than servers": ([(3, 4)], lambda p: torch.optim.Adafactor(p)),
    "an empty parameter": ([(2,), (0, 4), (3,)], STATEFUL["momentum"]),
    "an empty group": ([(3, 4)], lambda p: torch.optim.Adam([{"params": p}, {"params": []}])),
    "groups in another order": (
        [(3, 4), (2,), (5,), (2, 2)],
        lambda p: torch.optim.Adam([{"params": [p[3], p[0]]}, {"params": [p[2]], "lr": 0.3}, {"params": [p[1]]}], lr=0.01),
    ),
    "a rate that is a tensor": ([(3, 4)], lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64))),
    "foreach": ([(3, 4), (2,)], lambda p: torch.optim.Adam(p, foreach=True)),
    "fused": ([(3, 4), (2,)], lambda p: torch.optim.Adam(p, fused=True)),
    "maximize": ([(3, 4), (2,)], lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_optimizers_train_as_in_one_process(what: str) -> None:
    shapes, make = ODD[what]
    start = made_params(shapes)
    workers: list[Gradients] = [[list(step) for step in made_gradients(shapes, 4, seed)] for seed in (5, 6)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = DistributedOptimizer(make(params))
        for step in workers[session.rank]:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    wanted, _ = plain(start, make, mean_of(workers))
    with ThreadJob(2, 3) as job:
        results = job.run(work)
    for result in results:
        assert_close(result, wanted, rtol=1e-9)

"""What cannot work is refused on all ranks alike, in one line with the nearest choice, and the job can go on."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from spreading import MOMENTUM, cross_entropy, everywhere, sentences, spread, train, transformer
from torch import nn

import polytempo as pt
from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.strategy.distributed_model import digest
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import GroupJob, ThreadJob

pytestmark = pytest.mark.timeout(60)


def refused(strategy: str, size: int, **options: Any) -> set[str]:
    """What each rank was told."""

    def work(session: Session) -> str:
        with pytest.raises(UsageError) as found:
            spread(strategy, **options)
        return str(found.value)

    told = set(everywhere(size, work))
    assert all("\n" not in text for text in told)
    return told


def test_workers_heads_and_stages_that_do_not_divide() -> None:
    assert refused("data=2,pipe=3", 4) == {"data=2,pipe=3 needs 6 workers, the job has 4; nearest: data=2,pipe=2 or data=4"}
    (text,) = refused("tensor=3", 3)
    assert "divide by tensor=3" in text
    assert text.endswith("nearest: tensor=2")
    (text,) = refused("pipe=7", 7)
    assert "nearest: 5" in text
    (text,) = refused("pipe=2", 2, stages=[1, 1, 3])
    assert text == "stages= cuts the model into 3 stages, and the strategy has pipe=2"


def test_stages_without_parameters() -> None:
    def work(session: Session) -> str:
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU())
        with pytest.raises(UsageError) as found:
            Strategy(pipe=2).distribute(layers, loss=nn.functional.mse_loss, optimizer=MOMENTUM, stages=[1, 2])
        return str(found.value)

    (text,) = set(everywhere(2, work))
    assert text.startswith("stage 1 of 2 has no parameters to train")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.middle(self.embed(x)))


def test_tied_parameters_without_a_barrier() -> None:
    def work(session: Session) -> str:
        with pytest.raises(UsageError) as found:
            Strategy(2, 2, sync="ssp:1").distribute(Tied(), loss=cross_entropy, optimizer=MOMENTUM)
        return str(found.value)

    with ThreadJob(4, sync="ssp:1") as job:
        (text,) = set(job.run(work))
    assert re.match(r"stages 0, 1 hold the same parameter embed\.weight, and under sync=ssp:1", text)


def test_tied_parameters_with_one_train_as_one_process() -> None:
    data = sentences(3)
    torch.manual_seed(4)
    plain = Tied().double()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = MOMENTUM(list(plain.parameters()))
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()

    def work(session: Session) -> Any:
        model = Tied().double()
        model.load_state_dict(start)
        spreaded = Strategy(2, 2).distribute(model, loss=cross_entropy, optimizer=MOMENTUM)
        train(spreaded, data)
        return spreaded.state_dict(), spreaded.optimizer_state_dict()

    for state, saved in everywhere(4, work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-8)
        assert list(saved["state"]) == ["embed.weight", "middle.weight", "middle.bias"], "once, by its first name"


class Branching(nn.Module):
    """Cannot be traced: what it computes depends on values. Its dropout is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) if float(x.detach().sum()) > 0 else torch.tanh(self.first(x))
        result: torch.Tensor = self.second(nn.functional.dropout(hidden, 0.5, self.training))
        return result


@pytest.mark.parametrize(("strategy", "size"), [("data=2", 2), ("tensor=2", 2)])
def test_a_model_that_is_not_cut_need_not_be_traced(strategy: str, size: int) -> None:
    torch.manual_seed(5)
    start, x = Branching(), torch.randn(4, 4)
    plain = copy.deepcopy(start).eval()

    def work(session: Session) -> Any:
        model = Strategy.parse(strategy).distribute(
            copy.deepcopy(start),
            loss=nn.functional.mse_loss,
            optimizer=MOMENTUM,
            tensor_plan={"first": "column", "second": "row"},
        )
        before = model.predict(x)
        model.step(x, x)
        return before, list(model.state_dict())

    for outputs, names in everywhere(size, work):
        torch.testing.assert_close(outputs, plain(x).detach())
        assert names == list(start.state_dict())


# Batches.


def test_a_batch_that_does_not_divide() -> None:
    def work(session: Session) -> str:
        model = spread("data=2,pipe=2,microbatches=4")
        with pytest.raises(UsageError) as found:
            model.step(*sentences(1, 6)[0])
        train(model, sentences(1))
        return str(found.value)

    (text,) = set(everywhere(4, work))
    assert text.startswith("a batch of 6 samples does not divide into 4 microbatches; nearest: a batch of 4 or 8")


def test_ranks_of_a_replica_with_different_batches_are_named() -> None:
    def work(session: Session) -> str:
        model = spread("data=2,pipe=2")
        x, y = sentences(1, 4)[0]
        try:
            model.step(sentences(1, 4, seed=5)[0][0] if session.rank == 3 else x, y)
        except UsageError as error:
            return str(error)
        return ""

    told = everywhere(4, work)
    assert told[2] == told[3]
    assert told[2].startswith("ranks 2 and 3 belong to one replica and got different inputs")


def test_a_digest_tells_batches_apart() -> None:
    x = torch.arange(6)
    same = [digest((x, {"mask": x > 2})), digest((x.clone(), {"mask": x.clone() > 2}))]
    assert same[0] == same[1]
    others = [x + 1, x.reshape(2, 3), x.float(), (x, x), {"x": x}, [x, 1], "text", torch.zeros(0)]
    figures = [digest(other) for other in (x, *others)]
    assert len(set(figures)) == len(figures)
    assert digest(None) == 0


def test_ranks_with_other_models_or_strategies_are_named() -> None:
    def models(session: Session) -> str:
        with pytest.raises(UsageError) as found:
            Strategy().distribute(transformer(2 + session.rank // 2), loss=cross_entropy, optimizer=MOMENTUM)
        return str(found.value)

    def strategies(session: Session) -> str:
        with pytest.raises(UsageError) as found:
            spread("data=2,microbatches=2" if session.rank else "data=2")
        return str(found.value)

    assert {text.split(":")[0] for text in everywhere(3, models)} == {"rank 2 has another model than rank 0"}
    (text,) = set(everywhere(2, strategies))
    assert text.startswith("rank 1 has strategy data=2,sync=bsp,microbatches=2 and rank 0")


# Scopes, and the strategy of a job.


def test_a_scope_is_what_samplers_and_optimizers_use() -> None:
    data = list(range(8))

    def work(session: Session) -> Any:
        strategy = Strategy(pipe=2)
        with strategy.scope() as inside:
            assert inside == Strategy.current() == Strategy(2, 2, sync="bsp", microbatches=2)
            mine = list(pt.DistributedSampler(data, shuffle=False))
            with pytest.raises(UsageError, match=r"use strategy\.distribute"):
                pt.DistributedOptimizer(MOMENTUM(list(transformer().parameters())))
            with Strategy(data=4, sync="local:2").scope():
                optimizer = pt.DistributedOptimizer(MOMENTUM(list(transformer().parameters())))
                assert optimizer.spec.text == "local:2"
                assert len(list(pt.DistributedSampler(data))) == 2
            assert Strategy.current() == inside
        assert Strategy.current() == Strategy.of_job() == Strategy(data=4, sync="bsp")
        assert list(pt.DistributedSampler(data, shuffle=False)) == data[session.rank :: 4]
        return mine

    assert everywhere(4, work) == [data[::2], data[::2], data[1::2], data[1::2]]


class DeclaredJob(GroupJob):
    """A job of four that was started with `--strategy data=2,pipe=2`."""

    def __init__(self) -> None:
        super().__init__(4)
        facts = replace(self.sessions[0].job, strategy="data=2,pipe=2,sync=bsp,microbatches=4", replica=2)
        worlds = [session.world() for session in self.sessions]
        self.sessions = [Session(None, facts, rank) for rank in range(4)]
        for session, world in zip(self.sessions, worlds, strict=True):
            session.use(world)


def test_the_strategy_of_a_job_is_that_of_its_command() -> None:
    data = list(range(8))

    def work(session: Session) -> Any:
        assert Strategy.of_job() == Strategy.current() == Strategy(2, 2, sync="bsp", microbatches=4)
        assert list(pt.DistributedSampler(data, shuffle=False)) == data[session.rank // 2 :: 2]
        with pytest.raises(UsageError, match=r"the strategy data=2,pipe=2,sync=bsp,microbatches=4 splits it; use"):
            pt.DistributedOptimizer(MOMENTUM(list(transformer().parameters())))
        with Strategy(data=4).scope():  # what the script says wins
            pt.DistributedOptimizer(MOMENTUM(list(transformer().parameters())))
            assert len(list(pt.DistributedSampler(data))) == 2
        spread(Strategy(data=4))
        assert len(list(pt.DistributedSampler(data))) == 2, "of the model that was distributed last"

    with DeclaredJob() as job:
        job.run(work)


@pytest.mark.parametrize("sync", ["asp", "ssp:1"])
def test_modes_that_need_servers_are_refused_without_them(sync: str) -> None:
    (text,) = refused(f"data=2,pipe=2,sync={sync}", 4)
    assert "polytempo run" in text


def test_without_init_there_is_no_job() -> None:
    with pytest.raises(UsageError, match="init"):
        Strategy.of_job()

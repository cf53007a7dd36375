"""`fit` in threads: every strategy trains as one process does, runs resume exactly, and all ranks do the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import polytempo as pt
from polytempo.server.job_plan import Limits
from polytempo.testing.threads import GroupJob, ThreadJob

pytestmark = pytest.mark.long

ADAM = partial(torch.optim.Adam, lr=0.02)
cross_entropy = nn.functional.cross_entropy
WIDTH = 4


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


DATA, HELD_OUT = samples(70, 1), samples(29, 2)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def right(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == y


class Fitted:
    """The histories of all ranks, and their models."""

    def __init__(self, histories: list[pt.History], models: list[nn.Module]) -> None:
        self.histories, self.models = histories, models
        self.history = histories[0]

    @property
    def rows(self) -> list[dict[str, float]]:
        """Of rank 0, without times; those of all ranks are the same."""
        found = [[figures(row) for row in history.rows] for history in self.histories]
        assert all(rows == found[0] for rows in found)
        return found[0]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        states = [model.state_dict() for model in self.models]
        assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)
        return states[0]


def figures(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in ("seconds", "samples_per_s")}


def fitted(strategy: str, ranks: int, job: ThreadJob | None = None, data: Any = DATA, **options: Any) -> Fitted:
    """`fit` on every rank; options that are functions of the rank under the name `each`."""
    models = [network() for _ in range(ranks)]
    each: Callable[[int], dict[str, Any]] = options.pop("each", lambda rank: {})
    chosen = {"optimizer": ADAM, "batch_size": 12, "validation": HELD_OUT, "progress": False, "metrics": {"right": right}}

    def work(session: Any) -> pt.History:
        given = chosen | options | each(session.rank)
        return pt.fit(models[session.rank], data, cross_entropy, strategy=strategy, **given)

    with job or GroupJob(ranks) as running:
        return Fitted(running.run(work), models)


def assert_close(one: Fitted, other: Fitted, atol: float = 1e-10) -> None:
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    for name, value in other.state.items():
        torch.testing.assert_close(one.state[name], value, rtol=0, atol=atol)


SPREADS = [("data=2", 2), ("pipe=2", 2), ("tensor=2", 2), ("data=2,pipe=2,schedule=gpipe,microbatches=3", 4)]


@pytest.mark.parametrize(("strategy", "ranks"), SPREADS, ids=[name for name, _ in SPREADS])
def test_every_strategy_trains_as_one_process(strategy: str, ranks: int) -> None:
    options = {"epochs": 2, "clip_norm": 0.5, "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)}
    alone = fitted("data=1", 1, **options)
    assert [row["step"] for row in alone.rows] == [5, 10]
    assert alone.history["val_loss"][1] < alone.history["val_loss"][0]
    assert_close(fitted(strategy, ranks, **options), alone)


def test_one_process_is_plain_torch() -> None:
    found = fitted("data=1", 1, epochs=1, shuffle=False)
    model = network()
    optimizer = ADAM(model.parameters())
    for start in range(0, 60, 12):
        optimizer.zero_grad()
        cross_entropy(model(DATA[0][start : start + 12]), DATA[1][start : start + 12]).backward()
        optimizer.step()
    torch.testing.assert_close(found.state, dict(model.state_dict()), rtol=0, atol=1e-12)
    with torch.no_grad():
        out = model(HELD_OUT[0])
    assert found.rows[0]["val_loss"] == pytest.approx(float(cross_entropy(out, HELD_OUT[1])), abs=1e-12)
    assert found.rows[0]["val_right"] == float(right(out, HELD_OUT[1]).double().mean())


@pytest.mark.parametrize(("strategy", "ranks"), [("data=3", 3), ("pipe=2", 2), ("tensor=2", 2)])
def test_metrics_count_every_sample_once(strategy: str, ranks: int) -> None:
    """29 samples in batches of 12: the last has 5, and two of three replicas have nothing after it. Sums are exact."""
    means = {"mean": lambda out, y: (out.argmax(1) == y).double().mean(), "one": lambda out, y: torch.ones(len(y))}
    found = fitted(strategy, ranks, max_steps=2, metrics={"right": right, **means})
    with torch.no_grad():
        expected = right(found.models[0](HELD_OUT[0]), HELD_OUT[1]).double().mean()
    (row,) = found.rows
    assert row["val_right"] == float(expected)
    assert row["val_mean"] == pytest.approx(float(expected), abs=1e-12)
    assert row["val_one"] == 1.0


class Interrupted(Exception):
    pass


class Interrupt(pt.Callback):
    """Ends the process, as it were, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any) -> None:
        if run.step == self.step:
            raise Interrupted


def interrupted(strategy: str, ranks: int, step: int, **options: Any) -> None:
    with pytest.raises((Interrupted, pt.PeerError)):
        fitted(strategy, ranks, callbacks=[Interrupt(step)], **options)


SCHEDULED = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=30)


@pytest.mark.parametrize(("strategy", "ranks"), [("data=2", 2), ("data=2,pipe=2", 4)])
def test_a_resumed_run_equals_the_uninterrupted_one_exactly(strategy: str, ranks: int, tmp_path: Path) -> None:
    """It ends in the middle of the second epoch, 2 steps after a checkpoint."""
    options: dict[str, Any] = {"epochs": 3, "scheduler": SCHEDULED, "evaluate_every": 3}
    whole = fitted(strategy, ranks, **options)
    saving = options | {"checkpoint": tmp_path, "checkpoint_every": 7}
    interrupted(strategy, ranks, 9, **saving)
    resumed = fitted(strategy, ranks, **saving, resume=True)
    assert resumed.rows == whole.rows
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())


def test_a_checkpoint_of_one_strategy_is_resumed_under_others_and_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "scheduler": SCHEDULED}
    whole = fitted("data=1", 1, **options)
    steps = [("data=2,pipe=2", 4, 3), ("tensor=2", 2, 7), ("data=3", 3, 11), ("data=1", 1, None)]
    for strategy, ranks, end in steps:
        found = fitted(strategy, ranks, **options, checkpoint=tmp_path, resume=True, max_steps=end)
    for name, value in whole.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.rows[-1]["val_loss"], whole.rows[-1]["val_loss"], rtol=0, atol=1e-10)
    plain = network()
    assert found.history.checkpoint is not None
    from safetensors.torch import load_file

    plain.load_state_dict(load_file(found.history.checkpoint / "model.safetensors"))
    torch.testing.assert_close(dict(plain.state_dict()), found.state)


def test_the_last_checkpoint_and_the_best_stay(tmp_path: Path) -> None:
    rate = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 if step < 8 else 1e3)  # it gets worse
    found = fitted("data=2", 2, epochs=3, scheduler=rate, checkpoint=tmp_path)
    assert found.history.best is not None
    assert found.history.best["step"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000015"]
    assert found.history.best_checkpoint == tmp_path / "step-00000005"
    assert found.history.checkpoint == tmp_path / "step-00000015"


def test_early_stop_is_at_the_same_step_on_all_ranks() -> None:
    rate = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 if step < 6 else 1e3)
    rule = pt.EarlyStop("val_right", patience=2, largest=True)
    found = fitted("data=2,pipe=2", 4, epochs=50, scheduler=rate, evaluate_every=2, early_stop=rule)
    assert {history.stopped for history in found.histories} == {"early stop"}
    best = found.history.best
    assert best is not None
    assert found.rows.index(figures(best)) == len(found.rows) - 3
    assert max(row["val_right"] for row in found.rows) == best["val_right"]


class Steps(pt.Callback):
    """Notes what is called; may stop the run after a step, or at an evaluation."""

    def __init__(self, at_step: int = 0, at_evaluation: int = 0) -> None:
        self.at_step, self.at_evaluation = at_step, at_evaluation
        self.calls: list[str] = []

    def on_start(self, run: Any) -> None:
        self.calls.append("start")

    def on_step(self, run: Any) -> None:
        self.calls.append(f"step {run.step}")
        if run.step == self.at_step:
            run.stop()

    def on_evaluation(self, run: Any) -> None:
        self.calls.append(f"evaluation {run.row['step']}")
        if run.step == self.at_evaluation:
            run.stop()

    def on_epoch(self, run: Any) -> None:
        self.calls.append(f"epoch {run.epoch}")

    def on_end(self, run: Any) -> None:
        self.calls.append(f"end {run.history.stopped}")


def test_callbacks_are_called_in_order_on_every_rank() -> None:
    noted = [Steps() for _ in range(2)]
    fitted("pipe=2", 2, epochs=1, evaluate_every=3, each=lambda rank: {"callbacks": [noted[rank]]})
    steps = ["step 1", "step 2", "step 3", "evaluation 3", "step 4", "step 5", "evaluation 5"]
    assert noted[0].calls == noted[1].calls == ["start", *steps, "epoch 1", "end epochs"]


@pytest.mark.parametrize(("stop", "steps"), [({"at_step": 3}, 3), ({"at_evaluation": 6}, 6)])
def test_a_callback_of_one_rank_stops_all_at_the_same_step(stop: dict[str, int], steps: int) -> None:
    noted = [Steps(**(stop if rank == 1 else {})) for rank in range(4)]
    found = fitted("data=2,pipe=2", 4, epochs=9, evaluate_every=6, each=lambda rank: {"callbacks": [noted[rank]]})
    assert {history.stopped for history in found.histories} == {"callback"}
    made = {sum(call.startswith("step") for call in one.calls) for one in noted}
    assert len(made) == 1
    assert steps <= made.pop() <= 10


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_budget_of_the_launcher_ends_the_run_on_all_ranks(sync: str) -> None:
    """Under asp replicas are at different steps when it is used up; one waits at the end of an epoch for the other."""
    job = ThreadJob(2, 1, sync, limits=Limits(steps=26), slow={1: 1.5})
    found = fitted(f"data=2,sync={sync}", 2, job, epochs=50)
    assert {history.stopped for history in found.histories} == {"budget"}
    assert len(found.rows) >= 2
    if sync == "bsp":
        assert found.rows[-1]["step"] == 13  # a step of the job is one of a replica


def test_max_steps_ends_the_run_and_evaluates() -> None:
    found = fitted("data=2", 2, max_steps=7)
    assert found.history.stopped == "max_steps"
    assert [row["step"] for row in found.rows] == [5, 7]
    assert found.history["epoch"] == [0, 1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*DATA, strict=True)))


def test_a_stream_is_shared_by_the_replicas() -> None:
    assert_close(fitted("data=2", 2, data=Stream(), epochs=2), fitted("data=1", 1, shuffle=False, epochs=2))


def test_a_learning_rate_on_a_plateau_and_its_resume(tmp_path: Path) -> None:
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=0, threshold=0.5)
    options: dict[str, Any] = {"scheduler": plateau, "evaluate_every": 2, "epochs": 3}
    whole = fitted("data=2", 2, **options)
    interrupted("data=2", 2, 11, **options, checkpoint=tmp_path, checkpoint_every=4)
    resumed = fitted("data=2", 2, **options, checkpoint=tmp_path, checkpoint_every=4, resume=True)
    assert resumed.rows == whole.rows


def test_the_scope_and_alone_need_no_strategy_and_no_init() -> None:
    def work(session: Any) -> str:
        with pt.Strategy(pipe=2).scope():
            history = pt.fit(network(), DATA, cross_entropy, optimizer=ADAM, progress=False, max_steps=1)
        assert history.model is not None
        return str(history.model.strategy.pipe)

    with GroupJob(2) as job:
        assert job.run(work) == ["2", "2"]


def test_evaluate_after_the_run() -> None:
    def work(session: Any) -> tuple[dict[str, float], float]:
        history = pt.fit(network(), DATA, cross_entropy, optimizer=ADAM, validation=HELD_OUT, progress=False, batch_size=10)
        assert history.model is not None
        return pt.evaluate(history.model, HELD_OUT, metrics=[right], batch_size=7), history["val_loss"][-1]

    with GroupJob(2) as job:
        (found, loss), other = job.run(work)
    assert other == (found, loss)
    assert found["loss"] == pytest.approx(loss, abs=1e-12)
    assert 0 <= found["right"] <= 1


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (
            "data=2",
            {"batch_size": 7},
            "batch_size=7 cannot be shared by 2 replicas in 1 microbatches each; nearest: batch_size=6 or 8",
        ),
        ("pipe=2", {"batch_size": 9}, "nearest: batch_size=8 or 10"),
        ("data=4", {}, "data=4 needs 4 workers, the job has 2; nearest: data=2"),
        ("data=2", {"resume": True}, "resume=True needs checkpoint="),
        (
            "data=2",
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
            "functools.partial(torch.optim.SGD",
        ),
        (
            "data=2",
            {"early_stop": pt.EarlyStop("val_accuracy")},
            "got 'val_accuracy'; there are loss, val_loss, val_right",
        ),
    ],
)
def test_what_cannot_work_is_refused(strategy: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(pt.UsageError) as caught:
        fitted(strategy, 2, epochs=1, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("sync", ["asp", "local:4", "gossip:ring"])
def test_all_ranks_end_with_the_job_s_model_where_replicas_differ(sync: str) -> None:
    """With running statistics; the first run has no evaluation, the second, of the same job, evaluates the job's model."""
    models = [nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double() for _ in range(2)]
    given: dict[str, Any] = {"optimizer": ADAM, "batch_size": 12, "progress": False, "strategy": f"data=2,sync={sync}"}

    def work(session: Any) -> tuple[dict[str, torch.Tensor], pt.History]:
        model = models[session.rank]
        history = pt.fit(model, DATA, cross_entropy, max_steps=7, **given)
        assert history.stopped == "max_steps"
        first = copy.deepcopy(model.state_dict())
        return first, pt.fit(model, DATA, cross_entropy, max_steps=6, validation=HELD_OUT, **given)

    with ThreadJob(2, 1, sync) as job:
        found = job.run(work)
    for states in ([first for first, _ in found], [model.state_dict() for model in models]):
        for name in states[0]:
            torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-12)
    with torch.no_grad():
        expected = float(cross_entropy(models[0].eval()(HELD_OUT[0]), HELD_OUT[1]))
    assert found[0][1]["val_loss"][-1] == pytest.approx(expected, abs=1e-12)

"""The state of a worker's own optimizer: read, loaded, saved, carried to another number of workers and to other modes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MakeOptimizer, assert_close, assert_equal, copied, set_gradients, until
from own_momentum import (
    ORDER,
    START,
    ByHand,
    Tensors,
    Turn,
    by_hand,
    gradient,
    plain_turn,
    played,
)
from safetensors.torch import load_file
from test_lives import come_back

from polytempo.checkpoints import find_checkpoint
from polytempo.session.session import Session, as_current, current
from polytempo.tasks import digits
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(20)

State = dict[str, Any]
RULES: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
}
SCALES = {"SGD": 0.5, "Adam": 0.5**0.75}
#: By rule: the state in which its momentum is.
MOMENTA = {"SGD": "momentum_buffer", "Adam": "exp_avg"}


def momenta(state: State, name: str) -> Tensors:
    return [own[MOMENTA[name]] for own in state["state"].values()]


def state_after(make: MakeOptimizer, steps: int = 5) -> State:
    """Of a plain optimizer, elsewhere."""
    params = copied(START)
    optimizer = make(params)
    for number in range(steps):
        set_gradients(params, gradient([param.detach() for param in params], 7, number))
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", RULES)
def test_each_worker_reads_its_own_state_and_it_goes_on_in_plain_pytorch(name: str) -> None:
    hands: list[ByHand] = []

    def noted(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
        if one not in hands:
            hands.append(one)
        return one.change(values, gradient(values, worker, number))

    _, _, states = played("asp", RULES[name])
    by_hand(RULES[name], SCALES[name], of=noted)
    for one, state in zip(hands, states, strict=True):
        own = one._velocity if name == "SGD" else [s["exp_avg"] for s in one.optimizer.state_dict()["state"].values()]
        assert_close(momenta(state, name), own, rtol=1e-11)
        plain = RULES[name](copied(START))
        plain.load_state_dict(state)
        set_gradients(plain.param_groups[0]["params"], gradient(own, 0, 0))
        plain.step()


# Loaded.


def loading(saved: State, rank: int, at: int = 0) -> Callable[[Turn], None]:
    """This rank loads a state before this step of its own."""

    def turn(one: Turn) -> None:
        if (one.worker, one.number) == (rank, at):
            one.optimizer.load_state_dict(copy.deepcopy(saved))
        plain_turn(one)

    return turn


def loaded_by_hand(saved: State, ranks: tuple[int, ...], at: int = 0) -> Callable[[ByHand, Tensors, int, int], Tensors]:
    def turn(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
        if worker in ranks and number == at:
            one.load(saved)
        return one.change(values, gradient(values, worker, number))

    return turn


@pytest.mark.parametrize("name", RULES)
def test_a_state_loaded_before_the_first_step_reaches_all_workers(name: str) -> None:
    saved = state_after(RULES[name])
    end, _, _ = played("asp", RULES[name], loading(saved, 0))
    assert_close(end, by_hand(RULES[name], SCALES[name], of=loaded_by_hand(saved, (0, 1))), rtol=1e-11)


@pytest.mark.parametrize("name", RULES)
def test_a_state_that_the_optimizer_of_rank_0_has_when_it_is_wrapped_does_so_too(name: str) -> None:
    saved = state_after(RULES[name])

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = RULES[name](params)
        if current().rank == 0:
            optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    end, _, _ = played("asp", make)
    assert_close(end, by_hand(RULES[name], SCALES[name], of=loaded_by_hand(saved, (0, 1))), rtol=1e-11)


def test_who_has_made_a_step_or_loaded_another_keeps_its_own() -> None:
    make, saved = RULES["SGD"], state_after(RULES["SGD"])
    end, _, _ = played("asp", make, loading(saved, 0, at=1))  # worker 1 has made its first step by then
    assert_close(end, by_hand(make, 0.5, of=loaded_by_hand(saved, (0,), at=1)), rtol=1e-11)
    other = state_after(make, 3)

    def both(turn: Turn) -> None:
        loading(saved if turn.worker == 0 else other, turn.worker)(turn)

    def both_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
        return loaded_by_hand(saved if worker == 0 else other, (worker,))(one, values, worker, number)

    end, _, _ = played("asp", make, both)
    assert_close(end, by_hand(make, 0.5, of=both_by_hand), rtol=1e-11)


# Saved.


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_in_the_middle_goes_on_bit_for_bit(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where all read the newest values before their turn. It is made when worker 1 makes its second step: by then worker 0
    has made three, and hears of it after its fourth."""
    job = {"checkpoint": tmp_path, "checkpoint_every": 2}
    whole, _, states = played("asp", RULES[name], fresh=True, job_options=job)
    place = [number for number, worker in enumerate(ORDER) if worker == 1][1] + 1
    assert ORDER[:place].count(0) == 3
    assert 2 in checkpoints(tmp_path)
    resume = {"resume": tmp_path / "step-00000002"}
    end, _, after = played("asp", RULES[name], fresh=True, skip=place, job_options=resume)
    assert_equal(end, whole)
    for one, other in zip(after, states, strict=True):
        assert_equal(momenta(one, name), momenta(other, name))
    assert "the state of optimizer 0" not in capfd.readouterr().err, "it is of each worker's own last push"


def test_a_state_that_is_too_large_for_every_report_is_a_push_ahead_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that was told of a checkpoint with the answer to its next push."""
    monkeypatch.setattr("polytempo.train.script_state.LARGE", 10)
    velocities: list[Tensors] = []

    def noting(turn: Turn) -> None:
        plain_turn(turn)
        if turn.worker == 0:
            velocities.append([v.clone() for v in momenta(turn.optimizer.state_dict(), "SGD")])

    played("asp", RULES["SGD"], noting, job_options={"checkpoint": tmp_path, "checkpoint_every": 2})
    file = load_file(tmp_path / "step-00000002" / "state-worker-0.safetensors")
    assert_equal([file[f"0.{number}"].view(torch.float64) for number in (0, 2, 4)], [v.reshape(-1) for v in velocities[3]])


def resumed_with(workers: int, sync: str, directory: Path, make: MakeOptimizer) -> list[State]:
    """What the optimizers of a job that goes on have at its start."""

    def work(session: Session) -> State:
        return DistributedOptimizer(make(copied(START))).state_dict()

    with ThreadJob(workers, 1, sync, resume=directory) as job:
        return job.run(work)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_starts_from_the_mean(workers: int, name: str, tmp_path: Path) -> None:
    _, _, states = played("asp", RULES[name], job_options={"checkpoint": tmp_path})
    mean = [sum(parts) / 2 for parts in zip(*(momenta(state, name) for state in states), strict=True)]
    for state in resumed_with(workers, "asp", tmp_path, RULES[name]):  # one alone has it on the servers
        assert_close(momenta(state, name), mean, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("then", ["bsp", "asp,momentum=server", "ssp:3", "delay:2", "local:2"])
@pytest.mark.parametrize("first", ["bsp", "asp,momentum=server", "asp", "delay:2", "local:2"])
def test_adam_goes_on_under_another_mode(first: str, then: str, tmp_path: Path) -> None:
    order = [0, 1] * 4 if first in ("asp", "asp,momentum=server", "delay:2") else []
    if order:
        _, _, states = played(first, RULES["Adam"], order=order, job_options={"checkpoint": tmp_path})
    else:
        states = together(first, tmp_path)
    mean = [sum(parts) / 2 for parts in zip(*(momenta(state, "Adam") for state in states), strict=True)]
    at_workers = first not in ("bsp", "asp,momentum=server")
    for rank, state in enumerate(resumed_with(2, then, tmp_path, RULES["Adam"])):
        own = at_workers and then not in ("bsp", "asp,momentum=server")
        assert_close(momenta(state, "Adam"), momenta(states[rank], "Adam") if own else mean, rtol=1e-12)  # type: ignore[arg-type]
        if then in ("bsp", "asp,momentum=server"):
            assert "direction" not in state["state"][0], "servers have no use for the last change"


def together(sync: str, directory: Path) -> list[State]:
    """Workers that wait for each other."""

    def work(session: Session) -> State:
        params = copied(START)
        optimizer = DistributedOptimizer(RULES["Adam"](params))
        for number in range(4):
            set_gradients(params, gradient([param.detach() for param in params], session.rank, number))
            optimizer.step()
        return optimizer.state_dict()

    with ThreadJob(2, 1, sync, checkpoint=directory) as job:
        return job.run(work)


def test_a_checkpoint_that_says_nothing_of_momentum_gives_each_worker_the_servers_state(tmp_path: Path) -> None:
    """As earlier versions wrote it: plain `asp`, whose momentum is the servers'."""
    _, _, states = played("asp,momentum=server", RULES["SGD"], job_options={"checkpoint": tmp_path})
    path, manifest = find_checkpoint(tmp_path)
    text = json.dumps(manifest).replace("asp,momentum=server", "asp")
    (path / "manifest.json").write_text(text)
    for state in resumed_with(2, "asp", tmp_path, RULES["SGD"]):
        assert_equal(momenta(state, "SGD"), momenta(states[0], "SGD"))


@pytest.mark.parametrize(
    ("name", "own", "kept"),
    [("SGD", "usual_length", {"momentum_buffer"}), ("Adam", "direction", {"step", "exp_avg", "exp_avg_sq"})],
)
def test_what_workers_alone_have_use_for_is_not_loaded_into_servers(name: str, own: str, kept: set[str]) -> None:
    _, _, states = played("asp", RULES[name])
    assert set(states[0]["state"][0]) == kept | {own}

    def work(session: Session) -> State:
        optimizer = DistributedOptimizer(RULES[name](copied(START)))
        if session.rank == 0:
            optimizer.load_state_dict(copy.deepcopy(states[0]))
        return optimizer.state_dict()

    with ThreadJob(2, 2, "asp,momentum=server") as job:
        read, _ = job.run(work)
    assert set(read["state"][0]) == kept
    assert_equal(momenta(read, name), momenta(states[0], name))


# Workers that come and go.


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "given"])
@pytest.mark.parametrize("name", RULES)
def test_who_comes_back_starts_from_the_servers_values_and_what_workers_started_from(name: str, given: bool) -> None:
    """Nothing of what it had pushed is lost, and what others hold does not change when it comes. Under a schedule: each push
    counts with its worker's rate of then, scaled by the number of workers that are there. Adam comes in by degrees."""
    make, saved = RULES[name], state_after(RULES[name])
    gone, back, came = threading.Event(), threading.Event(), threading.Event()
    hands = [ByHand(make) for _ in range(3)]  # worker 0, and both lives of worker 1

    def step(params: list[torch.nn.Parameter], optimizer: DistributedOptimizer, life: int, number: int) -> None:
        optimizer.consolidate()
        optimizer.param_groups[0]["lr"] = hands[life].optimizer.param_groups[0]["lr"] = 0.05 * 0.7**number
        values = [param.detach().clone() for param in params]
        grads = gradient(values, life, number)
        set_gradients(params, grads)
        optimizer.step()
        coming_in = (1 + number + (5 if given else 0)) / 21 if life == 2 and name == "Adam" else 1.0
        pushed.append((scale() * coming_in, hands[life].change(values, grads)))

    def scale() -> float:
        active = sum(stats.left_at is None for stats in job.sequencer.statistics)
        return 1 / active if name == "SGD" else active**-0.75

    def stays(session: Session) -> Tensors:
        params = copied(START)
        optimizer = DistributedOptimizer(make(params))
        if given:
            optimizer.load_state_dict(copy.deepcopy(saved))
        step(params, optimizer, 0, 0)
        here.set()
        assert gone.wait(10)
        step(params, optimizer, 0, 1)
        back.set()
        assert came.wait(10)
        step(params, optimizer, 0, 2)
        optimizer.consolidate()
        return [param.detach().clone() for param in params]

    def leaves(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(make(params))
        assert here.wait(10)
        step(params, optimizer, 1, 0)
        session.close("failed")
        until(lambda: job.sequencer.statistics[1].left_at is not None, "worker 1 is gone")
        gone.set()
        assert back.wait(10)
        held = [param.detach() for param in START]
        for factor, changes in pushed:
            held = [value + factor * change for value, change in zip(held, changes, strict=True)]
        again = come_back(job, 1, 1)
        with as_current(again):
            params = copied(START)
            optimizer = DistributedOptimizer(make(params))
        assert_close([param.detach() for param in params], held, rtol=1e-11)
        for number in range(2):
            step(params, optimizer, 2, number)
        came.set()
        again.close()

    here, pushed = threading.Event(), list[tuple[float, Tensors]]()
    if given:
        for hand in hands:
            hand.load(saved)
    with ThreadJob(2, 2, "asp") as job:
        end, _ = job.run(lambda session: stays(session) if session.rank == 0 else leaves(session))  # type: ignore[func-returns-value]
    wanted = [param.detach() for param in START]
    for factor, changes in pushed:
        wanted = [value + factor * change for value, change in zip(wanted, changes, strict=True)]
    assert_close(end, wanted, rtol=1e-11)  # type: ignore[arg-type]


# Digits, with the rate and momentum of bsp, and a worker that was away or joins: what its first pushes do to the loss.


class Digits:
    """The task, as workers and a judge see it."""

    def __init__(self) -> None:
        task = digits(seed=0)
        (self.images, self.labels), _ = task.data
        self.model = task.model

    def loss(self, model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(self.images), self.labels))

    def differentiate(self, model: torch.nn.Module, generator: torch.Generator) -> None:
        chosen = torch.randint(0, len(self.images), (32,), generator=generator)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(self.images[chosen]), self.labels[chosen]).backward()


@pytest.mark.parametrize("what", ["away", "joins"])
@pytest.mark.parametrize("name", RULES)
def test_the_first_pushes_of_who_was_away_or_joins_do_not_throw_the_job_back(name: str, what: str) -> None:
    """Worker 1 is away for 300 updates, with a gradient of its 10th step in hand; or it leaves, and joins afresh."""
    make: MakeOptimizer = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    }[name]
    task, turn = Digits(), threading.Barrier(2)
    losses: list[float] = []

    def wrapped() -> tuple[torch.nn.Module, DistributedOptimizer]:
        model = copy.deepcopy(task.model)
        return model, DistributedOptimizer(make(list(model.parameters())))

    def judge(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
        optimizer.consolidate()
        losses.append(task.loss(model))

    def work(session: Session) -> None:
        (model, optimizer), generator = wrapped(), torch.Generator().manual_seed(session.rank)
        for _ in range(10 if session.rank else 310):
            task.differentiate(model, generator)
            optimizer.step()
        if session.rank == 0:
            judge(model, optimizer)
            turn.wait(8)
            turn.wait(8)
            return
        if what == "joins":
            session.close("failed")
            turn.wait(8)
            session = come_back(job, 1, 1)
            with as_current(session):
                model, optimizer = wrapped()
            task.differentiate(model, generator)
        else:
            task.differentiate(model, generator)
            turn.wait(8)
        for _ in range(60):
            optimizer.step()
            judge(model, optimizer)
            task.differentiate(model, generator)
        turn.wait(8)
        session.close()

    with ThreadJob(2, 1, "asp") as job:
        job.run(work)
    before, *after = losses
    assert before < 0.2
    assert max(after) < 3.5 * before, "it may rise for a while"
    assert min(after[-10:]) < before, "and training goes on"

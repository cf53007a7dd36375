"""Exchanges through device memory, with the stand-in for a GPU: the job is the CPU's, and answers are deferred."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import Batch, assert_equal, loss_of, small_batches, small_model, until, weights

from polytempo.device.device import Fences
from polytempo.device.host_device import HostDevice
from polytempo.errors import PolytempoError, UsageError
from polytempo.protocol.messages import Answer, DeviceShared
from polytempo.reducer.device_exchange import DeviceExchange
from polytempo.server.job_plan import Limits
from polytempo.session.script_calls import should_stop
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

DEVICES = [None, "stand-in"]
MODEL = small_model()  # made by the main thread: the seed is the process's
STEPS = 7
#: Mode, workers, servers, options: jobs whose result does not depend on timing.
JOBS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("bsp", 2, 2, {}),
    ("bsp", 2, 1, {"clip_norm": 0.5}),
    ("bsp", 2, 1, {"apply": "delta"}),
    ("asp", 1, 2, {}),
    ("asp", 1, 1, {"apply": "delta", "clip_norm": 0.1}),
    ("ssp:1", 1, 1, {}),
    ("asp,momentum=lookahead", 1, 2, {}),
    ("asp,momentum=lookahead", 1, 2, {"of": "SGD"}),
    ("asp,momentum=lookahead,spike=1.01", 1, 2, {"of": "SGD"}),
    ("asp,momentum=worker", 1, 1, {"of": "SGD", "clip_norm": 0.1}),
    ("local:3", 2, 2, {}),
    ("diloco:2", 2, 1, {}),
    ("diloco:4,fragments=2,overlap=1", 2, 1, {}),
]


def model_and_optimizer(of: str = "Adam", **options: Any) -> tuple[torch.nn.Module, DistributedOptimizer]:
    model = copy.deepcopy(MODEL)
    chosen = {"momentum": 0.9, "weight_decay": 0.01} if of == "SGD" else {}
    return model, DistributedOptimizer(getattr(torch.optim, of)(model.parameters(), lr=0.01, **chosen), model, **options)


def make_step(model: torch.nn.Module, optimizer: DistributedOptimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def is_shared(optimizer: DistributedOptimizer) -> bool:
    return optimizer.stats["device_bytes"] > 0


def hold_answers(session: Session) -> list[tuple[Any, ...]]:
    """Keep answers from the client, from now on; those that have come, to be handed on."""
    assert session.client is not None
    held: list[tuple[Any, ...]] = []
    session.client.connections._handlers[Answer] = lambda *what: held.append(what)  # type: ignore[index]
    return held


def hand_on(session: Session, held: list[tuple[Any, ...]]) -> None:
    assert session.client is not None
    session.client.connections._handlers[Answer] = session.client.requests.answered  # type: ignore[index]
    for what in held:
        session.client.requests.answered(*what)


@pytest.mark.parametrize(("sync", "workers", "servers", "options"), JOBS, ids=str)
def test_as_on_the_cpu_bit_for_bit(sync: str, workers: int, servers: int, options: dict[str, Any]) -> None:
    batches, ends = small_batches(STEPS, [4] * workers), []
    for device in DEVICES:

        def work(session: Session) -> tuple[list[torch.Tensor], dict[str, Any], bool]:
            model, optimizer = model_and_optimizer(**options)
            for number, step in enumerate(batches):
                if number == 3:
                    optimizer.param_groups[0]["lr"] = 0.02
                if number == 5 and sync == "bsp":
                    optimizer.synchronize()
                make_step(model, optimizer, step[session.rank])
            optimizer.consolidate()
            return weights(model), optimizer.state_dict()["state"], is_shared(optimizer)

        with ThreadJob(workers, servers, sync, device=device) as job:
            ends.append(job.run(work))
    for (values, state, shared), (of_device, its_state, its_shared) in zip(*ends, strict=True):
        assert_equal(of_device, values)
        assert (shared, its_shared) == (False, True)
        flat = [[v for _, of in sorted(s.items()) for v in of.values() if torch.is_tensor(v)] for s in (its_state, state)]
        assert_equal(*flat)


def test_step_returns_before_the_answer_and_values_are_there() -> None:
    batches = small_batches(3, [4])

    def work(session: Session) -> list[torch.Tensor]:
        assert session.client is not None
        model, optimizer = model_and_optimizer()
        make_step(model, optimizer, batches[0][0])
        assert optimizer.stats["step"] == 1
        before = weights(model)
        held = hold_answers(session)
        make_step(model, optimizer, batches[1][0])
        state = session.client.exchanges.states["0"]
        assert state.outstanding
        assert state.deferred
        assert not held
        assert not torch.equal(before[0], weights(model)[0])
        until(lambda: bool(session.client and (session.client.poll(), held)[1]), "the answer comes")
        assert state.outstanding
        waiting = threading.Thread(target=lambda: make_step(model, optimizer, batches[2][0]))
        waiting.start()  # the next push waits for it
        waiting.join(0.05)
        assert waiting.is_alive()
        assert list(state.outstanding) == [1]
        hand_on(session, held)
        waiting.join()
        assert optimizer.stats["step"] == 3
        return weights(model)

    ends = []
    with ThreadJob(1, 2, "asp", device="stand-in") as job:
        ends += job.run(work)
    with ThreadJob(1, 2, "asp") as job:

        def plain(session: Session) -> list[torch.Tensor]:
            model, optimizer = model_and_optimizer()
            for step in batches:
                make_step(model, optimizer, step[0])
            return weights(model)

        ends += job.run(plain)
    assert_equal(*ends)


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 2), ("asp", 1), ("ssp:2", 2), ("asp", 3)], ids=str)
def test_budgets_are_exact(sync: str, workers: int) -> None:
    batches, made = small_batches(40, [4] * workers), []
    for device in DEVICES:

        def work(session: Session) -> int:
            model, optimizer = model_and_optimizer()
            steps = 0
            while not should_stop():
                make_step(model, optimizer, batches[steps][session.rank])
                steps += 1
            assert should_stop()
            assert optimizer.stats["step"] == steps
            return steps

        budget = 11 * workers if sync == "asp" else 11
        with ThreadJob(workers, 1, sync, limits=Limits(steps=budget), device=device) as job:
            made.append(job.run(work))
    if sync == "bsp" or workers == 1:
        assert made[0] == made[1]
    else:  # what others have begun when the budget is used up is made to its end; on a device one step more of each
        assert all(budget <= sum(counted) <= budget + 2 * workers for counted in made)


def test_should_stop_does_not_wait_where_an_answer_was_certain() -> None:
    batches = small_batches(3, [4])

    def work(session: Session) -> None:
        assert session.client is not None
        model, optimizer = model_and_optimizer()
        make_step(model, optimizer, batches[0][0])
        optimizer._reducer.take_answer()  # type: ignore[union-attr]
        with session.lock:
            session.client.settle("0")
        session.client.exchanges.states["0"].answer.certain = 1  # whatever the server has said
        held = hold_answers(session)
        make_step(model, optimizer, batches[1][0])
        assert not should_stop()
        assert bool(session.client.exchanges.states["0"].outstanding)
        hand_on(session, held)

    with ThreadJob(1, 1, "asp", limits=Limits(steps=100), device="stand-in") as job:
        job.run(work)


def test_what_is_not_finite_counts_with_the_next_push() -> None:
    def work(session: Session) -> tuple[int, int, int]:
        model, optimizer = model_and_optimizer()
        counts = []
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.full_like(param, float("nan") if step == 1 else 1.0)
            optimizer.step()
            counts.append(optimizer.stats["nonfinite"])
        return tuple(counts)  # type: ignore[return-value]

    with ThreadJob(1, 1, "asp", device="stand-in") as job:
        assert job.run(work) == [(0, 1, 1)]
    refused = [small_model() for _ in range(2)]

    def refuse(session: Session) -> None:
        model = refused[session.rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, nonfinite="refuse")
        for param in model.parameters():
            param.grad = torch.full_like(param, float("nan"))
        optimizer.step()

    with (
        pytest.raises(UsageError, match=r"step 0: 0\.weight has a gradient that is not finite"),
        ThreadJob(1, 1, "asp", device="stand-in") as job,
    ):
        job.run(refuse)


def test_refusals_fall_back_to_the_host(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    batches = small_batches(3, [4])

    def work(session: Session) -> list[torch.Tensor]:
        if session.client is not None:
            answered = session.client.requests.answered

            def refuse(shard: int, message: DeviceShared, buffers: list[Any]) -> None:
                refusal = DeviceShared(optimizer_id=message.optimizer_id, shard=shard, refusal="this test refuses")
                answered(shard, refusal, buffers)

            session.client.connections._handlers[DeviceShared] = refuse  # type: ignore[index]
        model, optimizer = model_and_optimizer()
        for step in batches:
            make_step(model, optimizer, step[0])
        assert not is_shared(optimizer)
        return weights(model)

    ends = []
    for device in DEVICES:
        with ThreadJob(1, 2, "bsp", device=device) as job:
            ends += job.run(work)
    assert_equal(*ends)
    assert capfd.readouterr().err.count("rank 0 exchanges through the CPU: this test refuses") == 1


def test_two_flat_copies_at_most() -> None:
    def work(session: Session) -> None:
        for apply in ("server", "delta"):
            model, optimizer = model_and_optimizer(apply=apply)
            flat = sum(param.nbytes for param in model.parameters())
            for batch in small_batches(2, [4]):
                loss_of(model, batch[0]).backward()
                optimizer.synchronize()
                optimizer.step()
            assert optimizer.stats["device_bytes"] == 2 * flat

    with ThreadJob(1, 1, "bsp", device="stand-in") as job:
        job.run(work)


def test_values_that_the_script_writes_are_carried() -> None:
    batches, ends = small_batches(4, [4, 4]), []
    for device in DEVICES:

        def work(session: Session) -> list[torch.Tensor]:
            model, optimizer = model_and_optimizer()
            for number, step in enumerate(batches):
                if number == 2:
                    with torch.no_grad():
                        next(model.parameters()).fill_(0.25)
                make_step(model, optimizer, step[session.rank])
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.push_parameters()
            make_step(model, optimizer, batches[0][session.rank])
            return weights(model)

        with ThreadJob(2, 2, "bsp", device=device) as job:
            ends += job.run(work)
    for other in ends[1:]:
        assert_equal(other, ends[0])


def test_an_error_that_an_answer_brings_is_raised_by_the_next_call_and_streams_go_on() -> None:
    """Workers with different hyper-parameters in bsp: one is refused. Neither its stream nor the other's stays blocked."""
    batches = small_batches(5, [4, 4])

    def work(session: Session) -> None:
        model, optimizer = model_and_optimizer()
        for number, step in enumerate(batches):
            if number == 2 and session.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            make_step(model, optimizer, step[session.rank])
        optimizer.stats  # noqa: B018  it waits for the last answer

    with pytest.raises(PolytempoError, match="hyper-parameters differ"), ThreadJob(2, 1, "bsp", device="stand-in") as job:
        job.run(work)


def test_a_wait_of_a_stream_ends_when_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host hears nothing while it waits for its stream, here in the wait itself; the watching thread ends it."""
    batches, blocked = small_batches(2, [4, 4]), threading.Event()
    wait = DeviceExchange.wait

    def noted(self: DeviceExchange) -> None:
        blocked.set()
        wait(self)

    def work(session: Session) -> None:
        model, optimizer = model_and_optimizer()
        if session.rank == 0:
            monkeypatch.setattr(DeviceExchange, "wait", noted)
            make_step(model, optimizer, batches[0][0])  # rank 1 never pushes
            optimizer.stats  # noqa: B018
        else:
            assert blocked.wait(20)
            raise RuntimeError("rank 1 fails")

    with pytest.raises((RuntimeError, PolytempoError)), ThreadJob(2, 1, "bsp", device="stand-in") as job:
        job.run(work)


def test_fences_say_when_they_were_released() -> None:
    fences: Fences = HostDevice().fences(torch.zeros(16 << 10, dtype=torch.uint8).numpy())
    fences.release(1)
    assert fences.reached(1, 1)
    assert fences.reached(1, 1000)

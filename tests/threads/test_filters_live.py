"""Filters in live jobs: nothing is lost but late, and what a worker was told is what its servers believe, to the bit."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from helpers import made_gradients, made_params, set_gradients
from lossy import Fate, LossyJob, disturb, first_answers
from tests.tensors.stated import stated_bytes
from torch import nn

from polytempo.compression.chain import parse_chain
from polytempo.errors import UsageError
from polytempo.protocol.layout import lay_out
from polytempo.reducer.flat_buffer import FlatBuffer, describe
from polytempo.reducer.servers import PushFilters, ServerExchange
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

CHAINS = ["bf16", "fp16", "topk:0.1", "sign", "significant:1e-3", "topk:0.1+bf16"]
SIZE, STEPS = 41, 12
START = made_params([(SIZE,)])[0]
GRADIENTS = [[own for (own,) in made_gradients([(SIZE,)], STEPS, seed=50 + worker)] for worker in range(3)]


def made(session: Session, compression: Any, lr: float = 1.0, **options: Any) -> tuple[nn.Parameter, DistributedOptimizer]:
    param = nn.Parameter(START.detach().clone())
    sgd = torch.optim.SGD([param], lr=lr)
    return param, DistributedOptimizer(sgd, compression=compression, **options)


def reducer_of(optimizer: DistributedOptimizer) -> ServerExchange:
    assert isinstance(optimizer._reducer, ServerExchange)
    return optimizer._reducer


def sometimes(copies: int, seed: int) -> Fate:
    fates = {True: random.Random(seed), False: random.Random(seed + 100)}
    return lambda message, outward: copies if fates[outward].random() < 0.25 else 1


def believed(job: ThreadJob, rank: int) -> torch.Tensor:
    """What the servers think a worker was told."""
    return torch.cat(
        [server.executor.state.optimizer_shards["0"].pull_compression._shadows[rank]["float64"] for server in job.servers]
    )


def told(optimizer: DistributedOptimizer) -> torch.Tensor:
    parts = reducer_of(optimizer)._shadow._parts
    return torch.cat([torch.from_numpy(parts[shard][0].view("float64").copy()) for shard in sorted(parts)])


def held(job: ThreadJob) -> torch.Tensor:
    return torch.cat([server.executor.state.optimizer_shards["0"].values["float64"].clone() for server in job.servers])


def push_all(job: ThreadJob, compression: Any, fate: Any = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All workers push their gradients; for each what it has sent, and what waits at the end."""
    done = threading.Barrier(job.plan.size)

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        param, optimizer = made(session, compression)
        reducer = reducer_of(optimizer)
        sent = watched(reducer)
        if fate is not None:
            disturb(session, lambda shard: fate(session.rank, shard))
        for gradient in GRADIENTS[session.rank]:
            set_gradients([param], [gradient])
            optimizer.step()
        with session.lock:
            reducer.client.settle(reducer.name)
        if "backup" not in job.plan.sync:  # where who has done is missed by those who have not
            done.wait(20)  # else who leaves changes the others' rate
        if reducer.spec.pull_filter not in ("", "none"):
            assert torch.equal(told(optimizer), believed(job, session.rank))
            assert torch.equal(param.detach(), told(optimizer))
        return sent, reducer.filters.state().get("float64", torch.zeros(SIZE, dtype=torch.float64))

    return job.run(work)


def watched(reducer: ServerExchange) -> torch.Tensor:
    """The sum of all that goes out from now on, as the other side reads it."""
    total, filter_of, chain = torch.zeros(SIZE, dtype=torch.float64), reducer.filters.of, reducer.filters._chains

    def of(parts: Any) -> Any:
        result = filter_of(parts)
        for shard, stretches in enumerate(reducer.layout.shards):
            (stretch,) = stretches
            spec = chain[shard][0].spec if chain else parse_chain("none")
            total[stretch.start : stretch.stop] += spec.decode(result[shard], stretch.size, torch.float64)
        return result

    reducer.filters.of = of  # type: ignore[method-assign]
    return total


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("direction", ["push", "pull", "both"])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_the_servers_got_and_what_waits_is_what_was_computed(chain: str, direction: str, servers: int) -> None:
    compression = {"push": chain, "pull": chain} if direction == "both" else {direction: chain}
    with ThreadJob(1, servers, "asp") as job:
        ((sent, waits),) = push_all(job, compression)
        got = START.detach() - held(job)
    torch.testing.assert_close(got, sent, rtol=0, atol=1e-12)
    torch.testing.assert_close(got + waits, sum(GRADIENTS[0]), rtol=0, atol=1e-12)
    assert bool(waits.any()) == (direction != "pull" and chain != "significant:1e-3")


@pytest.mark.parametrize("sync", ["bsp", "ssp:1", "delay:2", "asp", "bsp+backup:1", "every:2"])
@pytest.mark.parametrize("chain", ["topk:0.1+bf16", "sign"])
def test_every_mode_conserves_what_it_sends_and_what_it_says(chain: str, sync: str) -> None:
    with ThreadJob(3, 2, sync) as job:
        results = push_all(job, {"push": chain, "pull": chain})
        got = START.detach() - held(job)
    for own, (sent, waits) in zip(GRADIENTS, results, strict=True):
        torch.testing.assert_close(sent + waits, sum(own), rtol=0, atol=1e-12)
    if sync != "bsp+backup:1":  # which discards what comes late
        torch.testing.assert_close(got, sum(sent for sent, _ in results) / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize(("sync", "seed"), [("bsp", 0), ("asp", 0), ("ssp:1", 0), ("delay:3", 0), ("delay:3", 1)])
def test_losses_and_repeats_leave_both_sides_alike(sync: str, seed: int, copies: int) -> None:
    compression = {"push": "topk:0.1+bf16", "pull": "topk:0.1"}
    with LossyJob(2, 2, sync, retry=0.02) as job:
        results = push_all(job, compression, lambda rank, shard: sometimes(copies, seed * 10 + 2 * shard + rank))
        got = START.detach() - held(job)
    torch.testing.assert_close(got, sum(sent for sent, _ in results) / 2, rtol=0, atol=1e-12)
    for own, (sent, waits) in zip(GRADIENTS, results, strict=False):
        torch.testing.assert_close(sent + waits, sum(own), rtol=0, atol=1e-12)


@pytest.mark.parametrize("servers", [1, 2])
def test_under_delay_an_answer_that_must_be_repeated_after_later_ones_is_not_counted_twice(servers: int) -> None:
    def fate_of(rank: int, shard: int) -> Fate:
        return first_answers((2, 5) if shard == 0 else ())

    with LossyJob(1, servers, "delay:3", retry=0.05) as job:
        push_all(job, {"pull": "topk:0.1"}, fate_of)


@pytest.mark.parametrize("chain", ["bf16", "topk:0.1", "sign"])
def test_what_answers_leave_out_comes_with_later_ones(chain: str) -> None:
    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        param, optimizer = made(session, {"pull": chain})
        set_gradients([param], [GRADIENTS[0][0]])
        optimizer.step()
        lacks = (param.detach() - held(job)).abs().max()
        for _ in range(40):
            set_gradients([param], [torch.zeros(SIZE)])
            optimizer.step()
        return lacks, (param.detach() - held(job)).abs().max()

    with ThreadJob(1, 2, "bsp") as job:
        before, after = job.run(work)[0]
    assert before > 1e-3
    assert after < before / 10


@pytest.mark.parametrize("chain", ["none", *CHAINS])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_bytes_on_the_wire_are_those_that_the_filter_states(chain: str, direction: str) -> None:
    size, steps, servers = 6000, 4, 2

    def work(session: Session) -> tuple[int, int]:
        param = nn.Parameter(torch.zeros(size))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=0.1), compression={direction: chain})
        which = "bytes_sent" if direction == "push" else "bytes_received"
        before = optimizer.stats[which]
        for _ in range(steps):
            set_gradients([param], [torch.linspace(-1, 1, size)])
            optimizer.step()
        return int(optimizer.stats[which] - before), len(reducer_of(optimizer).layout.shards)

    with ThreadJob(1, servers, "asp") as job:
        counted, shards = job.run(work)[0]
    stated = stated_bytes(chain, size // servers, torch.float32)
    if stated is None:
        assert counted < steps * (size * 8 + 1500 * servers)
    else:
        assert steps * servers * stated <= counted < steps * servers * (stated + 1500)
    assert shards == servers


def test_a_residual_goes_on_with_another_number_of_servers() -> None:
    params = [
        *made_params([(5, 3), (7,)]),
        *made_params([(4,)], dtype=torch.float32),
        *made_params([(9,)], dtype=torch.bfloat16),
    ]
    tensors = describe(params, ["a", "b", "c", "d"], [0, 0, 0, 0])

    def filters(shards: int) -> PushFilters:
        return PushFilters(parse_chain("topk:0.3+bf16"), lay_out(tensors, shards, False))

    first, buffer = filters(2), FlatBuffer(lay_out(tensors, 2, False), Pool())
    for step in range(3):
        for flat in buffer.tensors.values():
            flat.fill_(0.1 * (step + 1))
        first.of(buffer)
    state = first.state()
    assert all(bool(residual.any()) for residual in state.values())
    for count in (1, 3):
        other = filters(count)
        other.load(state)
        assert {name: one.tolist() for name, one in other.state().items()} == {n: one.tolist() for n, one in state.items()}


def test_a_skipped_step_sends_nothing_and_keeps_what_waits() -> None:
    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        param, optimizer = made(session, {"push": "topk:0.1"})
        for step, gradient in enumerate(GRADIENTS[0]):
            set_gradients([param], [gradient])
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(step % 3 == 1))
            optimizer.step()
        return START.detach() - held(job), reducer_of(optimizer).filters.state()["float64"]

    with ThreadJob(1, 2, "bsp") as job:
        got, waits = job.run(work)[0]
    wanted = sum(gradient for step, gradient in enumerate(GRADIENTS[0]) if step % 3 != 1)
    torch.testing.assert_close(got + waits, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("via", "options"), [("ps", {"apply": "delta"}), ("allreduce", {})])
def test_compression_is_refused_where_no_server_applies_gradients(via: str, options: dict[str, str]) -> None:
    with ThreadJob(1, 1, "bsp", via=via) as job, pytest.raises(UsageError, match="compression is for what goes to and from"):
        job.run(lambda session: made(session, "bf16", **options))


def test_workers_must_agree_on_the_compression() -> None:
    with ThreadJob(2, 1, "bsp") as job, pytest.raises(UsageError, match="the compression of pushes is"):
        job.run(lambda session: made(session, "bf16" if session.rank else {"push": "fp16", "pull": "bf16"}))


@pytest.mark.parametrize("compression", ["topk:0.1", None])
def test_where_the_way_is_open_compression_takes_servers(compression: str | None) -> None:
    def work(session: Session) -> tuple[bool, torch.Tensor]:
        param, optimizer = made(session, compression)
        for gradient in GRADIENTS[session.rank][:4]:
            param.grad = gradient.clone()
            optimizer.step()
        return isinstance(optimizer._reducer, ServerExchange), param.detach().clone()

    found: dict[str, list[tuple[bool, torch.Tensor]]] = {}
    for way in ("auto", "ps"):
        with ThreadJob(2, via=way) as job:
            found[way] = job.run(work)
    assert [by_servers for by_servers, _ in found["auto"]] == [compression is not None] * 2
    if compression is not None:
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found["auto"], found["ps"], strict=True))


def test_workers_that_take_different_ways_are_refused_by_name() -> None:
    def work(session: Session) -> str:
        try:
            made(session, "bf16" if session.rank else None)
        except UsageError as error:
            return str(error)
        return ""

    with ThreadJob(2, via="auto") as job:
        said = "".join(job.run(work))
    assert "worker 0" in said
    assert "worker 1" in said

"""Arrays on the servers: ranges, lists and wholes against plain loops, futures, compression, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import until
from lossy import LossyJob, disturb
from sessions import under, within

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.protocol.messages import AnyMessage, Push
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.kv import KV, Array

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

ROWS, DIM = 11, 3
#: A push: the first row of a range, a list of rows, or None for all.
PLACES: list[Any] = [None, 2, [0, 7, 5, 10], 9, [3], [4, 4, 1, 4], None, []]
WIDTHS = [ROWS, 6, 4, 2, 1, 4, ROWS, 0]
RULES: dict[str, dict[str, float]] = {
    "add": {},
    "assign": {},
    "min": {},
    "max": {},
    "sgd": {"lr": 0.3},
    "adagrad": {"lr": 0.2, "eps": 1e-6},
    "prox": {"lr": 0.3, "l1": 0.4},
    "ftrl": {"alpha": 0.5, "beta": 1.0, "l1": 0.3, "l2": 0.1},
}


def made_values(widths: list[int], dim: int | None, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(width,) if dim is None else (width, dim) for width in widths]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def first_tries_are_lost(message: AnyMessage, outward: bool) -> int:
    return int(not (isinstance(message, Push) and message.attempt == 0))


def alone(sync: str = "bsp") -> Session:
    return Session(None, JobFacts(1, (), sync), 0)


def on(servers: int, work: Callable[[Session], Any], sync: str = "bsp") -> Any:
    """What one worker gets of this number of servers; 0: without a launcher."""
    if not servers:
        return within(alone(sync), work)
    with ThreadJob(1, servers, sync) as job:
        return job.run(work)[0]


class Plain:
    """One number of an array, and what its rule keeps, in plain Python."""

    def __init__(self, rule: str, options: dict[str, float]) -> None:
        self.rule, self.o, self.value, self.sum, self.z = rule, options, 0.0, 0.0, 0.0

    def push(self, g: float) -> None:
        o, old = self.o, self.value
        if self.rule in ("add", "assign", "min", "max"):
            how = {"add": old + g, "assign": g, "min": min(old, g), "max": max(old, g)}
            self.value = how[self.rule]
        elif self.rule == "sgd":
            self.value -= o["lr"] * g
        elif self.rule == "adagrad":
            self.sum += g * g
            self.value -= o["lr"] * g / (self.sum**0.5 + o["eps"])
        elif self.rule == "prox":
            moved, by = old - o["lr"] * g, o["lr"] * o["l1"]
            self.value = max(moved - by, 0.0) if moved > 0 else min(moved + by, 0.0)
        else:
            root = (self.sum + g * g) ** 0.5
            self.z += g - (root - self.sum**0.5) / o["alpha"] * old
            self.sum += g * g
            toward = max(abs(self.z) - o["l1"], 0.0) * (1 if self.z > 0 else -1)
            self.value = -toward / ((o["beta"] + root) / o["alpha"] + o["l2"])


def plainly(rule: str, pushes: list[tuple[Any, torch.Tensor]]) -> list[list[float]]:
    """The array after these pushes; rows that a list names several times become one first."""
    cells = [[Plain(rule, RULES[rule]) for _ in range(DIM)] for _ in range(ROWS)]
    for place, values in pushes:
        ids = place if isinstance(place, list) else list(range(place or 0, (place or 0) + len(values)))
        for row in sorted(set(ids)):
            own = [values[i].tolist() for i, one in enumerate(ids) if one == row]
            whole = {"assign": lambda many: many[-1], "min": min, "max": max}.get(rule, sum)
            for column in range(DIM):
                cells[row][column].push(whole([one[column] for one in own]))
    return [[cell.value for cell in row] for row in cells]


def push_at(kv: KV, name: str, values: torch.Tensor, place: Any) -> Any:
    if isinstance(place, list):
        return kv[name].push(values, rows=place)
    return kv[name].push(values, start=place) if place is not None else kv[name].push(values)


@pytest.mark.parametrize("servers", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_is_a_plain_loop_over_its_numbers_however_many_servers(rule: str, servers: int) -> None:
    values = made_values(WIDTHS, DIM)

    def work(session: Session) -> tuple[torch.Tensor, ...]:
        kv = KV({"w": Array(ROWS, DIM, rule=rule, dtype=torch.float64, **RULES[rule])})
        for place, own in zip(PLACES, values, strict=True):
            push_at(kv, "w", own, place)
        w = kv["w"]
        return w.pull().result(), w.pull(start=3, stop=8).result(), w.pull(rows=[9, 2, 9]).result(), w.pull(rows=[]).result()

    whole, some, listed, none = on(servers, work)
    wanted = torch.tensor(plainly(rule, list(zip(PLACES, values, strict=True))), dtype=torch.float64)
    torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(some, whole[3:8])
    assert torch.equal(listed, whole[[9, 2, 9]])
    assert none.shape == (0, DIM)


@pytest.mark.parametrize("servers", [0, 1, 3])
def test_an_array_of_single_numbers_and_one_without_a_bound_take_part_in_one_step(servers: int) -> None:
    far = 2**62 + 1

    def work(session: Session) -> tuple[Any, ...]:
        kv = KV({"a": Array(5, dtype=torch.float64), "b": Array(None, 2, rule="max", dtype=torch.float64)})
        kv.push(("a", [1.0, 2.0], 3), ("b", [[5.0, -1.0], [2.0, 2.0]], [far, 0]))
        kv.push(("b", [[1.0, 1.0]], [far]))
        kv.push()
        last = kv.push(("a", torch.ones(5), None))
        return kv["a"].pull().result(), kv["b"].pull(rows=[0, 7, far]).result(), last.result(), kv.step

    a, b, version, step = on(servers, work)
    assert a.tolist() == [1, 1, 1, 2, 3]
    assert b.tolist() == [[2, 2], [0, 0], [5, 1]]
    assert (version, step) == (4, 4)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_what_is_pushed_belongs_to_the_caller_again_when_push_returns(servers: int) -> None:
    def work(session: Session) -> torch.Tensor:
        kv = KV({"w": Array(6, dtype=torch.float64)})
        if session.client is not None:
            disturb(session, lambda shard: first_tries_are_lost)
        values, ids = torch.ones(6, dtype=torch.float64), torch.arange(6)
        for rows in (None, ids):
            future = kv["w"].push(values, rows=rows)
            values.fill_(100)
            ids.fill_(0)
            future.result()
            values.fill_(1)
            ids.copy_(torch.arange(6))
        return kv["w"].pull().result()

    if servers:
        with LossyJob(1, servers, retry=0.05) as job:
            got = job.run(work)[0]
    else:
        got = within(alone(), work)
    assert got.tolist() == [2.0] * 6


def test_futures_are_done_when_the_answer_is_there_and_not_before() -> None:
    gate = threading.Event()

    def work(session: Session) -> tuple[Any, ...]:
        kv = KV({"w": Array(4)})
        keeper = job.servers[0].executor.state
        carry_out = keeper.carry_out

        def held_up(*given: Any) -> Any:
            assert gate.wait(20)
            return carry_out(*given)

        keeper.carry_out = held_up  # type: ignore[method-assign]
        push = kv["w"].push(torch.ones(4))
        pull = kv["w"].pull()
        before = push.done(), pull.done()
        gate.set()
        until(lambda: push.done() and pull.done(), "both are there")
        return before, push.result(), pull.result().tolist(), pull.result() is pull.result(), push.done()

    with ThreadJob(1, 1, "delay:2") as job:
        before, version, values, same, still = job.run(work)[0]
    assert before == (False, False)
    assert (version, values, same, still) == (1, [1.0] * 4, True, True)


# Compression, keys, refusals.


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("compression", ["topk:0.3", "significant:0.8", "bf16", "topk:0.5+fp16"])
def test_of_a_compressed_array_what_was_added_and_what_waits_is_what_was_pushed(compression: str, servers: int) -> None:
    values = made_values(WIDTHS * 6, DIM, seed=5)

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        kv = KV({"w": Array(ROWS, DIM, dtype=torch.float64, compression=compression)})
        for place, own in zip(PLACES * 6, values, strict=True):
            push_at(kv, "w", own, place)
        assert kv["w"].table.residual is not None
        return kv["w"].pull().result(), kv["w"].table.residual

    added, waits = on(servers, work)
    wanted = torch.tensor(plainly("add", list(zip(PLACES * 6, values, strict=True))), dtype=torch.float64)
    assert waits.abs().max() > 0
    torch.testing.assert_close(added + waits, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", ["fp16", "topk:1+fp16"])
def test_numbers_beyond_two_bytes_are_sent_in_parts_and_what_is_no_number_does_not_stay(compression: str) -> None:
    def work(session: Session) -> tuple[list[float], list[float]]:
        kv = KV({"w": Array(3, dtype=torch.float64, compression=compression)})
        kv["w"].push([1e5, 1.0, float("inf")])
        kv["w"].push([0.0, 0.0, 0.0])
        return kv["w"].pull().result().tolist(), kv["w"].table.residual.tolist()

    added, waits = on(0, work)
    assert [a + b for a, b in zip(added, waits, strict=True)] == [1e5, 1.0, float("inf")]
    assert waits[2] == 0


@pytest.mark.parametrize("compression", ["none", "bf16", "topk:0.1"])
def test_bytes_of_a_compressed_push(compression: str) -> None:
    rows, dim = 1000, 4

    def work(session: Session) -> int:
        kv = KV({"w": Array(rows, dim, compression=compression)})
        before = kv.stats["bytes_sent"]
        kv["w"].push(torch.ones(rows, dim)).result()
        return int(kv.stats["bytes_sent"] - before)

    sent = on(2, work)
    of_values = {"none": rows * dim * 4, "bf16": rows * (dim * 2 + 8), "topk:0.1": rows // 10 * (dim * 4 + 8)}[compression]
    assert of_values <= sent < of_values + 1000


@pytest.mark.parametrize("servers", [1, 3])
def test_lists_that_come_again_are_not_sent_again(servers: int) -> None:
    ids = torch.arange(0, 4000, 2)

    def work(session: Session) -> tuple[list[int], float]:
        kv = KV({"w": Array(4000, cache_keys=cached)})
        sent = []
        for _ in range(3):
            before = kv.stats["bytes_sent"]
            kv["w"].push(torch.ones(2000), rows=ids).result()
            kv["w"].pull(rows=ids).result()
            sent.append(int(kv.stats["bytes_sent"] - before))
        return sent, kv["w"].pull().result().sum().item()

    cached = False
    plain, total = on(servers, work)
    cached = True
    short, same = on(servers, work)
    assert total == same == 6000
    assert min(plain) > 2 * 8 * 2000
    assert short[0] > 8 * 2000
    assert max(short[1:]) < 4 * 2000 + 1500


BAD: list[tuple[tuple[Any, ...], str]] = [
    (("w", torch.ones(3), [0, 1]), "expected 2 values, one for each row, got 3"),
    (("w", torch.ones(2), [0, 6]), "expected ids from 0 to 5, got 6"),
    (("w", torch.ones(2), 5), "expected a range within 0 to 6, got 5 to 7"),
    (("w", torch.ones(5), None), "expected 6 values, got 5"),
    (("w", torch.ones(6, 1), None), "expected values of shape"),
    (("v", torch.ones(1), 0), "there is no array 'v'"),
    (("c", torch.ones(4), None), "each array once"),
]


@pytest.mark.parametrize("servers", [0, 2])
def test_a_push_with_one_bad_part_changes_nothing(servers: int) -> None:
    def work(session: Session) -> tuple[Any, ...]:
        kv = KV({"c": Array(4, compression="topk:0.5"), "w": Array(6)})
        kv.push(("c", [1.0, 2.0, 3.0, 4.0], None), ("w", torch.ones(6), None))
        before = kv["c"].table.residual
        for part, reason in BAD:
            with pytest.raises(UsageError, match=reason):
                kv.push(("c", torch.ones(4), None), part)
        assert kv.step == 1
        assert torch.equal(kv["c"].table.residual, before)
        last = kv.push(("w", torch.ones(6), None)).result()
        return last, kv["c"].pull().result().tolist(), kv["w"].pull().result().tolist()

    assert on(servers, work) == (2, [0, 0, 3, 4], [2.0] * 6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: under(alone(), KV, {}), "expected at least one array"),
        (lambda: under(alone(), KV, {"w": Array(3)}, sync="downpour"), "is for models"),
        (lambda: under(alone(), KV, {"w": Array(3)}, sync="asup"), "is for models"),
        (lambda: under(alone(), KV, {"w": Array(3)}, sync="asp,dc=0.04"), "is for models"),
        (lambda: under(alone(), KV, {"w": Array(3)}, sync="asp,momentum=async"), "is for models"),
        (lambda: under(alone(), KV, {"w": Array(3, rule="min", compression="topk:0.1")}), "cannot wait"),
        (lambda: under(alone(), KV, {"w": Array(None, compression="topk:0.1")}), "needs a number of rows"),
        (lambda: under(alone(), KV, {"w": Array(3, compression="sign")}), "compresses dense pushes"),
        (lambda: under(alone(), KV, {"w": Array(3)}).push(samples=0), "expected samples to be a number above 0"),
        (lambda: Array(0), "expected rows to be a number from 1 on"),
        (lambda: Array(3, rule="ad"), "add"),
        (lambda: Array(3, dtype=torch.complex64), "expected dtype"),
        (lambda: under(alone(), KV, {"w": Array(None)})["w"].pull(), "no ranges"),
        (lambda: under(alone(), KV, {"w": Array(3)})["x"], "there is no array 'x'"),
        (lambda: under(alone(), KV, {"w": Array(3)})["w"].clock(2, 1), "expected a range"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make()

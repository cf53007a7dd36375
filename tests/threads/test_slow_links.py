"""What is slow is not lost: each byte crosses a slow link once, however much longer than a retry that takes."""

from __future__ import annotations

import pytest
import torch
from slow import SlowJob
from test_conversation import Scripted, answer
from torch import nn

from polytempo.protocol.messages import Ask, Push
from polytempo.protocol.values import PushId
from polytempo.train.arrays import Array
from polytempo.train.client import Client
from polytempo.train.kv import KV
from polytempo.train.lines import Line, Outstanding
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.session import Session
from polytempo.transport.pool import Pool

pytestmark = pytest.mark.timeout(60)

SIZE, RATE, RETRY, STEPS = 300_000, 1e6, 0.04, 2  # a push takes seven retries


@pytest.mark.parametrize(("scheme", "servers"), [("tcp", 1), ("ipc", 2)])
def test_what_is_pushed_answered_and_read_crosses_a_slow_link_once(scheme: str, servers: int) -> None:
    """The values of the start go up, those of each answer come down; then a read, and a pull of a whole array."""

    def work(session: Session) -> list[torch.Tensor]:
        param = nn.Parameter(torch.zeros(SIZE // 4))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), session=session)
        for _ in range(STEPS):
            param.grad = torch.ones(SIZE // 4)
            optimizer.step()
        optimizer.consolidate()
        array = KV({"w": Array(SIZE // 4, rule="add", start="zeros")}, session=session)
        return [param.detach().clone(), array["w"].pull().result()]

    with SlowJob(scheme, RATE, 1, servers, "bsp", retry=RETRY) as job:
        ((values, pulled),) = job.run(work)
    assert torch.equal(values, torch.full((SIZE // 4,), -float(STEPS)))
    assert not pulled.any()
    assert job.sequencer.accounts[0].steps == STEPS
    sent, received = (1 + STEPS) * SIZE, (1 + STEPS + 1 + 1) * SIZE
    assert sent <= sum(cable.up for cable in job.cables) <= 1.2 * sent
    assert received <= sum(cable.down for cable in job.cables) <= 1.2 * received


class Creeping(Scripted):
    """Over which bytes move for a while, and then an answer is there."""

    def __init__(self, looks: int) -> None:
        super().__init__(1)
        self.looks = looks

    def moved(self) -> int:
        if not any(isinstance(message, Push) for message in self.sent):
            return 0
        self.looks -= 1
        if self.looks == 0:
            self.say(answer(0, place=1, version=1))
        return self.looks


def pushed_over(channel: Scripted) -> Client:
    client = Client([channel], 0, 0, Pool(), retry=0.001)
    client._lines["0"] = Line("0", joined=True)
    client.push(Outstanding(Push(id=PushId("0", 0, 0, 0)), [[]]))
    return client


def test_nothing_is_asked_while_bytes_move() -> None:
    channel = Creeping(looks=40)
    client = pushed_over(channel)
    client.wait_for_release("0", 1)
    assert [type(message).__name__ for message in channel.sent] == ["Hello", "Push"]
    client.close()


def test_where_nothing_moves_it_is_asked() -> None:
    channel = Scripted(1)
    client = pushed_over(channel)
    channel.on_send = lambda message: channel.say(answer(0, 1, 1)) if isinstance(message, Ask) else None
    client.wait_for_release("0", 1)
    assert Ask(what="push", track="0", number=0) in channel.sent
    client.close()

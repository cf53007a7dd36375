"""What is slow is not lost: each byte crosses a slow link once, however much longer than a retry that takes."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
import zmq
from slow import BUFFER, Cable, SlowJob
from test_conversation import Scripted, answer
from torch import nn
from wires import Client as Doing
from wires import filled, same

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.collectives.messaging import close_with_goodbye
from polytempo.protocol.messages import Push, PushStatus
from polytempo.protocol.push import PushedGradient
from polytempo.protocol.values import PushId
from polytempo.session.session import Session
from polytempo.train.kv import KV, Array
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport import zeromq
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.peer_link import BYE, DATA, LinkMessage

pytestmark = pytest.mark.timeout(60)

SIZE, RATE, RETRY, STEPS = 300_000, 1e6, 0.04, 2  # a push takes seven retries


@pytest.mark.parametrize(("scheme", "servers"), [("tcp", 1), ("ipc", 2)])
def test_what_is_pushed_answered_and_read_crosses_a_slow_link_once(scheme: str, servers: int) -> None:
    """The values of the start go up, those of each answer come down; then a read, and a pull of a whole array."""

    def work(session: Session) -> list[torch.Tensor]:
        param = nn.Parameter(torch.zeros(SIZE // 4))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        for _ in range(STEPS):
            param.grad = torch.ones(SIZE // 4)
            optimizer.step()
        assert session.client is not None
        session.client.read("0", "params")
        array = KV({"w": Array(SIZE // 4, rule="add", start="zeros")})
        return [param.detach().clone(), array["w"].pull().result()]

    with SlowJob(scheme, RATE, 1, servers, "bsp", retry=RETRY) as job:
        ((values, pulled),) = job.run(work)
    assert torch.equal(values, torch.full((SIZE // 4,), -float(STEPS)))
    assert not pulled.any()
    assert job.sequencer.statistics[0].steps == STEPS
    sent, received = (1 + STEPS) * SIZE, (1 + STEPS + 1 + 1) * SIZE
    assert sent <= sum(cable.up for cable in job.cables) <= 1.2 * sent
    assert received <= sum(cable.down for cable in job.cables) <= 1.2 * received


class Inbox:
    """Keeps what arrives over a link."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.payload = numpy.empty(0, dtype=numpy.uint8)
        self.lost = ""

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        self.payload = numpy.empty(length, dtype=numpy.uint8)
        return self.payload

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.kinds.append(message.kind)

    def gone(self, source: int, reason: str) -> None:
        self.lost = reason


def test_a_link_that_closes_over_a_slow_cable_first_delivers_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root may end before the others have its last broadcast: its last words have time as long as they move."""
    monkeypatch.setattr(zeromq, "LINK_LAST_WORDS_S", 0.1)
    near, far, inbox = zeromq.ZmqWires(None), zeromq.ZmqWires(None), Inbox()
    listening = zeromq.ZmqLink(0, inbox, far, serves=True)
    cable = Cable(listening.bind("127.0.0.1"), RATE, tmp_path)

    def send_and_end() -> None:
        link, poller = zeromq.ZmqLink(1, Inbox(), near, serves=False), Poller()
        link._socket.setsockopt(zmq.SNDBUF, BUFFER)  # else the kernel takes it all, and sends it when the process is gone
        link.connect(cable.address)
        link.attach(poller)
        while not link.established:
            link.handle(poller.poll(50))
        link.send(LinkMessage(DATA, 0, 0), filled(SIZE))
        close_with_goodbye(link)
        near.close()

    ending, poller = Doing(send_and_end), Poller()
    listening.attach(poller)
    while BYE not in inbox.kinds and not inbox.lost:
        listening.handle(poller.poll(50))
    assert inbox.kinds == [DATA, BYE]
    assert same([inbox.payload], [filled(SIZE)])
    ending.join(10)
    assert ending.error is None
    listening.close()
    far.close()
    cable.close()


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
    client.exchanges.states["0"] = ClientState("0", joined=True)
    client.push(Outstanding(Push(id=PushId("0", 0, 0, 0), body=PushedGradient()), [[]]))
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
    channel.on_send = lambda message: channel.say(answer(0, 1, 1)) if isinstance(message, PushStatus) else None
    client.wait_for_release("0", 1)
    assert PushStatus(what="push", optimizer_id="0", number=0) in channel.sent
    client.close()

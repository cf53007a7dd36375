"""Who has the key may come in; which worker it is, it must prove. Servers and the launcher do not come from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from wires import hear

from polytempo.errors import PeerError
from polytempo.protocol.messages import (
    STRANGER_LIMIT,
    Assigned,
    Expecting,
    Hello,
    Refused,
    StoreSet,
    Welcome,
    decode,
    encode,
)
from polytempo.testing.threads import ThreadJob
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Channel, Endpoint
from polytempo.transport.connect import connect
from polytempo.transport.keys import Credentials, JobKeys, make_keys, make_secret
from polytempo.transport.memory import MemoryChannel
from polytempo.transport.zeromq import ZmqEndpoint

pytestmark = pytest.mark.timeout(30)


class OpenJob(ThreadJob):
    """A job with a door for other hosts; `outside` is who stands there, with the key."""

    def __init__(self, workers: int) -> None:
        self.keys: JobKeys = make_keys()
        self.credentials = Credentials(make_secret())
        self._channels: list[Channel] = []
        super().__init__(workers)

    def _more_endpoints(self, index: int, pool: Pool) -> list[Endpoint]:
        self.door = ZmqEndpoint("tcp://127.0.0.1:*", self.keys, pool, STRANGER_LIMIT)
        return [self.door]

    def outside(self) -> Channel:
        self._channels.append(connect(self.door.address, os.urandom(8).hex(), self.keys.workers, Pool()))
        return self._channels[-1]

    def close(self, exit_status: int = 0) -> None:
        super().close(exit_status)
        for channel in self._channels:
            channel.close()


@pytest.fixture
def job() -> Iterator[OpenJob]:
    with OpenJob(3) as made:
        yield made


def greeted(channel: Channel, hello: Hello) -> object:
    channel.send(encode(hello))
    return decode(hear(channel)[0])


def test_an_agent_gets_tokens_with_which_its_workers_are_let_in_and_nobody_else(job: OpenJob) -> None:
    """One after the other, over the network: no token, another's, one of another role or life, and the right one."""
    job._launcher.send(encode(Expecting(job={}, ranks=(1, 2))))
    assigned = greeted(job.outside(), Hello(role="agent", count=1))
    assert isinstance(assigned, Assigned)
    assert assigned.ranks == (1,)
    (token,) = assigned.tokens
    made = job.credentials.token
    for wrong in ("", "é", token[:-1], made("worker", 2, 0), made("server", 1, 0), made("worker", 1, 1)):
        refused = greeted(job.outside(), Hello(role="worker", rank=1, token=wrong))
        assert isinstance(refused, Refused)
        assert "cannot prove that it is worker 1" in refused.reason
    for rank in (0, 2):
        assert isinstance(greeted(job.outside(), Hello(role="worker", rank=rank, token=token)), Refused)
    assert isinstance(greeted(job.outside(), Hello(role="worker", rank=1, incarnation=1, token=token)), Refused)
    assert isinstance(greeted(job.outside(), Hello(role="worker", rank=1, token=token)), Welcome)


@pytest.mark.parametrize(("role", "words"), [("launcher", "own host only"), ("server", "own host only"), ("king", "served")])
def test_who_comes_over_the_network_is_no_server_and_no_launcher(job: OpenJob, role: str, words: str) -> None:
    refused = greeted(job.outside(), Hello(role=role, rank=0))
    assert isinstance(refused, Refused)
    assert words in refused.reason


@pytest.mark.parametrize(("role", "rank"), [("launcher", 0), ("server", 1)])
def test_there_is_one_launcher_and_one_of_each_server(role: str, rank: int) -> None:
    with ThreadJob(1, 2) as job:
        channel = MemoryChannel(job.endpoints[0])
        refused = greeted(channel, Hello(role=role, rank=rank))
        assert isinstance(refused, Refused)
        assert "already" in refused.reason
        channel.close()


@pytest.mark.parametrize("key", ["host-0", "link-0-1", "token-0", "shared"])
def test_what_a_worker_has_posted_is_its_own(key: str) -> None:
    """Where rank 0 can be reached is for rank 0 to say."""
    with ThreadJob(2) as job:
        first, second = MemoryChannel(job.endpoints[0]), MemoryChannel(job.endpoints[0])
        assert isinstance(greeted(first, Hello(role="worker", rank=0)), Welcome)
        assert isinstance(greeted(second, Hello(role="worker", rank=1)), Welcome)
        if key == "shared":
            first.send(encode(StoreSet(key=key, value="here")))
        second.send(encode(StoreSet(key=key, value="there")))
        refused = decode(hear(second)[0])
        assert isinstance(refused, Refused)
        assert "belongs to another worker" in refused.reason
        first.close()
        second.close()


def test_tokens_differ_by_job() -> None:
    one, other = Credentials(make_secret()), Credentials(make_secret())
    one.check("worker", 3, 0, one.token("worker", 3, 0))
    with pytest.raises(PeerError, match="cannot prove that it is worker 3"):
        one.check("worker", 3, 0, other.token("worker", 3, 0))

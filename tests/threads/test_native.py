"""torch's own process groups beside a group: how ranks meet, what each collective gives, and what a lost rank does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from polytempo.collectives.device_choice import Network
from polytempo.collectives.native import Meeting, Native
from polytempo.collectives.world import open_in_threads
from polytempo.errors import PeerError, RankLost, UsageError

APART = Network(insecure=True, route="127.0.0.1:1")


@contextmanager
def natives(size: int, hosts: tuple[tuple[int, ...], ...] = (), network: Network = Network()) -> Iterator[list[Native]]:  # noqa: B008
    """Ranks in threads, as if they were on these hosts."""
    worlds = open_in_threads(size)
    for world in worlds:
        world.hosts, world.network = hosts or world.hosts, network
    groups = [world.new_group(range(size)) for world in worlds]
    made = [Native(group) for group in groups if group is not None]
    try:
        yield made
    finally:
        for native in made:
            native.close()
        for world in worlds:
            world.close()


#: The gloo of torch 2.11 has no all-to-all of lists.
GLOO_CROSSES = not torch.__version__.startswith("2.11.")


def together(made: list[Native], call: Callable[[Native, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(call, made, range(len(made))))


@pytest.mark.parametrize(("hosts", "network"), [((), Network()), (((0,), (1, 2)), APART)])
def test_all_collectives_on_one_host_and_between_hosts(hosts: tuple[tuple[int, ...], ...], network: Network) -> None:
    """The store of rank 0 listens where the others reach it."""

    def call(native: Native, rank: int) -> dict[str, list[float]]:
        mine = torch.tensor([float(rank), 1.0])
        found = {}
        for op in ("sum", "mean", "max"):
            found[op] = mine.clone()
            native.all_reduce([found[op]], op).wait(30)
        parts = [torch.zeros(2) for _ in range(3)]
        native.all_gather(parts, mine).wait(30)
        found["gathered"] = torch.cat(parts)
        found["root's"] = mine.clone()
        native.broadcast([found["root's"]], 2, background=True).wait(30)
        sent = [torch.tensor([10.0 * rank + other]) for other in range(3)]
        found["crossed"] = torch.zeros(3)
        if GLOO_CROSSES:
            native.all_to_all(list(found["crossed"].split(1)), sent).wait(30)
        return {name: tensor.tolist() for name, tensor in found.items()}

    with natives(3, hosts, network) as made:
        found = together(made, call)
        listened = {(where[0], where[1]) for where in _listening()}
        ports = {native._made["cpu"][1].store.port for native in made}
    for rank, of_rank in enumerate(found):
        assert of_rank["sum"] == [3.0, 3.0]
        assert of_rank["mean"] == [1.0, 1.0]
        assert of_rank["max"] == [2.0, 1.0]
        assert of_rank["gathered"] == [0.0, 1.0, 1.0, 1.0, 2.0, 1.0]
        assert of_rank["root's"] == [2.0, 1.0]
        assert of_rank["crossed"] == ([rank, 10.0 + rank, 20.0 + rank] if GLOO_CROSSES else [0.0, 0.0, 0.0])
    assert len(ports) == 1
    assert {host for host, port in listened if port in ports} == {"127.0.0.1"}  # and at no other address


def test_several_groups_at_once_have_a_store_each() -> None:
    worlds = open_in_threads(3)
    groups: list[list[Any]] = [[world.new_group(ranks) for world in worlds] for ranks in ([0, 1, 2], [0, 1], [1, 2])]
    made = [[group and Native(group) for group in row] for row in groups]
    tensors = [[torch.tensor([1.0 + rank]) for rank in range(3)] for _ in groups]
    pairs = [(native, tensor) for row in zip(made, tensors, strict=True) for native, tensor in zip(*row, strict=True)]
    tasks = [native.all_reduce([tensor], background=True) for native, tensor in pairs if native is not None]
    for task in tasks:
        task.wait(30)
    assert [[float(tensor) for tensor in row] for row in tensors] == [[6.0, 6.0, 6.0], [3.0, 3.0, 3.0], [1.0, 5.0, 5.0]]
    for native, _ in pairs:
        if native is not None:
            native.close()
    for world in worlds:
        world.close()


def test_no_port_is_left_behind() -> None:
    before = set(_listening())
    with natives(2) as made:
        together(made, lambda native, rank: native.all_reduce([torch.ones(1)]).wait(30))
        port = made[0]._made["cpu"][1].store.port
        assert ("127.0.0.1", port) in set(_listening()) - before
    del made
    assert port not in {number for _, number in _listening()}


def _listening() -> Iterator[tuple[str, int]]:
    """Where sockets of IPv4 listen, and of IPv6 at all addresses."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == "0A":
                at = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if name == "tcp" else host
                yield at, int(port, 16)


def test_different_calls_are_named() -> None:
    with natives(2) as made:

        def call(native: Native, rank: int) -> str:
            tensor = torch.ones(3 + rank)
            with pytest.raises(PeerError, match="calls") as caught:
                native.all_reduce([tensor]).wait(30)
            return str(caught.value)

        assert all("float32[3], by native" in text and "float32[4], by native" in text for text in together(made, call))


def test_a_rank_that_is_lost_in_a_call_is_named_and_the_group_of_torch_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo on rank 0 would wait for rank 1 for half an hour, and NCCL for ever."""
    worlds = open_in_threads(2)
    made = [Native(world.all_ranks) for world in worlds]
    together(made, lambda native, rank: native.all_reduce([torch.ones(1)]).wait(30))
    aborted = threading.Event()
    hanging = _Hanging(aborted)
    made[0]._made["cpu"] = hanging, made[0]._made["cpu"][1]
    task = made[0].all_reduce([torch.ones(1)], background=True)
    worlds[1].close(politely=False)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        task.wait(30)
    assert aborted.wait(10)
    made[0].close()
    worlds[0].close()


class _Hanging:
    """A process group that waits for a rank that has died."""

    def __init__(self, aborted: threading.Event) -> None:
        self.aborted = aborted

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> _Hanging:
        return self

    def wait(self) -> None:
        self.aborted.wait(30)

    def abort(self) -> None:
        self.aborted.set()


def test_a_rank_that_is_lost_before_the_meeting_is_named() -> None:
    worlds = open_in_threads(2)
    task = Native(worlds[0].all_ranks).all_reduce([torch.ones(1)], background=True)
    worlds[1].close(politely=False)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        task.wait(30)
    worlds[0].close()


def test_a_store_that_cannot_be_reached_names_the_rank_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.collectives.native.PATIENCE", 0.1)
    with pytest.raises(PeerError, match=r"rank 5 cannot open the store of rank 3 at 127.0.0.1:1: "):
        Meeting(2, APART, [3, 5], 5).join("1 127.0.0.1")


def test_between_hosts_it_is_refused_unless_the_job_is_insecure() -> None:
    with pytest.raises(UsageError, match="does not encrypt"), natives(2, ((0,), (1,))):
        pass


# NCCL, of which there is none here: a fake that records how it was made, and is gloo underneath.


class FakeNccl:
    made: ClassVar[list[tuple[str, int, int, float]]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self.made.append((type(store).__name__, rank, size, timeout.total_seconds()))
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("fake", store), rank, size, timeout)
        self.ended = ""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self.gloo.allreduce(tensors, options)

    def shutdown(self) -> None:
        self.ended = "shutdown"

    def abort(self) -> None:
        self.ended = "abort"


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    FakeNccl.made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return FakeNccl


@pytest.mark.parametrize(("hosts", "network", "store"), [((), Network(), "FileStore"), (((0,), (1,)), APART, "TCPStore")])
def test_the_meeting_of_nccl(nccl: type[FakeNccl], hosts: tuple[tuple[int, ...], ...], network: Network, store: str) -> None:
    """Each rank opens it with one store, its rank in the group, and the group's time-out."""
    with natives(2, hosts, network) as made:
        for native in made:
            native._group.timeout = 77.0

        def call(native: Native, rank: int) -> float:
            opened = native._group
            stage_device, tensor = torch.device("cuda", 0), torch.tensor([1.0 + rank])

            def steps(stage: Any) -> Any:
                pg = yield from native._opened(stage, stage_device)
                pg.allreduce([tensor], dist.AllreduceOptions()).wait()

            opened.start("all_reduce", "fake", "native", steps, False).wait(30)
            return float(tensor)

        assert together(made, call) == [3.0, 3.0]
        assert sorted(nccl.made) == [("TCPStore", 0, 2, 77.0), ("TCPStore", 1, 2, 77.0)]
        groups = [native._made["cuda"][0] for native in made]
    assert [group.ended for group in groups] == ["shutdown", "shutdown"]


def test_nccl_is_aborted_at_the_end_where_a_rank_has_crashed(nccl: type[FakeNccl]) -> None:
    with natives(2) as made:
        fake = object.__new__(FakeNccl)
        made[0]._made["cuda"] = fake, Meeting(1, Network(), [0, 1], 0)
        made[0]._group.engine.messages.crashed[1] = 0.0
        made[0].close()
        for thread in threading.enumerate():
            if thread.name == "polytempo-abort":
                thread.join(10)
        assert fake.ended == "abort"

"""Calls on GPUs of each rank's own go by NCCL: by gloo in its place, from the call on at which all ranks know of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from polytempo.collectives import device_route
from polytempo.collectives.device_buffer import facts_of
from polytempo.collectives.device_choice import DeviceFacts, Network
from polytempo.collectives.world import World, open_in_threads
from polytempo.device.device import Devices
from polytempo.device.host_device import HostDevice
from polytempo.errors import PeerError, RankLost
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob
from polytempo.train.communication import all_reduce, explain_algorithm

ALL = frozenset({"gpu-0", "gpu-1", "gpu-2"})


class Reaching(HostDevice):
    """A stand-in that maps the memory of all others, or only its own."""

    def __init__(self, identity: str, reaches: frozenset[str]) -> None:
        super().__init__(identity)
        self._reachable = reaches | {identity}

    def reachable(self) -> frozenset[str]:
        return self._reachable


def worlds_of(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    reaches: frozenset[str] = ALL,
    hosts: tuple[tuple[int, ...], ...] = (),
    network: Network = Network(),  # noqa: B008
) -> list[World]:
    """Ranks in threads, each with a stand-in of this name, and a torch that has NCCL."""

    def with_nccl(*about: Any) -> DeviceFacts:
        return replace(facts_of(*about), nccl=True)

    monkeypatch.setattr(device_route, "facts_of", with_nccl)
    worlds = open_in_threads(len(names))
    for world, name in zip(worlds, names, strict=True):
        world.hosts, world.network = hosts or world.hosts, network
        world.engine.streams.devices = Devices(Reaching(name, reaches))
    return worlds


def everywhere(worlds: list[World], work: Callable[[Any, int], Any]) -> list[Any]:
    groups = [world.new_group(range(len(worlds))) for world in worlds]
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(work, groups, range(len(worlds))))


def close(worlds: list[World]) -> None:
    for world in worlds:
        world.close()


def calls(group: Any, rank: int) -> tuple[list[list[float]], str, bool]:
    found = []
    for op in ("sum", "mean", "max", "sum"):
        tensors = [torch.tensor([float(rank), 1.0]), torch.full((2, 3), float(rank)).t()]
        group.all_reduce(tensors, op, background=True).wait(30)
        found.append([*tensors[0].tolist(), *tensors[1].flatten().tolist()])
    told = torch.tensor([float(rank)])
    group.broadcast([told], 1).wait(30)
    found.append(told.tolist())
    return found, group.route.way.name, group._native is not None


WANTED = [[3.0, 3.0, *[3.0] * 6], [1.0, 1.0, *[1.0] * 6], [2.0, 1.0, *[2.0] * 6], [3.0, 3.0, *[3.0] * 6], [1.0]]
OWN, SHARED = ["gpu-0", "gpu-1", "gpu-2"], ["gpu-0", "gpu-0", "gpu-1"]
APART = Network(insecure=True, route="127.0.0.1:1")


@pytest.mark.parametrize(
    ("names", "reaches", "hosts", "network", "way"),
    [
        (OWN, ALL, (), Network(), "nccl"),
        (OWN, frozenset(), (), Network(), "cpu"),  # no rank sees another one's GPU
        (SHARED, ALL, (), Network(), "cuda-ipc"),
        (OWN, ALL, ((0,), (1, 2)), APART, "nccl"),
        (SHARED, ALL, ((0, 1), (2,)), APART, "cpu"),
    ],
)
def test_results_are_the_same_by_every_way(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    reaches: frozenset[str],
    hosts: tuple[tuple[int, ...], ...],
    network: Network,
    way: str,
) -> None:
    worlds = worlds_of(monkeypatch, names, reaches, hosts, network)
    assert everywhere(worlds, calls) == [(WANTED, way, way == "nccl")] * 3
    close(worlds)


def test_what_nccl_cannot_do_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = worlds_of(monkeypatch, OWN)

    def work(group: Any, rank: int) -> tuple[list[int], list[bool], list[float]]:
        first, whole, truth = torch.ones(1), torch.tensor([1 << rank]), torch.tensor([rank == 1])
        group.all_reduce([first]).wait(30)
        group.all_reduce([whole], "bor").wait(30)
        group.all_reduce([truth], "max").wait(30)
        parts = [torch.zeros(1) for _ in range(3)]
        group.all_gather(parts, torch.tensor([float(rank)])).wait(30)
        return whole.tolist(), truth.tolist(), torch.cat(parts).tolist()

    assert everywhere(worlds, work) == [([7], [True], [0.0, 1.0, 2.0])] * 3
    close(worlds)


def test_a_rank_with_its_tensors_on_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for it for ever."""
    worlds = worlds_of(monkeypatch, OWN)

    def work(group: Any, rank: int) -> str:
        group.all_reduce([torch.ones(1)]).wait(30)
        if rank == 1:
            group.engine.streams.devices = Devices()
        with pytest.raises(PeerError) as caught:
            group.all_reduce([torch.ones(1)]).wait(30)
        return str(caught.value)

    assert all("by NCCL" in text and "rank 1 calls" in text for text in everywhere(worlds, work))
    close(worlds)


def test_a_rank_that_dies_in_a_call_by_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = worlds_of(monkeypatch, ["gpu-0", "gpu-1"])

    def work(group: Any, rank: int) -> str:
        for _ in range(2):
            group.all_reduce([torch.ones(1)]).wait(30)
        if rank == 1:
            worlds[1].close(politely=False)
            return ""
        with pytest.raises(RankLost) as caught:
            group.all_reduce([torch.ones(1)]).wait(30)
        assert not group._native._made
        return str(caught.value)

    assert "rank 1 is gone" in everywhere(worlds, work)[0]
    close(worlds[:1])


def test_the_way_is_explained_from_the_first_call_on() -> None:
    def work(session: Session) -> tuple[str, str, str]:
        session.devices = Devices(HostDevice("one"))
        before = explain_algorithm("all_reduce", 100, device="cuda").algorithm
        all_reduce(torch.ones(3))
        found = explain_algorithm("all_reduce", 100, device="cuda")
        return before, found.algorithm, found.reason

    with GroupJob(2) as job:
        for before, way, reason in job.run(work):
            assert (before, way) == ("auto", "cuda-ipc")
            assert "the torch of ranks 0 and 1 was built without it" in reason

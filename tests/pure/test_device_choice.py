"""The way of tensors on GPUs: NCCL, CUDA IPC or the CPU, from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.collectives.device_choice import DeviceFacts, Network, choose_way

ALL = frozenset("abcd")


def rank(number: int, device: str, host: int = 0, reachable: frozenset[str] = ALL, nccl: bool = True) -> DeviceFacts:
    return DeviceFacts(number, host, device, reachable, nccl)


ALONE = frozenset("a"), frozenset("b")
CASES = [
    ([rank(0, "a"), rank(1, "b")], Network(), "nccl", "each of the 2 ranks has a GPU of its own"),
    ([rank(0, "a", reachable=ALONE[0]), rank(1, "b", reachable=ALONE[1])], Network(), "nccl", "of its own"),
    ([rank(0, "a"), rank(1, "a")], Network(), "cuda-ipc", "ranks 0 and 1 share a GPU, which it refuses"),
    ([rank(0, "a"), rank(1, "b"), rank(2, "b")], Network(), "cuda-ipc", "ranks 1 and 2 share a GPU"),
    ([rank(0, "a"), rank(1, "b", nccl=False)], Network(), "cuda-ipc", "the torch of rank 1 was built without it"),
    (
        [rank(0, "a", nccl=False), rank(1, "b", nccl=False, reachable=ALONE[1])],
        Network(),
        "cpu",
        "rank 1 cannot map memory of rank 0's GPU",
    ),
    ([rank(0, "a"), rank(1, "b", host=1)], Network(), "cpu", "does not encrypt what goes between 2 hosts"),
    ([rank(0, "a"), rank(1, "b", host=1)], Network(insecure=True), "nccl", "NCCL does not encrypt, and the job of 2 hosts"),
    ([rank(0, "a"), rank(1, "a", host=1)], Network(insecure=True), "nccl", "of its own"),  # alike by name alone
    ([rank(0, "a"), rank(1, "a"), rank(2, "b", host=1)], Network(insecure=True), "cpu", "the ranks are on 2 hosts"),
    ([rank(0, "a"), rank(1, "")], Network(), "cpu", "the tensors of rank 1 are on the CPU"),
    ([rank(0, "a"), rank(1, "b")], Network(emulated=True), "cpu", "--link"),
    ([rank(0, "a")], Network(), "cuda-ipc", "one rank"),
]


@pytest.mark.parametrize(("facts", "network", "way", "said"), CASES)
def test_the_way_and_its_reason(facts: list[DeviceFacts], network: Network, way: str, said: str) -> None:
    found = choose_way(facts, network)
    assert found.name == way
    assert said in found.reason


@st.composite
def groups(draw: st.DrawFn) -> list[DeviceFacts]:
    size = draw(st.integers(2, 5))
    names = st.sampled_from("abcd")
    found = []
    for number in range(size):
        device = draw(names)
        reachable = draw(st.frozensets(names)) | {device}
        found.append(DeviceFacts(number, draw(st.integers(0, 1)), device, reachable, draw(st.booleans())))
    return found


@given(groups(), st.booleans())
def test_each_way_has_what_it_needs(facts: list[DeviceFacts], insecure: bool) -> None:
    way = choose_way(facts, Network(insecure)).name
    hosts = {fact.host for fact in facts}
    own = len({(fact.host, fact.device) for fact in facts}) == len(facts)
    nccl = own and all(fact.nccl for fact in facts) and (len(hosts) == 1 or insecure)
    ipc = len(hosts) == 1 and all(other.device in fact.reachable for fact in facts for other in facts)
    assert way == ("nccl" if nccl else "cuda-ipc" if ipc else "cpu")


@given(groups(), st.booleans(), st.randoms())
def test_the_order_of_ranks_and_numbers_of_hosts_do_not_matter(
    facts: list[DeviceFacts], insecure: bool, dice: object
) -> None:
    swapped = [replace(fact, host=1 - fact.host) for fact in facts]
    dice.shuffle(swapped)  # type: ignore[attr-defined]
    assert choose_way(swapped, Network(insecure)).name == choose_way(facts, Network(insecure)).name

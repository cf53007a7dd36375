"""How a group exchanges tensors that are on GPUs: by NCCL, by CUDA IPC, or through the CPU. Pure: facts in, a way out.

    nccl       each rank has a GPU of its own (NCCL refuses two ranks on one), torch has NCCL on each, and all ranks are on
               one host or the job is insecure: NCCL does not encrypt
    cuda-ipc   all ranks are on one host, and each maps the memory of every other one's GPU: it is the same, or a peer
    cpu        otherwise: tensors are copied to the host, and go as the host's tensors do

All ranks have the same facts (`device_buffer.py`), and so choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NCCL, CUDA_IPC, CPU = "nccl", "cuda-ipc", "cpu"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the choice needs to know of one rank.

    Attributes:
        rank: Its rank in the job.
        host: The number of its host among those of the group.
        device: The identity of its GPU; empty where its tensors are on the CPU.
        reachable: Identities of the devices whose memory it can map, its own among them.
        nccl: Whether its torch has NCCL.
    """

    rank: int
    host: int
    device: str
    reachable: frozenset[str] = frozenset()
    nccl: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """How the job's ranks reach each other.

    Attributes:
        insecure: What goes between hosts need not be encrypted.
        emulated: All traffic has to pass the emulated network (`--link`).
        route: An address that all hosts reach, by which a host finds its own.
    """

    insecure: bool = False
    emulated: bool = False
    route: str = ""


@dataclass(frozen=True, slots=True)
class DeviceWay:
    """A way (`nccl`, `cuda-ipc` or `cpu`), and why it was taken."""

    name: str
    reason: str


def choose_way(facts: Sequence[DeviceFacts], network: Network = Network()) -> DeviceWay:
    """The way for the tensors of a group.

    Args:
        facts: Those of each rank of the group.
        network: That between its ranks.

    Returns:
        The way, with the reason in words.
    """
    if away := [fact.rank for fact in facts if not fact.device]:
        return DeviceWay(CPU, f"the tensors of {_ranks(away)} are on the CPU")
    if network.emulated:
        return DeviceWay(CPU, "the network is emulated (--link), and neither NCCL nor CUDA IPC goes through it")
    if len(facts) == 1:
        return DeviceWay(CUDA_IPC, "there is one rank: nothing leaves its GPU")
    against_nccl = _against_nccl(facts, network)
    if not against_nccl:
        unencrypted = f"; NCCL does not encrypt, and the job of {_hosts(facts)} is insecure" if _hosts_of(facts) > 1 else ""
        return DeviceWay(NCCL, f"each of the {len(facts)} ranks has a GPU of its own, and torch has NCCL{unencrypted}")
    against_ipc = _against_ipc(facts)
    if not against_ipc:
        return DeviceWay(CUDA_IPC, f"no NCCL: {against_nccl}; all ranks are on one host and reach each other's GPUs")
    return DeviceWay(CPU, f"no NCCL: {against_nccl}; no CUDA IPC: {against_ipc}")


def _against_nccl(facts: Sequence[DeviceFacts], network: Network) -> str:
    """Why NCCL cannot be taken; empty where it can."""
    if without := [fact.rank for fact in facts if not fact.nccl]:
        return f"the torch of {_ranks(without)} was built without it"
    on_device: dict[tuple[int, str], list[int]] = {}
    for fact in facts:
        on_device.setdefault((fact.host, fact.device), []).append(fact.rank)
    if shared := [ranks for ranks in on_device.values() if len(ranks) > 1]:
        return f"{_ranks(shared[0])} share a GPU, which it refuses"
    if _hosts_of(facts) > 1 and not network.insecure:
        return f"it does not encrypt what goes between {_hosts(facts)}, and the job is not insecure"
    return ""


def _against_ipc(facts: Sequence[DeviceFacts]) -> str:
    """Why memory cannot be shared by CUDA IPC; empty where it can."""
    if _hosts_of(facts) > 1:
        return f"the ranks are on {_hosts(facts)}"
    for fact in facts:
        for other in facts:
            if other.device not in fact.reachable:
                return (
                    f"rank {fact.rank} cannot map memory of rank {other.rank}'s GPU (not visible to it, or no peer access)"
                )
    return ""


def _hosts_of(facts: Sequence[DeviceFacts]) -> int:
    return len({fact.host for fact in facts})


def _hosts(facts: Sequence[DeviceFacts]) -> str:
    return f"{_hosts_of(facts)} hosts"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

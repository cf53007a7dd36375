"""Two hosts on one machine: network namespaces joined by a cable, whose names and addresses no other test has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """Namespaces a and b; a has `address`."""

    a: str
    b: str
    address: str

    def inside(self, namespace: str) -> list[str]:
        """What a command starts with to run in a namespace."""
        return ["ip", "netns", "exec", namespace]


def why_not() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pt-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextmanager
def two_hosts(rate: str = "") -> Iterator[Hosts]:
    """`rate`: of the cable, each way, such as 100mbit; as fast as can be without."""
    number = os.getpid() % 50_000
    a, b = f"pt-a-{number}", f"pt-b-{number}"
    left, right = f"ptl{number}", f"ptr{number}"
    address, other = f"10.{number // 250}.{number % 250}.1", f"10.{number // 250}.{number % 250}.2"
    commands = [
        f"ip netns add {a}",
        f"ip netns add {b}",
        f"ip link add {left} type veth peer name {right}",
        f"ip link set {left} netns {a}",
        f"ip link set {right} netns {b}",
        f"ip -n {a} addr add {address}/24 dev {left}",
        f"ip -n {b} addr add {other}/24 dev {right}",
        f"ip -n {a} link set {left} up",
        f"ip -n {b} link set {right} up",
        f"ip -n {a} link set lo up",
        f"ip -n {b} link set lo up",
    ]
    if rate:
        shaped = f"root tbf rate {rate} burst 32kb latency 50ms"
        commands += [f"ip netns exec {name} tc qdisc add dev {end} {shaped}" for name, end in ((a, left), (b, right))]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield Hosts(a, b, address)
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

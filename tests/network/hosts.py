"""Hosts on one machine: network namespaces whose names and addresses no other test has. Two joined by a cable, or several by
a switch, of which each can be cut off."""

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


@dataclass(frozen=True)
class SwitchedHosts:
    """Namespaces that a switch joins, each by a cable of its own. What is cut drops packets without a word, as a broken
    network does; each end of a cable drops what it sends."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    switch: str

    def inside(self, host: int) -> list[str]:
        """What a command starts with to run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self, host: int, sends: bool = True, hears: bool = True) -> None:
        """A host is cut off: what it sends is lost, and what it would hear."""
        for namespace, end, lost in ((self.names[host], "cable", sends), (self.switch, f"port{host}", hears)):
            if lost:
                do(f"ip netns exec {namespace} tc qdisc replace dev {end} root blackhole")

    def heal(self, host: int) -> None:
        """It is back."""
        for namespace, end in ((self.names[host], "cable"), (self.switch, f"port{host}")):
            subprocess.run(
                f"ip netns exec {namespace} tc qdisc del dev {end} root".split(), check=False, capture_output=True
            )

    def part(self, one: int, other: int) -> None:
        """Two hosts lose each other, and no other: what they send to each other goes nowhere."""
        for here, there in ((one, other), (other, one)):
            do(f"ip -n {self.names[here]} neigh replace {self.addresses[there]} lladdr 02:00:00:00:00:fe dev cable")


def do(command: str) -> None:
    """Run a command that must work."""
    subprocess.run(command.split(), check=True, capture_output=True)


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


@contextmanager
def switched_hosts(count: int) -> Iterator[SwitchedHosts]:
    """Hosts 0 to `count` - 1."""
    number = os.getpid() % 50_000
    names = tuple(f"pt-{host}-{number}" for host in range(count))
    net, switch = f"10.{number // 250}.{number % 250}", f"pt-s-{number}"
    made = SwitchedHosts(names, tuple(f"{net}.{host + 1}" for host in range(count)), switch)
    try:
        do(f"ip netns add {switch}")
        do(f"ip -n {switch} link add bridge type bridge")
        do(f"ip -n {switch} link set bridge up")
        for host, name in enumerate(names):
            do(f"ip netns add {name}")
            do(f"ip -n {switch} link add port{host} type veth peer name cable netns {name}")
            do(f"ip -n {switch} link set port{host} master bridge up")
            do(f"ip -n {name} addr add {made.addresses[host]}/24 dev cable")
            do(f"ip -n {name} link set cable up")
            do(f"ip -n {name} link set lo up")
        yield made
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

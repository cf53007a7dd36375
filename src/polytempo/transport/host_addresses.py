"""The addresses of this host: the one on the way to another, and all that others may reach it by. Nothing is sent."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

#: Where a host listens that listens at all its addresses.
EVERYWHERE = ("0.0.0.0", "*", "::", "[::]")
#: Addresses for documentation: no host has one, so that the way there is the default route.
FAR_AWAY = ("198.51.100.1:9", "[2001:db8::1]:9")
#: Asks the kernel for the IPv4 address of an interface (netdevice(7)).
SIOCGIFADDR = 0x8915


def own_address(route: str) -> str:
    """The address of this host on the way to another."""
    host = route.rpartition(":")[0] or route
    family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def own_host(route: str) -> tuple[str, bool]:
    """Where to listen, and whether others can use that address: `*` and `::` stand for all addresses of this host."""
    host = route.rpartition(":")[0]
    if host in EVERYWHERE:
        return ("::" if ":" in host else "*"), False
    return own_address(route), True


def own_addresses() -> list[str]:
    """What other hosts may reach this one by: the addresses of its interfaces, those on the default route first.

    Loopback is for this host alone, and an address of one link needs the name of an interface of the other host.
    """
    first = []
    for place in FAR_AWAY:
        with suppress(OSError):  # there is no such route
            first.append(own_address(place))
    found = [ipaddress.ip_address(address) for address in (*first, *_of_interfaces())]
    return list(dict.fromkeys(str(address) for address in found if not (address.is_loopback or address.is_link_local)))


def _of_interfaces() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]
    return found


def joined_by(listen: str, port: int, addresses: list[str]) -> list[str]:
    """The HOST:PORT by which other hosts join, the likeliest first; of a host without a network that of loopback.

    Args:
        listen: Where this host listens, as the user gave it.
        port: The port, which the kernel may have chosen.
        addresses: `own_addresses()`.
    """
    host = listen.rpartition(":")[0]
    if host not in EVERYWHERE:
        return [f"{host}:{port}"]
    both = host in ("::", "[::]")
    usable = [address for address in addresses if both or ":" not in address] or ["::1" if both else "127.0.0.1"]
    return [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in usable]

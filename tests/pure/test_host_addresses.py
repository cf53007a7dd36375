"""Where other hosts find this one: never at the address that stands for all of them."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from polytempo.transport import host_addresses
from polytempo.transport.host_addresses import EVERYWHERE, joined_by, own_addresses, own_host

OWN = ["10.0.0.7", "192.168.1.7", "fd00::7"]


@pytest.mark.parametrize(
    ("listen", "port", "own", "join"),
    [
        ("10.0.0.7:7077", 7077, OWN, ["10.0.0.7:7077"]),
        ("node-7:0", 40001, OWN, ["node-7:40001"]),
        ("0.0.0.0:7077", 7077, OWN, ["10.0.0.7:7077", "192.168.1.7:7077"]),
        ("0.0.0.0:0", 40001, OWN, ["10.0.0.7:40001", "192.168.1.7:40001"]),
        ("[::]:7077", 7077, OWN, ["10.0.0.7:7077", "192.168.1.7:7077", "[fd00::7]:7077"]),
        ("[fd00::7]:7077", 7077, OWN, ["[fd00::7]:7077"]),
        ("0.0.0.0:7077", 7077, ["fd00::7"], ["127.0.0.1:7077"]),
        ("[::]:7077", 7077, [], ["[::1]:7077"]),
    ],
)
def test_what_is_joined(listen: str, port: int, own: list[str], join: list[str]) -> None:
    assert joined_by(listen, port, own) == join


@pytest.mark.parametrize("routed", [True, False])
def test_own_addresses_are_of_this_host(routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever network there is: each can be listened on, none is loopback's, none stands for all."""
    if not routed:

        def unreachable(route: str) -> str:
            raise OSError(f"no route to {route}")

        expected = set(own_addresses())
        monkeypatch.setattr(host_addresses, "own_address", unreachable)
        assert set(own_addresses()) == expected, "the interfaces have them too"
    found = own_addresses()
    assert len(found) == len(set(found))
    for address in found:
        assert address not in EVERYWHERE
        assert not ipaddress.ip_address(address).is_loopback
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            assert listener.getsockname()[0] == address


def test_where_a_host_listens_that_others_reach_by_many_addresses() -> None:
    assert [own_host(route) for route in ("0.0.0.0:7", "[::]:7", "127.0.0.1:7")] == [
        ("*", False),
        ("::", False),
        ("127.0.0.1", True),
    ]

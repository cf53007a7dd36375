"""Who may be whom: the key lets a host in, a token says which worker a process is.

The servers of a job share a secret that never leaves them. A worker of another host gets, with its rank, the MAC of its
role, rank and incarnation under that secret, over the encrypted connection of its agent; it shows it when it greets. So who
has the key file can bring workers that are expected, and cannot be a worker that was brought by another host.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from polytempo.errors import PeerError


def make_secret() -> str:
    """A new secret for the servers of a job."""
    return secrets.token_hex(32)


class Credentials:
    """Makes and checks tokens."""

    def __init__(self, secret: str) -> None:
        self._secret = bytes.fromhex(secret)

    def token(self, role: str, rank: int, incarnation: int) -> str:
        """What proves that a process is this one."""
        return hmac.new(self._secret, f"{role}/{rank}/{incarnation}".encode(), hashlib.sha256).hexdigest()

    def check(self, role: str, rank: int, incarnation: int, token: str) -> None:
        """Refuse who says to be somebody else."""
        if not hmac.compare_digest(self.token(role, rank, incarnation).encode(), token.encode()):
            raise PeerError(f"a process cannot prove that it is {role} {rank}; start it with polytempo worker --join")

"""Keys and tokens: the key file lets a host in, a token proves which worker a process is.

The servers of a job share a secret that never leaves them. A worker of another host gets, with its rank, the MAC of its
role, rank and incarnation under that secret, over the encrypted connection of its agent; it presents it in its hello. So a
host with the key file can bring workers that are expected, and cannot impersonate a worker of another host.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from polytempo.errors import PeerError, UsageError


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
        """Refuse a process whose token is of another role, rank or incarnation."""
        if not hmac.compare_digest(self.token(role, rank, incarnation).encode(), token.encode()):
            raise PeerError(
                f"a process cannot prove that it is {role} {rank}; start it with polytempo worker --join HOST:PORT"
            )


# Keys of a job that listens to other hosts: made for each job, passed on in a file that only its owner can read.
#
# Servers have one key pair, all workers of the job another: a server accepts only peers that prove that they have the
# workers' secret, and a worker only servers that prove that they have theirs. All traffic is encrypted (CURVE).


@dataclass(frozen=True)
class WorkerKeys:
    """What a worker on another host needs: this is in the key file."""

    server_public: str
    worker_public: str
    worker_secret: str


@dataclass(frozen=True)
class JobKeys:
    """All keys of a job: known to its servers."""

    workers: WorkerKeys
    server_secret: str


def make_keys() -> JobKeys:
    """New keys."""
    server_public, server_secret = zmq.curve_keypair()
    worker_public, worker_secret = zmq.curve_keypair()
    workers = WorkerKeys(server_public.decode(), worker_public.decode(), worker_secret.decode())
    return JobKeys(workers, server_secret.decode())


def write_key_file(path: str | Path, keys: WorkerKeys) -> None:
    """Write what a worker needs, readable by its owner alone from the first moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(keys), file)


def read_key_file(path: str | Path) -> WorkerKeys:
    """Read a key file; refused when others can read it too."""
    try:
        if os.stat(path).st_mode & 0o077:
            raise UsageError(f"{path} can be read by others; a key is a secret: chmod 600 {path}, then try again")
        return WorkerKeys(**json.loads(Path(path).read_text(encoding="utf-8")))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}; copy it from the listening host") from None
    except (ValueError, TypeError):
        raise UsageError(f"{path} is not a key file of polytempo; copy the one that `run --listen` named") from None

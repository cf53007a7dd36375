"""Keys of a job that listens to other hosts: made for each job, handed over in a file that only its owner can read.

Servers have one key pair, all workers of the job another: a server takes nobody who cannot prove that it has the workers'
secret, and a worker talks to nobody who cannot prove that it has the servers'. Everything between is encrypted (CURVE).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from polytempo.errors import UsageError


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

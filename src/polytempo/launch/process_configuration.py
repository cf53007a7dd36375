"""What the processes of a job are told when they are started: facts for workers, a configuration for each server."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from polytempo.launch.job_facts import JobFacts
from polytempo.launch.request import CheckedRequest, split_address
from polytempo.transport.keys import JobKeys, make_keys, make_secret
from polytempo.version import VERSION


class ProcessConfiguration:
    """Of one job, whose processes on this host meet in `folder`."""

    def __init__(self, checked: CheckedRequest, folder: Path) -> None:
        self.checked, self.request, self.plan = checked, checked.request, checked.plan
        self.folder = folder
        self.keys: JobKeys | None = make_keys() if self.request.listen and not self.request.insecure else None
        self._secret = make_secret()  # of the servers: it goes to nobody else
        self._port = free_port()

    def facts(self, addresses: tuple[str, ...], keys: dict[str, str] | None) -> JobFacts:
        """For workers that reach the servers at these addresses, with these keys."""
        request = self.request
        return JobFacts(
            size=request.size,
            addresses=addresses,
            sync=request.sync,
            seed=request.seed,
            local_size=request.workers,
            slow=request.slow,
            hiccup=request.hiccup,
            positions=tuple(self.plan.resumed.get("positions", ())),
            keys=keys,
            via="auto" if request.via == "auto" and request.way == "allreduce" else request.way,
            meeting="" if request.expect else str(self.folder),
            route=request.listen or "",
            insecure=request.insecure,
            port=self._port,
        )

    def server_config(self, index: int, path: str, first: str) -> dict[str, Any]:
        """For one server, which listens at `path`; `first` is where the first one does."""
        request = self.request
        listen = None
        if request.listen:
            host, port = split_address(request.listen, "--listen")
            listen = f"tcp://{host}:{port if index == 0 else '*'}"
        return {
            "index": index,
            "path": path,
            "first": f"ipc://{first}",
            "listen": listen,
            "keys": asdict(self.keys) if self.keys else None,
            "size": self.plan.size,
            "shards": self.plan.shards,
            "sync": self.plan.sync,
            "limits": {name: None if value == float("inf") else value for name, value in asdict(self.plan.limits).items()},
            "checkpoint_every": self.plan.checkpoint_every,
            "resumed": self.plan.resumed,
            "checkpoint": str(request.checkpoint) if request.checkpoint else None,
            "resume": str(self.checked.resume) if self.checked.resume else None,
            "record": str(request.record) if request.record else None,
            "threads": int(self.threads()["OMP_NUM_THREADS"]),
            "host_timeout": request.host_timeout,
            "secret": self._secret,
            "go_on_unsaved": request.checkpoint_errors == "continue",
            "facts": self._meta() if index == 0 else {},
        }

    def _meta(self) -> dict[str, Any]:
        versions = {"polytempo": VERSION, "python": platform.python_version(), "torch": installed_version("torch")}
        host = {"name": platform.node(), "cores": os.cpu_count(), "system": platform.platform()}
        return {
            "spec": self.request.sync,
            "size": self.request.size,
            "first_step": self.plan.first_step,
            "options": self.checked.options(),
            "versions": versions,
            "seed": self.request.seed,
            "host": host,
        }

    def threads(self) -> dict[str, str]:
        """Processes share the cores, unless the user has said otherwise."""
        busy = self.request.workers + (self.request.shards if self.request.way == "ps" else 0)
        share = max(1, (os.cpu_count() or 1) // busy)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}

    def log(self, name: str) -> Path | None:
        """Where the output of a process is kept, if it is."""
        return self.request.record / "logs" / f"{name}.log" if self.request.record else None


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])

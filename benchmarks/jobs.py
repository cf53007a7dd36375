"""Our side: servers, job file and environment of a job, as `polytempo run` makes them (`launcher/job_processes.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from polytempo.launcher.job_processes import KEEP_MEMORY
from rigs import Rig, RigFailed


def start_job(rig: Rig, workers: int, servers: int, sync: str, via: str = "ps") -> str:
    """Start the servers; the job file with which workers join."""
    from polytempo.launcher.job_facts import JobFacts

    rig.environment = KEEP_MEMORY
    paths = [str(rig.directory / f"server-{index}") for index in range(servers)]
    extra = _extra_facts(JobFacts, via, rig.directory)
    for index in range(servers):
        rig.servers.append(_start_server(_server_config(index, paths, workers, sync, via), rig.directory))
    job_file = rig.directory / "job.json"
    addresses = tuple(f"ipc://{path}" for path in paths)
    JobFacts(workers, addresses, sync, local_size=workers, **extra).write(job_file)
    return str(job_file)


def _extra_facts(facts: Any, via: str, directory: Path) -> dict[str, Any]:
    """Facts that older versions do not know."""
    known = {field.name for field in fields(facts)}
    if via != "ps" and not {"via", "meeting"} <= known:
        raise RigFailed(f"this version of polytempo has no jobs via {via}")
    return {name: value for name, value in (("via", via), ("meeting", str(directory))) if name in known}


def _server_config(index: int, paths: list[str], workers: int, sync: str, via: str) -> dict[str, Any]:
    return {
        "index": index,
        "path": paths[index],
        "first": f"ipc://{paths[0]}",
        "size": workers,
        "shards": len(paths),
        "sync": sync,
        "modes": [],
        "via": via,
        "limits": {},
        "checkpoint_every": 0,
        "threads": 1,
        "facts": {},
        "resumed": {},
        "device": "auto",
        "secret": "",
        "host_timeout": 5.0,
        "go_on_unsaved": False,
        "ends_diverged": False,
        **dict.fromkeys(("listen", "keys", "checkpoint", "resume", "record")),
    }


def _start_server(config: dict[str, Any], directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "polytempo.launcher.server_process"]
    with open(directory / f"server-{config['index']}.log", "wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **KEEP_MEMORY})
    assert server.stdin is not None
    server.stdin.write(json.dumps(config).encode() + b"\n")
    server.stdin.flush()  # it stays open: its end means that the launcher is gone
    return server

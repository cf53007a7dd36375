"""The program of a server process: `python -m polytempo.launcher.server_process`, its configuration on standard input.

Nothing secret is on its command line. When it listens it prints its addresses in one line of JSON. Its standard input stays
open as long as the launcher lives; its end tells the end of the launcher. Signals that end a job are left to the launcher
(`child_process.py`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from polytempo.door import ModeSource, bring
from polytempo.errors import PolytempoError
from polytempo.optim.torch_compiler import spare_compiler
from polytempo.protocol.messages import STRANGER_LIMIT
from polytempo.server.coordinator import Coordinator, JobRecord
from polytempo.server.io_loop import IoLoop
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.members import RemoteHosts
from polytempo.server.sequencer import Sequencer
from polytempo.server.shard_executor import ShardExecutor, ShardPlacement, ShardState
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Endpoint
from polytempo.transport.connect import connect
from polytempo.transport.keys import Credentials, JobKeys, WorkerKeys
from polytempo.transport.shared_memory import SharedMemoryRegistry
from polytempo.transport.stream import StreamEndpoint
from polytempo.transport.zeromq import ZmqEndpoint

PATIENCE = 60.0


def serve(config: dict[str, Any]) -> None:
    """Run the server that the configuration describes, until the job ends."""
    for source in config["modes"]:
        bring(ModeSource(**source))
    torch.set_num_threads(config["threads"])
    spare_compiler()
    index, pool = config["index"], Pool(SharedMemoryRegistry())
    limits = {name: value for name, value in config["limits"].items() if value is not None}
    plan = JobPlan(
        config["size"],
        config["shards"],
        config["sync"],
        Limits(**limits),
        config["checkpoint_every"],
        config["resumed"],
        recorded=bool(config["record"]),
    )
    endpoints: list[Endpoint] = [StreamEndpoint(config["path"], pool, STRANGER_LIMIT)]
    if config["listen"]:
        keys = config["keys"] and JobKeys(WorkerKeys(**config["keys"]["workers"]), config["keys"]["server_secret"])
        endpoints.append(ZmqEndpoint(config["listen"], keys, pool, STRANGER_LIMIT))
    checkpoints, resume = (Path(config[name]) if config[name] else None for name in ("checkpoint", "resume"))
    placement = ShardPlacement(config["device"], index)
    executor = ShardExecutor(ShardState(index, plan.shards, pool, plan.size, checkpoints, resume, placement))
    credentials = Credentials(config["secret"])
    if index:
        coordinator, to_coordinator = None, connect(config["first"], f"server-{index}", None, pool, PATIENCE)
    else:
        coordinator = Coordinator(
            *(Sequencer(plan), JobRecord(config["record"]), checkpoints, config["facts"]),
            RemoteHosts(config["host_timeout"], credentials),
            config["go_on_unsaved"],
            resume,
            config["ends_diverged"],
        )
        to_coordinator = None
    gc.collect()
    gc.freeze()  # these objects stay: collecting among them would cost more than serving
    server = IoLoop(executor, endpoints, plan.size, coordinator, to_coordinator, sys.stdin.fileno(), credentials)
    sys.stdout.write(json.dumps({"ready": [endpoint.address for endpoint in endpoints]}) + "\n")
    sys.stdout.flush()
    server.run()


def main() -> None:
    """Read the configuration and serve."""
    try:
        serve(json.loads(sys.stdin.readline()))
    except PolytempoError as error:
        sys.stderr.write(f"polytempo: {error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()

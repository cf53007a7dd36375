"""The program of the emulated network: `python -m polytempo.launcher.link_process`, its configuration on standard input.

It prints the proxy addresses of all workers in one line of JSON, and carries their bytes (`transport/link_relay.py`). When
its standard input ends, the workers have ended, or the launcher has: what they sent before is still carried, and then this
process ends, too. Signals that end a job are left to the launcher (`child_process.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from polytempo.transport.link_emulation import EmulatedNetwork
from polytempo.transport.link_relay import LinkRelay

#: Seconds without a byte after which it ends, though a connection is open.
SILENCE = 5.0


def main() -> None:
    """Read the configuration and relay."""
    config: dict[str, Any] = json.loads(sys.stdin.readline())
    network = EmulatedNetwork(config["bandwidth"], config["latency"], dict(config["own"]))
    relay = LinkRelay(network, config["workers"], config["servers"], time.monotonic)
    ending: list[float] = []
    relay.watch_end(sys.stdin.fileno(), lambda: ending.append(time.monotonic()))
    sys.stdout.write(json.dumps({"ready": relay.proxies}) + "\n")
    sys.stdout.flush()
    while not ending or (relay.carries() and time.monotonic() < max(ending[0], relay.moved_at) + SILENCE):
        relay.turn()
    os._exit(0)


if __name__ == "__main__":
    main()

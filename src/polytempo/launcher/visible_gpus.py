"""The number of GPUs that the processes of a job will see, found without loading torch or CUDA."""

from __future__ import annotations

import os
import re
from pathlib import Path

from polytempo.server.server_device import count_visible

_FILE = re.compile(r"nvidia\d+")


def visible_gpus() -> int:
    """GPUs of this host that CUDA_VISIBLE_DEVICES leaves visible."""
    try:
        files = sum(1 for path in Path("/dev").iterdir() if _FILE.fullmatch(path.name))
    except OSError:
        files = 0
    return count_visible(files, os.environ.get("CUDA_VISIBLE_DEVICES"))

"""`--server-device`: what it may be, which GPU a shard is made on, and how many servers there are by default.

cpu      values in the CPU's memory
auto     on a GPU where the first worker's parameters are on one and CUDA works in the server; else as with cpu
cuda     on a GPU: shard i on visible GPU i modulo their number
cuda:I   on visible GPU I
"""

from __future__ import annotations

import re

from polytempo.errors import UsageError

AUTO, CPU = "auto", "cpu"
_GPU = re.compile(r"cuda(?::(\d{1,4}))?")


def check_server_device(option: str, gpus: int) -> None:
    """Refuse an option that there is not, or that this host cannot fulfil.

    Args:
        option: The value of `--server-device`.
        gpus: The number of GPUs that are visible here.

    Raises:
        UsageError: One line, with what is there.
    """
    match = _GPU.fullmatch(option)
    if option in (AUTO, CPU):
        return
    if match is None:
        raise UsageError(f"expected --server-device auto, cpu, cuda or cuda:I, got {option!r}")
    if not gpus:
        raise UsageError(f"--server-device {option}: there is no GPU that CUDA can use on this host; use auto or cpu")
    if match[1] and int(match[1]) >= gpus:
        there = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise UsageError(f"--server-device {option}: there is {there} (CUDA_VISIBLE_DEVICES counts); use one of them")


def gpu_of_shard(option: str, shard: int, gpus: int, wanted: bool) -> int | None:
    """The visible GPU on which a shard is made; None for the CPU's memory.

    Args:
        option: The value of `--server-device`, checked.
        shard: Which shard.
        gpus: The number of GPUs that are visible.
        wanted: Are the first worker's parameters on a GPU?
    """
    match = _GPU.fullmatch(option)
    if match is not None and match[1]:
        return int(match[1])
    return shard % gpus if gpus and (match is not None or (option == AUTO and wanted)) else None


def count_visible(files: int, variable: str | None) -> int:
    """Of GPUs with this number of device files, those that the variable leaves visible.

    Args:
        files: Device files, one a GPU.
        variable: The value of CUDA_VISIBLE_DEVICES; None where it is not set. As CUDA reads it: entries count up to the
            first that is none (-1, a number beyond the last GPU); names of GPUs and of MIG instances count as they are.
    """
    if not files or variable is None:
        return files
    count = 0
    for entry in variable.split(","):
        name = entry.strip()
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < files)):
            break
        count += 1
    return count


def default_servers(gpus: int, workers: int, server_device: str) -> int:
    """Servers where the user gives no number: one a GPU that workers use, where values may be on GPUs; else one.

    Args:
        gpus: That are visible on this host.
        workers: On this host.
        server_device: The value of --server-device.
    """
    spread = server_device in ("auto", "cuda") and gpus > 1
    return max(1, min(gpus, workers)) if spread else 1

"""Every method of a group and of its `Work`, in a process beside: the names of those that end it.

Arguments are those that the method takes, where it is known here, and otherwise none, or up to five times None.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import polytempo  # noqa: F401  tells torch the word

CPU, SECOND = torch.device("cpu"), timedelta(seconds=1)
CUSTOM, GLOO = dist.ProcessGroup.BackendType.CUSTOM, dist.ProcessGroup.BackendType.GLOO
KNOWN: dict[str, list[tuple[Any, ...]]] = {
    "split_group": [([0],), ([0], SECOND, None, "name", "words", None)],
    "merge_remote_group": [(dist.HashStore(), 1, SECOND)],
    **{name: [(CPU,)] for name in ("_start_coalescing", "_end_coalescing", "_get_backend", "get_backend")},
    **{name: [(CUSTOM,), (GLOO,)] for name in ("_backend_id", "_set_default_backend")},
    **{name: [("name",)] for name in ("_set_group_name", "_set_group_desc")},
    "_register_on_completion_hook": [(print,)],
    "_register_backend": [(CPU, CUSTOM, None), (CPU, GLOO, None)],
    **{name: [(SECOND,)] for name in ("set_timeout", "wait")},
}


def in_child(calls: list[tuple[str, Callable[[Any], object]]], ended: bool) -> None:
    """Make a group and a `Work`, and these calls of them, one after another; name the one that ends the process."""
    while calls:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            dist.init_process_group("polytempo", store=dist.HashStore(), rank=0, world_size=1)
            made = {"group": dist.group.WORLD, "work": dist.all_reduce(torch.ones(2), async_op=True)}
            made["awaited"] = dist.all_reduce(torch.ones(2), async_op=True)
            made["awaited"].wait()
            if ended:
                dist.destroy_process_group()
            signal.alarm(30)
            for _, call in calls:
                os.write(writes, b".")
                with suppress(Exception):
                    call(made)
            os._exit(0)
        os.close(writes)
        with open(reads, "rb") as told:
            begun = len(told.read())
        if status := os.waitpid(child, 0)[1]:
            print(f"{calls[begun - 1][0]} ended the process: {status}")
        calls = calls[begun:]


def calls_of(which: str, kind: type) -> list[tuple[str, Callable[[Any], object]]]:
    """Each name of an object, and as the method of its class in C++, which a caller can reach, too. Last what ends it."""
    names = sorted((name for name in dir(kind) if not name.startswith("__")), key=lambda name: name in ("abort", "shutdown"))
    return [
        (f"{which}.{name}{given}", lambda made, name=name, given=given, of=of: of(made[which], name)(*given))
        for of in (getattr, lambda what, name: getattr(kind, name).__get__(what))
        for name in names
        for given in [*KNOWN.get(name, []), *((None,) * count for count in range(6))]
    ]


def main() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # torch warns in C++ of some of them
    work = torch._C._distributed_c10d.Work
    for ended in (False, True):
        in_child([*calls_of("work", work), *calls_of("awaited", work), *calls_of("group", dist.ProcessGroup)], ended)
    print("seen")


if __name__ == "__main__":
    main()

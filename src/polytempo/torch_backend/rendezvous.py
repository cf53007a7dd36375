"""From what torch knows of a group to links between its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed

from polytempo.client.key_value_store import TorchStore
from polytempo.collectives.world import World, open_by_store
from polytempo.errors import PolytempoError, UsageError
from polytempo.launch.job_facts import way_of
from polytempo.torch_backend.errors import as_torch_error
from polytempo.torch_backend.process_group import TorchGroup

_opened: Counter[str] = Counter()  # how often a group of this name was made


def open_group(options: Any, group_options: Any) -> TorchGroup:
    """Called by torch in each rank of a group."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    try:
        if group_options is not None:
            raise UsageError(f"expected no pg_options for the back end polytempo, got {type(group_options).__name__}")
        world = _open_world(options, ranks)
    except PolytempoError as error:
        raise as_torch_error(error, ranks) from None
    return TorchGroup(options.store, world, ranks)


def _open_world(options: Any, ranks: Sequence[int]) -> World:
    """A group that is made again under its old name finds the old one's words in the store: so times are counted."""
    _opened[options.group_id] += 1
    store = TorchStore(torch.distributed.PrefixStore(f"polytempo-{_opened[options.group_id]}", options.store))
    way, seconds = way_of(None, None), options.timeout.total_seconds()
    return open_by_store(
        store,
        options.group_rank,
        options.group_size,
        way.address or _route(options.store),
        way.keys,
        way.insecure,
        patience=seconds,
        timeout=seconds,
        gone=lambda: _gone(ranks),
    )


def _gone(ranks: Sequence[int]) -> dict[int, str]:
    """Whom the group of all ranks has lost, numbered as in a new group of these."""
    default = torch.distributed.group.WORLD
    if not isinstance(default, TorchGroup):  # another back end's, or this is the first
        return {}
    default.world.engine.look()
    left = default.world.engine.messages.left
    return {number: left[rank] for number, rank in enumerate(ranks) if rank in left}


def _route(store: Any) -> str:
    """The host where torch's store is: all ranks reach it. Other stores are files or memory, of one host."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, torch.distributed.TCPStore):
        return ""
    return f"[{store.host}]:{store.port}" if ":" in store.host else f"{store.host}:{store.port}"

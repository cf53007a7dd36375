"""May a job go on from a checkpoint of another mode, and with what? One pure function of what the checkpoint holds and of
what the mode needs. It loads no torch: a launcher asks before anything starts, as far as the manifest says enough.

    weights             carried between all modes that keep them on servers; refused of modes that keep them at workers
    fragments           a model that is averaged in fragments is held in as many parts: it goes on in as many
    script's optimizer  on servers or at the workers, by mode: its state is carried, also from one to the other. Servers that
                        ran it give it to all workers; servers take the mean of those that ran it. Workers go on from their
                        own, or, where they are more or fewer, from that mean
    outer momentum      goes on in modes with one of the same kind, and begins anew in others
    a mode's own rule   (`asup`) has a state that only the same rule can use
    companions          module buffers and optimizer state that are averaged with the values: those that both have
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import structs

from polytempo.errors import UsageError
from polytempo.protocol.layout import first_difference, table_difference
from polytempo.protocol.values import OptimizerSpec, TableInfo, TensorInfo
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.spec import Spec, parse_spec


@dataclass(frozen=True)
class Holding:
    """What a job holds of one optimizer, and where."""

    sync: str
    apply: str
    optimizer: str  #: the class that servers run; empty where they run none
    inner: str  #: the class that the script has wrapped; empty where an older version did not say it
    tensors: tuple[TensorInfo, ...] = ()
    tables: tuple[TableInfo, ...] = ()
    companions: int = 0  #: the last of the tensors, which are no parameters

    @cached_property
    def spec(self) -> Spec:
        return parse_spec(self.sync)

    @property
    def at_workers(self) -> bool:
        """Does the script's optimizer run there, so that they have its state?"""
        return self.spec.at_workers or self.apply == "delta"

    @property
    def on_servers(self) -> str:
        """The class whose state servers keep, the script's or a mode's own rule; empty without one."""
        return "" if self.at_workers else self.optimizer

    @property
    def script_class(self) -> str:
        """The class of the script's optimizer; empty where an older version did not say it."""
        return self.inner or ("" if self.spec.mode.rule else self.on_servers)

    @property
    def outer(self) -> str:
        """The kind of the outer momentum that servers keep; empty without one."""
        return self.spec.outer_momentum if self.apply == "server" else ""

    @property
    def parameters(self) -> tuple[TensorInfo, ...]:
        return self.tensors[: len(self.tensors) - self.companions]


@dataclass(frozen=True)
class Resumption:
    """What becomes of a checkpoint in a job."""

    loads: bool = False  #: servers go on with the state that servers kept
    to_workers: bool = False  #: workers do
    dropped: str = ""  #: what cannot go on, in a line


def holding_of(spec: OptimizerSpec) -> Holding:
    """What a job with this optimizer holds."""
    return Holding(spec.sync, spec.apply, spec.optimizer, spec.inner, spec.tensors, spec.tables, spec.companions)


def proposal_of(spec: OptimizerSpec) -> dict[str, Any]:
    """What a manifest says of an optimizer, for `holding_in`."""
    tensors = [[info.name, list(info.shape), info.dtype, info.group] for info in spec.tensors]
    tables = [list(structs.astuple(info)) for info in spec.tables]
    facts = {name: getattr(spec, name) for name in ("apply", "optimizer", "sync", "inner", "companions")}
    facts |= {"digest": spec.digest} if spec.digest else {}
    return {**facts, "tensors": tensors, "tables": tables}


def holding_in(manifest: Mapping[str, Any], optimizer_id: str) -> Holding:
    """What a checkpoint holds of an optimizer."""
    saved = manifest["tracks"][optimizer_id]["proposal"]
    return Holding(
        saved.get("sync", manifest.get("sync", "bsp")),
        saved["apply"],
        saved["optimizer"],
        saved.get("inner", ""),
        tuple(TensorInfo(name, tuple(shape), dtype, group) for name, shape, dtype, group in saved["tensors"]),
        tuple(TableInfo(*described) for described in saved.get("tables", [])),
        saved.get("companions", 0),
    )


def modes_in(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The modes of a checkpoint, as texts, each with the digest of its file; of ours that is empty."""
    proposals = [track["proposal"] for track in manifest.get("tracks", {}).values() if "proposal" in track]
    found = {one["sync"]: one.get("digest", "") for one in proposals if "sync" in one}
    return {manifest["sync"]: "", **found} if "sync" in manifest else found


def companions_in(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what a checkpoint holds beside parameters: module buffers and optimizer state that were averaged."""
    held = [holding_in(manifest, name) for name, track in manifest.get("tracks", {}).items() if "proposal" in track]
    return tuple(info.name for one in held for info in one.tensors[len(one.parameters) :])


def check_modes(name: str, before: Spec, after: Spec) -> None:
    """Refuse to go on under this mode from a checkpoint of that one, whatever the script makes.

    Raises: UsageError, with the mode to use."""
    for spec in (before, after):
        check_features(spec, Feature.RESUME)
    if before.fragments != after.fragments:
        raise UsageError(
            f"the checkpoint {name} is of {before.text}, which holds the model in {_parts(before.fragments)}, and "
            f"{after.text} takes it in {_parts(after.fragments)}; resume with --sync {before.text}"
        )


def _parts(number: int) -> str:
    return "one part" if number == 1 else f"{number} fragments"


def resumption(name: str, saved: Holding, wanted: Holding) -> Resumption:
    """What becomes of a checkpoint with this name.

    Raises: UsageError, in one line, where no job can go on from it."""
    check_modes(name, saved.spec, wanted.spec)
    if "peers" in (saved.apply, wanted.apply):
        who = f"the checkpoint {name} holds no values of it" if saved.apply == "peers" else "servers give it none"
        raise UsageError(f"an optimizer whose values are at the workers cannot be resumed: {who}; use via='ps'")
    difference = first_difference(wanted.parameters, saved.parameters) or table_difference(wanted.tables, saved.tables)
    if difference:
        raise UsageError(f"the checkpoint {name} is of another model: {difference} (there: the checkpoint)")
    before, after = saved.script_class, wanted.script_class
    if before and after and before != after:
        raise UsageError(f"the checkpoint {name} was made with {before}, the script uses {after}")
    lost = _lost(saved, wanted)
    dropped = (
        f"the checkpoint {name} is of {saved.sync}: {lost} cannot go on under {wanted.sync}, and is left out" if lost else ""
    )
    same_outer = bool(saved.outer) and saved.outer == wanted.outer
    same_class = bool(saved.on_servers) and saved.on_servers == wanted.on_servers
    to_workers = bool(saved.on_servers) and wanted.at_workers and saved.on_servers == wanted.inner
    return Resumption(same_outer or same_class, to_workers, dropped)


def _lost(saved: Holding, wanted: Holding) -> str:
    """The state that has no place in the job."""
    if saved.outer and saved.outer != wanted.outer:
        return f"the {saved.outer} on the servers"
    has = saved.on_servers or (saved.inner if saved.at_workers else "")
    runs = wanted.on_servers or wanted.inner
    return f"the state of {has}" if has and runs and has != runs else ""

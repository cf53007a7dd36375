"""The spec of an optimizer, by which it registers: its tensors, its hyper-parameters, the rule that servers run.

A mode may bring a rule of its own (`asup`): then the wrapped optimizer gives the learning rate and the weight decay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from polytempo.compression.chain import PushPullCompression
from polytempo.optim.asup import AsuP
from polytempo.protocol.values import OptimizerSpec, TableInfo, TensorInfo
from polytempo.reducer.flat_buffer import describe
from polytempo.server.optimizer_state import as_bytes, check_optimizer
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.spec import Spec


class SpecBuilder:
    """Builds the specs of one optimizer."""

    def __init__(
        self,
        spec: Spec,
        apply: str,
        inner: torch.optim.Optimizer,
        compression: PushPullCompression,
        clip_norm: float | None,
        members: tuple[int, ...] = (),
        fallback: str = "",
    ) -> None:
        """`members`: the ranks that take the steps together, where they are not all. `fallback`: why servers keep the
        momentum, where the mode would have each worker keep its own."""
        self._spec, self._apply, self._inner = spec, apply, inner
        self._compression, self._clip_norm, self.members = compression, clip_norm, members
        self._fallback = fallback
        #: Modes that the optimizer could not be given, for the advice at the end of a job.
        self.refused: tuple[str, ...] = ()

    def check(self, here: bool, together: bool, among_workers: bool) -> None:
        """Refuse arguments that do not go together; `here`: the wrapped optimizer runs on the worker."""
        lossy = together and not self._compression.is_lossless
        wanted = {
            Feature.OTHER_OPTIMIZER: type(self._inner) not in (torch.optim.SGD, AsuP),
            Feature.NO_MOMENTUM: "momentum" not in self._inner.param_groups[0],
            Feature.DELTA: self._apply == "delta",
            Feature.COMPRESSED_ANSWERS: not self._compression.pull.is_lossless,
            Feature.OPTIMIZER: True,
            Feature.SELECTION: self._compression.push.selects,
            Feature.COMPRESSION_AMONG_WORKERS: lossy and among_workers,
            Feature.COMPRESSED_CHANGES: lossy and here,
            Feature.COMPRESSED_VALUES: lossy,
        }
        check_features(self._spec, wanted, optimizer=type(self._inner).__name__, compression=self._compression.push.text)

    def describe(
        self, params: Sequence[torch.Tensor], names: Sequence[str], groups: Sequence[int], chosen: Iterable[int]
    ) -> tuple[TensorInfo, ...]:
        """The tensors of these parameters."""
        some = list(chosen)
        return describe([params[i] for i in some], [names[i] for i in some], [groups[i] for i in some])

    def build(
        self, special: str, tensors: tuple[TensorInfo, ...], hyper: tuple[dict[str, Any], ...], tables: tuple[TableInfo, ...]
    ) -> OptimizerSpec:
        """The spec; `special`: "peers" or "mean", where servers do not hold the values."""
        on_server = self._apply == "server" and not special
        name = ""
        if special == "peers":  # each worker keeps its own, and all must begin alike: from different states they drift apart
            name = type(self._inner).__name__
            if self._inner.state:
                name += f" with state {_digest(self._inner.state_dict()['state'])}"
        elif on_server and tensors:
            name = self._spec.mode.rule or check_optimizer(type(self._inner), self._spec.capabilities.rounds)
        filtered = (on_server or self._spec.capabilities.neighbours) and not self._compression.is_lossless
        return OptimizerSpec(
            sync=self._spec.text,
            apply=special or self._apply,
            optimizer=name,
            tensors=tensors,
            groups=hyper,
            clip_norm=self._clip_norm if on_server or special == "peers" else None,
            tables=tables,
            push_filter=self._compression.push.text if filtered else "",
            pull_filter=self._compression.pull.text if filtered and on_server else "",
            members=self.members,
            refused=self.refused,
            inner=type(self._inner).__name__,
            fallback=self._fallback,
            digest=self._spec.digest,
        )

    def of_values(
        self,
        tensors: tuple[TensorInfo, ...],
        hyper: tuple[dict[str, Any], ...],
        outer: tuple[dict[str, Any], ...],
        steps: bool,
        on_servers: bool,
        companions: int = 0,
    ) -> OptimizerSpec:
        """The spec of values that are averaged.

        Args:
            tensors: The values.
            hyper: The hyper-parameters of the local steps.
            outer: Those of the outer step.
            steps: Is an outer step made?
            companions: How many of the values, the last, are no parameters.
            on_servers: Do servers hold the values? They make the outer step then; it also serves where what travels is
                compressed, since differences to the servers' values can be.
        """
        sync, lossy, name = self._spec.text, not self._compression.is_lossless, type(self._inner).__name__
        more: dict[str, Any] = {"members": self.members, "refused": self.refused, "inner": name, "companions": companions}
        more["digest"] = self._spec.digest
        if not on_servers:
            return OptimizerSpec(sync, "peers", name, tensors, hyper, self._clip_norm, **more)
        if not steps and not lossy:
            return OptimizerSpec(sync, "delta", "", tensors, hyper, **more)
        return OptimizerSpec(
            sync=sync,
            apply="server",
            optimizer="SGD",
            tensors=tensors,
            groups=outer,
            push_filter=self._compression.push.text if lossy else "",
            pull_filter=self._compression.pull.text if lossy else "",
            **more,
        )


def _digest(state: dict[int, dict[str, Any]]) -> str:
    found = hashlib.blake2b(digest_size=4)
    for index, values in sorted(state.items()):
        for name, value in sorted(values.items()):
            found.update(f"{index} {name}".encode())
            plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
            found.update(as_bytes(value.detach().cpu()).tobytes() if plain else repr(value).encode())
    return found.hexdigest()

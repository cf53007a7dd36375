"""Finds parameters that the script has written to, or given other memory, since this library wrote them last.

Torch counts writes to a tensor (its version), but not those through `.data` or NumPy. For these a sample of the values is
compared, another one in each step, so that writes in every step are found soon. Both cost microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polytempo.errors import UsageError
from polytempo.protocol.training_troubles import ALIKE
from polytempo.protocol.values import TensorInfo
from polytempo.server.optimizer_state import as_bytes, digest_of_bytes, dtype_name, is_same
from polytempo.transport.channel import Bytes

#: Bytes of the values that are compared in a step, and of how many parameters at most.
COMPARED = 64 << 10
AT_MOST = 16
#: When values are compared.
CAUSES = "a change in place, or the loss of a rank"


class ParameterWatch:
    """The parameters of one optimizer. `compares`: also find writes that torch does not count."""

    def __init__(self, params: Sequence[torch.Tensor], infos: Sequence[TensorInfo], compares: bool = False) -> None:
        self._params, self._infos = list(params), infos
        self._devices = [param.device for param in params]
        self._compares = compares and all(device.type == "cpu" for device in self._devices)
        self.touched = ""  #: the first parameter that something else was seen to write to; until that is dealt with
        self._anchor: Sequence[torch.Tensor] | None = None
        self._turn = 0  # where the comparing goes on
        self._compared: list[tuple[int, Bytes, bytes]] = []
        self._find_places()
        self.record()

    def is_clean(self) -> bool:
        """Has only this library written to them, as far as can be seen?"""
        self.see_writes()
        return not self.touched and not self._has_moved()

    def _find_places(self) -> None:
        """Note where the values lie. Holding the memory keeps its address from being reused."""
        self._held = [param.detach() for param in self._params]
        self._places = [param.data_ptr() for param in self._params]
        self._plain = [param.is_contiguous() for param in self._params]
        self._strides = [param.stride() for param, plain in zip(self._params, self._plain, strict=True) if not plain]
        self._bytes = {
            index: as_bytes(param)
            for index, param in enumerate(self._params)
            if self._compares and self._plain[index] and param.numel()
        }
        self._order = list(self._bytes)
        self._compared = []

    def record(self) -> None:
        """This library has written: remember versions and a sample of the values."""
        self._versions = [param._version for param in self._params]
        self._compared = []
        room = COMPARED
        while self._order and room > 0 and len(self._compared) < min(AT_MOST, len(self._order)):
            index = self._order[self._turn % len(self._order)]
            self._turn += 1
            data = self._bytes[index]
            start = (self._turn // len(self._order)) * room % data.nbytes if data.nbytes > room else 0
            part = data[start : start + room]
            self._compared.append((index, part, part.tobytes()))
            room -= part.nbytes

    def see_writes(self) -> None:
        """Note if something else has written to a parameter."""
        if self.touched or [param._version for param in self._params] == self._versions:
            return
        pairs = zip(self._params, self._versions, strict=True)
        self.touched = next(self._infos[i].name for i, (param, version) in enumerate(pairs) if param._version != version)

    def declare(self) -> None:
        """The script says that it has written."""
        self.touched = self.touched or self.name_of(0)

    def was_written(self, tensors: Sequence[torch.Tensor]) -> bool:
        """These tensors have other values than before, which torch may not have counted: are there parameters among them?"""
        places = {tensor.data_ptr() for tensor in tensors}
        written = [index for index, param in enumerate(self._params) if param.data_ptr() in places]
        if written and not self.touched:
            self.touched = self._infos[written[0]].name
        return bool(written)

    def look(self, compare: bool = True) -> bool:
        """Note writes; do values lie elsewhere than before? What does not fit any more is refused by name; so is, where it
        is to be compared, what was written uncounted."""
        self.see_writes()
        moved = self._has_moved()
        if moved:
            self._check_forms()
            self._find_places()
        elif compare and not self.touched:
            for index, part, before in self._compared:
                if part.tobytes() != before:
                    raise UsageError(
                        f"{self._infos[index].name} was written to through .data or NumPy, which torch does not count and "
                        "the next step() would undo; call optimizer.push_parameters() after each such write"
                    )
        return moved

    def _has_moved(self) -> bool:
        params = self._params
        return (
            [param.data_ptr() for param in params] != self._places
            or [param.is_contiguous() for param in params] != self._plain
            or [param.stride() for param, plain in zip(params, self._plain, strict=True) if not plain] != self._strides
        )

    def _check_forms(self) -> None:
        for index, (param, before) in enumerate(zip(self._params, self._held, strict=True)):
            now, was = _form(param), _form(before)
            if now != was:
                raise UsageError(
                    f"{self._infos[index].name} was {was} when the optimizer was wrapped and is {now} now; "
                    "cast, move and reshape a model before DistributedOptimizer()"
                )
            shared = self._compares and param.numel() and [p.data_ptr() for p in self._params].count(param.data_ptr()) > 1
            if shared and not param.is_set_to(before):
                raise UsageError(
                    f"{self._infos[index].name} was made to share memory with another parameter, and servers keep values "
                    "for each; tie them as one parameter before DistributedOptimizer()"
                )
            if not self.touched and not param.is_set_to(before) and not is_same(param.detach(), before):
                self.touched = self._infos[index].name

    def compare_by(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where these start from an anchor, and differ between workers, that is what must be alike on all."""
        self._anchor = tensors

    @property
    def is_anchored(self) -> bool:
        """Are other tensors compared in their place?"""
        return self._anchor is not None

    def digests(self) -> bytes:
        """Eight bytes for the values of each parameter, or of its anchor: of what must be alike on all workers."""
        compared = self._params if self._anchor is None else self._anchor
        return b"".join(digest_of_bytes([as_bytes(tensor.detach().cpu())]) for tensor in compared)

    def check_alike(self, digests: Mapping[int, bytes], name: str = "") -> None:
        """Refuse values that are not the same on all workers.

        Args:
            digests: For each worker eight bytes for each parameter, or for all together.
            name: A parameter to name where there is one digest for all.
        """
        first = min(digests)
        for worker, theirs in digests.items():
            if theirs != digests[first]:
                unlike = (i for i in range(0, len(theirs), 8) if theirs[i : i + 8] != digests[first][i : i + 8])
                which = name or self.name_of(next(unlike) // 8)
                raise UsageError(f"workers {first} and {worker} hold different {which} after {CAUSES}; {ALIKE}")

    def name_of(self, index: int) -> str:
        """What a parameter is called."""
        return self._infos[index].name


def _form(tensor: torch.Tensor) -> str:
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{device}"

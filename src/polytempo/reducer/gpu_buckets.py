"""Buckets of gradients on a GPU, copied to the host while backward runs.

A hook says that a gradient is complete as soon as its kernels are in the stream's queue, long before they have run. So when
a bucket is complete its gradients are gathered by one call behind these kernels, and copied to the host's flat buffer on
a side stream; the hook waits for nothing. At `step()` the host waits for the first bucket and sends it, waits for the next,
and so on: one is on the wire while the next is copied, and later ones are still computed.

    stage     in a hook: gather and copy
    arrived   at step(): bucket by bucket, those that the script has not changed since, as far as torch knows
    settle    all gradients as they are at step(), compared with the buckets on the GPU, bit for bit; what differs, and what
              never left, is copied again, and travels with the push
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from polytempo.device.copy_stream import CopyMark
from polytempo.protocol.layout import Stretch
from polytempo.reducer.device_moves import HostStaging, copy_together, largest, runs_of
from polytempo.reducer.flat_buffer import FlatBuffer

WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class GpuBuckets:
    """The buckets of one optimizer, whose parameters are all on one GPU.

    Args:
        staging: Its twin holds the gradients at `step()`.
        params: All parameters.
        buffer: Where gradients go on the host.
    """

    def __init__(self, staging: HostStaging, params: Sequence[torch.Tensor], buffer: FlatBuffer) -> None:
        self._staging, self._params, self._buffer = staging, params, buffer
        self._flats = {dtype: torch.zeros_like(flat) for dtype, flat in staging.twin.items()}
        self._staged: dict[int, tuple[Sequence[int], list[object], CopyMark]] = {}  # by bucket: what was copied, and when
        self.changed: set[int] = set()  #: buckets that differ from what was copied, after `settle`

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in it."""
        return sum(flat.nbytes for flat in self._flats.values())

    def stage(self, bucket: int, members: Sequence[int]) -> None:
        """Gather a bucket that is complete, and start to copy it; not if some are sparse, or in a graph's capture."""
        before = self._staged.pop(bucket, None)
        grads = [self._params[index].grad for index in members]
        dense = [grad for grad in grads if grad is not None and grad.layout == torch.strided]
        captured = self._staging.place.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if len(dense) < len(grads) or captured:
            return
        if before is not None:
            before[2].hold()  # it may still be copied
        with torch.no_grad():
            views = [self._staging.view(index, self._flats) for index in members]
            copy_together(zip(views, dense, strict=True))
        copies = self._staging.copies
        copies.follow()
        for run in self._runs(members):
            copies.copy(self._buffer.tensors[run.dtype][run.start : run.stop], self._flats[run.dtype][run.start : run.stop])
        self._staged[bucket] = members, self._stamps(members), copies.mark()

    def arrived(self) -> Iterator[int]:
        """Buckets that can be sent, each when it is here."""
        for bucket, (members, stamps, mark) in list(self._staged.items()):
            if self._stamps(members) == stamps:
                mark.wait()
                yield bucket

    def settle(self) -> tuple[int, ...]:
        """Make the flat buffer what the gradients are now; the parameters that have none."""
        staging = self._staging
        absent = staging.collect(lambda param: param.grad)
        same = {bucket: self._differs(members) for bucket, (members, _, _) in self._staged.items()}
        most = [largest(flat).float() for flat in staging.twin.values()]
        found = torch.stack([*most, *same.values()]).tolist()  # the host waits for the end of backward
        finite = all(number - number == 0 for number in found[: len(most)])
        self.changed = {bucket for bucket, differs in zip(same, found[len(most) :], strict=True) if differs}
        known = {index for b, (members, _, _) in self._staged.items() if b not in self.changed for index in members}
        for _, _, mark in self._staged.values():
            mark.wait()
        for run in self._runs([index for index in staging.staged if index not in known]):
            staging.copies.copy(
                self._buffer.tensors[run.dtype][run.start : run.stop], staging.twin[run.dtype][run.start : run.stop]
            )
        staging.copies.mark().wait()
        self._buffer.filled(staging.staged, finite)
        return absent

    def start_over(self) -> None:
        """The next step."""
        for _, _, mark in self._staged.values():
            mark.wait()
        self._staged.clear()
        self.changed = set()

    def _differs(self, members: Sequence[int]) -> torch.Tensor:
        """1.0 where a bucket's gradients are not what was copied, on the GPU."""
        pairs = []
        for run in self._runs(members):
            whole, part = WHOLE[self._flats[run.dtype].element_size()], slice(run.start, run.stop)
            pairs.append((self._flats[run.dtype][part].view(whole) != self._staging.twin[run.dtype][part].view(whole)).any())
        return torch.stack(pairs).any().float() if pairs else torch.zeros((), device=self._staging.place)

    def _runs(self, members: Sequence[int]) -> list[Stretch]:
        return runs_of(self._staging.places, members)

    def _stamps(self, members: Sequence[int]) -> list[object]:
        """Differ once torch has changed a gradient, or it is another tensor."""
        grads = [self._params[index].grad for index in members]
        return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]

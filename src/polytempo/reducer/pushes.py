"""Pushes of which a part has left before `step()`, and pushes that the values of answers do not contain yet.

**Partial pushes.** Buckets travel to servers on other hosts while backward runs, and the push of `step()` commits them.

What is sent is a copy, since the gradient may change before `step()`. At `step()` the push names the buckets that count as
they were sent, and carries the rest: what was never sent, and what differs from the copy. A bucket that is sent again in the
same step replaces the one before. A lost bucket is a lost push: the whole push is sent again.

**On a GPU** they are copied to the host while backward runs. A hook says that a gradient is complete as soon as its kernels
are in the stream's queue, long before they have run. So when a bucket is complete its gradients are gathered by one call
behind these kernels, and copied to the host's flat buffer on a side stream; the hook waits for nothing. At `step()` the host
waits for the first bucket and sends it, then for the next, and so on: one is on the wire while the next is copied, and later
ones are still computed.

    stage     in a hook: gather and copy
    arrived   at step(): bucket by bucket, those that the script has not changed since, as far as torch knows
    settle    all gradients as they are at step(), compared with the buckets on the GPU, bit for bit; what differs, and what
              never left, is copied again, and travels with the push
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState, PartlySent
from polytempo.device.copy_stream import CopyMark
from polytempo.profile_ranges import profiled
from polytempo.protocol.layout import Layout
from polytempo.protocol.messages import PartialPush
from polytempo.protocol.values import BufferRange, PushId, SentBucket
from polytempo.reducer.buckets import Bucket, BucketScheduler, plan_buckets, rest_of
from polytempo.reducer.copier import Copier
from polytempo.reducer.device_moves import HostStaging, copy_together, largest, runs_of
from polytempo.reducer.exchange import GroupValues
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.sync.spec import Spec
from polytempo.transport.channel import Bytes

#: By which elements are compared bit for bit, by their bytes.
WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}
#: Bytes of a bucket.
LIMIT = 4 << 20


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
        for run in runs_of(self._staging.places, members):
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
        for run in runs_of(staging.places, [index for index in staging.staged if index not in known]):
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
        for run in runs_of(self._staging.places, members):
            whole, part = WHOLE[self._flats[run.dtype].element_size()], slice(run.start, run.stop)
            pairs.append((self._flats[run.dtype][part].view(whole) != self._staging.twin[run.dtype][part].view(whole)).any())
        return torch.stack(pairs).any().float() if pairs else torch.zeros((), device=self._staging.place)

    def _stamps(self, members: Sequence[int]) -> list[object]:
        """Differ once torch has changed a gradient, or it is another tensor."""
        grads = [self._params[index].grad for index in members]
        return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]


@dataclass
class BucketSend:
    """A copy of a bucket that was sent: for each shard its pieces."""

    serial: int
    copies: list[list[Bytes]]


class PartialPushes:
    """The buckets of one optimizer; `identity` names the push that they belong to."""

    def __init__(
        self,
        client: Client,
        layout: Layout,
        buffer: FlatBuffer,
        params: Sequence[int],
        identity: Callable[[], PushId],
        gpu: GpuBuckets | None = None,
    ) -> None:
        self._client, self._layout, self._buffer, self._identity = client, layout, buffer, identity
        self._gpu = gpu
        self._observed: list[int] | None = []  # the order of the first backward; None once it was used
        self._serial = 0
        self._plan([place.index for place in layout.places if place.index in params][::-1])

    def _plan(self, order: Sequence[int]) -> None:
        self._buckets: list[Bucket] = plan_buckets(self._layout, order, LIMIT)
        self._sent: dict[int, BucketSend] = {}
        params = [bucket.params for bucket in self._buckets]
        self._scheduler = BucketScheduler(params, self._launch, in_order=False, differs=self._differs)

    def complete(self, index: int) -> None:
        """A gradient is in the flat buffer; its bucket is sent when it is the last of it."""
        if self._observed is not None and index not in self._observed:
            self._observed.append(index)
        self._scheduler.complete(index)

    def _launch(self, number: int) -> None:
        if self._gpu is None:
            self._send(number)
        else:
            self._gpu.stage(number, self._buckets[number].params)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in it."""
        return 0 if self._gpu is None else self._gpu.device_bytes

    @property
    def on_gpu(self) -> bool:
        """Are gradients taken by `gather`?"""
        return self._gpu is not None

    def gather(self) -> tuple[int, ...]:
        """Of parameters on a GPU: send the buckets that have left it, and take all gradients as they are now."""
        assert self._gpu is not None
        for number in self._gpu.arrived():
            self._send(number)
        return self._gpu.settle()

    def _send(self, number: int) -> None:
        with profiled("push bucket", number):
            self._serial += 1
            pieces = self._buckets[number].pieces
            now = [[self._now(shard, piece) for piece in of_shard] for shard, of_shard in enumerate(pieces)]
            # What has left a GPU is a copy already.
            copies = now if self._gpu is not None else [[one.copy() for one in of_shard] for of_shard in now]
            self._sent[number] = BucketSend(self._serial, copies)
            for shard, buffers in enumerate(copies):
                if buffers:
                    message = PartialPush(id=self._identity(), bucket=number, serial=self._serial, pieces=pieces[shard])
                    self._client.send(shard, message, buffers)

    def _now(self, shard: int, piece: BufferRange) -> Bytes:
        return self._buffer.parts[shard][piece.buffer][piece.start : piece.stop]

    def commit(self) -> list[PartlySent]:
        """For each shard: the buckets that count as they were sent, and the pieces that go now, with their bytes."""
        changed = set(self._scheduler.changed()) if self._gpu is None else self._gpu.changed
        good = [number for number in self._sent if number not in changed]
        result = []
        for shard in range(len(self._layout.shards)):
            committed = [n for n in good if self._buckets[n].pieces[shard]]
            rest = rest_of(self._layout, shard, [p for n in committed for p in self._buckets[n].pieces[shard]])
            names = tuple(SentBucket(number, self._sent[number].serial) for number in committed)
            result.append((names, rest, [self._now(shard, piece) for piece in rest]))
        self.start_over()
        return result

    def _differs(self, number: int) -> bool:
        copies = self._sent[number].copies
        return not all(
            numpy.array_equal(copy, self._now(shard, piece))
            for shard, of_shard in enumerate(self._buckets[number].pieces)
            for piece, copy in zip(of_shard, copies[shard], strict=True)
        )

    def start_over(self) -> None:
        """The next step's buckets; after the first backward, in the order it had. What was sent and not committed counts
        for nothing."""
        if self._observed:
            known = [index for bucket in self._buckets for index in bucket.params]
            self._plan(self._observed + [index for index in known if index not in self._observed])
            self._observed = None
        self._sent.clear()
        self._scheduler.start_over()
        if self._gpu is not None:
            self._gpu.start_over()


class OwnPushes:
    """A worker's own pushes that the values it has read lack, added to these values: `delay:k` with momentum at the worker.

    While several pushes are in flight, an answer has the values of some pushes ago. A worker that computed on them as they
    are would make the step that it has made already, once for each push in flight. So it computes on what it has read plus
    what is under way. It knows its own pushes; the other n - 1 workers have as many under way, which it takes to be like its
    own:

        answer to push 0 --> values --> + n times push 1 and push 2 --> gradient 3    (these are not answered yet)

    With 4 workers and 4 pushes of each really in flight, digits at the rate and momentum of bsp end at 11 % without this, at
    14 % with its own pushes alone, and at 97 % like this, as bsp does.

    Args:
        copier: Of its parameters; it has a flat buffer for each push in flight, and one for the next.
        layout: The group of each parameter.
        spec: The mode.
        members: The ranks that may push.
        departed: Those that are known not to, any more; it may grow.
        state: This worker's, of the optimizer: which pushes are unanswered.
        changes: Are changes pushed? Otherwise gradients are.
    """

    def __init__(
        self,
        copier: Copier,
        layout: Layout,
        spec: Spec,
        members: Collection[int],
        departed: Container[int],
        state: ClientState,
        changes: bool,
    ) -> None:
        self._copier, self._spec, self._state, self._changes = copier, spec, state, changes
        self._members, self._departed = members, departed
        self._groups = {place.index: place.info.group for place in layout.places}
        self._sent: dict[int, tuple[dict[int, torch.Tensor], list[float]]] = {}  # by step, with a factor for each group

    def taken(self, buffer: FlatBuffer) -> dict[int, torch.Tensor]:
        """What is about to be pushed, of each parameter, where it lies: in the flat buffer, which is this push's until it is
        answered, or a copy on the GPU, whose staging the next answer passes through."""
        staging = self._copier.staging
        staged = {} if staging is None else {index: staging.views[index].clone() for index in staging.staged}
        return buffer.views | staged

    def sent(self, step: int, push: dict[int, torch.Tensor], hyper: GroupValues) -> None:
        """This push was sent. If it is not answered yet, the values go on from it."""
        if step not in self._state.outstanding:
            return
        # Its rate, with the pushes of others that are under way beside it. Its staleness is not known yet; it is taken to be
        # that of the last push that was answered.
        workers = sum(rank not in self._departed for rank in self._members)
        rate = self._spec.own_push_rate(workers) * self._spec.corrections.verdict(self._state.staleness).rate
        factors = [rate if self._changes else -rate * float(group["lr"]) for group in hyper]
        self._sent[step] = push, factors
        self._add(push, factors)
        self._copier.watch.record()

    def install(self, parts: dict[int, list[Bytes]], absent: Sequence[int] = ()) -> None:
        """New values have come, which have all pushes but those that are not answered."""
        self._copier.scatter(parts)
        self._sent = {step: push for step, push in self._sent.items() if step in self._state.outstanding}
        for _, (push, factors) in sorted(self._sent.items()):
            self._add(push, factors)
        self._copier.watch.record()

    def _add(self, push: dict[int, torch.Tensor], factors: list[float]) -> None:
        with torch.no_grad():
            for index, param in enumerate(self._copier.params):
                param.add_(push[index].to(param.device), alpha=factors[self._groups[index]])

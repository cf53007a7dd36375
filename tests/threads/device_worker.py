"""A worker of raw messages that shares device memory with its servers: what it sends, and when its fences are set, is up to
the test. Also used on a GPU (`tests/gpu/test_device_server.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from polytempo.device.device import FENCE_BYTES, Device
from polytempo.device.exchange_fences import ANSWERED, PUSHED
from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES, lay_out
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    DeviceShared,
    Hello,
    Push,
    PushStatus,
    Register,
    SendSeed,
    ShareDevice,
    StatusReply,
    Stopped,
    decode,
    encode,
)
from polytempo.protocol.push import FirstValues, PushedGradient
from polytempo.protocol.values import DeviceRange, OptimizerSpec, PushId, TensorInfo
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.testing.threads import ThreadJob
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.shared_memory import SharedMemoryRegistry


def spec_of(
    start: Sequence[torch.Tensor],
    sync: str = "bsp",
    optimizer: str = "SGD",
    hyper: dict[str, Any] | None = None,
    **more: Any,
) -> OptimizerSpec:
    """An optimizer of one group over these tensors."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in start]
    infos = tuple(TensorInfo(f"p{i}", tuple(t.shape), d, 0) for i, (t, d) in enumerate(zip(start, dtypes, strict=True)))
    apply = more.pop("apply", "server")
    return OptimizerSpec(sync, apply, optimizer if apply == "server" else "", infos, (hyper or {"lr": 0.1},), **more)


class DeviceWorker:
    """One worker, one optimizer; `start` are its parameters, in the order of the layout, of one dtype each."""

    def __init__(
        self,
        channels: Sequence[Channel],
        pool: Pool,
        device: Device,
        rank: int,
        spec: OptimizerSpec,
        start: Sequence[torch.Tensor],
        incarnation: int = 0,
    ) -> None:
        self.channels, self.pool, self.device, self.rank, self.spec = list(channels), pool, device, rank, spec
        self.incarnation, self.step, self.exchange = incarnation, 0, 0
        self.layout = lay_out(spec.tensors, len(self.channels))
        self.heard: list[tuple[int, AnyMessage, list[Bytes]]] = []
        self.values = {d: torch.empty(n, dtype=getattr(torch, d)) for d, n in self.layout.sizes.items()}
        for place in self.layout.places:
            self.values[place.info.dtype][place.start : place.stop] = start[place.index].reshape(-1).cpu()
        for channel in self.channels:
            channel.send(encode(Hello(role="worker", rank=rank, incarnation=incarnation, pid=incarnation * 100 + rank + 1)))
        self.channels[0].send(encode(Register(optimizer_id="0", optimizer_spec=spec)))

    def begin(self) -> None:
        """Until the first values are here; the seed is sent if it is asked for."""
        while True:
            shard, message, buffers = self.next(SendSeed, Answer)
            if isinstance(message, Answer):
                break
            for index, stretches in enumerate(self.layout.shards):
                parts = [as_bytes(self.values[s.dtype][s.start : s.stop]) for s in stretches]
                push = Push(id=PushId("0", self.rank, self.incarnation, -1), body=FirstValues())
                self.channels[index].send(encode(push), parts)
        self.take(shard, buffers)
        for _ in range(len(self.channels) - 1):
            shard, message, buffers = self.next(Answer)
            self.take(shard, buffers)
        self.step = message.step

    def take(self, shard: int, buffers: list[Bytes]) -> None:
        for stretch, buffer in zip(self.layout.shards[shard], buffers, strict=True):
            self.values[stretch.dtype][stretch.start : stretch.stop] = as_tensor(buffer, stretch.dtype)

    def share(self, **changes: Any) -> list[str]:
        """Share device memory with all servers; the refusals."""
        sizes = {d: n * ITEM_SIZES[d] for d, n in self.layout.sizes.items()}
        self.gradients = {d: self.device.allocate(n) for d, n in sizes.items()}
        self.landing = {d: self.device.allocate(n) for d, n in sizes.items()}
        self.words = [self.pool.allocate(FENCE_BYTES) for _ in self.channels]
        self.fences = [self.device.fences(words) for words in self.words]
        given = {
            "identity": self.device.identity,
            "gradients": tuple(DeviceRange(m.handle, m.nbytes) for m in self.gradients.values()),
            "values": tuple(DeviceRange(m.handle, m.nbytes) for m in self.landing.values()),
        }
        message = ShareDevice(optimizer_id="0", **{**given, **changes})
        for channel, words in zip(self.channels, self.words, strict=True):
            channel.send(encode(message), [words])
        return [self.next(DeviceShared)[1].refusal for _ in self.channels]

    def announce(self, attempt: int = 0, **fields: Any) -> int:
        """The header of the next push, to all servers; its fence."""
        self.exchange += 1
        identity = PushId("0", self.rank, self.incarnation, self.step)
        body = PushedGradient(fence=self.exchange, hyper=self.spec.groups, **fields)
        push = Push(id=identity, attempt=attempt, body=body)
        for channel in self.channels:
            channel.send(encode(push))
        return self.exchange

    def write(self, gradient: Sequence[torch.Tensor]) -> None:
        """On the current stream: the gradient, and its fences."""
        for place in self.layout.places:
            flat = self.gradients[place.info.dtype].tensor(getattr(torch, place.info.dtype))
            flat[place.start : place.stop].copy_(gradient[place.index].reshape(-1), non_blocking=True)
        for fences in self.fences:
            fences.signal(PUSHED, self.exchange)

    def answered(self) -> list[Answer]:
        """The headers of all servers; the values of the landing are this worker's then."""
        heard = sorted((self.next(Answer) for _ in self.channels), key=lambda each: each[0])
        answers = [message for _, message, _ in heard]
        assert all(
            answer.fence == self.exchange and not buffers for answer, (_, _, buffers) in zip(answers, heard, strict=True)
        )
        for fences in self.fences:
            fences.wait(ANSWERED, self.exchange)
        for dtype, memory in self.landing.items():
            self.values[dtype].copy_(memory.tensor(getattr(torch, dtype)))
        self.step = answers[0].step
        return answers

    def status(self, shard: int = 0) -> str:
        """What a server knows of the push of this step."""
        self.channels[shard].send(encode(PushStatus(what="push", optimizer_id="0", number=self.step)))
        return self.next(StatusReply)[1].state

    def parameters(self) -> list[torch.Tensor]:
        by_index = {p.index: self.values[p.info.dtype][p.start : p.stop].reshape(p.info.shape) for p in self.layout.places}
        return [by_index[index].clone() for index in sorted(by_index)]

    def next(self, *kinds: type, seconds: float = 20.0) -> tuple[int, Any, list[Bytes]]:
        """The next message of one of these kinds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for index, (shard, message, buffers) in enumerate(self.heard):
                if isinstance(message, kinds):
                    del self.heard[index]
                    return shard, message, buffers
                assert not isinstance(message, Stopped), message.cause
            for shard, channel in enumerate(self.channels):
                with suppress(PeerError):  # behind the last message
                    while (received := channel.receive()) is not None:
                        self.heard.append((shard, decode(received[0]), received[1]))
            time.sleep(1e-4)
        raise AssertionError(f"worker {self.rank} waited for {kinds} in vain; it has heard {[m for _, m, _ in self.heard]}")

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def joined(
    job: ThreadJob, device: Device, rank: int, spec: OptimizerSpec, start: Sequence[torch.Tensor], incarnation: int = 0
) -> DeviceWorker:
    """A worker of this job."""
    pool = Pool(SharedMemoryRegistry())
    channels = [job.connect(index, pool) for index in range(job.plan.shards)]
    return DeviceWorker(channels, pool, device, rank, spec, start, incarnation)

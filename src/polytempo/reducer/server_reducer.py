"""Dense pushes through a filter: a chain, with its residual, for each stretch of each shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState, Outstanding
from polytempo.client.row_traffic import RowTraffic, WorkerTable
from polytempo.compression.chain import ChainSpec, CompressionChain, parse_chain
from polytempo.errors import UsageError
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.messages import Keep, Push
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.bucket_overlap import BucketOverlap
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.server.optimizer_state import SegmentState, as_tensor, digest_of_bytes, pack, unpack
from polytempo.server.optimizers import is_whole
from polytempo.server.pull_compression import Shadow
from polytempo.session.session import Session
from polytempo.sync.spec import parse_spec
from polytempo.transport.channel import Bytes


class PushFilters:
    """The chains of one exchange."""

    def __init__(self, spec: ChainSpec, layout: Layout) -> None:
        self._layout = layout
        self._chains: list[list[CompressionChain]] = []
        if not spec.is_lossless:
            self._chains = [[spec.new(s.size, getattr(torch, s.dtype)) for s in shard] for shard in layout.shards]

    def of(self, parts: list[list[Bytes]]) -> list[list[Bytes]]:
        """What is sent of a push, for each shard."""
        if not self._chains:
            return parts
        return [self._of_shard(shard, part) for shard, part in enumerate(parts)]

    def _of_shard(self, shard: int, part: Sequence[Bytes]) -> list[Bytes]:
        stretches = zip(self._chains[shard], part, self._layout.shards[shard], strict=True)
        return [buffer for chain, data, s in stretches for buffer in chain.encode(as_tensor(data, s.dtype))]

    # The residual of the whole model, in its flat order, so that any number of servers can go on with it.

    def state(self) -> dict[str, torch.Tensor]:
        """What was produced and not sent yet, by dtype; empty without a lossy filter."""
        if not self._chains:
            return {}
        whole = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in self._layout.sizes.items()}
        for shard, stretches in enumerate(self._layout.shards):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                whole[s.dtype] = whole[s.dtype].to(chain.residual.dtype)
                whole[s.dtype][s.start : s.stop] = chain.residual
        return whole

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        for shard, stretches in enumerate(self._layout.shards if self._chains and state else ()):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                chain.load({"residual": state[s.dtype][s.start : s.stop].to(chain.residual.dtype)})


# One optimizer's exchange with the servers: the way from a worker's tensors to a push, and from an answer back.

GroupValues = tuple[dict[str, Any], ...]


class ServerReducer:
    """A track as its worker sees it."""

    def __init__(
        self,
        session: Session,
        name: str,
        proposal: OptimizerSpec,
        params: Sequence[torch.Tensor],
        state: Sequence[SegmentState] = (),
        staged: bool = False,
        tables: Sequence[WorkerTable] = (),
    ) -> None:
        assert session.client is not None
        self.name = name
        self.client: Client = session.client
        self.proposal = proposal
        self.session = session
        self.spec = parse_spec(proposal.sync)
        self.layout = lay_out(proposal.tensors, self.client.shards, is_whole(proposal.optimizer))
        delay = self.spec.ahead
        self.copier = Copier(params, self.layout, self.client.pool, slots=delay + 1, compares=proposal.apply != "mean")
        if delay:
            self.client.overlap()
        elif not staged:  # else gradients live there
            self.client.lend(self.copier.next_flat().parts)
        self._staging = GradientHooks(params, self.copier.next_flat()) if staged and not delay else None
        self._ahead: BucketOverlap | None = None
        self.before_read: Callable[[], None] = lambda: None  #: sends what the values read should contain
        self.sending = True  #: not while gradients are accumulated
        self.averages = proposal.apply == "mean"
        self.line = ClientState(name, ahead=delay)
        self.rows = RowTraffic(self.client, name, tables)
        self.line.take_rows = self.rows.take
        self.line.take = self.copier.scatter_gradients if self.averages else self.copier.scatter
        self.filters = PushFilters(parse_chain(proposal.push_filter), self.layout)
        self._shadow = Shadow(parse_chain(proposal.pull_filter), self.layout.shards, overlap=bool(delay))
        if proposal.pull_filter:
            self.line.take = self._take_difference
        self.step = 0
        self.waited = 0.0
        self._loads = -1  # numbers of what is given to the servers beside the steps
        self._values: FlatBuffer | None = None  # parameters on their way to the servers, once there were some
        #: Do all workers stand at the same place between two steps, so that a change of values has one meaning?
        one_place = self.spec.mode.name == "bsp" or (session.size == 1 and not delay and self.spec.local is None)
        self._carries = one_place and not proposal.pull_filter
        self._first_state = state
        with session.lock:
            self.client.register(name, proposal, self._seed, self.line)
        self.step = self.first_step = self.line.released - delay
        if self.first_step and proposal.push_filter:  # the job may go on from a checkpoint
            self.filters.load({run.dtype: run.state["residual"] for run in self._read_runs("filters")})
        if self._staging is not None and self.client.pool.registry is None:  # bytes must travel: let them go early
            self._ahead = BucketOverlap(self.client, self.layout, self.copier.next_flat(), self._staging.indices())
            self._staging.told = self._complete

    def _complete(self, index: int) -> None:
        if self.sending and self._ahead is not None:
            with self.session.lock:
                self._ahead.complete(index, self._identity())

    def _identity(self) -> PushId:
        return PushId(self.name, self.client.rank, self.client.incarnation, self.step)

    def _seed(self) -> tuple[dict[str, Any], list[list[Bytes]]]:
        """What the job starts from, when this worker is asked: its values, and the optimizer's state if it has some."""
        flat = self.copier.next_flat()
        self.copier.gather(flat, lambda param: param.detach())
        state, buffers = pack(self._first_state) if self._first_state else (b"", [])
        rows, of_rows = self.rows.seed()
        about = {"state": state, "rows": rows}
        return about, [[*part, *buffers, *own] for part, own in zip(flat.parts, of_rows, strict=True)]

    def flat_of(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[FlatBuffer, tuple[int, ...]]:
        """A flat copy of `of(param)` for each parameter, and those that have none."""
        flat = self.copier.next_flat()
        return flat, self.copier.gather(flat, of)

    def gradients(self) -> tuple[FlatBuffer, tuple[int, ...]]:
        """The bucket, with the gradients as they are now, and the parameters that have none."""
        flat, absent = self.flat_of(lambda param: param.grad)
        if self._staging is not None:
            self._staging.adopt()
        return flat, absent

    def push(self, flat: FlatBuffer | None, hyper: GroupValues, **about: Any) -> None:
        """Push a flat copy (or, without one, a step that changes nothing), and wait as the mode says."""
        began = time.perf_counter()
        skip = flat is None
        push = Push(
            id=self._identity(),
            version=self.line.version,
            hyper=hyper,
            skip=skip,
            sent=self.client.bytes_sent,
            received=self.client.bytes_received,
            exchanged=self.waited,
            **about,
        )
        parts = flat.parts if flat is not None else [[] for _ in range(self.client.shards)]
        waiting = self.rows.fill(Outstanding(push, parts if skip else self.filters.of(parts)))
        with self.session.lock, self.client.together():
            if skip and self._ahead is not None:
                self._ahead.drop()
            self.client.push(waiting, self._ahead.commit() if self._ahead is not None and not skip else None)
            self.client.wait_for_release(self.name, self.step + 1)
            if self.line.checkpoint:
                self._keep_filters()
        self.step = self.step + 1 if self.spec.ahead else self.line.released
        self.waited = time.perf_counter() - began

    # Values that the script has changed.

    def renew(self, compare: bool = True) -> None:
        """Look at the parameters: they may lie elsewhere, or have been written to."""
        if self.copier.look(compare) and self._staging is not None:
            self._staging.renew()

    def carry_changes(self) -> None:
        """What the script has written to parameters since the last step goes to the servers where all workers stand at one
        place, and is refused where it cannot be told what it should mean."""
        watch = self.copier.watch
        if watch.touched and self._carries:
            self._send_values()
        elif watch.touched and not self._are_the_jobs():
            why, alone = self._why_not_sent(), "a change by one worker is not the job's"
            how = "" if why else "call optimizer.push_parameters() after it to make it the job's, or "
            raise UsageError(
                f"{watch.touched} was changed in place since the last step(), and in {self.spec.text} {why or alone}; {how}"
                "call optimizer.consolidate() to take the job's values again"
            )
        watch.touched = ""

    def _are_the_jobs(self) -> bool:
        """Was nothing changed in the end? Where pushes are under way, their answers may have hidden a change."""
        if self.spec.ahead or self.spec.local is not None:
            return False
        with self.session.lock:
            return self.copier.holds(self._read_parts())

    def _why_not_sent(self) -> str:
        if self.spec.local is not None:
            return "values are this worker's own between fetches"
        return "answers are compressed: differences to what each worker was sent" if self.proposal.pull_filter else ""

    def push_values(self) -> None:
        """Make this worker's values the job's."""
        why = self._why_not_sent()
        if why:
            raise UsageError(f"push_parameters() cannot be in this job: {why}; change values before DistributedOptimizer()")
        self._send_values()

    def _send_values(self) -> None:
        if self._values is None:
            self._values = FlatBuffer(self.layout, self.client.pool, pinned=False)
        self.copier.gather(self._values, lambda param: param.detach())
        digest = digest_of_bytes(buffer for part in self._values.parts for buffer in part)
        push = Push(id=self._next_load(), kind="values", touched=self.copier.watch.touched, digest=digest)
        self._give(push, self._values.parts)
        self.copier.watch.touched = ""
        self.copier.watch.record()
        if self.spec.mode.name != "bsp":  # the job's may be newer: answers have come meanwhile, or they were given before
            self.read_values()

    def _next_load(self) -> PushId:
        self._loads -= 1
        return PushId(self.name, self.client.rank, self.client.incarnation, self._loads)

    def _give(self, push: Push, parts: list[list[Bytes]]) -> None:
        with self.session.lock:
            self.client.settle(self.name)
            self.client.push(Outstanding(push, parts))
            self.client.settle(self.name)

    def _take_difference(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        self.copier.scatter(self._shadow.hear(parts, self.line.answer.filtered, self.line.answer.exchange))

    def settle(self) -> None:
        """Wait for the answers that are still under way (`delay`)."""
        with self.session.lock:
            self.client.settle(self.name)

    def read_values(self) -> None:
        """The servers' newest values into the parameters."""
        self.renew(compare=self._carries)
        if self._carries:
            self.carry_changes()
        self.before_read()
        if self.client.companion is not None:
            self.client.companion.release()  # who reads is about to do something else for a while
        with self.session.lock:
            self.client.settle(self.name)
            if not self._carries:
                self.copier.scatter(self._read_parts())
            # Else they are here: the job's cannot move without this worker. What the servers have may be what another
            # worker's script made of them for the next step, before this one's script does the same.
            self.rows.read_mirrored()
        self.copier.watch.touched = ""

    def _read_parts(self) -> dict[int, list[Bytes]]:
        answers = self.client.read(self.name, "params")
        self.line.version = answers[0][0].version
        return {shard: buffers for shard, (_, buffers) in enumerate(answers)}

    def read_state(self) -> list[SegmentState]:
        """The optimizer's state on all servers, from one place of the log."""
        with self.session.lock:
            self.client.settle(self.name)
            return self._read_runs("state")

    def _read_runs(self, what: str) -> list[SegmentState]:
        with self.session.lock:
            answers = self.client.read(self.name, what)
        return [run for answer, buffers in answers for run in unpack(answer.state, buffers)]

    def _keep_filters(self) -> None:
        """A checkpoint is being made: what the filters hold back belongs to it."""
        name, self.line.checkpoint = self.line.checkpoint, ""
        held = [SegmentState(dtype, 0, flat.numel(), {"residual": flat}) for dtype, flat in self.filters.state().items()]
        state, buffers = pack(held)
        self.client.stage(0, Keep(track=self.name, checkpoint=name, state=state), buffers)

    def load_state(self, runs: Sequence[SegmentState]) -> None:
        """Give the servers an optimizer's state."""
        state, buffers = pack(runs)
        digest = digest_of_bytes(buffers, state)
        push = Push(id=self._next_load(), kind="state", state=state, digest=digest)
        self._give(push, [buffers for _ in range(self.client.shards)])

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far, all exchanges of this worker together."""
        return self.client.bytes_sent, self.client.bytes_received

    def check_same(self, params: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that were added or replaced after the start."""
        self.copier.check_same(params)


def change_of(
    exchange: ServerReducer, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, kind: str
) -> tuple[FlatBuffer, Any]:
    """Run an optimizer on this worker: the new values, or as "delta" what it has changed; and what the closure said."""
    if kind == "value":
        optimizer.step()
        exchange.copier.watch.record()
        return exchange.flat_of(lambda param: param.detach())[0], None
    flat, _ = exchange.flat_of(lambda param: param.detach())
    with torch.enable_grad():
        loss = optimizer.step(closure)
    for index, param in enumerate(exchange.copier.params):
        view = flat.views[index]
        view.neg_().add_(param.detach().to(view.device))
    exchange.copier.watch.record()
    return flat, loss

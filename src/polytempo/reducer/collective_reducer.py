"""Means over a group without anybody who decides: buckets go while backward runs, and a vote ends the step.

Buckets are sent in the same order everywhere, multiplied by this rank's share; the gradients themselves stay as they are.
A rank that votes has all sums of its step, for calls end in their order. So a vote that one rank has seen to its end is the
end of the step for all, even if somebody dies before the others have: they learn the ballots from who has them. If nobody
has, the step is made again from the gradients, without the dead.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from polytempo.client.client_state import ClientState, Outstanding
from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import RankLost, UsageError
from polytempo.protocol.duplicate_batches import advice
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.messages import Push
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.ballot import Ballot, BallotOutcome, outcome, size_of, unpack
from polytempo.reducer.buckets import Bucket, plan_buckets
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.reducer.mean_reducer import MeanReducer
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool

#: Bytes of a bucket.
BUCKET = 8 << 20
#: Of a text in which ranks differ, so much is compared.
TEXT = 64 << 10


class BucketRounds:
    """The rounds of one optimizer. `number` is its own in the job; with fewer than `least` ranks left it gives up."""

    def __init__(self, world: World, number: int, layout: Layout, flat: FlatBuffer, mean: FlatBuffer, least: int) -> None:
        group = world.new_group(range(world.size))
        assert group is not None
        self.world, self.group, self._number, self._least = world, group, number, least
        self._flat, self._mean, self._count = flat, mean, len(layout.places)
        self._is_narrow = "float16" in layout.sizes  # sums must not be larger than means
        order = [place.index for place in sorted(layout.places, key=lambda place: -place.index)]
        self._buckets: list[Bucket] = [bucket for bucket in plan_buckets(layout, order, BUCKET) if bucket.pieces[0]]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.params}
        self._parts = [self._slices(layout, bucket) for bucket in self._buckets]
        self.compare: Callable[[RankGroup], None] = lambda group: None  #: refuses parameters that are not alike on all ranks
        self.weight = 1.0  #: what this rank's gradients are expected to weigh
        self._total = float(world.size)  # and those of all together
        self._votes = 0
        self._ballots: list[bytes] = []  # of the last vote
        self._begin()

    def _slices(self, layout: Layout, bucket: Bucket) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where a bucket lies in the gradients and in the mean."""
        stretches = layout.shards[0]
        return [
            (
                as_tensor(self._flat.parts[0][piece.buffer][piece.start : piece.stop], stretches[piece.buffer].dtype),
                as_tensor(self._mean.parts[0][piece.buffer][piece.start : piece.stop], stretches[piece.buffer].dtype),
            )
            for piece in bucket.pieces[0]
        ]

    def _begin(self) -> None:
        self._tasks: list[Task] = []  # of buckets that are under way, from the first on
        self._ready: set[int] = set()
        self._stamps: dict[int, tuple[int, int]] = {}

    # While backward runs.

    def complete(self, index: int) -> None:
        """A gradient is in the bucket. The last bucket is left for `finish`: there is nothing behind it to hide."""
        self._ready.add(index)
        while len(self._tasks) < len(self._buckets) - 1 and self._ready.issuperset(self._buckets[len(self._tasks)].params):
            self._launch(len(self._tasks), self.weight, background=True)

    def _launch(self, number: int, weight: float, background: bool) -> None:
        self._fill(number, weight)
        self._tasks.append(self._reduce(number, background))

    def _fill(self, number: int, weight: float) -> None:
        for index in self._buckets[number].params:
            self._stamps[index] = self._flat.stamp(index)
        for source, target in self._parts[number]:
            if weight:
                torch.mul(source, weight / self._total, out=target)
            else:
                target.zero_()

    def _reduce(self, number: int, background: bool) -> Task:
        return self.group.all_reduce([target for _, target in self._parts[number]], "sum", background=background)

    # At the end of a step.

    def finish(self, ballot: Ballot, hyper: str) -> BallotOutcome:
        """The mean lies in its place, unless the step was skipped, or everybody has run out."""
        weight, ballot = ballot.weight, replace(ballot, digest=digest_of(hyper))
        changed = self._changed(weight)
        self.weight = weight or self.weight
        while True:
            try:
                found = self._step(ballot, changed, hyper)
                break
            except RankLost as error:
                if self._was_decided(error):
                    found = self._result()
                    break
                self._begin()
                changed = frozenset()
        self._begin()
        if found.total and not found.skipped:
            self._correct(found.total)
        return found

    def _correct(self, total: float) -> None:
        """Sums were made for a total as in the step before; mostly it is the same."""
        if total != self._total:
            for parts in self._parts:
                for _, target in parts:
                    target.mul_(self._total / total)
        self._total = total

    def _changed(self, weight: float) -> frozenset[int]:
        """Buckets under way that are not what they should be."""
        sent = range(len(self._tasks))
        if weight != self.weight:
            return frozenset(sent)
        moved = (index for index, stamp in self._stamps.items() if self._flat.stamp(index) != stamp)
        return frozenset(self._bucket_of[index] for index in moved) & frozenset(sent)

    def _step(self, ballot: Ballot, changed: frozenset[int], hyper: str) -> BallotOutcome:
        active = not (ballot.skips or ballot.ran_out)
        weight = ballot.weight if active else 0.0
        while len(self._tasks) < len(self._buckets):
            self._launch(len(self._tasks), weight, background=False)
            self._tasks[-1].wait()
        for task in self._tasks:
            task.wait()
        found = self._vote(ballot, changed)
        if found.unlike is not None:
            say_where_they_differ(self.group, hyper)
        again = self._to_make_again(found)
        if again or found.touched:
            self._expect(found)
            for number in again:
                self._fill(number, weight)
                self._reduce(number, False).wait()
            if found.touched:
                self.compare(self.group)
            return self._vote(replace(ballot, touched=False), frozenset())
        return found

    def _to_make_again(self, found: BallotOutcome) -> Sequence[int]:
        """Buckets that are not what they should be. Float16 made for another total may be beyond its largest number."""
        wrong = self._is_narrow and found.total and not found.skipped and found.total != self._total
        return range(len(self._buckets)) if wrong else found.again

    def _expect(self, found: BallotOutcome) -> None:
        if self._is_narrow and found.total and not found.skipped:
            self._total = found.total

    def _vote(self, ballot: Ballot, changed: frozenset[int]) -> BallotOutcome:
        data = replace(ballot, changed=changed).pack(len(self._buckets), self._count)
        self._ballots = gather_bytes(self.group, data)
        self._votes += 1
        return self._result()

    def _result(self) -> BallotOutcome:
        return outcome([unpack(data, len(self._buckets), self._count) for data in self._ballots])

    # When somebody is gone.

    def _was_decided(self, error: RankLost) -> bool:
        """Form the group again; was the vote that this rank did not see to its end seen by another?"""
        if self.world.size - len({*self.world.engine.left, *error.ranks}) < self._least:
            raise error
        before, earlier = self._votes, self._ballots
        self.group = self.world.reform(self._number, error.ranks)
        counts = [int.from_bytes(data, "little") for data in gather_bytes(self.group, before.to_bytes(8, "little"))]
        self._votes = max(counts)
        if min(counts) == max(counts):
            return False
        knows = counts.index(max(counts))
        size = torch.tensor([len(earlier)])
        self.group.broadcast([size], knows).wait()
        each = size_of(len(self._buckets), self._count)
        data = torch.zeros(int(size) * each, dtype=torch.uint8)
        if before == max(counts):
            data.copy_(torch.frombuffer(bytearray(b"".join(earlier)), dtype=torch.uint8))
        self.group.broadcast([data], knows).wait()
        if before == max(counts):
            return False
        whole = data.numpy().tobytes()
        self._ballots = [whole[start : start + each] for start in range(0, len(whole), each)]
        found = self._result()
        if self._to_make_again(found) or found.touched:
            self._expect(found)
            return False
        return True


def gather_bytes(group: RankGroup, data: bytes) -> list[bytes]:
    """What every rank has, which is as long everywhere."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    outputs = [torch.empty_like(mine) for _ in range(group.size)]
    group.all_gather(outputs, mine).wait()
    return [as_bytes(output).tobytes() for output in outputs]


def digest_of(text: str) -> int:
    """A number that differs where texts do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def say_where_they_differ(group: RankGroup, text: str) -> None:
    """Ranks have different texts: raise, on all of them, with the first line that differs."""
    padded = text.encode()[:TEXT].ljust(TEXT, b"\0")
    texts = [data.rstrip(b"\0").decode(errors="replace").splitlines() for data in gather_bytes(group, padded)]
    for rank, lines in enumerate(texts):
        for number in range(max(len(lines), len(texts[0]))):
            one, other = (part[number] if number < len(part) else "nothing" for part in (texts[0], lines))
            if one != other:
                ranks = group.ranks[0], group.ranks[rank]
                raise UsageError(f"rank {ranks[0]} has {one} where rank {ranks[1]} has {other}; all ranks must be alike")
    raise UsageError("ranks differ in what they optimize; all must be alike")


# BSP without servers: the workers average gradients among themselves, over whatever links and plans there are.
#
# Who has run out of data takes part with weight zero until everybody has (`join`), and makes the same updates, so that all
# replicas stay the same. Where there is a sequencer (`polytempo run` over several hosts) it is told of every step, and keeps
# the record and the budget; the mean is made without it.


class CollectiveReducer(MeanReducer):
    """A track whose means are made by all-reduce."""

    def __init__(self, session: Session, name: str, proposal: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.name, self.session, self.proposal = name, session, proposal
        self.layout = lay_out(proposal.tensors, 1)
        self.line = ClientState(name)
        self.step = 0
        self.absent = ()
        self.waited = 0.0
        self._said_alike = False
        self.sending = True  #: not while gradients are accumulated
        self.copier = Copier(params, self.layout, Pool())
        self._mean = FlatBuffer(self.layout, Pool(), pinned=False)
        flat = self.copier.next_flat()
        self._rounds = BucketRounds(session.world(), int(name) + 1, self.layout, flat, self._mean, session.least)
        self._rounds.compare = self._compare
        self._start(params)
        self._staging = GradientHooks(params, flat, self._complete)

    def _start(self, params: Sequence[torch.Tensor]) -> None:
        """All must optimize the same, and begin with what the first rank has."""
        client, group = self.session.client, self._rounds.group
        if client is not None:
            with self.session.lock:
                client.register(self.name, self.proposal, lambda: ({}, [[] for _ in range(client.shards)]), self.line)
            self.step = self.line.released
        text = _described(self.proposal)
        if len(set(gather_bytes(group, digest_of(text).to_bytes(8, "little")))) > 1:
            say_where_they_differ(group, text)
        with torch.no_grad():
            group.broadcast([param.detach() for param in params], 0).wait()
        self.copier.watch.record()

    def _compare(self, group: RankGroup) -> None:
        """A script has written to parameters on some rank: refuse them if they are not the same on all."""
        self.check_alike(dict(zip(group.ranks, gather_bytes(group, self.copier.watch.digests()), strict=True)))

    def _complete(self, index: int) -> None:
        if self.sending:
            self._rounds.complete(index)

    def push(self, flat: FlatBuffer | None, hyper: tuple[dict[str, Any], ...], average: bool = True, **about: Any) -> None:
        began = time.perf_counter()
        if self.session.client is not None:
            self._tell(hyper, flat is None, about)
        if average:
            self.agree(flat is None, hyper, about.get("samples", 1.0), about.get("absent", ()), about.get("likeness", 0))
        self.step += 1
        self.waited = time.perf_counter() - began
        if self.session.client is None:
            self.line.waited += self.waited

    def agree(
        self, skips: bool, hyper: tuple[dict[str, Any], ...], samples: float, absent: Sequence[int] = (), gradient: int = 0
    ) -> None:
        """One round."""
        touched = bool(self.copier.watch.touched)
        ballot = Ballot(samples, skips=skips, absent=frozenset(absent), touched=touched, gradient=gradient)
        found = self._rounds.finish(ballot, _lines(hyper))
        self._note(found)
        self.copier.watch.touched = ""
        if found.alike is not None and self.session.client is None and not self._said_alike:  # else the sequencer says it
            self._say_alike(*(self._rounds.group.ranks[index] for index in found.alike))

    def _say_alike(self, one: int, other: int) -> None:
        self._said_alike = True
        if self.session.rank == min(one, other):
            sys.stderr.write(f"polytempo: {advice(one, other, self.step)}\n")
            sys.stderr.flush()

    def join(self) -> bool:
        """Take part in one round with nothing to give; has everybody run out?"""
        found = self._rounds.finish(Ballot(0.0, ran_out=True), "")
        self._note(found)
        return found.over

    def _note(self, found: BallotOutcome) -> None:
        self.line.skipped, self.absent = found.skipped or found.total == 0, found.absent

    def _tell(self, hyper: tuple[dict[str, Any], ...], skip: bool, about: dict[str, Any]) -> None:
        """The sequencer's part: the record, the budget, and who is slow.

        What is waited for is the answer to the step before. An answer to this one may need somebody who has yet to make its
        mean, and who, should a rank have died in it, waits for us to form a group again.
        """
        client = self.session.client
        assert client is not None
        with self.session.lock:
            client.wait_for_release(self.name, self.step)
        sent, received = self.traffic()
        identity = PushId(self.name, client.rank, client.incarnation, self.step)
        push = Push(
            id=identity,
            kind="peers",
            version=self.line.version,
            hyper=hyper,
            skip=skip,
            sent=sent,
            received=received,
            exchanged=self.waited,
            **about,
        )
        with self.session.lock:
            client.push(Outstanding(push, [[] for _ in range(client.shards)]))

    def traffic(self) -> tuple[int, int]:
        sent = sum(link.payload_sent for link in self._rounds.world.engine.links.values())
        return sent, self._rounds.world.engine.payload_received


def _lines(hyper: tuple[dict[str, Any], ...]) -> str:
    return "\n".join(f"{key}={value!r} in group {i}" for i, group in enumerate(hyper) for key, value in group.items())


def _described(proposal: OptimizerSpec) -> str:
    """What must be alike, a line each."""
    head = [f"sync {proposal.sync}", f"optimizer {proposal.optimizer}", f"clip_norm {proposal.clip_norm}"]
    tensors = [f"parameter {t.name} of {t.dtype}{list(t.shape)} in group {t.group}" for t in proposal.tensors]
    return "\n".join([*head, f"{len(tensors)} parameters", *tensors])

"""BSP by all-reduce: workers average gradients among themselves, over whatever links and collective plans there are.

Buckets are reduced while backward runs, in the same order on all ranks, each multiplied by its rank's share; the gradients
themselves stay as they are. A ballot ends the step. A rank that votes has all sums of its step, since collectives end in
their order. So a vote that one rank has seen to its end is the end of the step for all, even if a rank dies before the
others have: they learn the ballots from a rank that has them. If none has, the step is made again from the gradients,
without the dead rank.

A rank that has run out of data takes part with weight zero until all have (`join`), and makes the same updates, so that all
replicas stay the same. Where there is a sequencer (`polytempo run` over several hosts) each step is reported to it for the
record and the budget; the mean is made without it.

With shares by speed (`bsp+balance`) the sequencer's answer brings new shares; without a sequencer each rank runs the rule on
the ballots, which say what each rank's batch cost and how long it took.

In modes with blocks of local steps the values are reduced in the place of gradients, all buckets at once, in the background
while the mode lets the worker go on. The sequencer says the period of the next block; without one each rank runs the rule
on the ballots.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import RankLost, UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.protocol.push import Measures, StepReport, no_steps
from polytempo.protocol.training_troubles import ended_early, same_batches
from polytempo.protocol.values import OptimizerSpec, number_of
from polytempo.reducer.ballot import Ballot, BallotOutcome, outcome, unpack
from polytempo.reducer.buckets import Bucket, BucketScheduler, plan_buckets
from polytempo.reducer.device_moves import device_of_all
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.reducer.peer_messages import traffic_of
from polytempo.reducer.reducer import GradientMean, GroupValues, Reducer, SequencerClient
from polytempo.server.optimizer_state import as_bytes
from polytempo.session.session import Session
from polytempo.sync.barrier import Barrier
from polytempo.sync.directives import Directive
from polytempo.sync.events import Measured, Pushed
from polytempo.sync.spec import Spec
from polytempo.transport.buffer_pool import Pool

#: Bytes of a bucket.
BUCKET = 8 << 20
#: Bytes of a text that are compared where ranks differ.
TEXT = 64 << 10


class VotingGroup:
    """The ranks that make rounds, and the last vote.

    Reducers whose rounds follow one another, in one order on all ranks, share one: where a rank has died, a rank that has
    gone on to the next reducer forms the group again together with ranks that have not.

    Args:
        world: All ranks of the job.
        number: The number of the first reducer's optimizer in the job, the same on all ranks.
        least: With fewer ranks left, the death of a rank is raised.
        members: The ranks that make rounds, where they are not all: then they go on together or not at all.
    """

    def __init__(self, world: World, number: int, least: int, members: Sequence[int] = ()) -> None:
        group = world.group_of_optimizer(members, number) if members else world.new_group(range(world.size))
        assert group is not None
        self.world, self.group, self._number, self._least = world, group, number + 1, least
        self._may_shrink = not members
        self._votes = 0
        self.ballots: list[bytes] = []  #: of the last vote
        self.voted: tuple[int, ...] = ()  #: whose they are: of more ranks than the group has, where one has died since

    def vote(self, ballot: bytes) -> None:
        """Give this rank's ballot, and get all."""
        self.ballots = gather_bytes(self.group, ballot, self.world.wait)
        self.voted = self.group.ranks
        self._votes += 1

    def form_again(self, error: RankLost) -> bool:
        """Form the group again without the dead ranks.

        Returns:
            Whether another rank has seen the vote to its end that this rank has not; its ballots are here then.
        """
        if not self._may_shrink or self.world.size - len({*self.world.engine.messages.left, *error.ranks}) < self._least:
            raise error
        before, earlier, members = self._votes, self.ballots, self.group.ranks
        self.group = self.world.reform(self._number)
        if self.group.size < self._least:
            raise error
        counts = [int.from_bytes(data, "little") for data in gather_bytes(self.group, before.to_bytes(8, "little"))]
        self._votes = max(counts)
        if min(counts) == max(counts):
            return False
        knows = counts.index(max(counts))
        sizes = torch.tensor([len(earlier), len(earlier[0]) if earlier else 0])
        self.group.broadcast([sizes], knows).wait()
        count, each = (int(size) for size in sizes)
        data = torch.zeros(count * each, dtype=torch.uint8)
        if before == max(counts):
            data.copy_(torch.frombuffer(bytearray(b"".join(earlier)), dtype=torch.uint8))
        self.group.broadcast([data], knows).wait()
        if before == max(counts):
            return False
        whole = data.numpy().tobytes()
        self.ballots = [whole[start : start + each] for start in range(0, len(whole), each)]
        self.voted = members
        return True


class BucketRounds:
    """The rounds of one reducer.

    Args:
        voters: The ranks that make them.
        layout: Where parameters lie in the flat buffers.
        gradients: This rank's gradients.
        mean: Receives the mean.
        compare: Refuses parameters that are not the same on all ranks of a group.
        alike: Are the parameters the same on all ranks in this mode? Then they are compared where ranks go on without one.
        resumes_exactly: The first round is scaled by the weights of its ballots, as later ones are by those of the round
            before, so that a resumed run is the same to the bit. Buckets that have left by then are reduced again.
    """

    def __init__(
        self,
        voters: VotingGroup,
        layout: Layout,
        gradients: FlatBuffer,
        mean: FlatBuffer,
        compare: Callable[[RankGroup], None],
        alike: Callable[[], bool],
        resumes_exactly: bool = True,
    ) -> None:
        self.voters, self._compare, self._alike = voters, compare, alike
        self._count = len(layout.places)
        self._is_narrow = "float16" in layout.sizes  # sums must not be larger than means
        order = [place.index for place in sorted(layout.places, key=lambda place: -place.index)]
        buckets: list[Bucket] = [bucket for bucket in plan_buckets(layout, order, BUCKET) if bucket.pieces[0]]
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each bucket, in the gradients and in the mean
        for bucket in buckets:
            parts = []
            for piece in bucket.pieces[0]:
                segment = layout.shards[0][piece.buffer]
                item = ITEM_SIZES[segment.dtype]
                part = slice(segment.start + piece.start // item, segment.start + piece.stop // item)
                parts.append((gradients.tensors[segment.dtype][part], mean.tensors[segment.dtype][part]))
            self._parts.append(parts)
        params = [bucket.params for bucket in buckets]
        self._scheduler = BucketScheduler(params, self._launch, gradients.stamp, in_order=True, hold_last=True)
        self.weight = 1.0  #: what this rank's gradients are expected to weigh
        self.expected: Callable[[], float] | None = None  #: says it, before the first bucket of a round leaves
        self._total = float(voters.group.size)  # and those of all ranks together
        self._is_first = resumes_exactly  # and no total is known: it is scaled as later ones are
        self._start_over()

    def _start_over(self) -> None:
        self._tasks: list[Task] = []  # of buckets that were launched
        self._final_weight: float | None = None  # the step's own weight, once it is known
        self._scheduler.start_over()

    # While backward runs.

    def complete(self, index: int) -> None:
        """A gradient is in the flat buffer."""
        if self.expected is not None and not self._tasks:
            self.weight = self.expected()
        self._scheduler.complete(index)

    def launch(self, weight: float) -> None:
        """Let all buckets travel in the background, at the weight that the ballot will say."""
        self.weight = weight
        try:
            self._scheduler.launch_rest()
        except RankLost:  # the end of the round deals with it
            self._start_over()

    def _launch(self, number: int) -> None:
        with profiled("all_reduce bucket", number):
            if self._final_weight is None:
                self._fill(number, self.weight)
                self._tasks.append(self._reduce(number, background=True))
            else:
                self._fill(number, self._final_weight)
                self.voters.world.wait(self._reduce(number, background=False))

    def _fill(self, number: int, weight: float) -> None:
        for source, target in self._parts[number]:
            if weight:
                torch.mul(source, weight / self._total, out=target)
            else:
                target.zero_()

    def _reduce(self, number: int, background: bool) -> Task:
        return self.voters.group.all_reduce([target for _, target in self._parts[number]], "sum", background=background)

    # At the end of a step.

    def finish(self, ballot: Ballot, hyper: str) -> BallotOutcome:
        """End the round. The mean lies in its buffer then, unless the step was skipped or all ranks have run out."""
        weight, ballot = ballot.weight, replace(ballot, digest=digest_of(hyper) if hyper else 0)
        changed = frozenset(self._scheduler.changed() if weight == self.weight else self._scheduler.launched)
        self.weight = weight or self.weight
        while True:
            try:
                found = self._step(ballot, changed, hyper)
                break
            except RankLost as error:
                if self.voters.form_again(error):  # the step is decided, if the vote that another rank has seen says so
                    found = outcome(self.ballots())
                    if not self._to_repeat(found) and not found.touched:
                        break
                self._start_over()
                changed, ballot = frozenset(), replace(ballot, touched=ballot.touched or self._alike())
        self._start_over()
        if found.total and not found.skipped:
            if found.total != self._total:  # sums were made for a total as in the step before; mostly it is the same
                for _, target in (part for parts in self._parts for part in parts):
                    target.mul_(self._total / found.total)
            self._total, self._is_first = found.total, False
        return found

    def _step(self, ballot: Ballot, changed: frozenset[int], hyper: str) -> BallotOutcome:
        weight = 0.0 if ballot.skips or ballot.ran_out else ballot.weight
        self._final_weight = weight
        self._scheduler.launch_rest()
        for task in self._tasks:
            self.voters.world.wait(task)
        found = self._vote(ballot, changed)
        if found.unlike is not None:
            raise_difference(self.voters.group, hyper)
        repeated = self._to_repeat(found)
        if repeated or found.touched:
            for number in repeated:
                self._fill(number, weight)
                self.voters.world.wait(self._reduce(number, False))
            if found.touched:
                self._compare(self.voters.group)
            return self._vote(replace(ballot, touched=False), frozenset())
        return found

    def _to_repeat(self, found: BallotOutcome) -> Sequence[int]:
        """Buckets to reduce again: changed on a rank, or all, where they were scaled for another total and that matters:
        float16 may overflow when it is scaled anew, and the first round had no total."""
        if found.skipped or found.total in (0, self._total) or not (self._is_narrow or self._is_first):
            return found.again
        self._total = found.total
        return range(len(self._parts))

    def _vote(self, ballot: Ballot, changed: frozenset[int]) -> BallotOutcome:
        self.voters.vote(replace(ballot, changed=changed).pack(len(self._parts), self._count))
        return outcome(self.ballots())

    def ballots(self) -> list[Ballot]:
        """Those of the last vote."""
        return [unpack(data, len(self._parts), self._count) for data in self.voters.ballots]


def gather_bytes(group: RankGroup, data: bytes, wait: Callable[[Task], object] = Task.wait) -> list[bytes]:
    """All ranks' bytes, which must have the same length on each."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    outputs = [torch.empty_like(mine) for _ in range(group.size)]
    wait(group.all_gather(outputs, mine))
    return [as_bytes(output).tobytes() for output in outputs]


def digest_of(text: str) -> int:
    """A 64-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def raise_difference(group: RankGroup, text: str) -> None:
    """Ranks have different texts: raise, on all of them, an error with the first line that differs."""
    padded = text.encode()[:TEXT].ljust(TEXT, b"\0")
    texts = [data.rstrip(b"\0").decode(errors="replace").splitlines() for data in gather_bytes(group, padded)]
    for rank, lines in enumerate(texts):
        for number in range(max(len(lines), len(texts[0]))):
            one, other = (part[number] if number < len(part) else "nothing" for part in (texts[0], lines))
            if one != other:
                ranks = group.ranks[0], group.ranks[rank]
                raise UsageError(f"rank {ranks[0]} has {one} where rank {ranks[1]} has {other}; all ranks must be alike")
    raise UsageError("ranks differ in what they optimize; all ranks must be alike")


class RuleByBallot:
    """The rule of a mode's rounds, run by each rank on the ballots of all: the same numbers, so the same decisions."""

    def __init__(self, sync: Spec, members: Sequence[int]) -> None:
        policy = sync.policy(len(members))
        assert isinstance(policy, Barrier)
        self._rule, self._step = policy.rule, 0
        self.began = time.monotonic()  #: seconds since then, of the first rank that votes, are the rule's clock
        self._rule.start(0.0)
        if self._rule.weights:
            self._rule.weights = tuple((worker, 1.0) for worker in members)

    @property
    def directive(self) -> Directive | None:
        """What it says of the next round."""
        return self._rule.directive(starts=True)

    def close(self, ranks: Sequence[int], ballots: Sequence[Ballot]) -> None:
        """A round has ended with the ballots of these ranks."""
        active = [(rank, ballot) for rank, ballot in zip(ranks, ballots, strict=True) if not ballot.ran_out]
        if not active:  # those that went on last may have shared all of it: now all begin together again
            self._rule.gather(ranks)
            return
        pushes = tuple(
            Pushed(rank, self._step, one.weight, measured=Measured(one.loss, one.lr, one.work, one.computed, one.drawn))
            for rank, one in active
        )
        self._step += 1
        self._rule.close(pushes, [worker for worker, _ in active], active[0][1].seconds)


class CollectiveReducer(Reducer):
    """Reduces the gradients of one optimizer by all-reduce."""

    mean: GradientMean
    needs_join = True

    def __init__(
        self,
        session: Session,
        name: str,
        spec: OptimizerSpec,
        params: Sequence[torch.Tensor],
        hooked: bool = True,
        beside: CollectiveReducer | None = None,
    ) -> None:
        super().__init__(session, name, spec)
        self._warned = False  # of equal gradients
        self._ended: set[int] = set()  # ranks that have run out of data, as was said
        self._steps = self._count = 0  # of all rounds so far, and of the one under way
        device = device_of_all(session.devices, params) if len(session.world().hosts) == 1 else None
        self.copier = Copier(params, self.layout, device or Pool())
        result = FlatBuffer(self.layout, Pool(), pinned=False) if device is None else self.copier.landing
        self.mean = GradientMean(self.copier, result)
        buffer = self.copier.next_buffer()
        if beside is None:
            self.voters = VotingGroup(session.world(), number_of(name), session.least, spec.members)
        else:  # its rounds and these follow one another
            self.voters = beside.voters
        self._rounds = BucketRounds(self.voters, self.layout, buffer, self.mean.buffer, self._compare, self._alike, hooked)
        self._clock = SequencerClient(session, spec, self.client_state) if session.client is not None else None
        self.step = self._clock.step if self._clock is not None else 0
        self._start(params)
        own_memory = hooked and device is None
        self.hooks = GradientHooks(params, buffer, self._complete) if own_memory else None
        self.digests = self.copier.watch.digests  #: of what must be alike on all ranks after a write by the script
        self._blocks, self._measured = spec.parsed.capabilities.averages, spec.parsed.capabilities.by_speed
        members = spec.members or tuple(range(session.size))
        ruled = (self._blocks or self._measured) and self._clock is None
        self._rule = RuleByBallot(spec.parsed, members) if ruled else None
        self._ballot, self._hyper, self._took = Ballot(0.0), "", 0.0  # of the round under way
        self._averages = True  # the round under way makes the mean; else `agree` has made it

    def _start(self, params: Sequence[torch.Tensor]) -> None:
        """Check that all ranks optimize the same, and start from the values of the first."""
        group, spec = self.voters.group, self.spec
        file = f" of a file with the digest {spec.digest}" if spec.digest else ""
        head = [f"sync {spec.sync}{file}", f"optimizer {spec.optimizer}", f"clip_norm {spec.clip_norm}"]
        tensors = [f"parameter {t.name} of {t.dtype}{list(t.shape)} in group {t.group}" for t in spec.tensors]
        text = "\n".join([*head, f"{len(tensors)} parameters", *tensors])
        if len(set(gather_bytes(group, digest_of(text).to_bytes(8, "little")))) > 1:
            raise_difference(group, text)
        with torch.no_grad():
            group.broadcast([param.detach() for param in params], 0).wait()
        self.copier.watch.record()

    def _compare(self, group: RankGroup) -> None:
        """A script has written to parameters on some rank: refuse them if they are not the same on all."""
        digests = gather_bytes(group, self.digests())
        self.copier.watch.check_alike(dict(zip(group.ranks, digests, strict=True)))

    def _alike(self) -> bool:
        """Not in a block of local steps; where an outer step follows, what it starts from (`train/fragment.py`)."""
        return not self._blocks or self.digests != self.copier.watch.digests

    def _complete(self, index: int) -> None:
        if self.sending:
            self._rounds.complete(index)

    def expect(self, weight: Callable[[], float]) -> None:
        self._rounds.expected = weight

    # A step.

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        began = time.perf_counter()
        skip, self._count = buffer is None, measures.count
        if self._clock is not None:
            # It waits for the answer to the step before. An answer to this step may need a rank that has yet to make its
            # mean and, should another have died in it, waits for this rank to form the group again.
            self._clock.wait_for(self.step)
            self._clock.push(StepReport(hyper=hyper, absent=tuple(absent), skip=skip), measures, self.traffic())
            self._clock.step += 1
        early = self._blocks and measures.count != self.period  # its worker stands at another step of a schedule
        self._hyper = "" if early else _lines(hyper)
        self._ballot = Ballot(
            measures.samples,
            skips=skip,
            absent=frozenset(absent),
            touched=bool(self.copier.watch.touched),
            gradient=measures.gradient_digest,
            loss=measures.loss,
            lr=measures.lr,
            seconds=time.monotonic() - self._rule.began if self._rule is not None else 0.0,
            work=measures.work if self._measured else None,
            computed=measures.computed,
            drawn=measures.drawn,
        )
        if self.hooks is None and self._averages:
            self._rounds.launch(self._ballot.weight)
        self._took = time.perf_counter() - began

    def finish(self) -> None:
        began = time.perf_counter()
        if self._averages:
            self._round(self._ballot, self._hyper)
        self._averages = True
        self.step += 1
        self._steps += self._count
        if self._clock is not None and (self._blocks or self._measured):
            # The period of the next block, or the shares of the next round. All ranks that have voted have pushed before,
            # so no rank is waited for that waits for this one.
            self._clock.wait_for(self.step)
        self.waited = self._took + time.perf_counter() - began
        if self._clock is not None:
            self._clock.waited = self.waited
        else:
            self.client_state.waited += self.waited

    @property
    def directive(self) -> Directive | None:
        return self._rule.directive if self._rule is not None else super().directive

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        absent = () if skip else self.gradients()[1]
        touched = bool(self.copier.watch.touched)
        self._round(Ballot(samples, skips=skip, absent=frozenset(absent), touched=touched), _lines(hyper))
        self._averages = False
        if not self.mean.skipped:
            self.mean.assign()
        return self.mean.skipped

    def join(self) -> bool:
        # The sequencer waits for this rank, too, unless the rank leaves the job: it has said so by then, and has no client.
        if self._clock is not None and self.session.client is not None:
            self._clock.wait_for(self.step)
            self._clock.push(StepReport(), no_steps(), self.traffic())
            self._clock.step += 1
            self.step += 1
        return self._finish(Ballot(0.0, ran_out=True), "").over

    def _round(self, ballot: Ballot, hyper: str) -> None:
        found = self._finish(ballot, hyper)
        self.copier.watch.touched = ""
        if found.alike is not None and self._clock is None and not self._warned:  # else the sequencer warns
            self._warned = True
            one, other = (self.voters.voted[index] for index in found.alike)
            if self.session.rank == min(one, other):
                sys.stderr.write(f"polytempo: {same_batches(one, other, self.step)}\n")
                sys.stderr.flush()

    def _finish(self, ballot: Ballot, hyper: str) -> BallotOutcome:
        found = self._rounds.finish(ballot, hyper)
        if found.ended and self._clock is None and not self._measured:  # else the sequencer warns
            ended = {self.voters.voted[index] for index in found.ended}
            behind, left = sorted(ended - self._ended), sorted(set(self.voters.voted) - ended)
            self._ended |= ended
            if behind and self.session.rank == left[0]:  # of those that go on one says it, once for each
                sys.stderr.write(f"polytempo: {ended_early(behind, self._steps, len(left))}\n")
                sys.stderr.flush()
        self.mean.skipped, self.mean.absent = found.skipped or found.total == 0, found.absent
        if self._rule is not None:
            self._rule.close(self.voters.voted, self._rounds.ballots())
        return found

    def groups(self) -> list[RankGroup]:
        return [self.voters.group]

    def traffic(self) -> tuple[int, int]:
        return traffic_of(self.voters.world.engine)

    def handed(self) -> int:
        return self.voters.world.engine.messages.handed[self.voters.group.context]


def _lines(hyper: tuple[dict[str, Any], ...]) -> str:
    return "\n".join(f"{key}={value!r} in group {i}" for i, group in enumerate(hyper) for key, value in group.items())

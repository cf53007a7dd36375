"""Who is in a round of workers that keep the values themselves, and what is then made of what they have.

    BySequencer  each worker reports its part by a push without data. The answer names the workers of the round, whose parts
                 are there: these make the sum
    ByBallot     no sequencer decides. The sums are made while backward runs, and a vote of all ranks ends the round
                 (`ballot.py`): what it shows to be wrong is made again

A job of one needs neither (`train/update.py`). In rounds with deadlines the sequencer decides, too (`deadline_peers.py`).

A rank that votes has all sums of its step, since collectives end in their order. So a vote that one rank has seen to its end
is the end of the step for all, even if a rank dies before the others have: they learn the ballots from a rank that has them.
If none has, the step is made again from the gradients, without the dead rank.

By ballot a rank that has run out of data takes part with weight zero until all have (`join`), and makes the same updates,
so that all replicas stay the same. Where there is a sequencer (`polytempo run` over several hosts) each step is reported to
it for the record and the budget; the mean is made without it. With shares by speed (`bsp+balance`) its answer brings new
shares; without a sequencer each rank runs the rule on the ballots, which say what each rank's batch cost and how long it
took.

In modes with blocks of local steps the values are reduced in the place of gradients, all buckets at once, in the background
while the mode lets the worker go on. The sequencer says the period of the next block; without one each rank runs the rule
on the ballots.
"""

from __future__ import annotations

import hashlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.collectives.group import RankGroup
from polytempo.errors import RankLost, UsageError
from polytempo.protocol.messages import Push
from polytempo.protocol.push import FirstValues, Measures, StepReport, no_steps
from polytempo.protocol.training_troubles import ended_early, same_batches
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.ballot import Ballot, BallotOutcome, outcome, unpack
from polytempo.reducer.sums import BucketSums, MemorySums, VotingGroup, gather_bytes, traffic_of
from polytempo.session.session import Session
from polytempo.sync.barrier import Barrier
from polytempo.sync.directives import Directive, NextBlock
from polytempo.sync.events import Measured, Pushed
from polytempo.sync.spec import Spec
from polytempo.transport.channel import Bytes

#: Bytes of a text that are compared where ranks differ.
TEXT = 64 << 10


def period_of(directive: Directive | None) -> int:
    """Local steps in the block that starts; 0 in modes without blocks."""
    return directive.period if isinstance(directive, NextBlock) else 0


class SequencerClient:
    """A clock of the sequencer, for a worker whose gradients do not go to servers: it pushes without data.

    The sequencer decides which workers are in a round, and keeps the record and the budget, as for any other push.
    """

    def __init__(self, session: Session, spec: OptimizerSpec, state: ClientState) -> None:
        assert session.client is not None
        self.client: Client = session.client
        self._session, self.state = session, state
        with session.lock:
            self.client.register(state.name, spec, lambda: (FirstValues(), self._no_data()), state)
        self.step = state.released
        self.waited = 0.0  #: seconds of the last round

    def _no_data(self) -> list[list[Bytes]]:
        return [[] for _ in range(self.client.shards)]

    def push(self, report: StepReport, measures: Measures, traffic: tuple[int, int]) -> None:
        """Report a step."""
        if measures.exchanged is None:
            measures.exchanged = self.waited
        push = Push(
            id=PushId(self.state.name, self.client.rank, self.client.incarnation, self.step),
            version=self.state.version,
            sent=traffic[0],
            received=traffic[1],
            measures=measures,
            body=report,
        )
        with self._session.lock:
            self.client.push(Outstanding(push, self._no_data()))

    def wait_for(self, step: int) -> None:
        """Wait until this worker may start a step."""
        with self._session.lock:
            self.client.wait_for_release(self.state.name, step)


class Coordination(ABC):
    """Who is in the rounds of one optimizer, on one worker; `state` is what the sequencer has answered, if there is one."""

    def __init__(self, state: ClientState) -> None:
        self.state = state
        self.step = 0  #: the next round
        self.waited = 0.0  #: seconds of the last one

    @abstractmethod
    def begin(self, report: StepReport, measures: Measures, makes_mean: bool) -> None:
        """Take part in a round with what lies where sums are made; `makes_mean`: its mean is not there yet."""

    @abstractmethod
    def end(self, makes_mean: bool) -> None:
        """Wait for the end of the round: the mean lies in its buffer then, if it was to be made."""

    @abstractmethod
    def agree(self, report: StepReport, samples: float) -> None:
        """A mean beside the rounds."""

    @property
    def directive(self) -> Directive | None:
        """What the policy has said of the round that starts."""
        return self.state.answer.directive

    @abstractmethod
    def join(self) -> bool:
        """A worker that has run out of data takes part in one round without; True once all have run out."""

    @abstractmethod
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far."""


class BySequencer(Coordination):
    """The sequencer names the workers of a round; one that ends is left out."""

    def __init__(self, session: Session, clock: SequencerClient, spec: OptimizerSpec, sums: MemorySums) -> None:
        super().__init__(clock.state)
        self._session, self._clock, self._spec, self._sums = session, clock, spec, sums
        self._agreement: SequencerClient | None = None  # the clock of `agree`, once it was called
        self._took = 0.0  # by the round under way so far
        self.step = clock.step

    def begin(self, report: StepReport, measures: Measures, makes_mean: bool) -> None:
        self._report(self._clock, report, measures)

    def end(self, makes_mean: bool) -> None:
        self._take_part(self._clock, makes_mean)
        self.step, self.waited = self._clock.step, self._clock.waited

    def agree(self, report: StepReport, samples: float) -> None:
        if self._agreement is None:
            self._agreement = SequencerClient(self._session, self._spec, ClientState(f"{self.state.name}/mean"))
        report.hyper = ()  # it is compared with the step's own push
        self._report(self._agreement, report, Measures(samples=samples))
        self._take_part(self._agreement, makes_mean=True)

    def _report(self, clock: SequencerClient, report: StepReport, measures: Measures) -> None:
        began = time.perf_counter()
        if not report.skip:
            self._sums.wait_until_filled()
        clock.push(report, measures, self.moved())
        self._took = time.perf_counter() - began

    def _take_part(self, clock: SequencerClient, makes_mean: bool) -> None:
        began, mean, watch = time.perf_counter(), self._sums.mean, self._sums.copier.watch
        with self._session.lock:
            clock.wait_for(clock.step + 1)
            answer, watch.touched = clock.state.answer, ""
            members = [share.worker for share in answer.shares]
            if answer.touched:  # a script has written to parameters: the replicas must still be the same
                digest = hashlib.blake2b(watch.digests(), digest_size=8).digest()
                watch.check_alike(self._sums.shared.compare(digest, members), answer.touched)
            mean.skipped, mean.absent = clock.state.skipped, answer.absent
            if makes_mean and not mean.skipped:
                self._sums.make(members, [share.weight for share in answer.shares])
        clock.step = clock.state.released
        clock.waited = self._took + time.perf_counter() - began

    def join(self) -> bool:
        return True  # no worker waits for one that has left

    def moved(self) -> tuple[int, int]:
        return self._clock.client.bytes_sent, self._clock.client.bytes_received


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


class ByBallot(Coordination):
    """All ranks vote at the end of a round. Optimizers whose rounds follow one another share the `voters`."""

    def __init__(
        self, session: Session, spec: OptimizerSpec, state: ClientState, voters: VotingGroup, sums: BucketSums
    ) -> None:
        super().__init__(state)
        self._session, self.voters, self._sums = session, voters, sums
        self._clock = SequencerClient(session, spec, state) if session.client is not None else None
        self.step = self._clock.step if self._clock is not None else 0
        self._blocks, self._measured = spec.parsed.capabilities.averages, spec.parsed.capabilities.by_speed
        ruled = (self._blocks or self._measured) and self._clock is None
        self._rule = RuleByBallot(spec.parsed, spec.members or range(session.size)) if ruled else None
        self._params = len(spec.tensors)
        self._warned = False  # of equal gradients
        self._ended: set[int] = set()  # ranks that have run out of data, as was said
        self._steps = self._count = 0  # of all rounds so far, and of the one under way
        self._ballot, self._hyper, self._took = Ballot(0.0), "", 0.0  # of the round under way

    def begin(self, report: StepReport, measures: Measures, makes_mean: bool) -> None:
        began = time.perf_counter()
        self._count, touched, report.touched = measures.count, bool(report.touched), ""
        self._report(report, measures)
        early = self._blocks and measures.count != period_of(self.directive)  # it stands at another step of a schedule
        self._hyper = "" if early else _lines(report.hyper)
        self._ballot = Ballot(
            measures.samples,
            skips=report.skip,
            absent=frozenset(report.absent),
            touched=touched,
            gradient=measures.gradient_digest,
            loss=measures.loss,
            lr=measures.lr,
            seconds=time.monotonic() - self._rule.began if self._rule is not None else 0.0,
            work=measures.work if self._measured else None,
            computed=measures.computed,
            drawn=measures.drawn,
        )
        if makes_mean and not self._sums.early:
            self._sums.launch(self._ballot.weight)
        self._took = time.perf_counter() - began

    def end(self, makes_mean: bool) -> None:
        began = time.perf_counter()
        if makes_mean:
            self._round(self._ballot, self._hyper)
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
            self.state.waited += self.waited

    @property
    def directive(self) -> Directive | None:
        return self._rule.directive if self._rule is not None else super().directive

    def agree(self, report: StepReport, samples: float) -> None:
        ballot = Ballot(samples, skips=report.skip, absent=frozenset(report.absent), touched=bool(report.touched))
        self._round(ballot, _lines(report.hyper))

    def join(self) -> bool:
        # The sequencer waits for this rank, too, unless the rank leaves the job: it has said so by then, and has no client.
        if self._clock is not None and self._session.client is not None:
            self._report(StepReport(), no_steps())
            self.step += 1
        return self._finish(Ballot(0.0, ran_out=True), "").over

    def moved(self) -> tuple[int, int]:
        return traffic_of(self.voters.world.engine)

    def _report(self, report: StepReport, measures: Measures) -> None:
        if self._clock is None:
            return
        # It waits for the answer to the step before. An answer to this step may need a rank that has yet to make its mean
        # and, should another have died in it, waits for this rank to form the group again.
        self._clock.wait_for(self.step)
        self._clock.push(report, measures, self.moved())
        self._clock.step += 1

    # The end of a round.

    def _round(self, ballot: Ballot, hyper: str) -> None:
        found = self._finish(ballot, hyper)
        self._sums.copier.watch.touched = ""
        if found.alike is not None and self._clock is None and not self._warned:  # else the sequencer warns
            self._warned = True
            one, other = (self.voters.voted[index] for index in found.alike)
            if self._session.rank == min(one, other):
                sys.stderr.write(f"polytempo: {same_batches(one, other, self.step)}\n")
                sys.stderr.flush()

    def _finish(self, ballot: Ballot, hyper: str) -> BallotOutcome:
        found = self._decide(ballot, hyper)
        if found.ended and self._clock is None and not self._measured:  # else the sequencer warns
            ended = {self.voters.voted[index] for index in found.ended}
            behind, left = sorted(ended - self._ended), sorted(set(self.voters.voted) - ended)
            self._ended |= ended
            if behind and self._session.rank == left[0]:  # of those that go on one says it, once for each
                sys.stderr.write(f"polytempo: {ended_early(behind, self._steps, len(left))}\n")
                sys.stderr.flush()
        mean = self._sums.mean
        mean.skipped, mean.absent = found.skipped or found.total == 0, found.absent
        if self._rule is not None:
            self._rule.close(self.voters.voted, self._ballots())
        return found

    def _decide(self, ballot: Ballot, hyper: str) -> BallotOutcome:
        """Vote until all know how the round ends: with a rank that died in it, or without."""
        ballot = replace(ballot, digest=digest_of(hyper) if hyper else 0)
        changed = self._sums.changed(ballot.weight)
        while True:
            try:
                found = self._reduce_and_vote(ballot, changed, hyper)
                break
            except RankLost as error:
                if self.voters.form_again(error):  # the step is decided, if the vote that another rank has seen says so
                    found = outcome(self._ballots())
                    if not self._to_repeat(found) and not found.touched:
                        break
                self._sums.start_over()
                # Where parameters are the same on all ranks in this mode, they are compared. In a block of local steps they
                # are not; where an outer step follows, what it starts from is (`train/fragment.py`).
                alike = not self._blocks or self._sums.copier.watch.is_anchored
                changed, ballot = frozenset(), replace(ballot, touched=ballot.touched or alike)
        self._sums.start_over()
        if found.total and not found.skipped:
            self._sums.finish(found.total)
        return found

    def _reduce_and_vote(self, ballot: Ballot, changed: frozenset[int], hyper: str) -> BallotOutcome:
        weight = 0.0 if ballot.skips or ballot.ran_out else ballot.weight
        self._sums.launch_rest(weight)
        found = self._vote(ballot, changed)
        group = self.voters.group
        if found.unlike is not None:
            raise_difference(group, hyper)
        repeated = self._to_repeat(found)
        if not repeated and not found.touched:
            return found
        for number in repeated:
            self._sums.make_again(number, weight)
        if found.touched:  # a script has written to parameters on some rank
            watch = self._sums.copier.watch
            watch.check_alike(dict(zip(group.ranks, gather_bytes(group, watch.digests()), strict=True)))
        return self._vote(replace(ballot, touched=False), frozenset())

    def _to_repeat(self, found: BallotOutcome) -> Sequence[int]:
        return found.again if found.skipped else self._sums.to_repeat(found.total, found.again)

    def _vote(self, ballot: Ballot, changed: frozenset[int]) -> BallotOutcome:
        self.voters.vote(replace(ballot, changed=changed).pack(self._sums.count, self._params))
        return outcome(self._ballots())

    def _ballots(self) -> list[Ballot]:
        """Those of the last vote."""
        return [unpack(data, self._sums.count, self._params) for data in self.voters.ballots]


def _lines(hyper: tuple[dict[str, Any], ...]) -> str:
    return "\n".join(f"{key}={value!r} in group {i}" for i, group in enumerate(hyper) for key, value in group.items())

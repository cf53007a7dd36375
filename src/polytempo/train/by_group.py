"""BSP without servers: the workers average gradients among themselves, over whatever links and plans there are.

Who has run out of data takes part with weight zero until everybody has (`join`), and makes the same updates, so that all
replicas stay the same. Where there is a sequencer (`polytempo run` over several hosts) it is told of every step, and keeps
the record and the budget; the mean is made without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from polytempo.collectives.group import Group
from polytempo.protocol.ballot import Ballot, Outcome
from polytempo.protocol.layout import lay_out
from polytempo.protocol.messages import Push
from polytempo.protocol.values import Proposal, PushId
from polytempo.train.flat import Copier, Flat
from polytempo.train.lines import Line, Outstanding
from polytempo.train.means import MeanExchange
from polytempo.train.rounds import Rounds, digest_of, gather_bytes, say_where_they_differ
from polytempo.train.session import Session
from polytempo.train.staging import Staging
from polytempo.transport.pool import Pool


class GroupExchange(MeanExchange):
    """A track whose means are made by all-reduce."""

    def __init__(self, session: Session, name: str, proposal: Proposal, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.name, self.session, self.proposal = name, session, proposal
        self.layout = lay_out(proposal.tensors, 1)
        self.line = Line(name)
        self.step = 0
        self.absent = ()
        self.waited = 0.0
        self.sending = True  #: not while gradients are accumulated
        self.copier = Copier(params, self.layout, Pool())
        self._mean = Flat(self.layout, Pool(), pinned=False)
        flat = self.copier.next_flat()
        self._rounds = Rounds(session.world(), int(name) + 1, self.layout, flat, self._mean, session.least)
        self._rounds.compare = self._compare
        self._start(params)
        self._staging = Staging(params, flat, self._complete)

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

    def _compare(self, group: Group) -> None:
        """A script has written to parameters on some rank: refuse them if they are not the same on all."""
        self.check_alike(dict(zip(group.ranks, gather_bytes(group, self.copier.watch.digests()), strict=True)))

    def _complete(self, index: int) -> None:
        if self.sending:
            self._rounds.complete(index)

    def push(self, flat: Flat | None, hyper: tuple[dict[str, Any], ...], average: bool = True, **about: Any) -> None:
        began = time.perf_counter()
        if self.session.client is not None:
            self._tell(hyper, flat is None, about)
        if average:
            self.agree(flat is None, hyper, about.get("samples", 1.0), about.get("absent", ()))
        self.step += 1
        self.waited = time.perf_counter() - began
        if self.session.client is None:
            self.line.waited += self.waited

    def agree(self, skips: bool, hyper: tuple[dict[str, Any], ...], samples: float, absent: Sequence[int] = ()) -> None:
        """One round."""
        ballot = Ballot(samples, skips=skips, absent=frozenset(absent), touched=bool(self.copier.watch.touched))
        self._note(self._rounds.finish(ballot, _lines(hyper)))
        self.copier.watch.touched = ""

    def join(self) -> bool:
        """Take part in one round with nothing to give; has everybody run out?"""
        found = self._rounds.finish(Ballot(0.0, ran_out=True), "")
        self._note(found)
        return found.over

    def _note(self, found: Outcome) -> None:
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


def _described(proposal: Proposal) -> str:
    """What must be alike, a line each."""
    head = [f"sync {proposal.sync}", f"optimizer {proposal.optimizer}", f"clip_norm {proposal.clip_norm}"]
    tensors = [f"parameter {t.name} of {t.dtype}{list(t.shape)} in group {t.group}" for t in proposal.tensors]
    return "\n".join([*head, f"{len(tensors)} parameters", *tensors])

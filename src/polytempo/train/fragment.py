"""A fragment: tensors of the model whose values are averaged together, over a reducer with a clock of its own.

    values       travel where the average itself is the new model
    differences  anchor - value, where servers make an outer step, or what travels is compressed
    send         this worker's part of the round leaves
    take         the round has ended: the new values are taken; where local steps were made since the sending, what they have
                 changed stays: x = new + (x - x at the sending)

Among workers the mean of the values is made by the reducers of `bsp`, and each worker makes the same outer step from it, on
an anchor of its own. On servers the anchor is what they hold; here is a copy, which each answer renews.

With the parameters may travel what belongs to them, its companions. These are averaged, and no outer step is made with them:

    module buffers    those of floating point (the running statistics of batch norm); counters stay each worker's own
    optimizer state   what the wrapped optimizer keeps for each parameter. Torch makes it in the first step, and all workers
                      must know what travels before: so a copy of the optimizer makes one step with gradients of zero, and
                      shows it
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.optim.outer_step import PLAIN, OuterRule, OuterStep, cut
from polytempo.protocol.push import no_steps
from polytempo.protocol.values import TensorInfo, part_of
from polytempo.reducer.exchange import Exchange, GroupValues
from polytempo.reducer.flat_buffer import FlatBuffer, describe
from polytempo.reducer.optimizer_spec import SpecBuilder
from polytempo.reducer.peers import PeerExchange, make_peers
from polytempo.reducer.servers import ServerExchange
from polytempo.session.session import Session
from polytempo.sync.blocks import Averaging
from polytempo.train.model_tables import dense_segments, dense_state
from polytempo.train.update import FiniteWatch
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes


class Companions:
    """Tensors that travel beside the parameters: stand-ins, filled before a round and copied back after it.

    Args:
        model: The model whose buffers are averaged, if they are.
        optimizer: The optimizer whose state is averaged, if it is.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        found = companions_of(model, None if optimizer is None else after_a_step(optimizer))
        self.names = list(found)
        self.tensors = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in found.values()]  #: the stand-ins

    def read(self) -> None:
        """Fill the stand-ins; with zeros for state that is not there yet."""
        found = companions_of(self._model, self._optimizer)
        for name, stand_in in zip(self.names, self.tensors, strict=True):
            if name in found:
                stand_in.copy_(found[name].detach())
            else:
                stand_in.zero_()

    def write(self) -> None:
        """Copy the stand-ins back."""
        found = companions_of(self._model, self._optimizer)
        for name, stand_in in zip(self.names, self.tensors, strict=True):
            if name in found:
                found[name].detach().copy_(stand_in)


def companions_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Buffers of a model and state of an optimizer that can be averaged, by the names that all workers have for them."""
    found: dict[str, Any] = {} if model is None else {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    if optimizer is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            for name, value in sorted(optimizer.state.get(param, {}).items()):
                found[f"{name} of parameter {index}"] = value
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided
    }


def after_a_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer that has its state."""
    if type(optimizer) is torch.optim.LBFGS:
        raise UsageError("state=mean cannot average the history of LBFGS; use state=keep or state=reset")
    trial = copy.deepcopy(optimizer)
    for group in trial.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    trial.step()
    return trial


class Fragment:
    """Some parameters, and what travels with them.

    Args:
        reducer: Reduces them; its tensors are the parameters, then those of `companions`.
        rules: The outer step of each group of tensors.
        companions: What travels with the parameters.
        overlaps: Are local steps made between sending and taking?
        alone: Are the values this worker's own at all times, so that what the script writes is never a new anchor?
    """

    def __init__(
        self,
        reducer: Exchange,
        rules: Sequence[OuterRule],
        companions: Companions,
        overlaps: bool,
        alone: bool = False,
    ) -> None:
        self.reducer, self._rules, self._groups = reducer, list(rules), [info.group for info in reducer.spec.tensors]
        self._companions, self._overlaps, self._alone = companions, overlaps, alone
        self._kept: list[torch.Tensor] = []  # the worker's own values, while those of the job are shown
        self.made = no_steps()  #: the local steps since the last sending
        self.sent_at: int | None = None  #: the local step after which the round under way was begun
        self._sent: list[torch.Tensor] = []  # values at the sending, where local steps follow
        self._unsent: list[torch.Tensor] = []  # changes that the values no longer have, for the next sending
        self._rates: list[float] = []  # of the round under way
        self._written = ""  # a parameter that the script has written to at the start of the block
        on_servers = isinstance(reducer, ServerExchange)
        self._differences = on_servers and reducer.spec.apply == "server"
        steps = any(rule != PLAIN for rule in rules)
        self._views: list[torch.Tensor] = []  # of the anchor, and of what servers have sent
        if on_servers or steps:
            on_device = on_servers and reducer.copier.on_device  # then what servers have sent is there already
            self._landing = reducer.copier.landing if on_device else FlatBuffer(reducer.layout, Pool())
            reducer.copier.gather(self._landing, lambda tensor: tensor.detach())
            self._views = self._in_order(self._landing)
        self._outer: OuterStep | None = None  # made here
        if isinstance(reducer, ServerExchange):
            landing = self._landing  # on a device, what has landed is where it shall be
            reducer.deliver_to(lambda parts, absent: landing.receive(parts), land=lambda: None)
        elif steps:
            self._outer = OuterStep(self._views, self._groups, rules)
            reducer.copier.watch.compare_by(self._views)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return self.reducer.copier.params

    def _in_order(self, buffer: FlatBuffer) -> list[torch.Tensor]:
        return [buffer.views[index] for index in range(len(self._tensors))]

    # A round.

    def send(self, step: int, hyper: GroupValues, finite: FiniteWatch) -> None:
        """Begin a round after this local step.

        Args:
            step: The number of the local step.
            hyper: The hyper-parameters of the local steps.
            finite: Counts or refuses values that are not finite.
        """
        made, self.made = self.made, no_steps()
        self.sent_at = step
        self.use_rates(hyper)
        self.reducer.renew(compare=False)  # they may lie elsewhere now
        self._companions.read()
        buffer, _ = self.reducer.buffer_of(lambda tensor: tensor.detach())
        made.nonfinite = finite.check(buffer, step, names=[info.name for info in self.reducer.spec.tensors])
        if self._overlaps:
            self._sent = [view.clone() for view in self._in_order(buffer)]
        if self._differences:
            units = [rule.unit(lr) for rule, lr in zip(self._rules, self._rates, strict=True)]
            for index, group in enumerate(self._groups):
                view = buffer.views[index].neg_().add_(self._views[index])
                if self._unsent:
                    view.sub_(self._unsent[index])
                if units[group] != 1.0:
                    view.div_(units[group])
            hyper = outer_hyper(self._rules, hyper)
        self._unsent = []
        self.reducer.copier.watch.touched, self._written = self._written, ""
        self.reducer.begin(buffer, hyper, made)

    def use_rates(self, hyper: GroupValues) -> None:
        """The round is made at these learning rates; here it may have been others that began it."""
        self._rates = rates_of(self._rules, hyper)

    def is_answered(self) -> bool:
        """Has the round under way ended, over servers?"""
        return self.sent_at is not None and not self.reducer.client_state.outstanding

    def install(self, pull: float = 1.0) -> None:
        """Take the new values of a round that has ended, or go this part of the way to them."""
        self.sent_at, mean = None, self.reducer.mean
        if mean is not None and mean.skipped:
            return
        new = self._views
        if mean is not None and self._outer is not None:
            self._outer.step(self._in_order(mean.buffer), self._rates)
        elif mean is not None:
            new = self._in_order(mean.buffer)
        moved = bool(self._sent) and (self.made.count > 0 or pull != 1.0)  # by local steps since the sending, or to be kept
        if moved:
            self._companions.read()
        values = [one - other for one, other in zip(new, self._sent, strict=True)] if moved else new
        if pull != 1.0:
            assert moved  # `Averaging.own` keeps what was sent: else this would be the anchor
            values = [value.mul_(pull) for value in values]
        self.reducer.copier.write(values, adds=moved)
        self._sent = []
        self._companions.write()
        self.record()

    def show(self, newest: dict[int, list[Bytes]] | None) -> None:
        """Take values of the servers in the middle of a block; what was changed and not sent goes with the next sending.

        Companions stay this worker's own until something was merged: what servers hold of them before is no average of
        anything, but what one worker had at the start.

        Args:
            newest: The values, one list of buffers for each shard; None: those of the last answer.
        """
        self._companions.read()
        before = self._sent or self._views
        copier = self.reducer.copier
        now = dict(enumerate(self._tensors)) if copier.on_device else copier.here(lambda tensor: tensor.detach())
        merged = self.reducer.client_state.version > 0
        shown = range(len(self._tensors) - (0 if merged else len(self._companions.tensors)))
        changes = [now[i].detach() - old if i in shown else torch.zeros_like(old) for i, old in enumerate(before)]
        self._unsent = [one + other for one, other in zip(self._unsent, changes, strict=True)] if self._unsent else changes
        self._landing.receive(newest or {})
        if self._sent:
            self._sent = [view.clone() if i in shown else self._sent[i] for i, view in enumerate(self._views)]
        self.reducer.copier.write(self._views)
        if merged:
            self._companions.write()
        self.record()

    def show_beside(self, newest: dict[int, list[Bytes]] | None) -> None:
        """Show the servers' values in place of the worker's own, which the next step goes on from."""
        copier = self.reducer.copier
        self.restore()
        self._companions.read()
        self._kept = [tensor.detach().clone() for tensor in self._tensors]
        self._landing.receive(newest or {})
        copier.write(self._views)
        self._companions.write()
        self.record()

    @property
    def shows_the_jobs(self) -> bool:
        return bool(self._kept)

    def restore(self) -> None:
        """Make the values this worker's own again, with what the script has written to them meanwhile."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        self._companions.read()
        own = []
        for before, now, view in zip(kept, self._tensors, self._views, strict=True):
            shown = view.to(now.device)
            own.append(before if torch.equal(now, shown) else before + (now - shown))
        self.reducer.copier.write(own)
        self._companions.write()
        self.record()

    # Values that the script has written.

    def record(self) -> None:
        """This library has written to the parameters."""
        self.reducer.copier.watch.touched = ""
        self.reducer.copier.watch.record()

    @property
    def _at_anchor(self) -> bool:
        """Are the values an anchor's? At the start of a block, where the mode has one."""
        anchored = (self._differences or self._outer is not None) and not self._alone
        return anchored and self.made.count == 0 and self.sent_at is None

    def look(self) -> None:
        """Find what the script has written. Inside a block it is this worker's progress. Where there is an anchor, and no
        local step was made since it was taken, the values are the new anchor, on all workers alike."""
        if self._at_anchor:
            self.reducer.renew(compare=False)
            if self.reducer.copier.watch.touched:
                self.carry()

    def carry(self) -> None:
        """At the start of a block: the values of now are the anchor. That all workers have the same is looked at with the
        next round."""
        if not self._at_anchor:
            return
        self.reducer.renew(compare=False)
        for view, tensor in zip(self._views, self._tensors, strict=True):
            view.copy_(tensor.detach())
        self.reducer.take_writes(declared=True)
        self._written = self.reducer.copier.watch.touched
        self.record()

    # The outer momentum.

    def momentum(self) -> list[torch.Tensor | None]:
        """Of each tensor, kept here or on servers; empty without an outer step, and in decoupled modes, where reading it
        would mean to wait."""
        if self._outer is not None:
            return self._outer.momentum()
        if not self._differences or self._alone:
            return []
        numbers = range(len(self._tensors))
        assert isinstance(self.reducer, ServerExchange)  # there differences travel
        found = dense_state(self.reducer.held.segments(), self.reducer.spec.tensors, numbers)
        return [found.get(index, {}).get("momentum_buffer") for index in numbers]

    def load_momentum(self, momentum: Sequence[torch.Tensor | None]) -> None:
        if self._outer is not None:
            self._outer.load(self._views, momentum)
        elif isinstance(self.reducer, ServerExchange) and self._differences and not self._alone:
            state = {index: {"momentum_buffer": own} for index, own in enumerate(momentum) if own is not None}
            self.reducer.held.load_state(dense_segments(state, self.reducer.spec.tensors, range(len(self._tensors))))


def rates_of(rules: Sequence[OuterRule], hyper: GroupValues) -> list[float]:
    """The learning rate of each group of tensors; the last may be the companions' group, which the optimizer has not."""
    return [*(float(group["lr"]) for group in hyper), 1.0][: len(rules)]


def outer_hyper(rules: Sequence[OuterRule], hyper: GroupValues) -> GroupValues:
    """What servers are told: the outer step's hyper-parameters, and those of the local steps, which must be alike too."""
    local = [{f"local {name}": value for name, value in group.items()} for group in (*hyper, {})]
    return tuple({**rule.hyper(lr), **own} for rule, lr, own in zip(rules, rates_of(rules, hyper), local, strict=False))


def make_fragments(
    session: Session,
    name: str,
    averaging: Averaging,
    specs: SpecBuilder,
    params: Sequence[torch.Tensor],
    described: Sequence[TensorInfo],
    hyper: GroupValues,
    companions: Companions,
    on_servers: bool,
) -> list[Fragment]:
    """The fragments of one optimizer, the same on all workers.

    Args:
        session: The job.
        name: Of the optimizer; the first fragment is registered under it, and takes the companions along.
        averaging: What the mode says about averages.
        specs: The specs by which they are registered.
        params: All parameters.
        described: The same, for the job.
        hyper: The hyper-parameters of the local steps.
        companions: What travels with the parameters.
        on_servers: Do servers hold the values?
    """
    rule = OuterRule(averaging.outer_lr, averaging.outer_momentum, averaging.nesterov, averaging.in_lr)
    rule, main = PLAIN if averaging.plain else rule, name
    alone = not averaging.waits or averaging.own
    fragments: list[Fragment] = []
    for number, part in enumerate(cut([param.numel() * param.element_size() for param in params], averaging.fragments)):
        more = companions if number == 0 else Companions()
        rules = [rule] * len(hyper) + [PLAIN] * bool(more.tensors)
        infos = (*(described[i] for i in part), *describe(more.tensors, more.names, [len(hyper)] * len(more.tensors)))
        steps = any(one != PLAIN for one in rules) or averaging.decoupled
        spec = specs.of_values(infos, hyper, outer_hyper(rules, hyper), steps, on_servers, len(more.tensors))
        if number:
            name = part_of(main, number) if specs.members else session.next_optimizer_id()
        more.read()
        tensors = [*(params[i] for i in part), *more.tensors]
        reducer: Exchange
        if on_servers:
            reducer = ServerExchange(session, name, spec, tensors)
        else:
            first = fragments[0].reducer if fragments else None
            beside = first.coordination if isinstance(first, PeerExchange) else None
            reducer = make_peers(session, name, spec, tensors, hooked=False, beside=beside)
        if not session.job.resumed or set(more.names) <= set(session.job.companions):
            more.write()  # all start from those of one worker, as with the values, or from the checkpoint's
        fragments.append(Fragment(reducer, rules, more, bool(averaging.overlap) or alone, alone))
    return fragments

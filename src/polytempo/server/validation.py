"""Validation of messages before they are acted on: the sender of an invalid one is disconnected, and the job goes on.

Sizes of buffers are checked by the shard that takes them (`shard.py`, `shard_tables.py`), turns by the policy. The rest is
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from polytempo.compression.chain import parse_chain
from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.messages import (
    RECALLED,
    AnyMessage,
    Arrived,
    AskWhere,
    Expecting,
    Gone,
    Hello,
    Keep,
    LeaseSamples,
    Leave,
    MetricReport,
    Norm,
    NotSaved,
    Push,
    ReadRequest,
    RecallState,
    Register,
    Repeat,
    Saved,
    ScriptState,
)
from polytempo.protocol.push import Content, FirstValues, StepBody
from polytempo.protocol.values import OptimizerSpec
from polytempo.server.optimizer_state import OF_TABLES, SegmentState, build
from polytempo.tables.initializers import check_start
from polytempo.tables.row_optimizers import rule
from polytempo.transport.channel import Bytes

APPLY = ("server", "delta", "peers", "mean")
REASONS = ("finished", "failed", "lost")
READ = ("params", "state", "filters", "saved state")
CHECKPOINT = re.compile(r"step-\d{8,20}")
#: Length of an optimizer's id, and elements of a table, at most.
NAME, LINE, ELEMENTS = 64, 400, 1 << 44
#: Parts into which data is shared out, at most.
PARTS = 1 << 20
#: Characters of the call that a worker says it is in, at most.
LONGEST_CALL = 1 << 14


def check_hello(hello: Hello, size: int) -> None:
    """Refuse a worker that cannot be."""
    if not 0 <= hello.rank < size:
        raise PeerError(f"there is no worker {hello.rank}; this job has {size}")
    if hello.incarnation < 0:
        raise PeerError(f"worker {hello.rank} says that it is life {hello.incarnation}; lives are counted from 0")


def check_push(push: Push) -> None:
    """Refuse numbers that would spoil the job's."""
    step, body, measures = push.id.step, push.body, push.measures
    fits = step >= 0 if isinstance(body, StepBody) else step == -1 if isinstance(body, FirstValues) else step < -1
    if not fits:
        raise PeerError(f"a push of kind {body.__struct_config__.tag!r} for step {step} was refused")
    if isinstance(body, Content) and not 0 <= body.fence < 1 << 31:
        raise PeerError(f"a push was refused: its fence is {body.fence}, expected a number from 0 on")
    if not (math.isfinite(measures.samples) and measures.samples >= 0):
        raise PeerError(f"a push was refused: its weight is {measures.samples:g}, expected a number from 0 on")
    if not (math.isfinite(measures.taken) and measures.taken >= 0):
        raise PeerError(f"a push was refused: it says that it was made of {measures.taken:g} samples")
    if any(place.parts and not 0 <= place.part < place.parts <= PARTS for place in measures.positions):
        raise PeerError("a push was refused: it says that it takes a part of the data which there is not")
    ranges = [(place.length, *part) for place in measures.positions for part in place.done]
    if not all(0 <= start < stop <= length for length, start, stop in ranges):
        raise PeerError("a push was refused: it says that it is made of places which the epoch's order does not have")
    least = 1 if measures.samples else 0  # without samples a push may only take part (`sync/blocks.py`)
    figures = measures.computed, measures.exchanged or 0.0, measures.input, measures.work or 0.0
    if measures.count < least or push.own < 0 or not all(map(math.isfinite, figures)):
        computed, exchanged, waited, work = figures
        raise PeerError(
            f"a push was refused: it counts {measures.count} steps, {computed:g} and {exchanged:g} s, "
            f"{waited:g} s of input and work of {work:g}"
        )


def check_fit(made: StepBody, spec: OptimizerSpec) -> None:
    """Refuse a push that is not of this model and optimizer."""
    absent = [index for index in made.absent if not 0 <= index < len(spec.tensors)]
    if absent:
        raise PeerError(f"a push was refused: it names tensor {absent[0]}, the model has {len(spec.tensors)}")


def check_hyper(made: StepBody, spec: OptimizerSpec) -> None:
    """Refuse hyper-parameters with which the optimizer cannot make its step."""
    if len(made.hyper) != len(spec.groups):
        raise PeerError(f"a push was refused: it has {len(made.hyper)} groups, the optimizer {len(spec.groups)}")
    for own, first in zip(made.hyper, spec.groups, strict=True):
        wrong = [name for name, value in first.items() if _is_number(value) and not _is_number(own.get(name, value))]
        if wrong or "lr" not in own:
            raise PeerError(f"a push was refused: {wrong[0] if wrong else 'lr'} is not a number in it")


def check_state(segments: Sequence[SegmentState], spec: OptimizerSpec) -> None:
    """Refuse an optimizer's state of another model."""
    known = {info.dtype for info in spec.tensors} | {OF_TABLES}
    for segment in segments:
        if segment.dtype not in known or not 0 <= segment.start <= segment.stop:
            raise PeerError(
                f"an optimizer's state was refused: {segment.dtype} {segment.start} to {segment.stop} is not in the model"
            )


def check_optimizer_spec(optimizer_id: str, spec: OptimizerSpec) -> None:
    """Refuse an optimizer that no shard can make."""
    if not optimizer_id or len(optimizer_id) > NAME:
        raise PeerError(f"an optimizer with a name of {len(optimizer_id)} characters was refused")
    if spec.apply not in APPLY:
        raise PeerError(f"apply={spec.apply!r} was refused; known are {', '.join(APPLY)}")
    for info in spec.tensors:
        if info.dtype not in ITEM_SIZES or any(length < 0 for length in info.shape):
            raise PeerError(f"parameter {info.name} was refused: {info.dtype} {list(info.shape)}")
        if spec.apply == "server" and not 0 <= info.group < len(spec.groups):
            raise PeerError(f"parameter {info.name} was refused: there is no group {info.group}")
    if spec.clip_norm is not None and not spec.clip_norm > 0:
        raise PeerError(f"clip_norm={spec.clip_norm:g} was refused; expected a number above 0")
    if not all(text.isprintable() and len(text) <= LINE for text in (spec.inner, spec.fallback)):
        raise PeerError(f"an optimizer was refused: {spec.inner[:40]!r} or what it says of momentum is no part of a line")
    for text in (spec.push_filter, spec.pull_filter):
        parse_chain(text)
    for table in spec.tables:
        rule(table.rule)
        check_start(table.start)
        if table.dtype not in ITEM_SIZES or table.dim < 1 or table.rows < 0 or table.rows * table.dim > ELEMENTS:
            raise PeerError(f"table {table.name} was refused: {table.rows} rows of {table.dim} {table.dtype}")
    if spec.apply == "server" and spec.tensors:
        _check_optimizer(spec)


def _check_optimizer(spec: OptimizerSpec) -> None:
    """Made once with next to nothing: torch itself knows what it takes."""
    try:
        made = build(spec.optimizer, spec.groups, [[torch.nn.Parameter(torch.zeros(1, 1))] for _ in spec.groups])
    except (TypeError, ValueError, KeyError) as error:
        raise PeerError(f"the optimizer {spec.optimizer} was refused: {error}") from None
    for name, default in made.defaults.items():
        for group in spec.groups:
            value = group.get(name, default)
            pair = isinstance(default, tuple) and isinstance(value, list | tuple) and len(value) == len(default)
            if (isinstance(default, tuple) and not pair) or (_is_number(default) and not _is_number(value)):
                raise PeerError(f"the optimizer {spec.optimizer} was refused: {name} cannot be {value!r}")


def check_keep(keep: Keep, segments: Sequence[SegmentState]) -> None:
    """Refuse what would not go into a checkpoint of this job."""
    if not CHECKPOINT.fullmatch(keep.checkpoint):
        raise PeerError(f"something to keep was refused: {keep.checkpoint[:40]!r} is no checkpoint's name")
    if any(not isinstance(segment.state.get("residual"), torch.Tensor) for segment in segments):
        raise PeerError("something to keep was refused: it is not what a filter holds back")


def check_script_state(message: ScriptState, buffers: Sequence[Bytes]) -> None:
    """Refuse what could not be read again."""
    if message.checkpoint and not CHECKPOINT.fullmatch(message.checkpoint):
        raise PeerError(f"a script's state was refused: {message.checkpoint[:40]!r} is no checkpoint's name")
    dtypes = [name for one in message.objects for name in one.dtypes]
    if len(dtypes) != len(buffers):
        raise PeerError(f"a script's state was refused: it has {len(dtypes)} tensors, and {len(buffers)} buffers came")
    for name, buffer in zip(dtypes, buffers, strict=True):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or buffer.nbytes % dtype.itemsize:
            raise PeerError(f"a script's state was refused: {buffer.nbytes} bytes are no tensor of {name[:40]!r}")


def check_message(message: AnyMessage, size: int) -> None:
    """Refuse what a worker, a launcher or an agent cannot say to the coordinator of a job of this many workers."""
    match message:
        case Register():
            check_optimizer_spec(message.optimizer_id, message.optimizer_spec)
        case ReadRequest(what=what) if what not in READ:
            raise PeerError(f"a read of {what!r} was refused; known are {', '.join(READ)}")
        case LeaseSamples(count=count, length=length):  # of places that there are
            numbers = (message.epoch, message.turn + 1, count, message.ahead)
            ranges = all(0 <= start <= stop <= length for start, stop in (*message.back, *message.done))
            if not (0 <= length < ELEMENTS and all(0 <= number < ELEMENTS for number in numbers) and ranges):
                raise PeerError(f"a lease of {count} places of {length} was refused: there are no such places")
        case RecallState(which=which) if which not in RECALLED:
            raise PeerError(f"state of the script was refused: expected one of {', '.join(RECALLED)}, got {which[:40]!r}")
        case AskWhere(ranks=ranks, call=call):
            if not all(0 <= rank < size for rank in ranks) or len(call or "") > LONGEST_CALL:
                raise PeerError(f"AskWhere for ranks {ranks[:8]} of {size} workers, with {len(call or '')} characters")
        case Leave(worker=worker, reason=reason) | Gone(worker=worker, reason=reason):
            if not 0 <= worker < size or reason not in REASONS:
                raise PeerError(f"the end of worker {worker} ({reason[:40]}) was refused; this job has {size} workers")
            if isinstance(message, Leave) and not (message.fault.isprintable() and len(message.fault) <= LINE):
                raise PeerError(f"the end of worker {worker} was refused: its cause is no part of a line")
        case Expecting(ranks=ranks):
            if len(set(ranks)) < len(ranks) or any(not 0 <= rank < size for rank in ranks):
                raise PeerError(f"ranks {ranks} were refused; this job has {size} workers")


def check_sender(sender: Hello, message: AnyMessage) -> None:
    """A worker and a shard speak for themselves."""
    match message:
        case Repeat(id=identity):
            if (identity.worker, identity.incarnation) != (sender.rank, sender.incarnation):
                raise PeerError(f"Repeat for a push of worker {identity.worker} came from {describe(sender)}")
            return
        case ReadRequest(worker=number) | MetricReport(worker=number):
            who = "worker"
        case Arrived(shard=number) | Norm(shard=number) | Saved(shard=number) | NotSaved(shard=number):
            who = "shard"
        case _:
            return
    if number != sender.rank:
        raise PeerError(f"{type(message).__name__} for {who} {number} came from {describe(sender)}")


def describe(sender: Hello | None) -> str:
    """The other side of a connection, for error messages."""
    if sender is None:
        return "a peer that has sent no Hello"
    return f"{sender.role} {sender.rank}" if sender.role in ("worker", "server") else f"the {sender.role}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

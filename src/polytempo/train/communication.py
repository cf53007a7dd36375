"""Point-to-point messages and collectives: the names and meanings of `torch.distributed`, over Polytempo's links and plans.

Tensors are changed in place. Ranks are ranks of the job, also within a group. A call with `async_op=True` returns a `Task`
at once; without it, the call returns None when the result is there. On a rank that is not in `group` a call does nothing and
returns None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import cleandoc
from typing import Any, TypeAlias, TypeVar

import torch

from polytempo.collectives import point_to_point
from polytempo.collectives.cost import Choice
from polytempo.collectives.device_call import DeviceCall
from polytempo.collectives.group import RankGroup, Then
from polytempo.collectives.group import exchange as exchange_records
from polytempo.collectives.reduce_ops import check_mean
from polytempo.collectives.tasks import Task
from polytempo.errors import UsageError
from polytempo.server.optimizer_state import as_bytes, digest_of_bytes
from polytempo.session.session import current, seconds_of
from polytempo.train.safe_serialization import decode_from, encode_for_all


@dataclass(frozen=True)
class Group:
    """Some ranks of the job, as `new_group` and `reform` return them; pass it as `group=` to any collective.

    Attributes:
        ranks: The ranks of the job that are members, ascending.
        inner: The group that carries out the calls; None on ranks that are not members, whose calls do nothing.
    """

    ranks: tuple[int, ...]
    inner: RankGroup | None

    @property
    def rank(self) -> int:
        """The index of this worker within the group; -1 on ranks outside."""
        return self.inner.rank if self.inner is not None else -1

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """The index within the group of a rank of the job.

        Args:
            rank: The rank of the job.

        Returns:
            Its place in `ranks`.

        Raises:
            UsageError: The rank is not a member.
        """
        if rank not in self.ranks:
            raise UsageError(f"rank {rank} is not in the group of ranks {', '.join(map(str, self.ranks))}")
        return self.ranks.index(rank)


AnyGroup: TypeAlias = Group | None
TensorOrList: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def new_group(ranks: Sequence[int] | None = None, timeout: float | timedelta | None = None) -> Group:
    """Make a group of some ranks of the job. Collective: all ranks call it, in the same order, members or not.

    Args:
        ranks: The members, each once; all ranks by default.
        timeout: Seconds, or a `timedelta`, after which its calls fail; that of `init` by default.

    Returns:
        The group, for `group=` of the calls below.

    Raises:
        UsageError: A rank is given twice or is not a rank of the job, or `timeout` is not above 0.

    Example:
        ```python
        pair = pt.new_group([0, 1])
        pt.all_reduce(tensor, group=pair)  # does nothing on ranks 2, 3, ...
        ```
    """
    limit = None if timeout is None else seconds_of(timeout) or math.inf
    world = current().world("new_group()")
    chosen = tuple(sorted(ranks)) if ranks is not None else tuple(range(world.size))
    return Group(chosen, world.new_group(chosen, limit))


def reform() -> Group:
    """Make a group of the ranks that are left after a call raised `RankLost`. Collective among these.

    Returns:
        A group of all ranks that are still connected. Its ranks keep their numbers in the job.

    Raises:
        PeerError: The remaining ranks did not all call it in time.

    Example:
        ```python
        group = None
        try:
            pt.all_reduce(tensor, group=group)
        except pt.RankLost as lost:
            print("lost", lost.ranks)
            group = pt.reform()
        ```
    """
    group = current().world("reform()").reform()
    return Group(group.ranks, group)


def explain_algorithm(collective: str, size: int, group: AnyGroup = None, device: str = "cpu") -> Choice:
    """Which algorithm `algorithm="auto"` chooses for a tensor of a given size, and why.

    Args:
        collective: The name of the call, such as `"all_reduce"`.
        size: Bytes of the tensor.
        group: The group; all ranks by default.
        device: Where the tensor is. For `"cuda"` the algorithm is `"nccl"`, `"cuda-ipc"` or `"cpu"`, and there is no
            prediction; it is known from the group's first call with tensors on GPUs on, and `"auto"` before.

    Returns:
        A `Choice`: the `algorithm`, the `reason` in words, and the `predicted` seconds of each candidate.

    Raises:
        UsageError: This rank is not in the group, or the collective is unknown.
    """
    inner = _inner(_resolve(group, "explain_algorithm"))
    if torch.device(device).type == "cpu":
        return inner.choice(collective, size)
    way = inner.route.way
    if way is None:
        return Choice("auto", "chosen in the group's first call with tensors on GPUs, from the facts of all ranks", {})
    return Choice(way.name, way.reason, {})


def _resolve(group: AnyGroup, call: str) -> Group:
    if group is not None:
        return group
    all_ranks = current().world(f"{call}() #1 in group world").all_ranks
    return Group(all_ranks.ranks, all_ranks)


def _inner(group: Group) -> RankGroup:
    if group.inner is None:
        raise UsageError(f"this rank is not in the group of ranks {', '.join(map(str, group.ranks))}")
    return group.inner


# Point to point.


def send(tensor: torch.Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> None:
    """Send a tensor to a rank; on return the tensor may be changed. The receiver need not have called `recv` yet.

    Args:
        tensor: What to send.
        dst: The receiving rank of the job.
        group: The group in which the message is matched; all ranks by default.
        tag: The message is received by a `recv` with the same tag.

    Raises:
        UsageError: `dst` is this rank or not in the group.
        RankLost: The receiver has ended.
    """
    members = _resolve(group, "send")
    if members.inner is not None:
        point_to_point.send(members.inner, tensor, members.index(dst), tag).wait()


def recv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> int:
    """Receive into a tensor.

    Args:
        tensor: Filled in place; its size must be that of the tensor sent.
        src: The sending rank of the job; None receives from any rank.
        group: The group in which the message is matched; all ranks by default.
        tag: Only messages with this tag are received.

    Returns:
        The rank of the job that sent it; -1 on ranks outside the group.

    Raises:
        PeerError: The sizes differ.
        RankLost: The sender has ended.
    """
    members = _resolve(group, "recv")
    if members.inner is None:
        return -1
    source = None if src is None else members.index(src)
    sender: int = point_to_point.receive(members.inner, tensor, source, tag).wait()
    return sender


def isend(tensor: torch.Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> Task | None:
    """Start a `send`; the tensor may be changed once the task has ended.

    Args:
        tensor: What to send.
        dst: The receiving rank of the job.
        group: The group in which the message is matched; all ranks by default.
        tag: The message is received by a `recv` with the same tag.

    Returns:
        The task; None on ranks outside the group.
    """
    members = _resolve(group, "isend")
    return point_to_point.send(members.inner, tensor, members.index(dst), tag, True) if members.inner is not None else None


def irecv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> Task | None:
    """Start a `recv`.

    Args:
        tensor: Filled in place by the end of the task.
        src: The sending rank of the job; None receives from any rank.
        group: The group in which the message is matched; all ranks by default.
        tag: Only messages with this tag are received.

    Returns:
        The task, whose `wait()` returns the rank of the job that sent it, as `recv` does; None on ranks outside the group.
    """
    members = _resolve(group, "irecv")
    if members.inner is None:
        return None
    return point_to_point.receive(members.inner, tensor, None if src is None else members.index(src), tag, True)


# Collectives. What they have in common stands at `all_reduce`.

_UNUSED = object()  #: in place of what a collective does not take; None is refused, as any other mistake is


def _call(
    collective: str,
    tensors: Sequence[Any],
    group: AnyGroup,
    async_op: bool,
    algorithm: str = "auto",
    op: object = _UNUSED,
    root: Any = _UNUSED,
) -> Task | None:
    """Start a collective; unless it is asynchronous, wait for its end. On ranks outside the group there is none.

    What carries it out, Polytempo's plans or torch's own back end, has a method of its name. `root` is a rank of the job.
    """
    members = _resolve(group, collective)
    if members.inner is None:
        return None
    how: dict[str, Any] = {"background": async_op}
    if collective != "barrier":  # which moves nothing
        how["algorithm"] = algorithm
    if root is not _UNUSED:
        how["root"] = members.index(root)
    if op is not _UNUSED:
        check_mean(op, _list(tensors[0]))
        how["op"] = op
    if algorithm == "native" and current().job.link is not None:
        raise UsageError("algorithm='native' sends by torch's own connections, which --link does not slow; use 'auto'")
    by = members.inner.native if algorithm == "native" else members.inner
    task: Task = getattr(by, collective)(*tensors, **how)
    if async_op:
        return task
    task.wait()
    return None


def _list(tensors: TensorOrList) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


AnyCall = TypeVar("AnyCall", bound=Callable[..., Task | None])
_AS_ALL_REDUCE = """
    group: The ranks that take part; all ranks by default.
    async_op: Return a task at once.
    algorithm: As in `all_reduce`, where the collective has it.

Returns:
    With `async_op` the task; otherwise None.

Raises:
    UsageError: The operation, the algorithm, a rank or a tensor cannot be used.
    RankLost: A rank of the group has ended.
    PeerError: Ranks made different calls, or one did not come in time.
"""


def _as_all_reduce(call: AnyCall) -> AnyCall:
    """For `help()`: the arguments, the result and the errors that a collective shares with `all_reduce`, behind its own."""
    call.__doc__ = cleandoc(call.__doc__ or "") + _AS_ALL_REDUCE
    return call


def all_reduce(
    tensor: TensorOrList, op: object = "sum", group: AnyGroup = None, async_op: bool = False, algorithm: str = "auto"
) -> Task | None:
    """Make a tensor, or each of a list (fused into few messages), the combination of that tensor over all ranks.

    Args:
        tensor: Changed in place on every rank.
        op: `"sum"`, `"mean"` (of floating point numbers), `"min"`, `"max"`, `"prod"`, or a `torch.distributed.ReduceOp`.
        group: The ranks that take part; all ranks by default.
        async_op: Return a task at once.
        algorithm: `"auto"`, `"ring"`, `"halving-doubling"`, `"tree"`, `"hierarchical"`, `"shared-memory"`, `"cuda-ipc"` or
            `"native"`.

    Returns:
        With `async_op` the task; otherwise None.

    Raises:
        UsageError: The operation, algorithm or tensor cannot be used.
        RankLost: A rank of the group has ended; see `reform`.
        PeerError: Ranks made different calls, or one did not come in time.

    Example:
        ```python
        pt.all_reduce(loss, op="mean")
        ```
    """
    return _call("all_reduce", [_list(tensor)], group, async_op, algorithm, op)


@_as_all_reduce
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: object = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Make the tensor of one rank the combination over all ranks; those of the others stay as they are.

    Args:
        tensor: Read on every rank, changed on `dst`.
        dst: The rank of the job that gets the result.
        op: As in `all_reduce`.
    """
    return _call("reduce", [tensor], group, async_op, algorithm, op, dst)


@_as_all_reduce
def broadcast(
    tensor: TensorOrList, src: int, group: AnyGroup = None, async_op: bool = False, algorithm: str = "auto"
) -> Task | None:
    """Make a tensor, or each of a list (fused into few messages), that of rank `src`.

    Args:
        tensor: Read on `src`, filled elsewhere.
        src: The rank of the job whose values all get.
    """
    return _call("broadcast", [_list(tensor)], group, async_op, algorithm, root=src)


@_as_all_reduce
def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Collect a tensor of every rank on every rank.

    Args:
        tensor_list: Filled: `tensor_list[q]` gets the tensor of the group's rank q.
        tensor: This rank's.
    """
    return _call("all_gather", [tensor_list, tensor], group, async_op, algorithm)


@_as_all_reduce
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Collect a tensor of every rank on one rank.

    Args:
        tensor: This rank's.
        gather_list: On `dst`, filled: `gather_list[q]` gets the tensor of the group's rank q. None elsewhere.
        dst: The rank of the job that gets them.
    """
    return _call("gather", [gather_list, tensor], group, async_op, algorithm, root=dst)


@_as_all_reduce
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Hand each rank its tensor of a list that one rank has.

    Args:
        tensor: Filled with this rank's entry.
        scatter_list: On `src`, one tensor for each rank of the group. None elsewhere.
        src: The rank of the job that has the list.
    """
    return _call("scatter", [tensor, scatter_list], group, async_op, algorithm, root=src)


@_as_all_reduce
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: object = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Combine lists of tensors over all ranks, and keep this rank's entry of the result.

    Args:
        output: Filled with the combination over all ranks of their entry for this rank.
        input_list: One tensor for each rank of the group.
        op: As in `all_reduce`.
    """
    return _call("reduce_scatter", [output, input_list], group, async_op, algorithm, op)


@_as_all_reduce
def all_to_all(
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Task | None:
    """Send a tensor to each rank, and receive one from each. Sizes may differ, where both sides agree.

    Args:
        output_list: Filled: `output_list[q]` gets what rank q of the group has for this rank.
        input_list: `input_list[q]` is for rank q of the group.
    """
    return _call("all_to_all", [output_list, input_list], group, async_op, algorithm)


def barrier(group: AnyGroup = None, async_op: bool = False) -> Task | None:
    """Wait until all ranks of the group have made this call.

    Args:
        group: The ranks that take part; all ranks by default.
        async_op: Return a task at once.

    Returns:
        With `async_op` the task; otherwise None.

    Raises:
        RankLost: A rank of the group has ended.
        PeerError: Ranks made different calls, or one did not come in time.
    """
    return _call("barrier", [], group, async_op)


def device_call(tensors: Sequence[torch.Tensor], group: Group) -> DeviceCall | None:
    """The place of a call on these tensors in the caller's stream; None where none is on a GPU, or they are on several."""
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    return _inner(group).route.call(away or tensors, "auto") if tensors else None


def exchange(record: torch.Tensor, then: Then, group: Group, background: bool) -> Task:
    """A call of several parts (`collectives/group.py`): gather a record of each rank, and go on with `then`."""
    return exchange_records(_inner(group), record, then, background)


# Models and optimizers of one rank on all, in place. Nothing is pickled (`safe_serialization.py`).


def broadcast_parameters(state: Any, root: int = 0) -> None:
    """Make the tensors of a model those of rank `root`, in place. Collective.

    `DistributedOptimizer` does this for its parameters by itself; this is for buffers and other models.

    Args:
        state: A `state_dict()` or `named_parameters()`, with the same names on all ranks.
        root: The rank whose values all get.

    Raises:
        UsageError: A tensor cannot be sent.
        PeerError: Ranks gave tensors of different shapes, or one is lost (`RankLost`).
    """
    items = dict(state)
    tensors = [items[name] for name in sorted(items) if isinstance(items[name], torch.Tensor)]
    if not tensors:
        return
    # Values that were the same everywhere before are no change of the script's, though they were written; others are,
    # though what comes over a link is written without torch.
    watches = list(current().watches)
    clean = [watch for watch in watches if watch.is_clean()]
    before = [_digest(tensor) for tensor in tensors if watches]
    broadcast([tensor.detach() for tensor in tensors], root)
    now = [_digest(tensor) for tensor in tensors if watches]
    changed = [tensor for tensor, old, new in zip(tensors, before, now, strict=False) if old != new]
    for watch in watches:
        if not watch.was_written(changed) and watch in clean:
            watch.record()


def _digest(tensor: torch.Tensor) -> bytes:
    return digest_of_bytes([as_bytes(tensor.detach().cpu())])


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Make the options and the state of an optimizer those of rank `root`, whatever state this rank's has. Collective.

    Args:
        optimizer: A torch optimizer, made over the same parameters on all ranks.
        root: The rank whose options and state all get.

    Raises:
        UsageError: The state holds an object that is neither a tensor nor plain data; nothing is pickled.
        PeerError: A rank does not take part, or is lost (`RankLost`).
    """
    current().check_part()
    if current().size == 1:
        return
    aside: list[torch.Tensor] = []
    mine = current().rank == root
    sent, refusal = encode_for_all(optimizer.state_dict(), aside) if mine else (b"", None)
    data = bytearray(sent)
    length = torch.tensor([len(data)])
    broadcast(length, root)
    text = torch.frombuffer(data, dtype=torch.uint8) if mine else torch.empty(int(length), dtype=torch.uint8)
    broadcast(text, root)
    if refusal is not None:
        raise refusal
    state = None if mine else decode_from(root, text.numpy().tobytes(), aside)
    if aside:
        broadcast([tensor.detach() for tensor in aside], root)
    if state is not None:
        load_in_place(optimizer, state)


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state. Groups and state stay the objects they were: schedulers and wrappers hold on to them."""
    groups, kept = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        old.update(new)
    entries = dict(optimizer.state)
    kept.clear()
    kept.update(entries)
    optimizer.param_groups, optimizer.state = groups, kept

"""What a script does to parameters after wrapping: new memory, other values. The same in every way of travel, or refused."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, assert_equal, joined, loss_of, made_from_seed, small_batches, weights
from torch import nn

from polytempo.errors import UsageError
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.copier import AT_MOST, COMPARED, ParameterWatch
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train import communication
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport import shared_memory

pytestmark = pytest.mark.timeout(60)

STEPS = 6
#: How gradients travel between two workers under bsp.
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ps": lambda: ThreadJob(workers=2),
    "ps-2": lambda: ThreadJob(workers=2, servers=2),
    "allreduce": lambda: ThreadJob(workers=2, via="allreduce"),
    "group": lambda: GroupJob(2),
}
each_way = pytest.mark.parametrize("way", WAYS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.conv = nn.Conv2d(2, 2, 2, padding=1)
        self.last = nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.conv(self.first(x).view(-1, 2, 2, 2)).flatten(1)))  # type: ignore[no-any-return]


START = made_from_seed(3, Net).double()
OTHER = made_from_seed(4, Net).double()

#: Does something to a model between two steps: model, number of the step, rank.
Change = Callable[[nn.Module, int, int], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], change: Change, rank: int
) -> list[torch.Tensor]:
    for number, batch in enumerate(batches):
        change(model, number, rank)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return weights(model)


def plainly(
    batches: Sequence[Sequence[Batch]], change: Change, make: Callable[[nn.Module], Any] = sgd
) -> list[torch.Tensor]:
    model = copy.deepcopy(START)
    return train(model, make(model), [joined(step) for step in batches], change, 0)


def together(
    job: Any, batches: Sequence[Sequence[Batch]], change: Change, push: bool = False, make: Any = sgd, **options: Any
) -> list[list[torch.Tensor]]:
    def work(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(make(model), model, **options)

        def changed(model: nn.Module, number: int, rank: int) -> None:
            change(model, number, rank)
            if push:
                optimizer.push_parameters()

        return train(model, optimizer, [step[session.rank] for step in batches], changed, session.rank)

    with job:
        return job.run(work)  # type: ignore[no-any-return]


# Changes.


def at(number: int, change: Callable[[nn.Module], object]) -> Change:
    def changed(model: nn.Module, now: int, rank: int) -> None:
        with torch.no_grad():
            if now == number:
                change(model)

    return changed


def clamp(model: nn.Module, number: int, rank: int) -> None:
    """What a WGAN does to its critic after each step."""
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module, number: int, rank: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


def swap_and_back(model: nn.Module, number: int, rank: int) -> None:
    """As an average of weights is evaluated."""
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(OTHER.state_dict())
    model.load_state_dict(kept)


def transpose(model: nn.Module) -> None:
    weight = model.last.weight
    weight.data = weight.data.t().contiguous().t()


def as_vector(model: nn.Module) -> None:
    values = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(values, model.parameters())


CHANGES: dict[str, Change] = {
    "channels_last": at(2, lambda model: model.to(memory_format=torch.channels_last)),
    "channels_last and back": lambda model, number, rank: model.to(
        memory_format=(torch.channels_last, torch.contiguous_format)[number % 2]
    ),
    "transposed memory": at(3, transpose),
    "vector_to_parameters": at(2, as_vector),
    "set_": at(2, lambda model: model.first.weight.set_(torch.ones(8, 5, dtype=torch.float64))),
    "load_state_dict": at(2, lambda model: model.load_state_dict(OTHER.state_dict())),
    "before the first step": at(0, lambda model: model.load_state_dict(OTHER.state_dict())),
    "clamp_": clamp,
    "swap and back": swap_and_back,
    "data replaced": at(4, lambda model: setattr(model.first.bias, "data", torch.ones(8, dtype=torch.float64))),
}


@each_way
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_all_workers_make_counts_as_in_one_process(way: str, name: str) -> None:
    batches = small_batches(STEPS, (4, 4))
    wanted = plainly(batches, CHANGES[name])
    for got in together(WAYS[way](), batches, CHANGES[name]):
        assert_close(got, wanted)


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_of_one_with_a_server_is_plain_training(name: str) -> None:
    batches = small_batches(STEPS, (4,))
    for sync in ("bsp", "asp"):
        got = together(ThreadJob(workers=1, sync=sync), batches, CHANGES[name])
        assert_equal(got[0], plainly(batches, CHANGES[name]))


@each_way
def test_a_gradient_that_is_given_other_memory_counts(way: str) -> None:
    def halve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data = param.grad.data * 0.5

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        inner = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            halve(model, optimizer)
            return inner(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    batches = small_batches(STEPS, (4, 4))
    wanted = plainly(batches, nothing, hooked)

    def work(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(sgd(model), model)
        for step in batches:
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            halve(model, optimizer)
            optimizer.step()
        return weights(model)

    with WAYS[way]() as job:
        for got in job.run(work):
            assert_close(got, wanted)


@each_way
def test_writes_through_data_count_when_they_are_pushed(way: str) -> None:
    batches = small_batches(STEPS, (4, 4))
    wanted = plainly(batches, clamp_data)
    for got in together(WAYS[way](), batches, clamp_data, push=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_writes_through_data_that_a_server_would_undo_are_found(sync: str) -> None:
    with pytest.raises(UsageError, match=r"weight was written to through \.data .* call optimizer\.push_parameters\(\)"):
        together(ThreadJob(workers=2, sync=sync), small_batches(STEPS, (4, 4)), clamp_data)


@each_way
@pytest.mark.parametrize("number", [0, 2])
def test_a_change_that_one_worker_makes_alone_is_refused(way: str, number: int) -> None:
    def change(model: nn.Module, now: int, rank: int) -> None:
        with torch.no_grad():
            if rank == 1 and now == number:
                model.conv.weight.mul_(0.5)

    with pytest.raises(UsageError, match=r"conv\.weight.* in place.*; make the change alike on all workers"):
        together(WAYS[way](), small_batches(STEPS, (4, 4)), change)


@each_way
def test_changes_that_differ_are_refused(way: str) -> None:
    def change(model: nn.Module, now: int, rank: int) -> None:
        with torch.no_grad():
            if now == 2:
                model.last.bias.fill_(rank)

    with pytest.raises(UsageError, match=r"workers 0 and 1 .* last\.bias .*; make the change alike on all workers"):
        together(WAYS[way](), small_batches(STEPS, (4, 4)), change)


@each_way
def test_what_one_worker_swaps_in_and_out_is_no_change(way: str) -> None:
    """Rank 0 evaluates an average of weights; values that are broadcast are the same on all workers already."""

    def change(model: nn.Module, number: int, rank: int) -> None:
        if rank == number % 2:
            swap_and_back(model, number, rank)

    batches = small_batches(STEPS, (4, 4))
    wanted = plainly(batches, nothing)
    for got in together(WAYS[way](), batches, change):
        assert_close(got, wanted)


def nothing(model: nn.Module, number: int, rank: int) -> None:
    pass


@pytest.mark.parametrize("sync", ["asp", "ssp:1", "every:2", "delay:1", "downpour:push=1,fetch=1", "bsp+backup:1"])
def test_without_a_barrier_a_change_is_refused_with_what_to_call(sync: str) -> None:
    change = at(2, lambda model: model.load_state_dict(OTHER.state_dict()))
    with pytest.raises(UsageError, match=r"first\.weight was changed in place since the last step\(\).*consolidate\(\)"):
        together(ThreadJob(workers=2, sync=sync), small_batches(STEPS, (4, 4)), change)


def test_an_answer_that_comes_late_does_not_hide_a_change() -> None:
    with pytest.raises(UsageError, match=r"first\.weight was changed in place since the last step\(\)"):
        together(ThreadJob(workers=1, sync="delay:1"), small_batches(STEPS, (4,)), CHANGES["load_state_dict"])


@pytest.mark.parametrize("sync", ["asp", "delay:1"])
def test_without_a_barrier_one_worker_sets_the_values_of_all(sync: str) -> None:
    """Worker 1 pushes nothing before it has seen what worker 0 has set."""
    told = threading.Event()

    def work(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        if session.rank == 0:
            model.load_state_dict(OTHER.state_dict())
            optimizer.push_parameters()
            told.set()
        else:
            assert told.wait(20)
        loss_of(model, small_batches(1, (4,))[0][0]).backward()
        optimizer.step()
        optimizer.consolidate()
        return weights(model)

    with ThreadJob(workers=2, sync=sync) as job:
        for got in job.run(work):
            assert_equal(got, weights(OTHER))


@pytest.mark.parametrize(("sync", "options"), [("asp", {}), ("bsp", {"compression": {"pull": "bf16"}})])
def test_consolidate_takes_the_jobs_values_again(sync: str, options: dict[str, Any]) -> None:
    """As after an average of weights was evaluated."""

    def work(session: Session) -> None:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(sgd(model), model, **options)
        for step in small_batches(3, (4, 4)):
            loss_of(model, step[session.rank]).backward()
            optimizer.step()
            swap_and_back(model, 0, 0)
            optimizer.consolidate()

    with ThreadJob(workers=2, sync=sync) as job:
        job.run(work)


@each_way
def test_consolidate_keeps_what_all_have_changed(way: str) -> None:
    def work(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(sgd(model), model)
        model.load_state_dict(OTHER.state_dict())
        optimizer.consolidate()
        return weights(model)

    with WAYS[way]() as job:
        for got in job.run(work):
            assert_equal(got, weights(OTHER))


@pytest.mark.parametrize("way", [*WAYS, "delta"])
def test_the_change_an_optimizer_makes_itself_is_none(way: str) -> None:
    """Forms of torch's optimizers count their own writes in different ways."""
    options = {"apply": "delta"} if way == "delta" else {}
    batches = small_batches(STEPS, (4, 4))
    for form in ({"foreach": True}, {"fused": True}, {}):
        make = lambda model, form=form: torch.optim.AdamW(model.parameters(), lr=0.1, **form)  # noqa: E731
        wanted = plainly(batches, clamp, make)
        for got in together(WAYS.get(way, WAYS["ps"])(), batches, clamp, make=make, **options):
            assert_close(got, wanted)


@each_way
@pytest.mark.parametrize(
    "change", [lambda model: model.float(), lambda model: setattr(model.last.bias, "data", torch.ones(4))]
)
def test_another_dtype_or_shape_is_refused_by_name(way: str, change: Callable[[nn.Module], object]) -> None:
    def work(session: Session) -> None:
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(sgd(model), model)
        change(model)
        optimizer.step()

    with pytest.raises(UsageError, match=r"was float64\[.*\] when the optimizer was wrapped and is"), WAYS[way]() as job:
        job.run(work)


def test_answers_that_are_compressed_refuse_changed_values() -> None:
    job = ThreadJob(workers=2)
    with pytest.raises(UsageError, match=r"first\.weight was changed in place .* answers are compressed"):
        together(job, small_batches(3, (4, 4)), CHANGES["clamp_"], compression={"pull": "bf16"})


def test_a_sparse_embedding_that_is_written_to_is_refused() -> None:
    def work(session: Session) -> None:
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            model(torch.tensor([session.rank])).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model.weight[0] = 0.0
        optimizer.step()

    with (
        pytest.raises(UsageError, match=r"weight was changed in place, and of a sparse"),
        ThreadJob(workers=2) as job,
    ):
        job.run(work)


@each_way
def test_an_embedding_that_limits_its_norms_on_each_worker_is_refused(way: str) -> None:
    """`max_norm` writes in forward, to the rows of this worker's batch: replicas would drift apart, or forget it."""

    def work(session: Session) -> None:
        model = nn.Embedding(6, 2, max_norm=0.1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            model(torch.tensor([session.rank])).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"weight .*in place"), WAYS[way]() as job:
        job.run(work)


def test_looking_costs_little() -> None:
    """Some hundred parameters, a few calls of torch each: counted, not timed."""
    params = [nn.Parameter(torch.zeros(8, 8)) for _ in range(300)]
    watch = ParameterWatch(params, [TensorInfo(str(i), (8, 8), "float32", 0) for i in range(300)], compares=True)
    watch.record()
    assert not watch.look()
    compared = watch._compared
    assert 0 < len(compared) <= AT_MOST
    assert sum(part.nbytes for _, part, _ in compared) <= COMPARED
    seen = set()
    for _ in range(300 // AT_MOST + 1):  # each gets its turn
        watch.record()
        seen |= {index for index, _, _ in watch._compared}
    assert len(seen) == 300


# Parameters that belong to several.


@each_way
def test_of_two_optimizers_with_one_parameter_the_first_is_refused(way: str) -> None:
    """The second may step: a script may go on with another optimizer."""

    def work(session: Session) -> None:
        model = copy.deepcopy(START)
        first = DistributedOptimizer(sgd(model), model)
        loss_of(model, small_batches(1, (4,))[0][0]).backward()
        first.step()
        second = DistributedOptimizer(torch.optim.SGD(model.last.parameters(), lr=0.1), model)
        second.step()
        with pytest.raises(UsageError, match=r"last\.weight was given to another DistributedOptimizer after this one"):
            first.step()

    with WAYS[way]() as job:
        job.run(work)


@each_way
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_stands_twice_is_refused(way: str) -> None:
    def work(session: Session) -> None:
        param = nn.Parameter(torch.zeros(2))
        DistributedOptimizer(torch.optim.SGD([param, param], lr=0.1))

    with pytest.raises(UsageError, match=r"parameter [01] is in the optimizer twice"), WAYS[way]() as job:
        job.run(work)


@pytest.mark.parametrize("when", ["before", "after"])
def test_parameters_that_share_memory_are_refused_where_servers_keep_each(when: str) -> None:
    def work(session: Session) -> None:
        params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))]
        if when == "before":
            params[1].data = params[0].data
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        params[1].data = params[0].data
        optimizer.step()

    with pytest.raises(UsageError, match=r"share memory.* tie them as one parameter"), ThreadJob(workers=2) as job:
        job.run(work)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_values_that_are_broadcast_and_stay_the_same_are_no_change(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script does that came from Horovod. Who is late must not be refused for what others have pushed since."""
    here = threading.local()
    monkeypatch.setattr(communication, "current", lambda: here.session)
    pushed = threading.Event()

    def work(session: Session) -> None:
        here.session = session
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(sgd(model), model)
        communication.broadcast_parameters(model.state_dict(), root=0)
        with torch.no_grad():
            for param in model.parameters() if session.rank else ():
                assert param._version  # else nothing is tested
        if session.rank and sync == "asp":
            assert pushed.wait(20)
        loss_of(model, small_batches(1, (4,))[0][0]).backward()
        optimizer.step()
        pushed.set()

    with ThreadJob(workers=2, sync=sync) as job:
        job.run(work)


def test_values_that_are_broadcast_count_though_links_write_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()

    def written(tensors: list[torch.Tensor], root: int) -> None:
        for tensor, value in zip(tensors, [OTHER.state_dict()[name] for name in sorted(OTHER.state_dict())], strict=True):
            tensor.numpy()[...] = value.numpy()

    monkeypatch.setattr(communication, "current", lambda: here.session)
    monkeypatch.setattr(communication, "broadcast", written)

    def work(session: Session) -> list[torch.Tensor]:
        here.session = session
        model = copy.deepcopy(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        if session.rank == 0:
            model.load_state_dict(OTHER.state_dict())
        communication.broadcast_parameters(model.state_dict(), root=0)
        optimizer.step()
        return weights(model)

    with ThreadJob(workers=2, servers=2) as job:
        for got in job.run(work):
            assert_equal(got, weights(OTHER))


# What is used again.


def test_the_mean_of_buffers_is_taken_again_and_again_without_more_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadJob, "wire", "ipc")
    monkeypatch.setattr(shared_memory, "SHARE_FROM", 1)
    counts: dict[int, int] = {}
    meeting = threading.Barrier(2)

    def work(session: Session) -> None:
        model = nn.BatchNorm1d(3)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, buffers="mean")
        for number in range(4):
            model.running_mean = torch.full((3,), float(session.rank + number))  # another tensor each time
            optimizer.consolidate()
            assert torch.equal(model.running_mean, torch.full((3,), number + 0.5))
            meeting.wait(20)
            counts[number] = shared_descriptors()
            meeting.wait(20)

    gc.collect()  # what earlier tests left is not closed in the middle of this one
    with ThreadJob(workers=2) as job:
        job.run(work)
    assert counts[3] == counts[1] == counts[0] > 0


def shared_descriptors() -> int:
    """How many shared-memory segments this process has open; sockets of other tests' ending jobs are not counted."""
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and str(link.readlink()).startswith("/memfd:") for link in links)

"""What `DistributedOptimizer` adds to an optimizer: gradients are averaged while backward makes them, and `step()` waits.

Buckets of gradients (`buckets.py`) leave in one order on all ranks, whatever order backward takes: a bucket that is ready
waits for those before it, and `step()` sends what has not left. They have a group of their own, so that a script may make
other calls at any time; in a process set, whose optimizers share one, all leave in `step()`. What it announces then
(`records.py`) tells ranks that have joined to take part. Gradients that were changed after they left, by clipping them, say,
leave again on all ranks: what counts is what they are in `step()`.

The result is an object of a class derived from the wrapped optimizer's, as Horovod's is; groups and state are the wrapped
optimizer's own, so that schedulers made before see what happens to them.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.horovod.gathers import gather_sparse
from polytempo.horovod.gradient_buckets import GradientBucket, Travel, buckets_of, is_sparse
from polytempo.horovod.negotiation import Call, CallKind, digest, negotiator_of, no_body
from polytempo.horovod.ops import Average, Op
from polytempo.horovod.process_sets import ProcessSet, global_process_set, state
from polytempo.train import communication


class Distributed(torch.optim.Optimizer):  # type: ignore[misc]
    """Comes before the wrapped optimizer's class in the class of what `DistributedOptimizer` returns."""

    inner: torch.optim.Optimizer

    def begin(self, travel: Travel, passes: int, members: ProcessSet, names: dict[torch.Tensor, str]) -> None:
        """Hang on to the gradients."""
        self._members, self._wanted = members, passes
        self._passes: Counter[torch.Tensor] = Counter()
        self._buckets: list[GradientBucket] = []
        self._launched = 0
        self._apart: list[torch.Tensor] = []  # parameters whose gradients are sparse, and travel by themselves
        self._synchronizes, self._synchronized = True, False
        self._takes_part = False
        if members.size() == 1 or not members.included():
            return
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._params, self._travel, self._takes_part = params, travel, True
        self._make_buckets()
        self._early = members is global_process_set
        self._group = communication.new_group(members.ranks) if self._early else members.gradients
        self._call = _call_of(params, names, travel.op)
        state().optimizers.append(weakref.ref(self))
        own = weakref.ref(self)  # a parameter that is kept must not keep its optimizer
        self._hooks = [param.register_post_accumulate_grad_hook(lambda param: _count(own, param)) for param in params]

    def _make_buckets(self) -> None:
        apart = set(self._apart)
        self._buckets = buckets_of([param for param in self._params if param not in apart], self._travel)
        self._where = {param: bucket for bucket in self._buckets for param in bucket.params}

    # It shares everything with the optimizer it wraps.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups themselves."""
        return self.inner.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state itself."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before it is wrapped."""
        raise UsageError("add parameter groups before wrapping the optimizer: its gradients are in buckets already")

    # Backward.

    def count_pass(self, param: torch.Tensor) -> None:
        """A backward pass has reached this parameter."""
        self._passes[param] += 1
        if self._passes[param] > self._wanted:
            raise UsageError(
                f"backward() came more than {self._wanted} times before step(); give DistributedOptimizer "
                "backward_passes_per_step= the number of passes whose gradients are to be added up"
            )
        if self._passes[param] == self._wanted and param in self._where:
            self._where[param].missing.discard(param)
            while self._early and self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        with torch.no_grad():
            bucket.fill()
            bucket.launch(self._group)
        self._launched += 1

    def set_backward_passes_per_step(self, passes: int) -> None:
        """So many backward passes are added up before gradients leave."""
        check_passes(passes)
        self.check_idle("set_backward_passes_per_step()")
        self._wanted = passes
        self._start_over()

    def check_idle(self, call: str) -> None:
        """Refuse what cannot be done while gradients are under way."""
        if self._launched:
            raise UsageError(f"{call} came between backward() and step(), while gradients were on their way; step first")

    def _start_over(self) -> None:
        self._passes.clear()
        self._launched = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.params)

    # Steps.

    def synchronize(self) -> None:
        """Make `.grad` the mean over all ranks, now: to be clipped, say, before `step()` in `skip_synchronize()`."""
        if self._takes_part:
            self._reduce()
        self._synchronized = True

    def _reduce(self) -> None:
        outdated = any(bucket.is_outdated() for bucket in self._buckets[: self._launched])
        announced = negotiator_of(self._members).start(replace(self._call, own=int(outdated)), no_body)
        try:
            self._launch_rest()
            calls = announced.wait()
            self._wait()
            if any(call.own for call in calls.values()):
                self._launched = 0
                self._launch_rest()
                self._wait()
            sparse = self._gather_sparse()
        except PolytempoError:
            self._make_buckets()  # what is under way may still be written to
            self._start_over()  # a script that catches it may go on with the next backward pass
            raise
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.hand_out()
            for param, grad in sparse.items():
                mixed = param in self._where and self._where[param].had_dense(param)
                param.grad = param.grad + grad if mixed else grad
        self._set_apart(sparse)
        self._start_over()

    def _launch_rest(self) -> None:
        while self._launched < len(self._buckets):
            self._launch()

    def _wait(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.wait()

    def _gather_sparse(self, joined: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """Everybody's sparse gradients, which no bucket holds; all ranks know of which parameters there are any."""
        found = {param for bucket in self._buckets for param in bucket.sparse_params()}.union(self._apart)
        params = [param for param in self._params if param in found]
        own = [None if joined or (param in self._where and not is_sparse(param.grad)) else param.grad for param in params]
        share = self._members.size() if self._travel.op is Average else 1
        return gather_sparse(params, own, self._travel.before * self._travel.after / share, self._group)

    def _set_apart(self, sparse: Iterable[torch.Tensor]) -> None:
        """From now on these need no room in a bucket: on all ranks, since all have seen the same."""
        more = [param for param in sparse if param in self._where]
        if more:
            self._apart += more
            self._make_buckets()

    def take_part(self, times: int) -> None:
        """In a step of the others, with nothing: this rank has joined."""
        for _ in range(times):
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.empty()
                    bucket.launch(self._group)
            self._wait()
        self._set_apart(self._gather_sparse(joined=True))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` takes the gradients as they are: `synchronize()` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for everybody's gradients, and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synchronizes:
            if self._synchronized:
                words = "optimizer.step() called without optimizer.skip_synchronize() after synchronize()"
                warnings.warn(f"{words}: gradients travel twice", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        self.inner._opt_called = True  # a scheduler made before wrapping looks for it there
        self.inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Not while gradients are on their way."""
        self.check_idle("zero_grad()")
        self._start_over()
        self.inner.zero_grad(set_to_none)


def _count(own: weakref.ref[Distributed], param: torch.Tensor) -> None:
    optimizer = own()
    if optimizer is not None:
        optimizer.count_pass(param)


def _call_of(params: list[torch.Tensor], names: dict[torch.Tensor, str], op: Op) -> Call:
    """What `step()` announces: ranks whose models differ learn of it there."""
    about = [(names.get(param, ""), tuple(param.shape), str(param.dtype)) for param in params]
    count = sum(param.numel() for param in params)
    return Call(CallKind.STEP, op.code, 0, count, digest(*about), root=len(state().optimizers))


def check_passes(passes: int) -> None:
    """At least one."""
    if passes < 1:
        raise UsageError(f"expected backward_passes_per_step to be 1 or more, got {passes}")

"""A random script as one worker of a job runs it; and the jobs, in threads, that it runs in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy
import torch
from fuzz_pieces import batch_of, kept, loss_of, optimizer_of, weight_of
from fuzz_plain import Outcome, Run, evaluated, loaded, look, resumed
from fuzz_program import Line, Script, Setting

from polytempo.launcher.job_facts import JobFacts
from polytempo.reducer import pushes, sums
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport import shared_memory


class JobRun(Run):
    """One worker."""

    def __init__(self, script: Script, session: Session) -> None:
        super().__init__(script)
        self.session, self.rank = session, session.rank
        self.inner = optimizer_of(script, self.model)
        self.optimizer: DistributedOptimizer | None = None
        self.outcome = Outcome()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def target(self) -> torch.optim.Optimizer:
        return self.optimizer or self.inner

    @property
    def wrapped(self) -> DistributedOptimizer:
        assert self.optimizer is not None
        return self.optimizer

    def run(self) -> None:
        super().run()
        if self.optimizer is not None:
            self.optimizer.consolidate()
        look(self.model, self.outcome)

    def do_load(self, line: Line) -> None:
        self.model.load_state_dict(loaded(self.script, line, self.rank, self.model))

    def do_warm(self, line: Line) -> None:
        self.inner.zero_grad()
        loss = loss_of(self.model, batch_of(self.script, line, 0))
        if loss.requires_grad:
            loss.backward()
        self.inner.step()

    def do_wrap(self, line: Line) -> None:
        about = self.script.optimizer
        with as_current(self.session):
            self.optimizer = DistributedOptimizer(
                self.inner,
                self.model if about["model"] else None,
                sync=self.script.setting.sync,
                apply=self.script.setting.apply,
                clip_norm=about["clip_norm"],
            )

    def backward(self, line: Line, part: int, loss: torch.Tensor) -> None:
        accumulates = line.get("no_sync") and (part < line["parts"] - 1 or line["no_sync"] == "all")
        with self.wrapped.no_sync() if accumulates else nullcontext():
            super().backward(line, part, self.scaler.scale(loss) if line.get("scaler") else loss)

    def do_step(self, line: Line) -> None:
        samples: Any = None if line["samples"] == "none" else weight_of(self.script, line, self.rank)
        if line.get("given"):
            samples = {"int": int, "numpy": numpy.float64, "tensor": torch.tensor}[line["given"]](samples)
        about = {} if samples is None else {"samples": samples}
        if line.get("closure"):
            closure = lambda: torch.tensor(self.gradients(line, self.rank, self.wrapped), dtype=torch.float64)  # noqa: E731
            self.outcome.losses.append(float(self.wrapped.step(closure, **about)))
        else:
            self.outcome.losses.append(self.gradients(line, self.rank, self.wrapped))
            self.own_changes(line, self.rank)
            if line.get("clip", "").startswith("mean"):
                self.wrapped.synchronize(**about)
                self.mean_changes(line)
            if line.get("scaler"):
                self.scaler.step(self.wrapped, **about)
                self.scaler.update()
            else:
                self.wrapped.step(**about)
        if self.scheduler is not None:
            self.scheduler.step()

    def do_evaluate(self, line: Line) -> None:
        if self.optimizer is not None:
            self.optimizer.consolidate()
        self.outcome.seen.append(evaluated(self.script, line, self.model))

    def do_state(self, line: Line) -> None:
        self.outcome.states.append(kept(self.target().state_dict()))

    def do_save(self, line: Line) -> None:
        if self.optimizer is not None:
            self.optimizer.consolidate()
        self.saved = {"model": kept(self.model.state_dict()), "optimizer": kept(self.target().state_dict())}

    def do_reload(self, line: Line) -> None:
        if self.saved and line["what"] != "optimizer":
            self.model.load_state_dict(self.saved["model"])
            self.push_if(line)
        if self.saved and line["what"] != "model":
            self.target().load_state_dict(copy.deepcopy(self.saved["optimizer"]))

    def do_change(self, line: Line) -> None:
        super().do_change(line)
        self.push_if(line)

    def push_if(self, line: Line) -> None:
        """Say that weights were changed by hand."""
        if line["push"] and hasattr(self.optimizer, "push_parameters"):
            self.optimizer.push_parameters()

    def do_resume(self, line: Line) -> None:
        if not self.saved:
            return
        if line["model"] == "new":
            self.model = resumed(self.script, self.model, [param.requires_grad for param in self.model.parameters()])
        self.model.load_state_dict(self.saved["model"])
        self.inner, self.scheduler, was_wrapped = optimizer_of(self.script, self.model), None, self.optimizer is not None
        self.optimizer = None
        if line["load"] == "before" or not was_wrapped:
            self.inner.load_state_dict(copy.deepcopy(self.saved["optimizer"]))
        if was_wrapped:
            self.do_wrap(line)
        if line["load"] == "after" and was_wrapped:
            self.wrapped.load_state_dict(copy.deepcopy(self.saved["optimizer"]))

    def do_group(self, line: Line) -> None:
        self.target().add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]})


def outcome_of(script: Script, session: Session) -> Outcome:
    """One worker's whole run."""
    run = JobRun(script, session)
    run.run()
    return run.outcome


@contextmanager
def _places(setting: Setting) -> Iterator[None]:
    """How bytes travel."""
    with ExitStack() as patches:
        for kind in (ThreadJob, GroupJob):
            patches.enter_context(mock.patch.object(kind, "wire", setting.wire))
        if setting.small:
            patches.enter_context(mock.patch.object(shared_memory, "SHARE_FROM", 1))
            patches.enter_context(mock.patch.object(pushes, "LIMIT", 100))
            patches.enter_context(mock.patch.object(sums, "BUCKET", 100))
        yield


def run_in_threads(script: Script) -> list[Outcome]:
    """The whole job; what came out for each worker."""
    setting = script.setting
    work: Any = lambda session: outcome_of(script, session)  # noqa: E731
    with _places(setting):
        if setting.way == "alone":
            return [work(Session(None, JobFacts(1, (), setting.sync), 0))]
        if setting.way == "group":
            with GroupJob(setting.workers) as group:
                return group.run(work)
        via = "allreduce" if setting.way == "allreduce" else "ps"
        with ThreadJob(setting.workers, setting.servers, setting.sync, via=via) as job:
            return job.run(work)

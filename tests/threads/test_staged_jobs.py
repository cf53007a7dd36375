"""Jobs whose parameters are staged as those on a GPU are, here on the CPU with copies that are late: they end as others do,
bit for bit, also where buckets leave before `step()` and gradients are changed afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.tensors.test_host_staging import LateCopies

import polytempo as pt
from polytempo.protocol.layout import Layout
from polytempo.reducer import copier, pushes, servers
from polytempo.reducer.device_moves import HostStaging
from polytempo.reducer.flat_buffer import GradientHooks
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob

SHAPES = ((30, 7), (5,), (4, 3, 3, 3), (), (11, 40))


class Sent:
    """Counts buckets that have left before their push, and those of them that counted."""

    def __init__(self) -> None:
        self.left = self.counted = 0


def staged(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Take parameters on the CPU for parameters on a GPU."""

    def staging_for(params: Sequence[torch.Tensor], layout: Layout) -> HostStaging:
        return HostStaging(params, layout, torch.device("cpu"), LateCopies())

    monkeypatch.setattr(copier, "staging_for", staging_for)
    monkeypatch.setattr(servers, "GradientHooks", lambda params, buffer, early: GradientHooks([], buffer, early))
    sent, send, commit = Sent(), pushes.PartialPushes._send, pushes.PartialPushes.commit

    def counted_send(self: Any, number: int) -> None:
        sent.left += 1
        send(self, number)

    def counted_commit(self: Any) -> Any:
        result = commit(self)
        sent.counted += max(len(names) for names, _, _ in result)
        return result

    monkeypatch.setattr(pushes.PartialPushes, "_send", counted_send)
    monkeypatch.setattr(pushes.PartialPushes, "commit", counted_commit)
    return sent


def train(session: Session, options: Mapping[str, Any], touch: str) -> list[torch.Tensor]:
    given = dict(options)
    rule = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[name := given.pop("of", "SGD")]
    dice = torch.Generator().manual_seed(7 + session.rank)
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    optimizer = pt.DistributedOptimizer(getattr(torch.optim, name)(params, **rule), named_parameters=named, **given)
    for step in range(5):
        factors = [torch.randn(param.shape, generator=dice) for param in params]
        used = [pair for number, pair in enumerate(zip(params, factors, strict=True)) if (number, step) != (0, 2)]
        optimizer.zero_grad()
        for _ in range(2 if touch == "twice" else 1):
            torch.stack([(param * factor).sum() for param, factor in used]).sum().backward()
        if touch in ("data", "counted") and params[4].grad is not None:
            (params[4].grad.data if touch == "data" else params[4].grad).mul_(0.5)
        optimizer.step()
    optimizer.consolidate()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("touch", ["", "data", "counted", "twice"])
@pytest.mark.parametrize(
    ("workers", "sync", "options"),
    [
        (2, "bsp", {}),
        (1, "asp", {}),
        (1, "delay:2", {}),
        (2, "bsp", {"compression": "topk:0.2"}),
        (1, "asp", {"apply": "delta"}),
        (2, "bsp", {"apply": "delta"}),
        (1, "asp,momentum=lookahead", {}),
        (1, "asp,momentum=lookahead", {"of": "AdamW"}),
        (1, "asp,momentum=lookahead", {"compression": "topk:0.2"}),
        (1, "delay:2,momentum=lookahead", {}),
        (1, "delay:2,momentum=lookahead", {"of": "AdamW"}),
        (1, "delay:2,momentum=lookahead", {"compression": "topk:0.2"}),
        (1, "downpour:push=2,fetch=3", {}),
        (2, "local:2", {}),
        (2, "diloco:4,fragments=2,overlap=1", {}),
    ],
    ids=str,
)
def test_a_staged_job_ends_as_others_do(
    workers: int, sync: str, options: Mapping[str, Any], touch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "LIMIT", 800)
    with ThreadJob(workers, 2, sync) as job:
        expected = job.run(lambda session: train(session, options, touch))
    sent = staged(monkeypatch)
    with ThreadJob(workers, 2, sync) as job:
        got = job.run(lambda session: train(session, options, touch))
    for one, other in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    if not options and sync in ("bsp", "asp"):  # two buckets a step; one of them lacks a gradient once, one is touched
        assert sent.left == workers * (9 if touch != "counted" else 4)
        assert sent.counted == workers * (9 if touch in ("", "twice") else 4)

"""What a worker sees of a step on a GPU is what it sees on the CPU, a step later, and without waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polytempo.launcher.job_facts import JobFacts
from polytempo.protocol.push import Measures
from polytempo.protocol.values import VitalSigns
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session, as_current
from polytempo.train.driver import StepRequest
from polytempo.train.observers import StepSigns


def seen_on(place: str) -> list[VitalSigns | None]:
    """Of five steps of one model, which differ."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(place)) for shape in ((64, 32), (64,), (3, 64))]
    session, found = Session(None, JobFacts(1, ()), 0), []
    with as_current(session):
        signs = StepSigns(session, params)
        for step in range(5):
            for param in params:
                param.grad = None
            sum((param.square().sum() for param in params), torch.zeros((), device=place)).mul(1.0 + step).backward()
            with torch.no_grad():
                loss = None if step % 2 else 7.0 + step
                found.append(signs.look(StepRequest(Measures(), skip=False, agreed=False, loss=loss)))
                for param in params:
                    param.mul_(1.1)
            torch.cuda.synchronize()
    for close in session.leaving.of[LeavingStep.UNDO]:
        close()
    return found


def test_the_device_says_what_the_host_does() -> None:
    there, here = seen_on("cuda"), seen_on("cpu")
    assert there[0] is None
    for late, wanted in zip(there[1:], here[:-1], strict=True):
        assert late is not None
        assert wanted is not None
        assert late.loss == pytest.approx(wanted.loss, rel=1e-5)
        for name in ("gradient", "change", "size"):
            assert getattr(late, name) == pytest.approx(getattr(wanted, name), rel=1e-5)

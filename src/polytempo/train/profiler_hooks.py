"""Torch wraps every optimizer's `step` for its profiler and hooks. Where nobody looks, the wrappers are left out.

They cost 40 us a step, and the first of them imports torch's compiler: 1.4 s, in which everybody else would wait.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Does anybody want to know of its steps?"""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(hooks or everywhere or torch.autograd._profiler_enabled())


def step_plainly(optimizer: torch.optim.Optimizer) -> None:
    """A step of this optimizer, under `no_grad`."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if of_torch and not differentiable and not is_watched(optimizer):
        inspect.unwrap(type(optimizer).step)(optimizer)
    else:
        optimizer.step()


def unscale(gradients: list[torch.Tensor], factor: float) -> None:
    """Multiply gradients in place, sparse ones too."""
    values = [grad if grad.layout == torch.strided else grad._values() for grad in gradients]
    if values:
        torch._foreach_mul_(values, factor)

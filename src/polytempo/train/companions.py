"""What is averaged together with the parameters: module buffers, and the state of each worker's optimizer.

Both are optional. Module buffers are those of floating point (the running statistics of batch norm); counters stay each
worker's own. Optimizer state is what the wrapped optimizer keeps for each parameter. Torch makes it in the first step, and
all workers must know what travels before: so a copy of the optimizer makes one step with gradients of zero, and shows it.
"""

from __future__ import annotations

import copy

import torch

from polytempo.errors import UsageError


class Companions:
    """Tensors that travel beside the parameters: stand-ins, filled before a round and copied back after it.

    Args:
        model: The model whose buffers are averaged, if they are.
        optimizer: The optimizer whose state is averaged, if it is.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        named = [] if model is None else [(name, tensor) for name, tensor in model.named_buffers() if _averaged(tensor)]
        self._buffers = [name for name, _ in named]
        self._state = [] if optimizer is None else state_names(optimizer)
        shapes = [tensor for _, tensor in named] + [tensor for _, _, tensor in self._state]
        self.tensors = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in shapes]  #: the stand-ins
        self.names = [f"buffer {name}" for name in self._buffers]  #: their names
        self.names += [f"{name} of parameter {index}" for index, name, _ in self._state]

    def _live(self) -> list[torch.Tensor | None]:
        """The tensors themselves; None for state that is not there yet."""
        known = dict(self._model.named_buffers()) if self._model is not None else {}
        found: list[torch.Tensor | None] = [known.get(name) for name in self._buffers]
        if self._optimizer is not None:
            params = [param for group in self._optimizer.param_groups for param in group["params"]]
            found += [self._optimizer.state.get(params[index], {}).get(name) for index, name, _ in self._state]
        return found

    def read(self) -> None:
        """Fill the stand-ins."""
        for stand_in, live in zip(self.tensors, self._live(), strict=True):
            if live is None:
                stand_in.zero_()
            else:
                stand_in.copy_(live.detach())

    def write(self) -> None:
        """Copy the stand-ins back."""
        for stand_in, live in zip(self.tensors, self._live(), strict=True):
            if live is not None:
                live.detach().copy_(stand_in)


def _averaged(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided


def state_names(optimizer: torch.optim.Optimizer) -> list[tuple[int, str, torch.Tensor]]:
    """What this optimizer keeps: the number of a parameter, a name, and a tensor of that form."""
    if type(optimizer) is torch.optim.LBFGS:
        raise UsageError("state=mean cannot average the history of LBFGS; use state=keep or state=reset")
    trial = copy.deepcopy(optimizer)
    params = [param for group in trial.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    trial.step()
    return [
        (index, name, value)
        for index, param in enumerate(params)
        for name, value in sorted(trial.state.get(param, {}).items())
        if _averaged(value)
    ]

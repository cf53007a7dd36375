"""`SyncBatchNorm`: batch normalization over the batches of all ranks; sums, and their gradients, travel by `allreduce`."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from polytempo.errors import UsageError
from polytempo.horovod.ops import Sum
from polytempo.horovod.process_sets import ProcessSet, global_process_set
from polytempo.horovod.reductions import allreduce


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalisation over the batches of all ranks; in evaluation, and in a job of one, the same as `BatchNorm`.

    Args:
        num_features: The number of channels.
        eps: Added to the variance.
        momentum: Of the running statistics; None for a cumulative average.
        affine: Whether there are a trained scale and shift.
        track_running_stats: Whether running statistics are kept.
        process_set: The ranks whose batches are normalised together.

    Raises:
        UsageError: In forward, for a tensor with fewer than two dimensions.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, tensor: torch.Tensor) -> None:
        if tensor.dim() < 2:
            raise UsageError(f"SyncBatchNorm needs at least 2 dimensions, got {tensor.dim()}")

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Normalise a tensor.

        Args:
            tensor: Of shape (batch, channels, ...).

        Returns:
            The normalised tensor.
        """
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or self.process_set.size() == 1:
            return super().forward(tensor)
        self._check_input_dim(tensor)
        over = [dim for dim in range(tensor.dim()) if dim != 1]
        wide = tensor.float() if tensor.element_size() < 4 else tensor
        count = wide.new_tensor([float(tensor.numel() // tensor.shape[1])])
        sums = self._total(torch.cat([wide.sum(over), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1, *[1] * (tensor.dim() - 2)]
        centered = wide - mean.view(shape)
        variance = self._total((centered * centered).sum(over)) / total
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance.detach() * total / (total - 1).clamp(min=1)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(tensor.dtype)

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=Sum, process_set=self.process_set)

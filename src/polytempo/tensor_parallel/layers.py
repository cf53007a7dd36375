"""Linear layers that are split over the ranks of a group: by columns (outputs) and by rows (inputs).

With A cut by columns and B by rows, f(X) A_i is this rank's part of X A, and g(Y_i B_i) is the sum of Y B: between the two
no communication is needed, if what lies between works element by element. The bias of a column-parallel layer is split with
its outputs; that of a row-parallel one is added once, after the sum.

A split layer is the layer itself with another class and a shard as its parameter (`plan.py`): its name, its hooks and the
parameters that it shares with other layers stay.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.mappings import copy_to, gather_from, reduce_from, split_to


class ColumnLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer of which this rank computes some of the outputs.

    Where the number of outputs was padded, outputs that are not split are cut back to it.
    """

    group: TensorGroup
    gathers: bool  #: the output is gathered, else each rank keeps its part

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """This rank's outputs, or all of them."""
        output = functional.linear(copy_to(input, self.group), self.weight, self.bias)
        if not self.gathers:
            return output
        return gather_from(output, self.group).narrow(-1, 0, self.out_features)


class RowLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that adds up what each rank computes from its part of the inputs."""

    group: TensorGroup
    splits: bool  #: the input is whole and is split here, else each rank is given its part

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """The output, on all ranks."""
        part = split_to(input, self.group) if self.splits else input
        total = reduce_from(functional.linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias.to(total.dtype)  # as torch does under autocast

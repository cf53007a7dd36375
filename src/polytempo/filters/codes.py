"""What a code is, and the plain one: every value, as it is or cast.

A code takes the sum p of new values and what was held back, writes a message q, and leaves p - D(q) where p was: so what is
sent and what is held back always add up to what was produced.

What is no number (infinities and NaN) is sent as it is and leaves 0 behind: the other side sees it, and what is held back
stays finite. Where more of them come than a message has room for, those that are sent speak for the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polytempo.filters.forms import Bytes, Form, as_bytes, as_values, clear, item_size, narrow


class Code(ABC):
    """One way to write values into buffers and to read them back."""

    buffers: int  #: of every message

    @property
    @abstractmethod
    def text(self) -> str:
        """As it is written in the name of a chain."""

    def check(self, form: Form) -> None:
        """Refuse, as a `UsageError`, values that cannot be written."""

    @abstractmethod
    def encode(self, held: torch.Tensor, form: Form) -> list[Bytes]:
        """A message about what is held, which becomes what the message does not say."""

    @abstractmethod
    def decode(self, buffers: Sequence[Bytes], form: Form) -> torch.Tensor:
        """The values that a message says; `PeerError` when it cannot be right."""

    @abstractmethod
    def stated_bytes(self, form: Form) -> int | None:
        """Bytes of every message; None where the values decide."""


@dataclass(frozen=True)
class Dense(Code):
    """Every value, in the dtype of its way. What is not cast is sent from where it is, and nothing is held."""

    buffers = 1
    text = ""

    def encode(self, held: torch.Tensor, form: Form) -> list[Bytes]:
        sent = narrow(held, form)
        held.sub_(sent.to(form.dtype))
        clear(held)
        return [as_bytes(sent)]

    def decode(self, buffers: Sequence[Bytes], form: Form) -> torch.Tensor:
        return as_values(buffers[0], form.size, form.wire, "values").to(form.dtype)

    def stated_bytes(self, form: Form) -> int:
        return form.size * item_size(form.wire)

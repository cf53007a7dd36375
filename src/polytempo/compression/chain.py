"""Compression chains: how a flat tensor is encoded before it is sent, and decoded at the other end.

    none               all values, unchanged
    bf16, fp16         all values, in two bytes each
    int8               all values, in one byte each and a scale for each 256
    topk:0.01          the largest hundredth; significant:1e-3 the values beyond a threshold; sign one bit each
    topk:0.01+bf16     a selection, then a cast of the selected values

A lossy chain keeps the residual, the difference between its input and its message, and adds it to the next input (error
feedback): p = g + e; q = C(p); e = p - D(q). So every value is sent in the end, and sent + residual = produced at any time.
Casts keep their rounding errors too, which papers usually leave out.

A chain belongs to a device, where its residual lies and its input must lie: values on a GPU are encoded there
(`encode_tensors`), and only the encoded bytes are copied to the host. Its saved state is on the CPU.

A cast given as a bare text is for pushes and pulls, the other codes are for pushes alone: a worker would miss the values
that a selection leaves out of an answer. {"push": ..., "pull": ...} chooses both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.compression.encoding import ByteArray, Code, Dense, NumberFormat, as_bytes, dtype_name
from polytempo.compression.quantization import Int8
from polytempo.compression.sign import Sign
from polytempo.compression.sparsification import Significant, TopK
from polytempo.errors import PeerError, UsageError, WrongType, nearest
from polytempo.options import Syntax, number, parse

CPU = torch.device("cpu")
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Selections: what makes the code from the argument.
_CODES: dict[str, Callable[[Any], Code]] = {
    "topk": TopK,
    "significant": Significant,
    "sign": lambda _: Sign(),
    "int8": lambda _: Int8(),
}
_SYNTAX = {
    "none": Syntax("none"),
    "bf16": Syntax("bf16"),
    "fp16": Syntax("fp16"),
    "topk": Syntax("topk:0.01", number("a share above 0 and up to 1", lambda share: 0 < share <= 1)),
    "significant": Syntax("significant:1e-3", number("a threshold of at least 0", lambda threshold: threshold >= 0)),
    "sign": Syntax("sign"),
    "int8": Syntax("int8"),
}
#: Codes whose numbers have a form of their own.
_UNCASTABLE = {"sign": "single bits", "int8": "single bytes"}
KNOWN = "none, bf16, fp16, int8, topk:0.01, significant:1e-3, sign, and a selection with a cast such as topk:0.01+bf16"

#: A plus that is not part of a number such as 1e+3.
PLUS = re.compile(r"(?<![\d.][eE])\+")


@dataclass(frozen=True)
class ChainSpec:
    """A parsed chain."""

    code: Code
    cast: str = ""

    @property
    def text(self) -> str:
        """Its one canonical name."""
        return "+".join(filter(None, (self.code.text, self.cast))) or "none"

    @property
    def is_lossless(self) -> bool:
        """Do all values arrive unchanged?"""
        return not self.selects and not self.cast

    @property
    def selects(self) -> bool:
        """Does it select values, beyond a cast?"""
        return self.code != Dense()

    @property
    def buffers(self) -> int:
        """The number of buffers of every message."""
        return self.code.buffers

    def new(self, size: int, dtype: torch.dtype, device: torch.device = CPU) -> CompressionChain:
        """A chain for one flat tensor on a device, with a residual of zero."""
        return CompressionChain(self, self._form(size, dtype, device), device)

    def decode(
        self, buffers: Sequence[ByteArray], size: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> torch.Tensor:
        """The values of a message, in memory of their own, on a device; `PeerError` when the message is invalid."""
        form = self._form(size, dtype, device)
        try:
            if len(buffers) != self.buffers:
                raise PeerError(f"expected {self.buffers} buffers, got {len(buffers)}")
            return self.code.decode(buffers, form, device)
        except PeerError as error:
            raise PeerError(f"cannot decode a message of {form} compressed with {self.text}: {error}") from None

    def _form(self, size: int, dtype: torch.dtype, device: torch.device = CPU) -> NumberFormat:
        form = NumberFormat(size, dtype, CASTS.get(self.cast, dtype), on_host=device.type == "cpu")
        self.code.check(form)
        return form

    def __str__(self) -> str:
        return self.text


class CompressionChain:
    """A chain for one flat tensor on one device, with its residual."""

    def __init__(self, spec: ChainSpec, form: NumberFormat, device: torch.device = CPU) -> None:
        self.spec, self.form, self.device = spec, form, device
        self._held = torch.zeros(0 if spec.is_lossless else form.size, dtype=form.wide, device=device)

    @property
    def residual(self) -> torch.Tensor:
        """The sum of the values not sent yet, on the CPU; float32 for values of two bytes."""
        return torch.zeros(self.form.size, dtype=self.form.wide) if self.spec.is_lossless else self._on_cpu()

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residual, on its device."""
        return int(self._held.nbytes)

    def encode(self, values: torch.Tensor) -> list[ByteArray]:
        """The next message of values on the CPU. Without compression its memory is that of `values`, which must not change
        until it is sent."""
        return [as_bytes(part) for part in self.encode_tensors(values)]

    def encode_tensors(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The next message, as flat tensors on the device of `values`: the buffers of the message are their bytes."""
        values = self._checked(values)
        if self.spec.is_lossless:
            return [values]
        self._held.add_(values)
        return self.spec.code.encode(self._held, self.form)

    def state(self) -> dict[str, torch.Tensor]:
        """The state to save in a checkpoint, on the CPU."""
        return {} if self.spec.is_lossless else {"residual": self._on_cpu()}

    def _on_cpu(self) -> torch.Tensor:
        return self._held.clone() if self.form.on_host else self._held.to(CPU)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a saved state."""
        ours, theirs = _described({} if self.spec.is_lossless else {"residual": self._held}), _described(state)
        if ours != theirs:
            raise UsageError(
                f"the state of compression {self.spec} is {ours}, got {theirs}; use the compression that saved it"
            )
        if not self.spec.is_lossless:
            self._held.copy_(state["residual"])

    def _checked(self, values: torch.Tensor) -> torch.Tensor:
        fits = values.dtype == self.form.dtype and values.shape == (self.form.size,)
        if not fits or values.device != self.device:
            got = f"{list(values.shape)} {dtype_name(values.dtype)} on {values.device}"
            where = "the CPU" if self.device == CPU else str(self.device)
            raise UsageError(f"expected a flat tensor of {self.form} on {where}, got {got}; make a chain for each tensor")
        return values.detach()


def _described(state: Mapping[str, torch.Tensor]) -> str:
    parts = (f"{name} {list(value.shape)} {dtype_name(value.dtype)}" for name, value in state.items())
    return ", ".join(parts) or "nothing"


def parse_chain(text: str) -> ChainSpec:
    """Read a chain such as `topk:0.01+bf16`; a `UsageError` says in one line what is wrong."""
    links = [parse(link, "compression", _SYNTAX) for link in PLUS.split(text.strip() or "none")]
    names = [link.name for link in links]
    if names[0] in _UNCASTABLE and len(names) == 2 and names[1] in CASTS:
        what = _UNCASTABLE[names[0]]
        raise UsageError(f"{names[0]} sends {what}, which cannot be cast, got {text!r}; write {names[0]}")
    if len(names) > 1 and not (len(names) == 2 and names[0] in _CODES and names[1] in CASTS):
        raise UsageError(f"expected a selection, a cast, or one of each in this order, got {text!r}; known: {KNOWN}")
    code = _CODES[names[0]](links[0].argument) if names[0] in _CODES else Dense()
    return ChainSpec(code, names[-1] if names[-1] in CASTS else "")


DIRECTIONS = ("push", "pull")


@dataclass(frozen=True)
class PushPullCompression:
    """The chain of each direction."""

    push: ChainSpec
    pull: ChainSpec

    @property
    def is_lossless(self) -> bool:
        """Do all values arrive unchanged, both ways?"""
        return self.push.is_lossless and self.pull.is_lossless

    def __str__(self) -> str:
        return self.push.text if self.push == self.pull else f"push {self.push}, pull {self.pull}"


def parse_compression(given: str | Mapping[str, str] | None) -> PushPullCompression:
    """Read `compression=`: a chain, one for each direction, or nothing."""
    if given is None:
        return PushPullCompression(parse_chain("none"), parse_chain("none"))
    if isinstance(given, str):
        chain = parse_chain(given)
        return PushPullCompression(chain, parse_chain("none") if chain.selects else chain)
    if not isinstance(given, Mapping):
        expected = 'expected a text such as "bf16" or {"push": "topk:0.01", "pull": "bf16"}'
        raise WrongType(f"{expected} as compression, got {type(given).__name__}")
    for direction in given:
        if direction not in DIRECTIONS:
            near = nearest(str(direction).lower(), DIRECTIONS)
            raise UsageError(f"unknown direction {direction!r} of compression{near}; known: {', '.join(DIRECTIONS)}")
    return PushPullCompression(*(_of(given, direction) for direction in DIRECTIONS))


def _of(given: Mapping[str, str], direction: str) -> ChainSpec:
    text = given.get(direction, "none")
    if not isinstance(text, str):
        raise WrongType(f'expected a text such as "bf16" as compression of {direction}, got {type(text).__name__}')
    return parse_chain(text)

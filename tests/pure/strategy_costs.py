"""Made-up models and machines for the tests of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from polytempo.pipeline.layer_profile import Layer
from polytempo.strategy.costs import Machine, MeasuredLink, ModelProfile, ShardedLayer, TensorCall

FREE = MeasuredLink(0.0, 0.0)


def layer(
    forward: float = 1.0,
    backward: float = 2.0,
    passes: float = 640.0,
    weights: float = 1000.0,
    made: float = 3000.0,
    update: float = 0.0,
    calls: Sequence[TensorCall] = (),
) -> ShardedLayer:
    figures = Layer("layer", forward, backward, passes, weights, made)
    return ShardedLayer(figures, tuple(calls), update, 2 * weights, 1.0, weights)


def model(*layers: ShardedLayer, tensor: int = 1, microbatch: int = 1, **more: object) -> ModelProfile:
    return ModelProfile("model", tensor, microbatch, layers, **more)  # type: ignore[arg-type]


def machine(ranks: int, cores: int | None = None, inside: MeasuredLink = FREE, **more: object) -> Machine:
    return Machine((tuple(range(ranks)),), (cores or ranks,), inside, **more)  # type: ignore[arg-type]


seconds = st.integers(0, 40).map(lambda tenths: tenths / 8)  # sums of these are exact
links = st.builds(MeasuredLink, seconds, st.integers(0, 4).map(lambda rate: rate / 1024))


@st.composite
def working_links(draw: st.DrawFn) -> MeasuredLink:
    """A part of the latency is work."""
    link, part = draw(links), draw(st.integers(0, 4))
    return replace(link, core_s=link.latency * part / 8)


@st.composite
def layers(draw: st.DrawFn, split: bool = False) -> ShardedLayer:
    calls = (
        [TensorCall("all_reduce", 1024, backward) for backward in draw(st.lists(st.booleans(), max_size=3))] if split else ()
    )
    made = layer(
        draw(seconds),
        draw(seconds),
        draw(st.integers(1, 9)) * 640.0,
        draw(st.integers(0, 9)) * 1024.0,
        draw(st.integers(1, 9)) * 640.0,
        draw(seconds),
        calls,
    )
    return replace(made, passing_bytes=draw(st.sampled_from([0.0, 64.0])))

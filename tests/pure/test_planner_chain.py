"""Graphs become chains, topologies are read, and profiles survive a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_brute import profiles

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer, Profile, chain_of, load_profile, save_profile
from polytempo.pipeline.planner import Level, Topology, parse_topology

often = settings(max_examples=200, deadline=None, derandomize=True, database=None)

Graph = dict[str, Any]


def graph(edges: str, *, free: str = "", names: dict[str, str] | None = None) -> Graph:
    """`a-b b-c`: nodes in order of their names, the n-th with n seconds, 2 ** n bytes of weights and 10 ** n of output."""
    pairs = [tuple(edge.split("-")) for edge in edges.split()]
    nodes = sorted({node for pair in pairs for node in pair})
    return {
        "model": "drawn",
        "nodes": [
            {
                "id": node,
                "name": (names or {}).get(node, node),
                "forward_ms": 1000.0 * n,
                "backward_ms": 0.0,
                "activation_bytes": 0.0 if node in free else 10.0**n,
                "weight_bytes": 2.0**n,
            }
            for n, node in enumerate(nodes)
        ],
        "edges": [list(pair) for pair in pairs],
    }


def members(profile: Profile) -> list[set[int]]:
    """The numbers of the nodes in each layer, read from the bits of its weights."""
    return [{n for n in range(60) if int(layer.weight_bytes) >> n & 1} for layer in profile.layers]


def names(profile: Profile) -> str:
    return " ".join("".join(chr(ord("a") + n) for n in sorted(layer)) for layer in members(profile))


def test_a_chain_stays_a_chain() -> None:
    chain = chain_of(graph("a-b b-c"))
    assert names(chain) == "a b c"
    assert chain.layers[1] == Layer("b", 1.0, 0.0, 10.0, 2.0, 10.0)


def test_what_runs_side_by_side_is_one_layer() -> None:
    chain = chain_of(graph("a-b b-c a-d c-e d-e e-f"))
    assert names(chain) == "a bcde f"
    middle = chain.layers[1]
    assert middle == Layer("b..e", 1.0 + 2 + 3 + 4, 0.0, 1e4, 2 + 4 + 8 + 16, 10 + 1e2 + 1e3 + 1e4)


def test_a_shortcut_around_a_layer_is_not_cut() -> None:
    assert names(chain_of(graph("a-b b-c a-c c-d"))) == "a bc d"
    wide = chain_of(graph("a-b b-c a-c c-d"), width=2)
    assert names(wide) == "a b c d"
    assert [layer.activation_bytes for layer in wide.layers] == [1, 1 + 10, 100, 1000]
    assert sum(layer.kept_bytes for layer in wide.layers) == 1111  # what passes through b is not kept there twice


def test_what_a_late_layer_needs_is_made_beside_it() -> None:
    """b, as the embedding of a decoder, has no producer and is used at d."""
    assert names(chain_of(graph("a-c c-d b-d d-e"))) == "a bcd e"
    assert names(chain_of(graph("a-c c-d d-e b-e e-f"))) == "a c bde f"


def test_an_output_that_nobody_uses_holds_nothing_up() -> None:
    """b and f, then g, lead nowhere: they stand beside a, and c follows with only the output of a."""
    chain = chain_of(graph("a-b a-c c-d d-e b-f f-g"))
    assert names(chain) == "a bfg c d e"
    assert [layer.activation_bytes for layer in chain.layers[:3]] == [1, 1, 100]


def test_an_output_without_bytes_holds_nothing_up() -> None:
    assert names(chain_of(graph("a-b b-c c-d a-d", free="a"))) == "a b c d"
    assert names(chain_of(graph("a-b b-c c-d a-d"))) == "a bcd"


def test_inputs_are_left_out() -> None:
    chain = chain_of(graph("a-b b-c a-c c-d", names={"a": "Input0"}))
    assert names(chain) == "b c d"
    assert names(chain_of(graph("a-b b-c", names={"b": "InputNorm"}))) == "a b c"  # it has a producer: it is a layer


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes a.. in an order that is not that of the edges, all but the first with a producer or two."""
    count = draw(st.integers(2, 10))
    order = draw(st.permutations(range(count)))
    edges = [
        f"{chr(97 + order[draw(st.integers(0, n - 1))])}-{chr(97 + order[n])}"
        for n in range(1, count)
        for _ in range(draw(st.integers(1, 2)))
    ]
    return graph(" ".join(edges))


def ancestors(node: int, edges: set[tuple[int, int]]) -> set[int]:
    found = {node}
    while more := {a for a, b in edges if b in found} - found:
        found |= more
    return found


@often
@given(drawn=graphs(), width=st.integers(1, 3))
def test_every_cut_is_lawful_and_every_single_separator_is_cut(drawn: Graph, width: int) -> None:
    edges = {(ord(a) - 97, ord(b) - 97) for a, b in drawn["edges"]}
    everything = set(range(len(drawn["nodes"])))
    chain = chain_of(drawn, width=width)
    parts = members(chain)
    assert sorted(n for part in parts for n in part) == sorted(everything)
    cuts = [set().union(*parts[: n + 1]) for n in range(len(parts) - 1)]
    for before, layer in zip(cuts, chain.layers, strict=False):
        assert not {(a, b) for a, b in edges if b in before and a not in before}
        passing = {a for a, b in edges if a in before and b not in before}
        assert len(passing) <= width
        assert layer.activation_bytes == sum(10.0**n for n in passing)
    for node in everything:
        before = ancestors(node, edges)
        after = everything - before
        separates = all(node in ancestors(n, edges) for n in after)
        if after and separates and {a for a, b in edges if a in before and b in after} == {node}:
            assert before in cuts
    assert sum(layer.seconds for layer in chain.layers) == pytest.approx(sum(everything))
    assert sum(layer.kept_bytes for layer in chain.layers) == sum(10.0**n for n in everything)


def test_a_graph_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="without cycles, got"):
        chain_of(graph("a-b b-c c-b"))
    broken = graph("layer1-layer2")
    broken["edges"].append(["layer1", "layer9"])
    with pytest.raises(UsageError, match="names node 'layer9', which is not there; nearest: layer"):
        chain_of(broken)
    with pytest.raises(UsageError, match="between layers, to be at least 1, got 0"):
        chain_of(graph("a-b"), width=0)
    with pytest.raises(UsageError, match="nodes that are not inputs"):
        chain_of({"nodes": [{"id": "a", "name": "Input"}], "edges": []})


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(profile=profiles(4))
def test_a_profile_survives_a_file(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profiles") / "one.json"
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_a_graph_is_loaded_as_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph("a-b b-c a-c")), encoding="utf-8")
    assert load_profile(path) == chain_of(graph("a-b b-c a-c"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read the profile"),
        ("[]", "is no profile: expected model, batch and layers"),
        ('{"model": "m", "batch": 1}', "'layers'"),
        ('{"nodes": [{"id": "a"}], "edges": []}', "'name'"),
        ('{"model": "m", "batch": 1, "layers": []}', "at least one layer, got none"),
        ('{"model": "m", "batch": 1, "layers": [3]}', "is no profile"),
        ('{"model": "m", "batch": 1, "layers": [{"name": "x", "forward_ms": 1}]}', "no 'forward_ms'; nearest: forward_s"),
        ('{"model": "m", "batch": 1, "layers": [{"name": "x", "forward_s": 1}]}', "missing 3 required"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said) as error:
        load_profile(path)
    assert "profile.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the profile"):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", True])
def test_a_layer_has_numbers(value: Any) -> None:
    with pytest.raises(UsageError, match="layer 'x': expected weight_bytes to be a number of at least 0, got"):
        Layer("x", 1, 1, 1, value)


def test_a_profile_has_samples() -> None:
    with pytest.raises(UsageError, match="batch of at least 1 sample, got 0"):
        Profile("m", (Layer("x", 1, 1, 1, 1),), 0)


def test_topologies_are_read() -> None:
    assert parse_topology("4x4:12GB/s,10Gb/s") == Topology((Level(4, 12e9), Level(4, 1.25e9)))
    assert parse_topology("16: 1e9") == Topology((Level(16, 1e9),))
    assert parse_topology("2x3x4:3MB/s, 2kB/s,8bit/s").levels[-1] == Level(4, 1.0)
    assert parse_topology("2x3x4:3,2,1").devices == 24
    assert parse_topology("2x3x4:3,2,1").flat() == Topology((Level(24, 1.0),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4x4", "expected a topology COUNTxCOUNT:RATE,RATE such as 4x4:12GB/s,10Gb/s, got '4x4'"),
        ("4xfour:1,2", "expected a topology"),
        ("4x4:1GB/s", "got 2 counts and 1 bandwidths in '4x4:1GB/s'"),
        ("4:fast", "expected a bandwidth such as 1Gb/s or 125MB/s, got 'fast'"),
        ("4:10Gbps", "got '10Gbps'; nearest: G"),
        ("0:1GB/s", "at least 1 component in a level of a topology, got 0"),
        ("4:0", "bandwidth above 0 bytes a second in a topology, got 0"),
    ],
)
def test_a_topology_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_topology(text)


def test_a_topology_has_a_level() -> None:
    with pytest.raises(UsageError, match="at least one level"):
        Topology(())

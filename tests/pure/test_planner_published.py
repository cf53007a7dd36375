"""Published profiles give the published plans: 4 hosts of 4 GPUs, 12 GB/s inside a host and 10 Gb/s between hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polytempo.pipeline.layer_profile import Profile, chain_of, load_profile
from polytempo.pipeline.planner import StagePlan, parse_topology, plan

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "profiles"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the published profiles are not beside the repository")

HOSTS = parse_topology("4x4:12GB/s,10Gb/s")


def profile(model: str) -> Profile:
    return load_profile(FOLDER / f"{model}.json")


def said(model: str, found: StagePlan) -> str:
    stages = ", ".join(f"{stage.first}-{stage.last} x{stage.replicas}: {stage.time:.4g} s" for stage in found.stages)
    return f"{model}: {found.config} {found.seconds:.4g} s ({stages}), data parallelism {found.data_parallel_seconds:.4g} s"


@pytest.mark.parametrize(("model", "config"), [("vgg16", "15-1"), ("resnet50", "16"), ("alexnet", "15-1")])
def test_the_plans_of_the_table(model: str, config: str) -> None:
    found = plan(profile(model), HOSTS)
    assert found.config == config, said(model, found)
    assert (found.seconds < found.data_parallel_seconds) == (config != "16"), said(model, found)


def test_all_that_is_dense_of_vgg_is_on_one_device() -> None:
    layers, found = profile("vgg16").layers, plan(profile("vgg16"), HOSTS)
    dense = {n for n, layer in enumerate(layers) if layer.name == "Linear"}
    assert len(dense) == 3
    assert dense <= set(range(found.stages[1].first, found.stages[1].last + 1)), said("vgg16", found)
    assert found.data_parallel_seconds / found.seconds == pytest.approx(2.61, abs=0.01), said("vgg16", found)


def test_a_translator_on_one_host_is_a_straight_pipeline() -> None:
    found = plan(profile("gnmt"), parse_topology("4:12GB/s"))
    assert found.config == "1-1-1-1", said("gnmt", found)
    hosts = plan(profile("gnmt"), HOSTS)
    assert len(hosts.stages) > 4, said("gnmt", hosts)
    assert hosts.seconds < hosts.data_parallel_seconds / 4, said("gnmt", hosts)


@pytest.mark.parametrize(
    ("model", "formula", "whole_hosts", "config"),
    [
        ("vgg16", "released", True, "12-1-1-1-1"),
        ("vgg16", "paper", True, "12-2-1-1"),
        ("vgg16", "paper", False, "12-2-1-1"),
        ("resnet50", "released", True, "6-3-3-4"),
        ("resnet50", "paper", True, "8-6-2"),
        ("resnet50", "paper", False, "8-6-2"),
    ],
)
def test_only_the_released_formula_with_parts_of_hosts_gives_them(
    model: str, formula: str, whole_hosts: bool, config: str
) -> None:
    """Why the defaults are what they are: each of the other choices gives other plans than the published ones."""
    found = plan(profile(model), HOSTS, formula=formula, whole_hosts=whole_hosts)
    assert found.config == config, said(model, found)


@pytest.mark.long
def test_the_graph_of_resnet_cut_everywhere_gives_the_same() -> None:
    graph = json.loads((FOLDER / "resnet50.json").read_text(encoding="utf-8"))
    chain = chain_of(graph, width=2)
    assert len(chain.layers) == 176
    found = plan(chain, HOSTS)
    assert found.config == "16", said("resnet50", found)
    assert found.seconds == pytest.approx(plan(profile("resnet50"), HOSTS).seconds)

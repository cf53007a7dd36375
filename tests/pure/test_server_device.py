"""Where servers keep their values: what the option may be, which GPU a shard gets, and how many servers there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.server.server_device import check_server_device, count_visible, default_servers, gpu_of_shard


@pytest.mark.parametrize(
    ("option", "gpus", "said"),
    [
        ("gpu", 1, "expected --server-device auto, cpu, cuda or cuda:I, got 'gpu'"),
        ("cuda:", 1, "expected --server-device auto, cpu, cuda or cuda:I, got 'cuda:'"),
        ("cuda", 0, "--server-device cuda: there is no GPU that CUDA can use on this host; use auto or cpu"),
        ("cuda:1", 1, "--server-device cuda:1: there is cuda:0 (CUDA_VISIBLE_DEVICES counts); use one of them"),
        ("cuda:9", 4, "--server-device cuda:9: there is cuda:0 to cuda:3 (CUDA_VISIBLE_DEVICES counts); use one of them"),
    ],
)
def test_what_this_host_cannot_do_is_refused_in_one_line_before_anything_starts(option: str, gpus: int, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_server_device(option, gpus)
    assert str(refused.value) == said
    request = RunRequest(ScriptProgram(__file__), sync="asp", server_device=option, gpus=gpus)
    with pytest.raises(UsageError, match="server-device"):
        request.checked()


@pytest.mark.parametrize(("option", "gpus"), [("auto", 0), ("cpu", 0), ("cuda", 1), ("cuda:3", 4), ("cuda:0", 1)])
def test_what_can_be_done_is_not_refused(option: str, gpus: int) -> None:
    check_server_device(option, gpus)


@given(st.sampled_from(["auto", "cpu", "cuda"]), st.integers(0, 20), st.integers(0, 8), st.booleans())
def test_a_shard_is_on_the_gpu_of_its_number(option: str, shard: int, gpus: int, wanted: bool) -> None:
    index = gpu_of_shard(option, shard, gpus, wanted)
    if option == "cpu" or not gpus or (option == "auto" and not wanted):
        assert index is None
    else:
        assert index == shard % gpus
    assert gpu_of_shard("cuda:2", shard, gpus, wanted) == 2


@pytest.mark.parametrize(
    ("files", "variable", "count"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "2", 1),
        (4, "3, 1", 2),
        (4, "0,7,1", 1),  # entries behind one that is none do not count
        (2, "-1", 0),
        (2, "GPU-8d5a,MIG-11", 2),
        (0, "0", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(files: int, variable: str | None, count: int) -> None:
    assert count_visible(files, variable) == count


def test_one_server_a_gpu_by_default_where_there_are_several() -> None:
    assert [default_servers(gpus, 8, "auto") for gpus in (0, 1, 2, 4, 16)] == [1, 1, 2, 4, 8]
    assert [default_servers(4, 8, option) for option in ("cpu", "cuda", "cuda:1")] == [1, 4, 1]


def test_a_request_takes_the_default_only_where_servers_keep_values(tmp_path: Path) -> None:
    several = {"program": ScriptProgram(__file__), "workers": 4, "gpus": 4}
    assert RunRequest(**several, sync="asp").shards == 4  # type: ignore[arg-type]
    assert RunRequest(**several, sync="asp", servers=2).shards == 2  # type: ignore[arg-type]
    assert RunRequest(**several, sync="bsp").shards == 1  # type: ignore[arg-type]
    assert RunRequest(**several, sync="bsp", via="ps", server_device="cpu").shards == 1  # type: ignore[arg-type]
    asked = RunRequest(**several, sync="bsp", server_device="cuda")  # type: ignore[arg-type]
    assert (asked.way, asked.shards) == ("ps", 4)
    with pytest.raises(UsageError, match="--via allreduce cannot do --server-device"):
        RunRequest(**several, via="allreduce", server_device="cuda").checked()  # type: ignore[arg-type]
    assert RunRequest(**several, sync="asp", server_device="cuda").checked().options()["server_device"] == "cuda"  # type: ignore[arg-type]

"""Where a stage computes: by the user's word, the rank on its host, and the GPUs that the process sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.pipeline.builder import asks_for_gpu, chosen, shared_device


@given(local_rank=st.integers(0, 20), gpus=st.integers(1, 8), stages=st.integers(1, 8), data=st.data())
def test_a_gpu_without_a_number_is_that_of_the_local_rank(
    local_rank: int, gpus: int, stages: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    wanted = torch.device("cuda", local_rank % gpus)
    assert chosen("cuda", stage, stages, local_rank, gpus) == wanted
    assert chosen(None, stage, stages, local_rank, gpus, asks=True) == wanted
    assert chosen(None, stage, stages, local_rank, gpus) is None
    given = [f"cuda:{one % gpus}" if one % 3 else "cpu" for one in range(stages)]
    assert chosen(given, stage, stages, local_rank, gpus) == torch.device(given[stage])


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [
        ("cuda", 0, "this process sees none"),
        ("cuda:2", 2, "from cuda:0 to cuda:1, got 'cuda:2'"),
        (["cpu"], 0, "a device for each of 2 stages, got 1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: Any, gpus: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(device, 0, 2, 0, gpus)


def test_a_model_and_an_example_on_the_cpu_ask_for_no_gpu_and_share_no_device() -> None:
    assert not asks_for_gpu((torch.ones(1), 3), [torch.ones(1)])
    assert not asks_for_gpu(None, [])
    assert shared_device(torch.device("cpu")) is None

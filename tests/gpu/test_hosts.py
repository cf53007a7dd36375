"""CUDA values that leave the device: compression computed on the GPU gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch

from polytempo.compression.chain import parse_chain
from polytempo.compression.encoding import as_bytes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(120),
]

CHAINS = ("bf16", "fp16", "int8", "sign", "topk:0.01", "topk:0.1+bf16", "significant:0.5", "significant:0.5+fp16")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GPU = torch.device("cuda", 0)


def feed(seed: int, size: int, dtype: torch.dtype, bad: bool) -> torch.Tensor:
    """Values of very different sizes, of which many are equal in size."""
    dice = torch.Generator().manual_seed(seed)
    values = torch.randint(-60, 61, (size,), generator=dice).double() / 7
    values *= 10.0 ** torch.randint(-3, 3, (size,), generator=dice)
    if bad:
        values[torch.randint(size, (3,), generator=dice)] = torch.tensor([torch.inf, -torch.inf, torch.nan]).double()
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_on_the_gpu_equals_the_cpus(text: str, dtype: torch.dtype) -> None:
    """Messages bit for bit where all values are numbers, what is read and held back always; also decoded on the GPU."""
    spec, loose = parse_chain(text), text == "sign" and dtype == torch.float64
    for size in (3, 1000, 300_007):
        host, device = spec.new(size, dtype), spec.new(size, dtype, GPU)
        for step in range(4):
            values = feed(step, size, dtype, bad=step == 2)
            expected = host.encode(values)
            encoded = device.encode_tensors(values.to(GPU))
            assert all(part.device == GPU for part in encoded)
            got = [as_bytes(part.cpu()) for part in encoded]
            if loose:  # the mean is added up in another order: its last digits may differ
                torch.testing.assert_close(encoded[0].cpu(), torch.from_numpy(expected[0].view("float64")), equal_nan=True)
                device.load(host.state())
                got[0] = expected[0]
            elif step != 2:
                assert [part.tobytes() for part in got] == [part.tobytes() for part in expected], (size, step)
            read = spec.decode(expected, size, dtype)
            for other in (spec.decode(got, size, dtype), spec.decode(got, size, dtype, GPU).cpu()):
                torch.testing.assert_close(other, read, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(device.residual, host.residual), (size, step)
    again = spec.new(size, dtype, GPU)
    again.load(device.state())
    assert torch.equal(again.residual, host.residual)

"""A job on the GPU has the values of the same job on the CPU: barrier modes, every mode with one worker, each optimizer; and
two jobs on the GPU have the same bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from small_training import OPTIMIZERS, network, trained

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob

if TYPE_CHECKING:
    from live import Bench

pytestmark = pytest.mark.timeout(150)
DEVICE = os.environ.get("POLYTEMPO_TEST_DEVICE", "cuda")
SCRIPT = str(Path(__file__).parent / "train_on_gpu.py")
LAYOUTS = ("SGD momentum/server/channels_last", "AdamW/delta", "AdamW/delta/channels_last")
Values = dict[str, list[torch.Tensor]]


def on_gpu(bench: Bench, cases: Sequence[str], *flags: str, folder: str = "values", alike: bool = True) -> Values:
    """Rank 0's values of a job of processes on the GPU; all ranks have the same, if `alike`."""
    where = bench.folder / folder
    where.mkdir()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
    done = bench.run("run", *flags, SCRIPT, DEVICE, str(where), *cases, timeout=70)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(path) for path in sorted(where.iterdir())]
    for other in ranks[1:] if alike else ():
        same(ranks[0], other)
    return dict(ranks[0])


def on_cpu(cases: Sequence[str], workers: int, sync: str, servers: int = 1) -> Values:
    """The same job in threads, on the CPU."""

    def work(session: Session) -> Values:
        found = {}
        for case in cases:
            name, apply, layout = [*case.split("/"), "", ""][:3]
            options = {"apply": apply} if apply else {}
            found[case] = trained(session.rank, session.size, "cpu", OPTIMIZERS[name], layout, **options)
        return found

    with ThreadJob(workers, servers, sync) as job:
        return job.run(work)[0]


def same(one: Values, other: Values) -> None:
    for name, values in one.items():
        for a, b in zip(values, other[name], strict=True):
            assert torch.equal(a, b), name


def close(one: Values, other: Values) -> None:
    for name, values in one.items():
        for a, b in zip(values, other[name], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("servers", [1, 2])
def test_bsp_over_servers_with_each_optimizer(servers: int, bench: Bench) -> None:
    cases = [*OPTIMIZERS, *LAYOUTS]
    flags = ("-n", "2", "--via", "ps", "--servers", str(servers))
    first = on_gpu(bench, cases, *flags)
    close(first, on_cpu(cases, 2, "bsp", servers))
    if servers == 1:
        same(first, on_gpu(bench, cases, *flags, folder="again"))


def test_bsp_by_all_reduce_with_each_optimizer(bench: Bench) -> None:
    cases = [*OPTIMIZERS, "SGD momentum/server/channels_last"]
    flags = ("-n", "2", "--via", "allreduce")
    first = on_gpu(bench, list(OPTIMIZERS), *flags)
    close(first, on_cpu(cases, 2, "bsp"))
    same(first, on_gpu(bench, list(OPTIMIZERS), *flags, folder="again"))


@pytest.mark.parametrize(
    ("sync", "flags"),
    [
        ("local:4", ()),
        ("local:4", ("--servers", "2")),
        ("adacomm:4", ()),
        ("diloco:4,fragments=2,overlap=1", ()),
        ("gossip:ring", ()),
    ],
    ids=str,
)
def test_local_steps_and_neighbours(sync: str, flags: tuple[str, ...], bench: Bench) -> None:
    close(on_gpu(bench, ["SGD", "AdamW"], "-n", "2", "--sync", sync, *flags), on_cpu(["SGD", "AdamW"], 2, sync))


@pytest.mark.parametrize("sync", ["asp", "ssp:1", "delay:2", "diloco:4,quorum=1,grace=0", "easgd:4", "adpsgd:ring"])
def test_modes_whose_result_depends_on_the_order_of_two_workers(sync: str, bench: Bench) -> None:
    """Near the values of a loop with the whole batch; the outer momentum of DiLoCo goes farthest."""
    cases = ["SGD"] if "ring" in sync or "diloco" in sync else ["SGD", "SGD momentum", "AdamW"]
    found, whole = on_gpu(bench, cases, "-n", "2", "--sync", sync, alike=False), on_cpu(cases, 2, "bsp")
    first = [param.detach() for param in network("cpu").parameters()]
    for case in cases:
        for start, value, expected in zip(first, found[case], whole[case], strict=True):
            assert bool(value.isfinite().all())
            assert not torch.equal(start, value)
            torch.testing.assert_close(value, expected, rtol=0, atol=0.3)


def test_each_collective(bench: Bench) -> None:
    script = str(Path(__file__).parent / "collectives_on_gpu.py")
    done = bench.run("run", "-n", "3", script, DEVICE, timeout=70)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("100 calls as on the CPU") == 3, done.stdout


MODES = (
    *("bsp", "ssp:3", "dssp:3..15", "asp", "every:4", "delay:0", "downpour:push=8,fetch=8", "asup"),
    *("local:4", "adacomm:4", "diloco:4", "easgd:4", "asp,momentum=lookahead", "ssp:3,momentum=worker"),
    *("delay:0,momentum=lookahead", "asp,momentum=lookahead,spike=1.1"),
)


@pytest.mark.parametrize("sync", MODES)
def test_every_mode_with_one_worker(sync: str, bench: Bench) -> None:
    """`delay` and `downpour` go on while an exchange is under way, so only these forms of them have one result."""
    cases = ["SGD"] if sync == "asup" else ["SGD", "SGD momentum", "AdamW", *LAYOUTS[:1]]
    close(on_gpu(bench, cases, "-n", "1", "--sync", sync, "--servers", "1"), on_cpu(cases, 1, sync))

"""`make proof`: bars that need many seeds. Results in out/proof/.

prediction: live runs against the simulator fitted on one of them: seconds within 10 %, waiting within 5 points
modes     time to 95 % on digits, many paired seeds, on three clusters: which mode wins where, with its spread
records   random clusters on which everything happens, every mode: each record keeps every promise and replays
tables    a table of 20 million rows on two servers: memory, traffic, checkpoint
scripts   random training scripts against plain PyTorch, in threads, and some with processes
asup      ASU-P against bsp with the same update rule, one worker three times slower, paired seeds
accuracy  local steps, AdaComm and DiLoCo against bsp given the same samples: a small CNN with batch norm, live
network   time to a target loss on two hosts at 100 Mbit/s: local steps against bsp
talk_less the same in virtual time; 64 learners under failures; bytes: the bars of local steps, DiLoCo and gossip
pauses    the longest pause of a worker while another is stopped or killed: decoupled DiLoCo against rounds
strategies bytes, memory and seconds of strategies of four processes: predicted against counted
gpt       examples/gpt.py under every strategy: its validation loss against one process with the same samples
auto      strategy="auto" against all factorisations of 4 x schedules x microbatch counts, each measured, on three models
elastic   elastic averaging against bsp: digits in virtual time, 4 to 16 workers, even and with a slow one; paired seeds
asynchronous  what asynchronous modes end with at bsp's rate and momentum, against bsp: digits, a CNN, a GPT; paired seeds
uneven    time to 87 % on Fashion-MNIST of all modes on four clusters, with slow and stalled workers
uneven_live  workers of unequal speed, live: waiting, samples a second; a worker that changes its speed
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from rich.progress import track

from asup import asup
from asynchronous import asynchronous
from auto_strategy import auto_strategy
from elastic import elastic
from gpt_strategies import gpt_strategies
from local_accuracy import local_accuracy
from measure import save
from pauses import longest_pauses
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Hiccup, Lognormal
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec
from prediction import predict
from scripts_proof import scripts
from slow_network import slow_network
from strategies import strategies
from tables_proof import tables
from talk_less import talk_less
from uneven import uneven
from uneven_live import uneven_live

OUT = Path("out/proof")
COMPARED = ("bsp", "bsp+backup:1", "ssp:3", "dssp:3..15", "asp", "every:8", "delay:3")
CLUSTERS = {
    "even": Cluster(step_time=Lognormal(1.0, 0.1)),
    "one 3x slower": Cluster(step_time=Lognormal(1.0, 0.1), slow={3: 3.0}),
    "stalls": Cluster(step_time=Lognormal(1.0, 0.1), hiccup=Hiccup(0.05, 10.0)),
}
CHECKED = (
    *COMPARED,
    "ssp:0",
    "dssp:0..4",
    "dssp-paper:1..6",
    "every:3,wait=1",
    "delay:0",
    "downpour:push=3,fetch=2,warm=7",
    "asup,bound=2",
    "asp,drop=2",
    "local:3",
    "local:4,after=5",
    "adacomm:2",
    "diloco:3",
    "diloco:4,quorum=2",
    "diloco:4,quorum=2,grace=1,drop=2",
    "easgd:3",
    "easgd:4,rho=0.5,overlap=1",
    "gossip:ring",
    "gossip:exp",
    "gossip:full,overlap=1",
    "adpsgd:ring",
    "adpsgd:exp",
    "bsp+balance",
    "bsp+balance,micro=4",
    "anytime:auto",
    "anytime:auto,late=keep",
    "anytime:0.7",
)


def modes(seeds: int) -> None:
    import torch

    from polytempo.simulate.virtual_training import train_virtually
    from polytempo.tasks import digits

    torch.set_num_threads(1)
    times: dict[str, dict[str, list[float]]] = {}
    for name, cluster in CLUSTERS.items():
        for sync in track(COMPARED, description=name):
            for seed in range(seeds):
                task = digits(seed)
                optimizer = partial(torch.optim.SGD, lr=task.lr)
                run = train_virtually(
                    task.model, task.data, task.loss, sync=sync, cluster=cluster, optimizer=optimizer, steps=1600,
                    evaluate_every=2.0, seed=seed,
                )  # fmt: skip
                times.setdefault(name, {}).setdefault(sync, []).append(run.time_to(task.target) or float("inf"))
    rows = tuple((name, *(_mean(values) for values in by_mode.values())) for name, by_mode in times.items())
    title = f"Simulated seconds to 95 %, mean and deviation over {seeds} seeds"
    save(OUT, "modes", [TextTable(title, ("cluster", *COMPARED), rows)], times)


def _mean(values: list[float]) -> str:
    there = [value for value in values if value != float("inf")]
    missed = f", {len(values) - len(there)} never" if len(there) < len(values) else ""
    if len(there) < 2:
        return f"{there[0]:.0f}{missed}" if there else "never"
    return f"{statistics.mean(there):.0f} ±{statistics.stdev(there):.0f}{missed}"


def records(seeds: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pure"))
    from clusters import random_cluster

    lines_of: dict[str, int] = {}
    for seed in track(range(seeds), description="records"):
        cluster = random_cluster(seed)
        for sync in CHECKED:
            if (sync == "bsp+backup:1" or "quorum=2" in sync) and cluster.workers == 1:
                continue
            lines: list[RecordLine] = []
            simulate_job(cluster, sync, seed=seed, steps_each=40, record=lines.append)
            spec = parse_spec(sync)
            check_lines(lines, spec, cluster.workers)
            replay(lines, spec.policy(cluster.workers))
            lines_of[sync] = lines_of.get(sync, 0) + len(lines)
    rows = tuple((sync, f"{count:,}") for sync, count in lines_of.items())
    save(
        OUT,
        "records",
        [TextTable(f"Lines checked and replayed, {seeds} random clusters", ("mode", "lines"), rows)],
        lines_of,
    )


def prediction(steps: int) -> None:
    results = predict(OUT / "prediction", steps)
    rows = []
    for r in results:
        time_off = r["predicted_s"] / r["live_s"] - 1
        waiting_off = 100 * (r["predicted_waiting"] - r["live_waiting"])
        seconds = f"{r['live_s']:.2f}", f"{r['predicted_s']:.2f}", f"{100 * time_off:+.1f} %"
        waiting = f"{100 * r['live_waiting']:.1f}", f"{100 * r['predicted_waiting']:.1f}", f"{waiting_off:+.1f}"
        verdict = "ok" if abs(time_off) <= 0.10 and abs(waiting_off) <= 5 else "MISSED"
        rows.append((r["scene"], r["sync"], *seconds, *waiting, verdict))
    heads = ("scene", "mode", "live\n(s)", "predicted\n(s)", "off", "waiting\n(%)", "predicted\n(%)", "off by", "bar")
    save(OUT, "prediction", [TextTable("Fitted on the recorded bsp run", heads, tuple(rows))], results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        choices=(
            *("modes", "records", "prediction", "tables", "asup", "scripts", "accuracy", "network", "pauses"),
            *("talk_less", "strategies", "auto", "gpt", "uneven", "uneven_live", "asynchronous", "elastic"),
        ),
    )
    parser.add_argument("--seeds", type=int, help="number of seeds instead of 10, 300, 5 and 400 (prediction: steps, 600)")
    arguments = parser.parse_args()
    if arguments.only in (None, "prediction"):
        prediction(arguments.seeds or 600)
    if arguments.only in (None, "tables"):
        tables()
    if arguments.only in (None, "asup"):
        asup(arguments.seeds or 5)
    if arguments.only in (None, "scripts"):
        scripts(arguments.seeds or 400)
    if arguments.only in (None, "accuracy"):
        local_accuracy(arguments.seeds or 5)
    if arguments.only in (None, "network"):
        slow_network()
    if arguments.only in (None, "talk_less"):
        talk_less(arguments.seeds or 5)
    if arguments.only in (None, "asynchronous"):
        asynchronous(seeds=arguments.seeds)
    if arguments.only in (None, "elastic"):
        elastic(arguments.seeds or 10)
    if arguments.only in (None, "uneven"):
        uneven(arguments.seeds or 5)
    if arguments.only in (None, "uneven_live"):
        uneven_live()
    if arguments.only in (None, "strategies"):
        strategies()
    if arguments.only in (None, "auto"):
        auto_strategy()
    if arguments.only in (None, "gpt"):
        gpt_strategies()
    if arguments.only in (None, "pauses"):
        longest_pauses()
    if arguments.only in (None, "records"):
        records(arguments.seeds or 300)
    if arguments.only in (None, "modes"):
        modes(arguments.seeds or 10)


if __name__ == "__main__":
    main()

"""Random training scripts against plain PyTorch (`tests/fuzzed`): in threads, and some with processes.

`make proof ARGS="--only scripts"` runs all. One of them alone, whose seed was printed, and what is left of it when lines are
dropped for as long as it fails:

    python benchmarks/scripts_proof.py --seed 17 --shrink
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzzed"))

from fuzz_processes import SETTINGS, run_job, seeds_for
from fuzz_program import Script, script_of
from fuzz_verdict import Verdict, judge, report, shrunk

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
#: The least share of scripts that must run to their end, so that the absence of failures means something.
LEAST = 0.6
PROCESSES = 20

#: So long no script takes; a hang is shown with the stacks of all threads.
SECONDS = 60


def judged(script: Script) -> Verdict:
    """With an end to waiting."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        return judge(script)
    finally:
        faulthandler.cancel_dump_traceback_later()


def one(seed: int, without: tuple[int, ...], shrink: bool) -> int:
    script = script_of(seed).dropping(without)
    verdict = judged(script)
    if verdict.failed and shrink:
        script = shrunk(script, lambda fewer: judged(fewer).like == verdict.like)
        verdict = judged(script)
    print(report(script, f"{verdict.kind}: {verdict.why}"))
    return int(verdict.failed)


def many(seeds: range) -> dict[int, Verdict]:
    """In threads, one after another; each seed is printed before it runs."""
    verdicts = {}
    for seed in seeds:
        script = script_of(seed)
        print(f"seed {seed} [{script.setting}]", end=" ", flush=True)
        verdicts[seed] = verdict = judged(script)
        print(verdict.kind, verdict.why.strip().splitlines()[-1][:300] if verdict.failed else verdict.why, flush=True)
    return verdicts


def with_processes(count: int) -> dict[str, Verdict]:
    """As many as `count` in real jobs, shared out over all ways."""
    verdicts = {}
    for setting in SETTINGS:
        seeds = seeds_for(setting, -(-count // len(SETTINGS)), first=1000)
        print(f"processes [{setting}] seeds {seeds}", flush=True)
        with tempfile.TemporaryDirectory(prefix="pt-") as folder:
            for seed, verdict in zip(seeds, run_job(setting, seeds, Path(folder)), strict=True):
                verdicts[f"{setting.way} {setting.workers}w{setting.servers}s seed {seed}"] = verdict
                print("   ", seed, verdict.kind, verdict.why[-400:] if verdict.failed else verdict.why, flush=True)
    return verdicts


def scripts(seeds: int) -> None:
    """The proof: none may fail, and most must run to their end."""
    faulthandler.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of what they do, alone as well
        threads, processes = many(range(seeds)), with_processes(PROCESSES)
    rows, ended = [], True
    for where, verdicts in (("threads", list(threads.values())), ("processes", list(processes.values()))):
        tally = Counter(f"{v.kind}: {v.why}" if v.kind == "refused" else v.kind for v in verdicts)
        rows += [(where, kind, str(count)) for kind, count in tally.most_common()]
        ended = ended and tally["same"] >= LEAST * len(verdicts) and not tally["failed"]
    title = f"{seeds} random scripts in threads and {len(processes)} with processes, against plain PyTorch"
    results = {str(seed): [v.kind, v.why] for seed, v in (*threads.items(), *processes.items())}
    save(OUT, "scripts", [TextTable(title, ("where", "outcome", "scripts"), tuple(rows))], results)
    if not ended:
        raise SystemExit(f"a script has failed, or fewer than {LEAST:.0%} have run to their end; see {OUT}/scripts.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", default="", help="numbers of lines to drop")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.seed is not None:
        without = tuple(int(number) for number in arguments.without.split(",") if number)
        sys.exit(one(arguments.seed, without, arguments.shrink))
    verdicts = many(range(arguments.first, arguments.first + arguments.seeds))
    print(Counter(f"{v.kind} {'' if v.failed else v.why}".strip() for v in verdicts.values()))


if __name__ == "__main__":
    main()

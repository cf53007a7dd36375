"""Random training scripts against plain PyTorch (`tests/fuzzed`): in threads, and some with processes.

`make proof ARGS="--only scripts"` runs all. One of them alone, whose seed was printed, and what is left of it when lines are
dropped for as long as it fails:

    python benchmarks/scripts_proof.py --seed 17 --shrink
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzzed"))

from fuzz_program import Script, script_of
from fuzz_verdict import Verdict, judge, report, shrunk

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


def many(seeds: range) -> Counter[str]:
    tally: Counter[str] = Counter()
    for seed in seeds:
        print(f"seed {seed}", end=" ", flush=True)
        script = script_of(seed)
        verdict = judged(script)
        tally["failed" if verdict.failed else f"{verdict.kind} {verdict.why}".strip()] += 1
        print(f"{verdict.kind} {'' if verdict.failed else verdict.why} [{script.setting}]", flush=True)
        if verdict.failed:
            print("    " + verdict.why.strip().splitlines()[-1][:300], flush=True)
    return tally


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
    print(many(range(arguments.first, arguments.first + arguments.seeds)))


if __name__ == "__main__":
    main()

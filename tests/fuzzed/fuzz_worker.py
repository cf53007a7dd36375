"""The worker of a real job that runs several random scripts, one after another: what came of each goes to a file.

polytempo run -n 2 ... fuzz_worker.py FOLDER SEED,SEED,... WAY WORKERS SERVERS
"""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from fuzz_job import outcome_of
from fuzz_program import Setting, script_of

import polytempo as pt
from polytempo.session.session import current


def main(folder: str, seeds: str, way: str, workers: str, servers: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pt.init()
    for seed in seeds.split(","):
        script = script_of(int(seed), Setting(way, int(workers), int(servers)))
        try:
            result = {"outcome": asdict(outcome_of(script, current()))}
        except pt.PolytempoError as error:
            result = {"refused": str(error)}
        except Exception:  # noqa: BLE001  whatever it is, it belongs into the report
            result = {"failed": traceback.format_exc()}
        torch.save(result, Path(folder) / f"{seed}-{pt.rank()}.pt")
    pt.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

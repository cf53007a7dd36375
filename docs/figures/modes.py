"""The tables of docs/reference/modes.md: what goes with which mode. `make figures` writes them anew.

They are `src/polytempo/sync/compatibility.py` for people. A cell is "yes", or the numbers of the remarks that say
when it is not.
"""

from __future__ import annotations

import re
from pathlib import Path

from polytempo.report.table import TextTable
from polytempo.sync.capabilities import MadeOf, PushedWork
from polytempo.sync.compatibility import TABLE, Feature, conflict
from polytempo.sync.spec import every_mode, parse_spec

PAGE = Path(__file__).parents[1] / "reference" / "modes.md"
MODES = tuple(mode.example for mode in every_mode())

#: The columns of each table, and the features that each has; one without a row goes with every mode.
COLUMNS: dict[str, dict[str, tuple[Feature, ...]]] = {
    "jobs and modes": {
        "servers": (Feature.SERVERS, Feature.VIA_PS),
        "all-reduce": (Feature.ALLREDUCE, Feature.VIA_ALLREDUCE),
        "torchrun, mpirun, srun": (Feature.OTHER_LAUNCHER, Feature.NO_SEQUENCER, Feature.NO_SERVERS),
        "joining": (Feature.JOINING,),
        "`--checkpoint`": (Feature.CHECKPOINT,),
        "`--resume`": (Feature.RESUME,),
        "`group=`": (Feature.GROUP,),
        "pipelines": (Feature.PIPELINE, Feature.TIED),
        "tensor parallelism": (Feature.TENSOR,),
    },
    "data and modes": {
        "compression": (
            *(Feature.SELECTION, Feature.COMPRESSED_ANSWERS),
            *(Feature.COMPRESSION_AMONG_WORKERS, Feature.COMPRESSED_CHANGES, Feature.COMPRESSED_VALUES),
        ),
        "`ServerEmbedding`": (Feature.SERVER_EMBEDDING, Feature.ROWS),
        "sparse embeddings": (Feature.SPARSE_EMBEDDING, Feature.ROWS),
        "`KV`": (Feature.KV,),
        '`apply="delta"`': (Feature.DELTA, Feature.DELTA_ON_SERVERS),
        '`buffers="mean"`': (Feature.MEAN_OF_BUFFERS,),
        "GPU memory": (Feature.GPU_MEMORY,),
    },
    "calls and modes": {
        "any optimizer": (Feature.OPTIMIZER, Feature.OTHER_OPTIMIZER, Feature.NO_MOMENTUM),
        "`LBFGS`": (Feature.LBFGS, Feature.OTHER_OPTIMIZER, Feature.DELTA),
        "`synchronize()`": (Feature.SYNCHRONIZE,),
        "`no_sync()`": (Feature.NO_SYNC,),
        "`push_parameters()`": (Feature.PUSH_PARAMETERS,),
        "`fit()`": (Feature.FIT,),
    },
}
#: What a template of a remark names, in capitals as on a command's help page.
_NAMES = re.compile(r"\{(\w+)(?:![rs])?\}")


def remarks() -> dict[str, list[str]]:
    """Each text of the table, with the capabilities from which it follows."""
    shown = {feature for columns in COLUMNS.values() for features in columns.values() for feature in features}
    found: dict[str, list[str]] = {}
    for (capability, feature), row in TABLE.items():
        if feature in shown:
            words = found.setdefault(f"{row.reason}; {row.remedy}", [])
            words += [capability.words] if capability.words not in words else []
    return found


def summary() -> TextTable:
    """The four facts about each mode from which all else follows."""
    made = {
        MadeOf.ALL: "all workers' pushes",
        MadeOf.ROUND: "a round, without late pushes",
        MadeOf.EACH: "each push as it comes",
    }
    work = {
        PushedWork.BATCH: "a batch",
        PushedWork.SHARE: "a share, by speed",
        PushedWork.DEADLINE: "until a deadline",
        PushedWork.LOCAL: "local steps",
    }
    rows = []
    for mode in MODES:
        can = parse_spec(mode).capabilities
        update = "its neighbours' models" if can.neighbours else made[can.update]
        pushes = "models, to neighbours" if can.neighbours else can.pushes.name.lower()
        rows.append((f"`{mode}`", pushes, update, work[can.work], "yes" if can.waits else "no"))
    heads = ("mode", "a worker pushes", "an update is made of", "work for a push", "waits for the answer")
    return TextTable("modes", heads, tuple(rows))


def table(title: str) -> TextTable:
    """A mode in each row, a feature in each column."""
    numbers = {text: number for number, text in enumerate(remarks(), 1)}

    def cell(mode: str, features: tuple[Feature, ...]) -> str:
        rows = [row for feature in features if (row := conflict(parse_spec(mode), feature)) is not None]
        told = sorted({numbers[f"{row.reason}; {row.remedy}"] for row in rows})
        return ", ".join(map(str, told)) or "yes"

    columns = COLUMNS[title]
    rows = tuple((f"`{mode}`", *(cell(mode, features) for features in columns.values())) for mode in MODES)
    return TextTable(title, ("mode", *columns), rows)


def listed_remarks() -> str:
    """The remarks by their numbers."""
    lines = []
    for number, (text, words) in enumerate(remarks().items(), 1):
        plain = _NAMES.sub(lambda name: name[1].upper(), text).replace("{{", "{").replace("}}", "}")
        lines.append(f"{number}. *{' / '.join(words)}*: {plain.replace('; use INSTEAD', '')}")
    return "\n".join(lines) + "\n"


def page_with_tables(page: str) -> str:
    """The page, all between its marks made anew."""
    for one in (summary(), *map(table, COLUMNS)):
        page = one.put_into(page)
    start, end = "<!-- remarks -->\n", "<!-- end of remarks -->"
    before, rest = page.split(start)
    return f"{before}{start}{listed_remarks()}{end}{rest.split(end)[1]}"


def main() -> None:
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.relative_to(PAGE.parents[2])}")


if __name__ == "__main__":
    main()

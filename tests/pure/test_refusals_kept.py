"""No refusal vanishes by accident: `refusals.txt` holds what `src/` could say at one time, a template on each line.

A text that is said in other words is in `REWORDED`, old to new. After texts were added:
`python tests/pure/test_refusals_kept.py` writes the file anew, with what it had and what there is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from polytempo.sync.compatibility import TABLE

SOURCE = Path(__file__).parents[2] / "src/polytempo"
KEPT = Path(__file__).with_name("refusals.txt")

_TIED = (
    "stages {} hold {}, and under sync={} its copies would be updated in different orders and drift apart; use bsp, local "
    "or diloco, or stages= that keep it in one"
)
#: What was said in other words since, and how it is said now.
#: What only tests have ever asked, and says its refusals there.
ORACLES = ("plan_checker.py", "planning.py")
REWORDED = {
    **dict.fromkeys(
        [f"{{}}: expected {kind}, got {{}}" for kind in ("a number", "a whole number", "a word", "true or false")],
        "{}: expected {}, got {}",
    ),
    "stages {} hold the same parameter, and {} applies the steps of each stage in an order of its own, so that the copies "
    "would drift apart; use bsp, local:K or diloco:K, or cut the model so that one stage holds it": _TIED,
    "stages {} hold the same parameter {}, and under sync={} its copies would be updated in different orders and drift "
    "apart; use bsp, local or diloco, or stages= that keep it in one": _TIED,
    "push_parameters() is not possible in decoupled DiLoCo: values are this worker's own at all times; change them before "
    "DistributedOptimizer()": (
        "push_parameters() is not possible in {}: values are this worker's own at all times; change them before "
        "DistributedOptimizer()"
    ),
    "sync={} needs {}, which {} does not start; use polytempo run": (
        "sync='{}' needs servers, which {} does not start; use polytempo run"
    ),
    "{}: build of {} makes {}, expected a Policy": "{}: {} of {} makes {}, expected a {}",
    "{}: machine of {} makes {}, expected a WorkerMachine": "{}: {} of {} makes {}, expected a {}",
    "{} for shard {} came from {}": "{} for {} {} came from {}",
    "{} for worker {} came from {}": "{} for {} {} came from {}",
    "{}: expected {}; got {}": "{}: {} {}; got {}",
    "{}: {} needs {}; got {}": "{}: {} {}; got {}",
    "invalid lease (segment {}, byte {}): that segment was not handed over or is smaller": (
        "invalid lease ({}): that segment was not handed over or is smaller"
    ),
    "a message of {} bytes was refused; at most {} are taken, and lengths must be true": (
        "a message of {} bytes was refused: at most {} are taken, and lengths must be true"
    ),
    "{} cannot go by {}; use {}": "{} cannot go by {}; use ps, or gossip:ring with peers",
    "ps, or gossip:ring with peers": "{} cannot go by {}; use ps, or gossip:ring with peers",
    "peers: its values go from worker to worker": "{} cannot go by {}; use peers: its values go from worker to worker",
    "{} from a barrier (wait=)": "stages could leave out different replicas from a barrier (wait=)",
    "{} from a merge (quorum=)": "stages could leave out different replicas from a merge (quorum=)",
    "{} from a round": "stages could leave out different replicas from a round",
    **dict.fromkeys(
        [f"{{}}: expected {what}, got {{}}" for what in ("a number", "a whole number", "a word", "true or false")],
        "{}: expected {}, got {}",
    ),
}

#: Functions and tables with such a name make texts of refusals, though they may raise nothing themselves.
_SAYS_WHY = re.compile("refus|unsound|why|missing", re.IGNORECASE)


def blank(text: str) -> str:
    """With `{}` for each place that `str.format` fills in."""
    return re.sub(r"\{\w*(![rs])?\}", "{}", text).replace("{{", "{").replace("}}", "}")


def template(node: ast.AST) -> str | None:
    """A string literal with `{}` for what is filled in, by an f-string or by `str.format`; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return blank(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def literals(tree: ast.AST) -> Iterator[str]:
    """The templates below a node, without docstrings and without the pieces of f-strings."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        found = template(node)
        if found is not None:
            yield found
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, ast.JoinedStr):  # what is filled in may be chosen between literals
            waiting += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]


def refusals(tree: ast.Module) -> Iterator[str]:
    """The texts that a module can refuse something with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from (text for text in literals(node.exc) if " " in text)
        if isinstance(node, ast.FunctionDef | ast.Assign | ast.AnnAssign):
            raises = isinstance(node, ast.FunctionDef) and any(isinstance(one, ast.Raise) for one in ast.walk(node))
            if raises or any(_SAYS_WHY.search(name) for name in _names(node)):
                yield from (text for text in literals(node) if text.count(" ") >= 3)


def _names(node: ast.FunctionDef | ast.Assign | ast.AnnAssign) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def modules() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))]


@cache
def said_now() -> frozenset[str]:
    of_table = {blank(f"{row.reason}; {row.remedy}") for row in TABLE.values()}
    oracles = [ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8")) for name in ORACLES]
    return frozenset(of_table.union(text for tree in [*modules(), *oracles] for text in literals(tree)))


def test_no_refusal_has_vanished() -> None:
    kept = [ast.literal_eval(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
    gone = [text for text in kept if REWORDED.get(text, text) not in said_now()]
    assert not gone, "not in src/ any more: say them, or add them to REWORDED with the words of now"


def test_what_was_reworded_is_not_said_any_more() -> None:
    assert not [old for old in REWORDED if old in said_now()]


if __name__ == "__main__":
    before = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    found = {repr(text) for tree in modules() for text in refusals(tree)}
    KEPT.write_text("".join(f"{line}\n" for line in sorted(found.union(before))), encoding="utf-8")

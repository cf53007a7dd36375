"""Mistakes planted in copies of our own modes: one fragment of the source of each is another."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from polytempo.door import read_sync
from polytempo.sync import machine
from polytempo.sync.spec import Spec, parse_spec

SYNC = Path(machine.__file__).parent

#: The machine of modes that declare none, as a class of the copy's own.
STEPS = f"""
from polytempo.sync.machine import *


{inspect.getsource(machine.StepMachine)}
"""


@dataclass(frozen=True)
class Copy:
    """Files of our own modes, one after the other, and what is written after them."""

    files: tuple[str, ...]
    mode: str  #: its name in the copy, and its argument
    more: str = ""

    def source(self) -> str:
        """The text of one file."""
        parts = []
        for file in self.files:
            text = (SYNC / f"{file}.py").read_text("utf-8").replace("from __future__ import annotations\n", "")
            for other in self.files:  # what stands in the copy is not imported
                text = re.sub(rf"from polytempo\.sync\.{other} import (\([^)]*\)|.*)\n", "", text)
            parts.append(text)
        return "\n".join(["from __future__ import annotations", *parts, self.more])


def with_steps(mode: str, *files: str) -> Copy:
    """A copy whose machine is a copy, too."""
    name, colon, argument = mode.partition(":")
    own = f"OWN = replace({name}, machine=lambda worker, last, *_, **__: StepMachine(last))"
    return Copy(files, f"OWN{colon}{argument}", f"from dataclasses import replace\n{STEPS}\n{own}\n")


SSP = Copy(("asynchronous", "ssp"), "SSP:2")
ASP = Copy(("asynchronous",), "ASP")
BSP = Copy(("barrier",), "BSP")
BACKUP = Copy(("barrier",), "BACKUP:1")
DELAY = Copy(("delay",), "DELAY:2")
LOCAL = Copy(("blocks", "barrier", "local_sgd"), "LOCAL:2")
DOWNPOUR = Copy(("downpour",), "DOWNPOUR")
GOSSIP = Copy(("topology", "gossip"), "GOSSIP:exp")
ADPSGD = Copy(("adpsgd",), "ADPSGD:ring")
STEPPED_SSP, STEPPED_BACKUP = with_steps("SSP:2", "ssp"), with_steps("BACKUP:1", "barrier")


@dataclass(frozen=True)
class Planted:
    """A mistake."""

    name: str
    copy: Copy
    fragment: str
    mistake: str
    promise: str  #: that is found broken
    said: str  #: a pattern in the line

    def source(self) -> str:
        """The copy with the mistake."""
        source = self.copy.source()
        assert source.count(self.fragment) == 1, f"{self.fragment!r} is {source.count(self.fragment)} times in the copy"
        return source.replace(self.fragment, self.mistake)

    def line(self) -> int:
        """The first line of the mistake."""
        return self.copy.source().partition(self.fragment)[0].count("\n") + 1


GOES_ON = "        worker, step = push.worker, push.step + 1\n        progress = self.progress\n"
RATE, OWN_RATE = "rate_of(self.scale, len(progress.pushed))", "1 / len(progress.pushed)"
CLOSES = "if len(self._arrived) >= self._quorum():\n            return self._close(now)\n        return self._held"
PUSH = "            self.computes = False\n            return PUSHES"
HELD = r"may not start|nothing can happen"  # by one who looks at the bound, or by all who wait

PLANTED = (
    Planted(
        "bound off by one",
        SSP,
        "return step - self.bound <= progress.slowest",
        "return step - self.bound <= progress.slowest + 1",
        "lead",
        "3 ahead of the slowest; at most 2",
    ),
    Planted(
        "held too late",
        SSP,
        "return step - self.bound\n",
        "return step - self.bound - 1\n",
        "orders|lead",
        "IndexError|at most",
    ),
    Planted(
        "bound too narrow",
        SSP,
        "return step - self.bound <= progress.slowest",
        "return step - self.bound < progress.slowest",
        "waits|orders",
        "may not start step .* up to 2 ahead|IndexError",
    ),
    Planted(
        "lost wake-up",
        SSP,
        "if moved and self.room.by_step:",
        "if moved and len(self.room.by_step) > 1:",
        "waits|liveness",
        HELD,
    ),
    Planted(
        "starving worker",
        SSP,
        "for worker, step in released]",
        "for worker, step in released[:1]]",
        "waits|liveness",
        HELD,
    ),
    Planted(
        "a leaver frees no worker",
        SSP,
        "self.gate.forget(worker)\n        return self._open(now)",
        "self.gate.forget(worker)\n        return []",
        "waits|liveness",
        HELD,
    ),
    Planted(
        "fails when one leaves",
        SSP,
        "self._released_at.pop(worker, None)\n",
        "self._released_at.pop(worker + 1)\n",
        "orders",
        "KeyError",
    ),
    Planted(
        "says a step that is over",
        SSP,
        "actions.append(Release(worker, step, progress.slowest))",
        "actions.append(Release(worker, step, max(progress.slowest - 1, 0)))",
        "slowest",
        "says slowest=0, the slowest is at 1",
    ),
    Planted(
        "double apply",
        ASP,
        f"[Apply((push,), {RATE})]",
        f"[Apply((push,), {OWN_RATE} / 2), Apply((push,), {OWN_RATE} / 2)]",
        "orders",
        "decided on already",
    ),
    Planted("wrong rate", ASP, RATE, "1.0", "even", "at rate 1, expected 0.5 with 2"),
    Planted("rate of the initial workers", ASP, RATE, "1 / self.workers", "even", "at rate .*, expected"),
    Planted(
        "joiner starts at 0",
        ASP,
        "    def on_leave(",
        "    def entry_step(self) -> int:\n        return 0\n\n    def on_leave(",
        "joiner",
        "starts at step 0; the slowest one is at 1",
    ),
    Planted(
        "dice",
        ASP,
        "            return actions\n",
        "            import random\n            return [*actions, *[Wake(now + 1)] * random.randrange(2)]\n",
        "same again",
        "answered in another way",
    ),
    Planted("lost release", BSP, "if not self._arrived and not self._behind:", "if True:", "waits|liveness", HELD),
    Planted(
        "order of arrival",
        BSP,
        "tuple(sorted(self._arrived, key=lambda push: push.worker))",
        "tuple(self._arrived)",
        "round",
        "order of arrival",
    ),
    Planted(
        "weights by count",
        BSP,
        "Apply(pushes, 1.0, divisor=rule.divisor(pushes))",
        "Apply(pushes, 1.0, tuple(float(push.count) for push in pushes))",
        "even",
        "an update with weights",
    ),
    Planted(
        "a round without a worker",
        BSP,
        CLOSES,
        CLOSES.replace("self._quorum()", "max(self._quorum() - 1, 1)"),
        "round|lead|quorum",
        "without worker|ahead|promised are",
    ),
    Planted(
        "late push forgotten",
        BACKUP,
        "return [self._discarded(push), release]",
        "return [release]",
        "orders",
        "its next is|before its last push is applied or discarded",
    ),
    Planted(
        "a backup too many",
        BACKUP,
        "return min(max(self.workers, members) - self.backups, members)",
        "return max(min(max(self.workers, members) - self.backups - 1, members), 1)",
        "quorum",
        "promised are",
    ),
    Planted("too far", DELAY, "push.step + 1 + self.delay", "push.step + 2 + self.delay", "orders", "its next is"),
    Planted(
        "released twice",
        DELAY,
        "range(self.delay + 1)",
        "(*range(self.delay + 1), self.delay)",
        "orders",
        "for step 2, after step 2",
    ),
    Planted(
        "does not wait",
        LOCAL,
        "return any(not part.started or (part.is_under_way and self._is_over(part)) for part",
        "return any(not part.started for part",
        "orders",
        "does not wait",
    ),
    Planted("optimizer reset", LOCAL, '("reset" if momentum else "keep")', '"reset"', "alone", "off a plain loop"),
    Planted("fetches twice", DOWNPOUR, "if self._due and not self._fetching:", "if self._due:", "orders", "fetches twice"),
    Planted("more than there is", GOSSIP, "1 - share * len(hops),", "1 - share * (len(hops) - 1),", "rows", "not 1"),
    Planted(
        "receives another share",
        GOSSIP,
        "tuple((members[(position - hop) % count], share) for hop in hops)",
        "tuple((members[(position - hop) % count], share / 2) for hop in hops)",
        "rows",
        "which counts",
    ),
    Planted("averages always", ADPSGD, "self._pair.grants() and self._has_model", "True", "orders", "averages"),
    Planted(
        "a partner's end goes unheard",
        ADPSGD,
        "self._wait_is_over(averaged=False) if self._pair.lost(worker) else NO_ORDERS",
        "NO_ORDERS",
        "liveness|orders",
        "nothing can happen|waits",
    ),
    Planted(
        "drops the last push",
        STEPPED_SSP,
        PUSH,
        PUSH + " if step < self.last else NO_ORDERS",
        "orders|liveness",
        "not pushed|nothing can happen",
    ),
    Planted(
        "an order of other modes",
        STEPPED_SSP,
        PUSH,
        PUSH.replace("PUSHES", "(StepHere(step), *PUSHES)"),
        "orders",
        "orders StepHere",
    ),
    Planted(
        "runs ahead of releases",
        STEPPED_SSP,
        "if step <= self.allowed and step < self.last",
        "if step <= self.allowed + 1 and step < self.last",
        "orders",
        "without a release",
    ),
    Planted(
        "forgets what was dropped",
        STEPPED_BACKUP,
        "self._dropped, self.step = False, allowed\n",
        "self._dropped = False\n",
        "orders",
        "pushes step|without a release",
    ),
)


def brought(source: str, mode: str, folder: Path, name: str) -> Spec:
    """The spec of a mode in a file with this source."""
    file = folder / f"{name}.py"
    file.write_text(source, "utf-8")
    return parse_spec(read_sync(f"{file}:{mode}"))

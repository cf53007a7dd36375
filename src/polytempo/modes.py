"""What a file of a mode is written with: `from polytempo.modes import ...`. `docs/write-a-mode.md` builds one in a page.

    Mode                     the declaration: name, argument and options, both halves, what it can do, what it promises
    Policy                   the coordinator's half, and what it is told and answers with
    WorkerMachine            the worker's half, and what it is told and orders
    Capabilities, Promises   facts about the mode, as values

All of it is pure: no clock, no tensor, no socket, no file. The same object runs live, in virtual time and in a proof.
"""

from __future__ import annotations

from polytempo.errors import SpecError
from polytempo.options import choice, fraction, number, positive_number, switch, whole_number
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.asynchronous import AsynchronousPolicy, Gate
from polytempo.sync.barrier import Barrier, RoundRule
from polytempo.sync.blocks import Averaging, BlockMachine, machine_of_blocks
from polytempo.sync.capabilities import Capabilities, MadeOf, Promises, PushedWork, Pushes, Unsound
from polytempo.sync.directives import Mixing, NextBlock, NextMixing
from polytempo.sync.events import Event, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.fields import Fields, fields
from polytempo.sync.machine import (
    AllArrived,
    AskAgain,
    Asked,
    Compute,
    Computed,
    Dropped,
    EndBlock,
    GoHome,
    Install,
    Leaving,
    Orders,
    PushStep,
    SendPush,
    Settle,
    StepHere,
    StepMachine,
    WorkerEvent,
    WorkerMachine,
)
from polytempo.sync.mode import SCALE, Mode, rate_of
from polytempo.sync.policy import Policy
from polytempo.sync.progress import HeldWorkers, Progress

__all__ = [
    "SCALE",
    "Action",
    "Admit",
    "AllArrived",
    "Apply",
    "AskAgain",
    "Asked",
    "AsynchronousPolicy",
    "Averaging",
    "Barrier",
    "BlockMachine",
    "Capabilities",
    "Compute",
    "Computed",
    "Discard",
    "Dropped",
    "EndBlock",
    "Event",
    "Fields",
    "Gate",
    "GoHome",
    "HeldWorkers",
    "Hold",
    "Install",
    "Joined",
    "Leaving",
    "Left",
    "MadeOf",
    "Measured",
    "Mixing",
    "Mode",
    "NextBlock",
    "NextMixing",
    "Orders",
    "Policy",
    "Progress",
    "Promises",
    "PushStep",
    "Pushed",
    "PushedWork",
    "Pushes",
    "Refuse",
    "Release",
    "RoundRule",
    "SendPush",
    "Settle",
    "SpecError",
    "StepHere",
    "StepMachine",
    "Ticked",
    "Unsound",
    "Wake",
    "WorkerEvent",
    "WorkerMachine",
    "choice",
    "fields",
    "fraction",
    "machine_of_blocks",
    "number",
    "positive_number",
    "rate_of",
    "switch",
    "whole_number",
]

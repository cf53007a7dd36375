"""The words users type: the good ones build what they say, the bad ones are refused in one line that helps."""

from __future__ import annotations

import pytest

from polytempo.errors import SpecError
from polytempo.sync.asynchronous import AsynchronousPolicy, Unbounded
from polytempo.sync.barrier import Barrier
from polytempo.sync.corrections import Compensation, Corrections
from polytempo.sync.delay import Delay
from polytempo.sync.downpour import DownpourPolicy, LocalSteps
from polytempo.sync.dssp import DynamicBound
from polytempo.sync.dssp_paper import PrintedBound
from polytempo.sync.every import Periodic
from polytempo.sync.spec import MODES, parse_spec
from polytempo.sync.ssp import Bound

WORKERS = 4


def refusal(text: str) -> str:
    """What is said to somebody who types this."""
    with pytest.raises(SpecError) as caught:
        parse_spec(text).policy(WORKERS)
    said = str(caught.value)
    assert "\n" not in said, "more than one line"
    return said


# Good ones.


@pytest.mark.parametrize(("text", "backups"), [("bsp", 0), ("bsp+backup:1", 1), ("bsp+backup:3", 3)])
def test_rounds(text: str, backups: int) -> None:
    policy = parse_spec(text).policy(WORKERS)
    assert isinstance(policy, Barrier)
    assert policy.backups == backups


@pytest.mark.parametrize(
    ("text", "kind", "memory"),
    [
        ("asp", Unbounded, {}),
        ("ssp:3", Bound, {"bound": 3}),
        ("ssp:0", Bound, {"bound": 0}),
        ("dssp:3..15", DynamicBound, {"lower": 3, "upper": 15}),
        ("dssp:3..3", DynamicBound, {"lower": 3, "upper": 3}),
        ("dssp-paper:3..15", PrintedBound, {"lower": 3, "upper": 15}),
        ("every:8", Periodic, {"period": 8, "timed": False}),
        ("every:8,wait=2", Periodic, {"period": 8, "timed": True}),
        ("every:8,wait=0.5", Periodic, {"period": 8, "timed": True}),
        ("asup", Unbounded, {}),
        ("asup,bound=3", Bound, {"bound": 3}),
        ("asup:bound=3,momentum=0.5,rho=0,eps=1,initial=1", Bound, {"bound": 3}),
        ("ssp:3,drop=8,dc=0.04,lr=staleness,decay=0.5,momentum=async", Bound, {"bound": 3}),
    ],
)
def test_gates(text: str, kind: type, memory: dict[str, object]) -> None:
    policy = parse_spec(text).policy(WORKERS)
    assert isinstance(policy, AsynchronousPolicy)
    assert type(policy.gate) is kind
    assert {name: getattr(policy.gate, name) for name in memory} == memory
    assert policy.scale is None
    assert policy.workers == WORKERS


@pytest.mark.parametrize(("text", "delay"), [("delay:8", 8), ("delay:0", 0)])
def test_delays(text: str, delay: int) -> None:
    policy = parse_spec(text).policy(WORKERS)
    assert isinstance(policy, Delay)
    assert policy.delay == delay


@pytest.mark.parametrize(
    ("text", "push", "warm", "local"),
    [
        ("downpour", 1, 0, LocalSteps()),
        ("downpour:push=5,fetch=3", 5, 0, LocalSteps(5, 3)),
        ("downpour,push=5,fetch=3", 5, 0, LocalSteps(5, 3)),
        ("downpour:fetch=3", 1, 0, LocalSteps(1, 3)),
        ("downpour:push=5,warm=20,alpha=0.5", 5, 20, LocalSteps(5, 1, 0.5)),
    ],
)
def test_downpour(text: str, push: int, warm: int, local: LocalSteps) -> None:
    spec = parse_spec(text)
    policy = spec.policy(WORKERS)
    assert isinstance(policy, DownpourPolicy)
    assert (policy.push, policy.warm, policy.scale) == (push, warm, None)
    assert spec.machine(0).local == local
    assert spec.text == text


def test_how_many_pushes_may_be_under_way() -> None:
    assert [parse_spec(text).capabilities.ahead for text in ("asp", "delay:3", "delay:0", "downpour", "bsp")] == [
        0,
        3,
        0,
        1,
        0,
    ]
    assert [parse_spec(text).capabilities.fetches for text in ("delay:3", "downpour", "local:4")] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "options", "adapts"),
    [
        ("asup", (0.9, 0.9, 1e-10, 0.0), False),
        ("asup:momentum=0.5,rho=0.8,eps=1e-3,initial=1", (0.5, 0.8, 1e-3, 1.0), False),
        ("asup,momentum=async", (0.9, 0.9, 1e-10, 0.0), True),
        ("asup,momentum=async:0.8,rho=0", (0.8, 0.0, 1e-10, 0.0), True),
    ],
)
def test_what_the_rule_of_asup_is_made_with(text: str, options: tuple[float, ...], adapts: bool) -> None:
    spec = parse_spec(text)
    assert spec.mode.rule == "AsuP"
    assert spec.rule_options == dict(zip(("momentum", "rho", "eps", "initial"), options, strict=True))
    assert spec.corrections.adapts_momentum == adapts


def test_other_modes_have_no_rule() -> None:
    assert {name for name, mode in MODES.items() if mode.rule} == {"asup"}
    assert parse_spec("asp,momentum=async").rule_options == {}


SCALED = (
    "asp",
    "ssp:3",
    "dssp:3..15",
    "dssp-paper:3..15",
    "every:8",
    "every:8,wait=2",
    "delay:8",
    "downpour:push=2",
    "asup",
)


@pytest.mark.parametrize("head", SCALED)
@pytest.mark.parametrize(("option", "scale"), [("scale=1", 1.0), ("scale=0.25", 0.25), (" scale=2e-1", 0.2)])
def test_scales(head: str, option: str, scale: float) -> None:
    policy = parse_spec(f"{head},{option}").policy(WORKERS)
    assert isinstance(policy, AsynchronousPolicy | Delay | DownpourPolicy)
    assert policy.scale == scale


@pytest.mark.parametrize("name", MODES)
def test_corrections_are_options_of_every_mode_without_rounds(name: str) -> None:
    example, option = MODES[name].example, "dca=1,drop=8,dcm=0.5"
    can = parse_spec(example).capabilities
    if can.rounds or can.neighbours or "scale" not in MODES[name].options:
        assert f"{name} has no option 'dca'; known: " in refusal(f"{example},{option}")
    else:
        corrections = parse_spec(f"{example},{option}").corrections
        assert corrections == Corrections(most=8, compensation=Compensation(1.0, True, 0.5))


def test_options_come_in_any_order() -> None:
    one, other = parse_spec("every:8,wait=2,scale=1"), parse_spec("every:8,scale=1,wait=2")
    assert one.options == other.options == {"wait": 2.0, "scale": 1.0}


def test_the_text_is_kept_as_it_was_written() -> None:
    assert parse_spec("  every:8,wait=2\n").text == "every:8,wait=2"


def test_every_example_builds_and_says_its_name() -> None:
    for name, mode in MODES.items():
        spec = parse_spec(mode.example)
        assert spec.mode is mode
        assert mode.name == name
        assert mode.example.startswith(name)
        spec.policy(WORKERS)


def test_each_policy_is_a_fresh_one() -> None:
    spec = parse_spec("dssp:3..15")
    one, other = spec.policy(WORKERS), spec.policy(WORKERS)
    assert isinstance(one, AsynchronousPolicy)
    assert isinstance(other, AsynchronousPolicy)
    assert one is not other
    assert one.gate is not other.gate


# Bad ones: unknown.


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("sssp:3", "ssp:3"),
        ("SSP:3", "ssp:3"),
        ("BSP", "bsp"),
        ("Asp", "asp"),
        ("DSSP:3..15", "dssp:3..15"),
        ("dssp_paper:3..15", "dssp-paper:3..15"),
        ("evry:8", "every:8"),
        ("dealy:8", "delay:8"),
        ("bsp+bakcup:1", "bsp+backup:1"),
        ("bsp+balanc:1", "bsp+balance"),
        ("bspp:1", "bsp"),
        ("gosip", "gossip:ring"),
        ("gosip:rnig", "gossip:ring"),
        ("dsssp:3", "dssp:3..15"),
        ("dssp_:5..3", "dssp:3..15"),
        ("dwnpour:push=5,fetch=5", "downpour:push=5"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(text: str, nearest: str) -> None:
    said = refusal(text)
    assert repr(text) in said
    assert f"nearest: {nearest};" in said
    assert_names_all(said)
    parse_spec(nearest)


@pytest.mark.parametrize("text", ["", "   ", ":3", ",", ",scale=1", "xyzzy", "3", "=", "local-sgd:8"])
def test_what_resembles_nothing_is_answered_with_all_there_is(text: str) -> None:
    said = refusal(text)
    assert repr(text) in said
    assert_names_all(said)


@pytest.mark.parametrize("text", ["xyzzy\n:3", "sssp:3\n4", "ssp:3\n4", "ssp:3,scale=\n", "ssp:3,sc\nale=1", "bsp:\n"])
def test_even_of_several_lines_one_is_made(text: str) -> None:
    refusal(text)


def test_the_contract_is_covered() -> None:
    named = {
        *("bsp", "bsp+backup", "asp", "ssp", "dssp", "dssp-paper", "every", "delay", "bsp+balance", "anytime", "local"),
        *("adacomm", "diloco", "gossip", "adpsgd", "downpour", "asup"),
    }
    assert named <= MODES.keys()


def test_what_workers_must_know_of_uneven_modes() -> None:
    texts = ("bsp+balance,micro=4", "bsp+balance", "bsp", "anytime:auto", "anytime:0.5,micro=3")
    assert [parse_spec(text).capabilities.micro for text in texts] == [4, 0, 0, 8, 3]
    assert [parse_spec(text).capabilities.by_speed for text in ("bsp", "bsp+backup:1", "bsp+balance", "anytime:1")] == [
        0,
        0,
        1,
        1,
    ]
    late = ("anytime:auto,late=keep", "anytime:auto", "bsp+balance")
    assert [parse_spec(text).capabilities.keeps_late for text in late] == [True, False, False]


def assert_names_all(said: str) -> None:
    known = said.split("known: ")[1].split("; ")[0].split(", ")
    assert known == [mode.example for mode in MODES.values()]


# Bad ones: a known mode, and something wrong with it.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ssp", ["ssp needs", "whole number", "ssp:3"]),
        ("bsp+balance:3", ["bsp+balance takes no argument", "write bsp+balance"]),
        ("bsp+balance,most=0.5", ["most of at least 1", "'0.5'", "most=2"]),
        ("bsp+balance,micro=0", ["micro of at least 1", "micro=8"]),
        ("bsp+balance,late=keep", ["no option 'late'", "micro, most"]),
        ("bsp+balance,drop=3", ["no option 'drop'", "micro, most"]),
        ("anytime", ["anytime needs auto or a number of seconds above 0", "anytime:auto"]),
        ("anytime:0", ["auto or a number of seconds above 0", "'0'", "anytime:auto"]),
        ("anytime:-1", ["auto or a number of seconds above 0", "'-1'"]),
        ("anytime:inf", ["auto or a number of seconds above 0", "'inf'"]),
        ("anytime:soon", ["auto or a number of seconds above 0", "'soon'"]),
        ("anytime:auto,micro=0", ["micro of at least 1", "micro=8"]),
        ("anytime:auto,late=later", ["late to be drop or keep", "'later'"]),
        ("anytime:auto,divide=2", ["divide to be expected or actual", "'2'"]),
        ("anytime:auto,most=2", ["no option 'most'", "micro, late, divide"]),
        ("ssp:", ["ssp needs", "whole number", "ssp:3"]),
        ("ssp:x", ["'x'", "whole number", "at least 0", "ssp:3"]),
        ("ssp:-1", ["'-1'", "at least 0", "ssp:3"]),
        ("ssp:1.5", ["'1.5'", "whole number", "ssp:3"]),
        ("ssp: 3", ["' 3'", "whole number", "ssp:3"]),
        ("ssp:3..5", ["'3..5'", "whole number", "ssp:3"]),
        ("ssp:1_0", ["'1_0'", "whole number", "ssp:3"]),
        ("ssp:\u0663", ["whole number", "ssp:3"]),
        ("every:0", ["'0'", "at least 1", "every:8"]),
        ("delay:x", ["'x'", "whole number", "delay:8"]),
        ("bsp+backup", ["bsp+backup needs", "bsp+backup:1"]),
        ("bsp+backup:0", ["'0'", "at least 1", "bsp+backup:1"]),
        ("downpour:5", ["downpour takes no argument", "'downpour:5'", "write downpour:push=5,fetch=5"]),
        ("asup:3", ["asup takes no argument", "'asup:3'", "write asup"]),
        ("bsp:2", ["bsp takes no argument", "'bsp:2'", "write bsp"]),
        ("asp:", ["asp takes no argument", "'asp:'", "write asp"]),
        ("dssp:3", ["'3'", "L..U", "dssp:3..15"]),
        ("dssp:3..", ["'3..'", "L..U", "dssp:3..15"]),
        ("dssp:..15", ["'..15'", "L..U", "dssp:3..15"]),
        ("dssp:3...15", ["'3...15'", "L..U", "dssp:3..15"]),
        ("dssp:3-15", ["'3-15'", "L..U", "dssp:3..15"]),
        ("dssp:5..3", ["'dssp:5..3'", "lower bound 5", "upper bound 3", "3..5"]),
        ("dssp-paper:5..3", ["'dssp-paper:5..3'", "lower bound 5", "upper bound 3", "3..5"]),
    ],
)
def test_a_wrong_argument_is_answered_with_a_right_one(text: str, says: list[str]) -> None:
    said = refusal(text)
    assert [words for words in says if words not in said] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("every:8,wiat=2", ["every has no option 'wiat'", "known: wait, scale", "nearest: wait"]),
        ("ssp:3,Scale=1", ["ssp has no option 'Scale'", "known: scale", "nearest: scale"]),
        ("ssp:3,wait=2", ["ssp has no option 'wait'", "known: scale"]),
        ("ssp:3,lrs=staleness", ["ssp has no option 'lrs'", "known: scale, lr, decay", "nearest: lr"]),
        ("asp,lr=0.1", ["the word staleness", "option 'lr' of asp", "'0.1'", "lr=staleness"]),
        ("asp,momentum=0.9", ["lookahead, worker, server or async", "option 'momentum' of asp", "momentum=lookahead"]),
        ("asp,decay=0", ["'0'", "above 0 and at most 1", "decay=0.9"]),
        ("asp,decay=1.1", ["'1.1'", "above 0 and at most 1"]),
        ("asp,decay=nan", ["'nan'", "above 0 and at most 1"]),
        ("asp,drop=-1", ["'-1'", "whole number", "drop=8"]),
        ("asp,drop=1.5", ["'1.5'", "whole number"]),
        ("asp,dc=-1", ["'-1'", "at least 0", "dc=0.04"]),
        ("asp,dca=inf", ["'inf'", "at least 0", "dca=2"]),
        ("asp,dca=1,dcm=1", ["'1'", "at least 0 and below 1", "dcm=0.95"]),
        ("asp,dc=1,dca=1", ["dc and dca exclude each other"]),
        ("asp,dc=1,dcm=0.5", ["dcm is the memory of dca"]),
        ("downpour:push=0", ["'0'", "option 'push' of downpour", "at least 1", "push=5"]),
        ("downpour:fetch=x", ["'x'", "option 'fetch' of downpour", "at least 1"]),
        ("downpour:warm=-1", ["'-1'", "option 'warm' of downpour", "at least 0"]),
        ("downpour:alpha=0", ["'0'", "option 'alpha' of downpour", "above 0"]),
        ("downpour:pull=5", ["downpour has no option 'pull'", "known: push, fetch", "nearest: push"]),
        ("downpour:push=5,push=5", ["option 'push' of downpour", "once"]),
        ("asup:rho=1", ["'1'", "option 'rho' of asup", "below 1"]),
        ("asup,momentum=async:2", ["'async:2'", "below 1", "async:NUMBER"]),
        ("asup,momentum=asyn", ["'asyn'", "async"]),
        ("asup,eps=0", ["'0'", "option 'eps' of asup", "above 0"]),
        ("asup,initial=-1", ["'-1'", "option 'initial' of asup", "at least 0"]),
        ("bsp:scale=1", ["bsp has no option 'scale'", "known: none"]),
        ("ssp:3,", ["ssp has no option ''", "known: scale"]),
        ("bsp,scale=1", ["bsp has no option 'scale'", "known: none"]),
        ("bsp+backup:1,scale=1", ["bsp+backup has no option 'scale'", "known: none"]),
        ("ssp:3,scale=1,scale=1", ["option 'scale' of ssp", "once", "scale=VALUE"]),
        ("every:8,wait=1,scale=1,wait=2", ["option 'wait' of every", "once", "wait=VALUE"]),
        ("ssp:3,scale", ["option 'scale' of ssp", "scale=VALUE"]),
        ("ssp:3,scale=", ["''", "option 'scale' of ssp", "above 0", "scale=2"]),
        ("ssp:3,scale=0", ["'0'", "above 0"]),
        ("ssp:3,scale=-1", ["'-1'", "above 0"]),
        ("ssp:3,scale=nan", ["'nan'", "above 0"]),
        ("ssp:3,scale=inf", ["'inf'", "above 0"]),
        ("ssp:3,scale=fast", ["'fast'", "above 0"]),
        ("every:8,wait=0", ["'0'", "option 'wait' of every", "above 0"]),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_ones(text: str, says: list[str]) -> None:
    said = refusal(text)
    assert [words for words in says if words not in said] == []


@pytest.mark.parametrize(
    ("workers", "backups", "instead"),
    [(4, 4, "bsp+backup:3"), (4, 7, "bsp+backup:3"), (2, 2, "bsp+backup:1"), (1, 1, "bsp")],
)
def test_more_backups_than_the_job_has_workers(workers: int, backups: int, instead: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"bsp+backup:{backups}").policy(workers)
    said = str(caught.value)
    assert f"bsp+backup:{backups} needs more than {backups} workers, got {workers}" in said
    assert said.endswith(f" {instead}")
    parse_spec(instead).policy(workers)

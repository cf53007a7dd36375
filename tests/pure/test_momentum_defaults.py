"""What a spec leaves to the optimizer is written out once: class, parameter groups and number of workers in, text out."""

from __future__ import annotations

from typing import Any

import pytest
from driving import Job
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import SpecError
from polytempo.sync.actions import Apply
from polytempo.sync.momentum import MOMENTUM, RULES, MomentumForm, form_of
from polytempo.sync.spec import MODES, parse_spec

SGD = [{"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}]
PLAIN = [{"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}]
ADAM = [{"lr": 0.001, "betas": (0.9, 0.999), "weight_decay": 0}]
NO_BETA = [{"lr": 0.001, "betas": (0.0, 0.999), "weight_decay": 0}]
ADAGRAD = [{"lr": 0.01, "lr_decay": 0, "weight_decay": 0}]
RMSPROP = [{"lr": 0.01, "alpha": 0.99, "momentum": 0}]

AHEAD, SPIKE, SQRT, POWER = "momentum=lookahead", "spike=1.5", "scale=sqrt", "scale=n^-0.75"
#: Modes that keep momentum at workers.
KEEPING = ("asp", "ssp:3", "dssp:3..15", "dssp-paper:3..15", "every:8", "every:8,wait=2", "delay:4")
#: Modes that leave nothing to the optimizer.
SETTLED = (
    *("bsp", "bsp+backup:1", "bsp+balance", "anytime:auto", "anytime:0.7,late=keep", "local:4", "adacomm:16", "diloco:8"),
    *("diloco:4,quorum=2", "easgd:4", "gossip:ring", "adpsgd:ring", "asup", "asup,bound=3", "asup,momentum=async"),
)


def settled(text: str, optimizer: str, groups: list[dict[str, Any]], workers: int = 4, needs_server: str = "") -> str:
    spec = parse_spec(text).settled(optimizer, groups, workers=workers, needs_server=needs_server)
    again = spec.settled(optimizer, groups, workers=workers, needs_server=needs_server)
    assert again.text == spec.text, "settling twice is settling once"
    assert parse_spec(spec.text).options == spec.options
    assert (spec.mode, spec.arguments) == (parse_spec(text).mode, parse_spec(text).arguments)
    return spec.text


@pytest.mark.parametrize("text", KEEPING)
@pytest.mark.parametrize(
    ("optimizer", "groups", "added"),
    [
        ("SGD", SGD, (AHEAD, SPIKE)),
        ("SGD", PLAIN, ()),
        ("SGD", [*PLAIN, *SGD], (AHEAD, SPIKE)),
        ("SGD", [{**SGD[0], "nesterov": True}], (AHEAD, SPIKE)),
        ("SGD", [{**SGD[0], "dampening": 0.1}], (AHEAD,)),
        ("ASGD", [{"lr": 0.01}], ()),
        ("Adam", ADAM, (AHEAD, POWER)),
        ("Adam", NO_BETA, (SQRT,)),
        ("Adam", [*NO_BETA, *ADAM], (AHEAD, POWER)),
        ("AdamW", ADAM, (AHEAD, POWER)),
        ("Adamax", ADAM, (AHEAD, POWER)),
        ("RAdam", ADAM, (AHEAD, POWER)),
        ("NAdam", ADAM, (AHEAD, POWER)),
        ("RMSprop", RMSPROP, (SQRT,)),
        ("RMSprop", [{**RMSPROP[0], "momentum": 0.9}], (AHEAD, POWER)),
        ("Adagrad", ADAGRAD, (SQRT,)),
        ("Adadelta", [{"lr": 1.0, "rho": 0.9}], (SQRT,)),
        ("Adafactor", [{"lr": 0.01}], (SQRT,)),
        ("SparseAdam", ADAM, ()),
        ("LBFGS", [{"lr": 1}], ()),
        ("MyOwn", SGD, ()),
        ("", ADAM, ()),
    ],
)
def test_defaults_are_written_out(text: str, optimizer: str, groups: list[dict[str, Any]], added: tuple[str, ...]) -> None:
    assert settled(text, optimizer, groups) == ",".join((text, *added))


@pytest.mark.parametrize("text", SETTLED)
@pytest.mark.parametrize(("optimizer", "groups"), [("SGD", SGD), ("Adam", ADAM), ("Adagrad", ADAGRAD)])
def test_other_modes_have_nothing_to_choose(text: str, optimizer: str, groups: list[dict[str, Any]]) -> None:
    assert settled(text, optimizer, groups) == text


@pytest.mark.parametrize("name", MODES)
def test_every_mode_is_settled_or_keeps_momentum(name: str) -> None:
    known = {parse_spec(text).mode.name for text in (*KEEPING, *SETTLED, "downpour")}
    assert parse_spec(MODES[name].example).mode.name in known


@pytest.mark.parametrize("text", ["downpour", "downpour:push=5,fetch=5,warm=100", "downpour,alpha=0.1"])
def test_downpour_has_a_scale_and_no_momentum(text: str) -> None:
    assert settled(text, "SGD", SGD) == text
    for optimizer, groups, added in (("Adagrad", ADAGRAD, SQRT), ("Adam", ADAM, POWER)):
        assert settled(text, optimizer, groups) == f"{text},{added}"


@pytest.mark.parametrize(
    ("text", "optimizer", "groups", "whole"),
    [
        ("asp,momentum=server", "SGD", SGD, "asp,momentum=server"),
        ("asp,momentum=worker", "SGD", SGD, "asp,momentum=worker"),
        ("asp,momentum=async", "SGD", SGD, "asp,momentum=async"),
        ("asp,momentum=lookahead", "SGD", PLAIN, "asp,momentum=lookahead"),
        ("asp,scale=1", "SGD", SGD, f"asp,scale=1,{AHEAD},{SPIKE}"),
        ("ssp:3,scale=0.25", "Adam", ADAM, f"ssp:3,scale=0.25,{AHEAD}"),
        ("ssp:3,scale=sqrt", "SGD", SGD, f"ssp:3,scale=sqrt,{AHEAD},{SPIKE}"),
        ("delay:2,momentum=server", "Adam", ADAM, f"delay:2,momentum=server,{POWER}"),
        ("delay:2,momentum=server,scale=1", "Adam", ADAM, "delay:2,momentum=server,scale=1"),
        ("asp,lr=staleness,drop=8", "SGD", SGD, f"asp,lr=staleness,drop=8,{AHEAD},{SPIKE}"),
        ("downpour:push=5,scale=1", "Adagrad", ADAGRAD, "downpour:push=5,scale=1"),
    ],
)
def test_what_is_given_is_never_overridden(text: str, optimizer: str, groups: list[dict[str, Any]], whole: str) -> None:
    assert settled(text, optimizer, groups) == whole


@pytest.mark.parametrize("text", [*KEEPING, *SETTLED, "downpour"])
def test_one_worker_alone_trains_as_it_is(text: str) -> None:
    for optimizer, groups in (("SGD", SGD), ("Adam", ADAM)):
        assert settled(text, optimizer, groups, workers=1) == text


@pytest.mark.parametrize("workers", [2, 3, 16, 1000])
def test_the_number_of_workers_is_not_part_of_the_text(workers: int) -> None:
    """So a job that grows or shrinks goes on under the same text."""
    assert settled("asp", "Adam", ADAM, workers) == f"asp,{AHEAD},{POWER}"


@pytest.mark.parametrize(
    ("option", "why"), [("dc=0.04", ""), ("dca=2,dcm=0.9", ""), ("decay=0.9", "because"), ("", "because")]
)
def test_what_needs_the_servers_momentum_has_it(option: str, why: str) -> None:
    """And it is said in the text, since a text without it would be settled anew elsewhere."""
    head = ",".join(filter(None, ("asp", option)))
    assert settled(head, "SGD", SGD, needs_server=why) == f"{head},momentum=server"
    assert settled(head, "Adam", ADAM, needs_server=why) == f"{head},momentum=server,{POWER}"
    assert settled(head, "SGD", PLAIN, needs_server=why) == head


@pytest.mark.parametrize("where", ["lookahead", "worker"])
@pytest.mark.parametrize("option", ["dc=0.04", "dca=2"])
def test_compensation_with_momentum_at_workers_is_refused(where: str, option: str) -> None:
    with pytest.raises(SpecError, match=f"momentum={where} pushes .*; write momentum=server$"):
        parse_spec(f"asp,{option},momentum={where}")


@pytest.mark.parametrize(
    "text", ["asp", "asp,momentum=server", "asp,momentum=async", "downpour", "bsp", "asup,momentum=async"]
)
def test_a_text_without_it_means_the_servers(text: str) -> None:
    """As in records and checkpoints of versions that knew nothing else."""
    assert parse_spec(text).worker_momentum == ""


@pytest.mark.parametrize("text", KEEPING)
@pytest.mark.parametrize("where", ["lookahead", "worker"])
def test_a_text_with_it_means_the_workers(text: str, where: str) -> None:
    spec = parse_spec(f"{text},momentum={where}")
    assert spec.worker_momentum == where
    assert not spec.corrections.adapts_momentum


def test_only_modes_that_keep_momentum_have_the_option() -> None:
    for name, mode in MODES.items():
        if not mode.keeps_momentum:
            with pytest.raises(SpecError) as refused:
                parse_spec(f"{mode.example},momentum=lookahead")
            assert "\n" not in str(refused.value), name
    with pytest.raises(SpecError, match="lookahead, worker, server or async"):
        parse_spec("asp,momentum=servers")
    assert set(MOMENTUM) == {"momentum", "spike"}


settings_of_groups = st.lists(
    st.fixed_dictionaries(
        {"lr": st.floats(0, 1)},
        optional={
            "momentum": st.sampled_from((0, 0.0, 0.9)),
            "betas": st.sampled_from(((0.9, 0.999), (0.0, 0.9), [0.5, 0.5])),
            "dampening": st.sampled_from((0, 0.5)),
            "nesterov": st.booleans(),
        },
    ),
    min_size=1,
    max_size=3,
)
options = st.lists(st.sampled_from(("scale=0.5", "scale=sqrt", "momentum=server", "drop=3", "decay=0.9")), unique=True)


@given(st.sampled_from(KEEPING), st.sampled_from([*RULES, "Other"]), settings_of_groups, options, st.integers(1, 9))
def test_any_spec_is_settled_once_and_says_all(
    text: str, optimizer: str, groups: list[dict[str, Any]], given_options: list[str], workers: int
) -> None:
    names = [option.partition("=")[0] for option in given_options]
    if len(set(names)) < len(names):
        return
    before = parse_spec(",".join((text, *given_options)))
    after = parse_spec(settled(before.text, optimizer, groups, workers))
    assert after.text.startswith(before.text)
    assert before.options.items() <= after.options.items()
    assert set(after.options) - set(before.options) <= {"momentum", "scale", "spike"}
    has_momentum = optimizer in RULES and any(RULES[optimizer].momentum_in(group) for group in groups)
    if workers > 1 and has_momentum:
        assert "momentum" in after.options
    if workers == 1 or optimizer == "Other":
        assert after.text == before.text


@pytest.mark.parametrize(
    ("optimizer", "groups", "form"),
    [
        ("SGD", SGD, MomentumForm.GRADIENT),
        ("SGD", [{**SGD[0], "nesterov": True}], MomentumForm.GRADIENT),
        ("SGD", [*SGD, {**SGD[0], "dampening": 0.1}], MomentumForm.CHANGE),
        ("Adam", ADAM, MomentumForm.CHANGE),
        ("RMSprop", RMSPROP, MomentumForm.CHANGE),
    ],
)
def test_sgd_without_dampening_pushes_gradients(optimizer: str, groups: list[dict[str, Any]], form: MomentumForm) -> None:
    assert form_of(optimizer, groups) is form


@pytest.mark.parametrize(
    ("optimizer", "group", "extrapolation", "decay"),
    [
        ("SGD", {"momentum": 0.9}, 0.9, 0.0),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 0.0, 0.0),
        ("Adam", {"betas": (0.8, 0.999), "weight_decay": 0.1}, 0.8, 0.0),
        ("Adam", {"betas": (0.8, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": True}, 0.8, 0.1),
        ("AdamW", {"betas": (0.8, 0.999), "weight_decay": 0.1}, 0.8, 0.1),
        ("RAdam", {"betas": (0.8, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": False}, 0.8, 0.0),
        ("NAdam", {"betas": (0.8, 0.999)}, 0.0, 0.0),
        ("RMSprop", {"momentum": 0.7}, 0.7, 0.0),
        ("Adagrad", {"weight_decay": 0.1}, 0.0, 0.0),
    ],
)
def test_what_is_extrapolated_and_what_is_not(
    optimizer: str, group: dict[str, Any], extrapolation: float, decay: float
) -> None:
    assert RULES[optimizer].extrapolation(group) == extrapolation
    assert RULES[optimizer].decay_in(group) == decay


@pytest.mark.parametrize("text", [*KEEPING, "downpour"])
@pytest.mark.parametrize(
    ("scale", "rates"),
    [
        ("", [1 / 4, 1 / 3, 1 / 2, 1 / 3]),
        (",scale=sqrt", [4**-0.5, 3**-0.5, 2**-0.5, 3**-0.5]),
        (",scale=n^-0.75", [4**-0.75, 3**-0.75, 2**-0.75, 3**-0.75]),
        (",scale=0.4", [0.4] * 4),
    ],
)
def test_a_push_counts_as_one_of_those_that_are_active(text: str, scale: str, rates: list[float]) -> None:
    """Whatever rate the script's scheduler has set: of a job of 4 one worker leaves, another, and one comes back."""
    job, found = Job(f"{text}{scale}", 4).start(), []
    for change in (lambda: None, lambda: job.leave(3, "lost"), lambda: job.leave(2, "finished"), lambda: job.join(3)):
        change()
        found += [action.rate for action in job.push(0) if isinstance(action, Apply)]
    assert found == pytest.approx(rates)
